"""Integers of Triton's in Python, for :mod:`gluon_in_python`."""

from __future__ import annotations

from typing import Any

import torch

ADDRESSED: dict[int, Any] = {}  # pointers by the numbers that they are in a table


class Int(int):
    """A 32-bit integer: division truncates, comparisons are numbers."""

    def to(self, dtype, bitcast=False):
        return ADDRESSED[self] if bitcast else self

    @property
    def dtype(self):
        return torch.int32


def _operator(name, function):
    def method(self, other):
        return function(int(self), int(other)) if isinstance(other, int) else NotImplemented

    setattr(Int, f"__{name}__", method)


def _quotient(a, b):
    return Int(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))


_ARITHMETIC = {
    "add": lambda a, b: Int(a + b), "radd": lambda a, b: Int(b + a), "sub": lambda a, b: Int(a - b),
    "rsub": lambda a, b: Int(b - a), "mul": lambda a, b: Int(a * b), "rmul": lambda a, b: Int(b * a),
    "floordiv": _quotient, "rfloordiv": lambda a, b: _quotient(b, a), "mod": lambda a, b: Int(a - b * _quotient(a, b)),
    "xor": lambda a, b: Int(a ^ b), "or": lambda a, b: Int(a | b), "and": lambda a, b: Int(a & b),
    "lt": lambda a, b: Int(a < b), "gt": lambda a, b: Int(a > b), "le": lambda a, b: Int(a <= b), "ge": lambda a, b: Int(a >= b),
    "eq": lambda a, b: Int(a == b), "ne": lambda a, b: Int(a != b),
}  # fmt: skip
for _name, _function in _ARITHMETIC.items():
    _operator(_name, _function)
Int.__hash__ = int.__hash__  # type: ignore[method-assign]


def number(x):
    """A whole number as an :class:`Int`; what is none as it is."""
    return Int(x) if isinstance(x, int) and not isinstance(x, bool) else x
