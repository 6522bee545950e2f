"""The attributes that a function reads of the objects that it captures, by its code, so that equal ones need no new trace."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from typing import Any

import torch

Paths = tuple[tuple[str, ...], ...]
"""Attributes, and attributes of these: ("config", "width") is that of ``x.config.width``."""

_LOADS = frozenset(("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"))


@functools.lru_cache(1024)
def read(code: types.CodeType, name: str, is_module: bool = False) -> Paths | None:
    """Return the attributes that code reads of a variable; None if it may do anything else with it, as to call its methods.

    The functions of a module are attributes of it like others.

    >>> read((lambda: x.a.b + x.c).__code__, "x")
    (('a', 'b'), ('c',))
    >>> read((lambda: x.a + len(x)).__code__, "x")
    """
    found: dict[tuple[str, ...], None] = {}
    steps = list(dis.get_instructions(code))
    for at, step in enumerate(steps):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if name not in names or step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            continue
        path = _path(steps[at + 1 :], is_module) if step.opname in _LOADS else ()
        if not path:
            return None
        found[path] = None
    for constant in code.co_consts:
        inner = read(constant, name, is_module) if isinstance(constant, types.CodeType) else ()
        if inner is None:
            return None
        found.update(dict.fromkeys(inner))
    return tuple(found)


def _path(steps: list[dis.Instruction], is_module: bool) -> tuple[str, ...]:
    """Return the attributes that instructions read of what the one before has loaded."""
    path: list[str] = []
    for step in steps:
        calls = step.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and bool((step.arg or 0) & 1))
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or (calls and not (is_module and not path)):
            break
        path.append(step.argval)
        if calls:
            break
    return tuple(path)


def plain_value(value: Any, path: tuple[str, ...]) -> Any:
    """Return an attribute that nothing computes: of the object itself, of its class, or a parameter, buffer or part of a module.

    Raises:
        AttributeError: there is none, or code computes it, as a property does.
    """
    for name in path:
        value = _plain_value(value, name)
    return value


def _plain_value(value: Any, name: str) -> Any:
    if type(value).__getattribute__ not in (object.__getattribute__, type.__getattribute__):
        raise AttributeError(name)
    if isinstance(value, torch.nn.Module):
        for table in (value._parameters, value._buffers, value._modules):
            if name in table:
                return table[name]
    own = getattr(value, "__dict__", {})
    if name in own and not any(name in base.__dict__ for base in type(value).__mro__):
        return own[name]  # as what follows says, which takes longer
    found = inspect.getattr_static(value, name)
    if (name in own and own[name] is found) or not hasattr(type(found), "__get__"):
        return found
    if isinstance(found, types.MemberDescriptorType):  # of __slots__
        return getattr(value, name)
    raise AttributeError(name)
