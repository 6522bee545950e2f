"""What a user's function reads apart from its arguments, and a key by which its expression is cached."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass
class Captures:
    """What a function reads apart from its arguments.

    Attributes:
        function: the function, None if it is another callable.
        tensors: the tensors in its cells, globals and defaults, and in those of the functions that it calls.
        numbers: the cells that hold integers and floats.
        key: decides the expression, together with the captured tensors and numbers; None if something else may decide it.
    """

    function: Any
    tensors: list[Tensor]
    numbers: list[types.CellType]
    key: Any

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Captures:
        captures = cls(function if isinstance(function, types.FunctionType) else None, [], [], None)
        try:
            captures.key = captures._described(function, ())
        except _Opaque:
            captures.key = None
        return captures

    def _described(self, value: Any, outer: tuple[Any, ...]) -> Any:
        """Return a hashable description of a value that the function may read; collect tensors and numbers on the way."""
        if isinstance(value, Tensor):
            first = next((k for k, known in enumerate(self.tensors) if known is value), len(self.tensors))
            self.tensors.append(value)
            return ("tensor", first, value.dtype, tuple(value.shape), value.device)
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return (type(value), value)
        if isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)) or _is_torch(value):
            return ("known", id(value))
        if isinstance(value, tuple):
            return tuple([self._described(each, outer) for each in value])
        if isinstance(value, types.FunctionType):
            return self._of_function(value, outer)
        raise _Opaque

    def _of_function(self, function: Any, outer: tuple[Any, ...]) -> Any:
        if function in outer:
            return ("recursive", outer.index(function))
        inner, scope = (*outer, function), function.__globals__
        cells = [self._of_cell(cell, inner) for cell in function.__closure__ or ()]
        defaults = [self._described(each, inner) for each in function.__defaults__ or ()]
        keywords: dict[str, Any] = function.__kwdefaults__ or {}
        named = [(name, self._described(each, inner)) for name, each in keywords.items()]
        of_globals = [
            (name, self._described(scope[name], inner)) for name in _names(function.__code__) if name in scope
        ]
        return (function.__code__, tuple(cells), tuple(defaults), tuple(named), tuple(of_globals))

    def _of_cell(self, cell: types.CellType, outer: tuple[Any, ...]) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:
            raise _Opaque from None
        if len(outer) == 1 and isinstance(value, (int, float)) and not isinstance(value, bool):
            self.numbers.append(cell)
            return type(value) if outer[0].__code__ not in needs_numbers else (type(value), value)
        return self._described(value, outer)


class _Opaque(Exception):
    """A function reads an object whose content may change, so its expression is not cached."""


needs_numbers: set[types.CodeType] = set()  # functions that need the values of captured numbers


def _is_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] in ("torch", "math", "operator", "builtins")


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names, of globals and attributes, that code and the functions defined in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def with_numbers(captures: Captures, numbers: list[Tensor]) -> Callable[..., Any]:
    """Return the function with tensors in place of the captured numbers."""
    function = captures.function
    assert function is not None
    place = {id(cell): types.CellType(x) for cell, x in zip(captures.numbers, numbers, strict=True)}
    closure: tuple[types.CellType, ...] = function.__closure__ or ()
    cells = tuple(place.get(id(cell), cell) for cell in closure)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
