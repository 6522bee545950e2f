"""From one symbolic run to the words of a program: outputs, and the guard under which they are right."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opkit.op import layout_program as p
from opkit.op.body import concrete
from opkit.op.layout_code import Code, NoCodeError, Translator, constant, joined
from opkit.op.layout_trace import SymbolicRun, expression


class Writer:
    """Writes the parts of a program; :meth:`guard` comes last, because it holds what the outputs assume."""

    def __init__(self, traced: SymbolicRun) -> None:
        self.traced = traced
        self.env = traced.symbols.env
        self.translator = Translator(traced.symbols.code)
        self.apart: list[Code] = []

    def output(self, tensor: torch.Tensor) -> list[int]:
        """The words of one new output."""
        sizes, strides = [[expression(n) for n in numbers] for numbers in (tensor.shape, tensor.stride())]
        words = [p.DTYPES[tensor.dtype], len(sizes), *self._codes(sizes)]
        if self._row_major(sizes, strides):
            return [*words, 0]
        self._keep_apart(sizes, strides, [concrete(n) for n in tensor.stride()])
        return [*words, 1, *self._codes(strides)]

    def guard(self) -> list[int]:
        """The words of the guard."""
        guards = [self.translator.code(guard) for guard in dict.fromkeys(self.traced.guards)]
        conditions = [*self.traced.symbols.conditions, *guards, *self.apart, *self.translator.conditions]
        conditions = [code for code in dict.fromkeys(conditions) if code != constant(1)]
        return _sized(joined(p.AND, conditions or [constant(1)]))

    def _codes(self, numbers: Sequence[Any]) -> list[int]:
        return [word for number in numbers for word in _sized(self.translator.code(number))]

    def _row_major(self, sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
        from torch.utils._sympy.functions import Max

        step: Any = 1
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            if not _equal(stride, step):
                return False
            step = step * (size if self.env.bound_sympy(size).lower >= 1 else Max(1, size))
        return True

    def _keep_apart(self, sizes: Sequence[Any], strides: Sequence[Any], hints: Sequence[int]) -> None:
        """Demand that no two elements share memory, with the dimensions nested as they are in this call."""
        extent: Any = 1
        for _, size, stride in sorted(zip(hints, sizes, strides, strict=True), key=lambda item: item[0]):
            if size != 1 and not _equal(stride, extent):
                self.apart.append((*self.translator.code(extent), *self.translator.code(stride), p.LESS_EQUAL))
            extent = _expanded(extent + (size - 1) * stride)


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
