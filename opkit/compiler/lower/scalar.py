"""Expressions with Python's operators, so that a rule reads as the formula that it is.

>>> from opkit.compiler.ir.expr import load
>>> x = Scalar(load("x", "f32", 0))
>>> (x * 2 + 1).expr
add(mul(x[0], 2.0), 1.0)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Index
from opkit.compiler.ir.program import Formula, ScalarItem
from opkit.compiler.lower.registry import NoRule
from opkit.compiler.lower.rewrites import simplified


@dataclasses.dataclass(frozen=True, eq=False)
class Scalar:
    """One element; a number on the other side of an operator takes its type."""

    expr: Expr

    @property
    def dtype(self) -> str:
        return self.expr.dtype

    def __add__(self, other: Operand) -> Scalar:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Scalar:
        return apply("add", number(other, self), self)

    def __sub__(self, other: Operand) -> Scalar:
        return apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Scalar:
        return apply("sub", number(other, self), self)

    def __mul__(self, other: Operand) -> Scalar:
        return apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Scalar:
        return apply("mul", number(other, self), self)

    def __truediv__(self, other: Operand) -> Scalar:
        return apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Scalar:
        return apply("div", number(other, self), self)

    def __neg__(self) -> Scalar:
        return apply("neg", self)

    def __lt__(self, other: Operand) -> Scalar:
        return apply("lt", self, other)

    def __le__(self, other: Operand) -> Scalar:
        return apply("le", self, other)

    def __gt__(self, other: Operand) -> Scalar:
        return apply("lt", number(other, self), self)

    def __ge__(self, other: Operand) -> Scalar:
        return apply("le", number(other, self), self)

    def __and__(self, other: Operand) -> Scalar:
        return apply("and", self, other)

    def __or__(self, other: Operand) -> Scalar:
        return apply("or", self, other)

    def __xor__(self, other: Operand) -> Scalar:
        return apply("xor", self, other)

    def __invert__(self) -> Scalar:
        return apply("not", self)


class Number(Scalar):
    """A Python float that may change from call to call: next to an element it takes the element's type, as a number does."""

    def __bool__(self) -> bool:
        raise NoRule("a float decides which formula it is, and may change")

    __float__ = __int__ = __bool__


_PYTHON = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "div": "({0} / {1})", "pow": "({0} ** {1})",
    "min": "min({0}, {1})", "max": "max({0}, {1})", "neg": "(-{0})", "abs": "abs({0})", "sqrt": "math.sqrt({0})",
    "cast": "float({0})",
}  # fmt: skip


def formula(root: Expr) -> Any:
    """Return the expression of a :class:`Number` as the host computes it."""
    if root.op in ("const", "index"):
        return root.data
    if root.op == "load":
        return ScalarItem(root.data[0])
    return Formula(_PYTHON[root.op], tuple(map(formula, root.args)))


Operand = Scalar | int | float | bool | Index


def number(value: Operand, like: Scalar | str) -> Scalar:
    """Return a number or a size as an element of the type of ``like``; an element unchanged."""
    dtype = like if isinstance(like, str) else like.dtype
    kind = Number if isinstance(like, Number) else Scalar
    if isinstance(value, Number):
        return kind(cast(value, dtype).expr)
    if isinstance(value, Scalar):
        return value
    if isinstance(value, Index):
        return kind(simplified(expr.position(value, dtype)))
    return kind(expr.const(_wrapped(value, dtype), dtype))


def _wrapped(value: bool | int | float, dtype: str) -> bool | int | float:
    """Return an integer modulo the range of a type."""
    row = DTYPES[dtype]
    if row.kind != "int":
        return value
    bits = 8 * row.bytes
    low = int(value) % 2**bits
    return low - 2**bits if row.signed and low >= 2 ** (bits - 1) else low


def apply(op: str, *args: Operand) -> Scalar:
    """Return an op of the table applied to elements and numbers; at least one is an element, or else a ``Number``."""
    like = _like(args)
    return type(like)(simplified(expr.op(op, *(number(a, like).expr for a in args))))


def _like(args: Iterable[Operand]) -> Scalar:
    """Return the first element, whose type the others take; a ``Number`` if there is none."""
    found = [a for a in args if isinstance(a, Scalar)]
    return next((a for a in found if not isinstance(a, Number)), found[0])


def cast(x: Scalar, dtype: str, asked: bool = False) -> Scalar:
    """Return an element converted to another type, such as "f32"."""
    return Scalar(simplified(expr.cast(x.expr, dtype, asked)))


def where(condition: Scalar, yes: Operand, no: Operand) -> Scalar:
    """Return ``yes`` if the condition is true, else ``no``; at least one of them is an element."""
    like = _like((yes, no))
    chosen = expr.where(condition.expr, number(yes, like).expr, number(no, like).expr)
    return Scalar(simplified(chosen))


def truth(x: Scalar) -> Scalar:
    """Return whether it is not 0."""
    return cast(x, "b1")


def function(op: str) -> Callable[..., Scalar]:
    """Return an op of the table as a function of elements."""

    def called(*args: Any) -> Scalar:
        return apply(op, *args)

    called.__name__ = op
    called.__doc__ = f"Return the op ``{op}`` of elements and numbers, of which at least one is an element."
    return called


absolute, minimum, maximum = function("abs"), function("min"), function("max")
exp, expm1, log, log1p, sqrt = function("exp"), function("expm1"), function("log"), function("log1p"), function("sqrt")
sin, cos, tanh, erf, erfc = function("sin"), function("cos"), function("tanh"), function("erf"), function("erfc")
floor, trunc, power = function("floor"), function("trunc"), function("pow")
equal, unequal, fmod = function("eq"), function("ne"), function("fmod")


def ceil(x: Scalar) -> Scalar:
    """Return the least whole number that is not less; -0.0 for numbers between -1 and 0."""
    return -floor(-x)


def nonzero(x: Scalar) -> Scalar:
    """Return an integer that is not 0; the program stops where it is."""
    return Scalar(expr.nonzero(x.expr))


def is_nan(x: Scalar) -> Scalar:
    return unequal(x, x)
