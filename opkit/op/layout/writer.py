"""From one symbolic run to the words of a program: outputs, and the guard under which they are right."""

# pyright: reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opkit.op.layout import program as p
from opkit.op.layout.code import Code, NoCodeError, Translator, constant, joined
from opkit.op.layout.trace import SymbolicRun, expression
from opkit.op.trace.body import concrete


class Writer:
    """Writes the parts of a program; :meth:`guard` comes last, because it holds what the outputs assume."""

    def __init__(self, traced: SymbolicRun) -> None:
        self.traced = traced
        self.env = traced.symbols.env
        self.translator = Translator(traced.symbols.code)
        self.apart: list[Code] = []

    def output(self, tensor: torch.Tensor) -> list[int]:
        """The words of one new output."""
        sizes, strides = [[self._plain(expression(n)) for n in ns] for ns in (tensor.shape, tensor.stride())]
        words = [p.DTYPES[tensor.dtype], len(sizes), *self._codes(sizes)]
        if self._row_major(sizes, strides):
            return [*words, 0]
        nested = sorted(range(len(sizes)), key=lambda i: (concrete(tensor.stride(i)), concrete(tensor.shape[i])))
        self._keep_apart([(sizes[i], strides[i]) for i in nested])
        return [*words, 1, *self._codes(strides)]

    def guard(self) -> list[int]:
        """The words of the guard."""
        guards = [self.translator.code(guard) for guard in dict.fromkeys(self.traced.guards)]
        conditions = [*self.traced.symbols.conditions, *guards, *self.apart, *self.translator.conditions]
        conditions = [code for code in dict.fromkeys(conditions) if code != constant(1)]
        return _sized(joined(p.AND, conditions or [constant(1)]))

    def _codes(self, numbers: Sequence[Any]) -> list[int]:
        return [word for number in numbers for word in _sized(self.translator.code(number))]

    def _plain(self, number: Any) -> Any:
        """``number`` without "at least 1" where that is so anyway."""
        known = {
            item: self._at_least_one(other) for item in number.atoms(_max()) if (other := _other(item)) is not None
        }
        return number.xreplace({item: other for item, other in known.items() if other is not item})

    def _at_least_one(self, number: Any) -> Any:
        return number if self.env.bound_sympy(number).lower >= 1 else _max()(1, number)

    def _row_major(self, sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
        step: Any = 1
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            if not _equal(stride, step):
                return False
            step = step * self._at_least_one(size)
        return True

    def _keep_apart(self, dimensions: Sequence[tuple[Any, Any]]) -> None:
        """Demand that no two elements share memory, with the dimensions (size, stride) nested as in this call."""
        extent = expression(1)
        if any(size == 0 for size, _ in dimensions):
            return
        for size, stride in dimensions:
            if size != 1 and not _equal(stride, extent):
                self.apart.append((*self.translator.code(extent), *self.translator.code(stride), p.LESS_EQUAL))
            extent = _expanded(extent + (size - 1) * stride)


def _max() -> Any:
    from torch.utils._sympy.functions import Max

    return Max


def _other(maximum: Any) -> Any:
    """What "at least 1" is said of; None for any other maximum."""
    rest = [item for item in maximum.args if item != 1]
    return rest[0] if len(rest) == 1 and len(maximum.args) == 2 else None


def _expanded(number: Any) -> Any:
    import sympy

    return sympy.expand(number)


def _equal(one: Any, other: Any) -> bool:
    return one == other or _expanded(one - other) == 0


def _sized(code: Code) -> list[int]:
    """A piece of code behind its length."""
    if p.depth(code) > p.MOST_DEEP:
        raise NoCodeError(f"the code of one number holds more than {p.MOST_DEEP} values at a time")
    return [len(code), *code]
