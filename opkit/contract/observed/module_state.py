"""This module finds numbers in a module's globals that its functions assign and an operator's functions read."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

from opkit.contract.subject import Subject


@dataclasses.dataclass(frozen=True)
class ModuleState:
    """A number in a module's globals."""

    name: str
    scope: dict[str, Any]

    def changed(self) -> Any:
        """Return a context in which it has another value."""
        value = self.scope[self.name]
        return mock.patch.dict(self.scope, {self.name: not value if isinstance(value, bool) else value + 1})


def state_of(subject: Subject) -> list[ModuleState]:
    """Return the numbers that the operator's functions read, without constants, which no function assigns.

    The functions are its body, reference, kernels, fake implementation and backward, and those of their module that they call.
    """
    found: dict[tuple[int, str], ModuleState] = {}
    for function in _reached([*_functions(subject)]):
        scope = function.__globals__
        for name in function.__code__.co_names:
            if isinstance(scope.get(name), (bool, int, float)) and _assigned(scope, name):
                found[id(scope), name] = ModuleState(name, scope)
    return [*found.values()]


def _functions(subject: Subject) -> Iterator[Any]:
    yield from (subject.reference, subject.target, getattr(subject.target, "_init_fn", None))
    if subject.operator is not None:
        operator = subject.operator._operator
        yield operator.registered.fake
        if operator.registered.autograd is not None:
            yield from (operator.registered.autograd.backward_function, operator.registered.autograd.setup_context)
    else:
        yield from (
            getattr(subject.target, name, None) for name in ("_abstract_fn", "_backward_fn", "_setup_context_fn")
        )
    yield from getattr(subject.target, "_backend_fns", {}).values()


def _reached(waiting: list[Any]) -> Iterator[types.FunctionType]:
    seen: set[int] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop()) if callable(waiting[-1]) else waiting.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        scope = function.__globals__
        called = [scope.get(name) for name in function.__code__.co_names]
        waiting += [f for f in called if isinstance(f, types.FunctionType) and f.__globals__ is scope]


def _assigned(scope: dict[str, Any], name: str) -> bool:
    functions = [f for f in scope.values() if isinstance(f, types.FunctionType) and name in f.__code__.co_names]
    return any(i.opname == "STORE_GLOBAL" and i.argval == name for f in functions for i in dis.get_instructions(f))
