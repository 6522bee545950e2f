"""Translate sympy expressions, which torch's symbolic sizes hold, into the code of layout programs.

Sizes are whole numbers, but a body may compute them by way of fractions or floating-point numbers (``ceil(n / 2)``,
``int(n * 0.5)``). Such a step is translated where whole numbers give the same result: fractions of whole numbers, and
doubles that are whole numbers over a power of two, while no numerator exceeds 2**53. The conditions for
that are collected in ``conditions``, which belong to the guard. Expressions are distinguished by their classes' names, because
sympy is slow to import.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from opkit.op.layout import program as p

Code = tuple[int, ...]

_MAX_FACTORS = 8
_EXACT = 2**53  # doubles hold every whole number up to this one
_FLOATS = {"Float", "ToFloat", "IntTrueDiv", "FloatTrueDiv", "FloatPow", "TruncToFloat", "RoundDecimal"}
_ROUNDINGS = {"TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt", "floor", "ceiling"}
_RELATIONS = {
    "Equality": (p.EQUAL, False),
    "Unequality": (p.NOT_EQUAL, False),
    "StrictLessThan": (p.LESS, False),
    "LessThan": (p.LESS_EQUAL, False),
    "StrictGreaterThan": (p.LESS, True),
    "GreaterThan": (p.LESS_EQUAL, True),
}
"""The operation of each relation, and whether its sides are swapped."""


class NoCodeError(Exception):
    """An expression has no translation into a program's code; the message names it."""


def constant(value: Any) -> Code:
    """Return code for a number.

    Raises:
        NoCodeError: it is out of the range of ``int64_t``.
    """
    if not p.is_int64(int(value)):
        raise NoCodeError(f"the number {value} does not fit 64 bits")
    return (p.CONSTANT, int(value))


def joined(op: int, parts: Iterable[Code]) -> Code:
    """Return code that applies ``op`` to ``parts`` from left to right."""
    first, *rest = parts
    return sum(((*part, op) for part in rest), start=tuple(first))


class Translator:
    """Translates expressions over ``symbols``, which maps each symbol to its code.

    The translations so far are right if no piece of code in ``conditions`` yields 0.
    """

    def __init__(self, symbols: Mapping[Any, Code]) -> None:
        self.symbols = symbols
        self.conditions: list[Code] = []

    def code(self, expression: Any) -> Code:
        """Return the code of a whole number or of a condition.

        Raises:
            NoCodeError: naming the part that has no code.
        """
        kind = type(expression).__name__
        if kind in _RELATIONS:
            return self._relation(expression, *_RELATIONS[kind])
        rule = _RULES.get(kind)
        if expression.is_Symbol and expression in self.symbols:
            return self.symbols[expression]
        if expression.is_Integer:
            return constant(expression)
        if rule is None:
            why = "depends on data" if expression.is_Symbol else f"({kind}) has no code"
            raise NoCodeError(f"{expression} {why}")
        return rule(self, expression)

    # ---- sums and products of fractions ----------------------------------------------------------------------------

    def whole(self, expression: Any) -> Code:
        """Return code for a sum or product with fractional coefficients whose value is known to be whole."""
        numerator, denominator = self.fraction(expression)
        if denominator == 1:
            return numerator
        remainder = (*numerator, *constant(denominator), p.MODULO)
        self.conditions.append((*remainder, *constant(0), p.EQUAL))
        return (*numerator, *constant(denominator), p.FLOOR_DIVIDE)

    def fraction(self, expression: Any) -> tuple[Code, int]:
        """Return code for the numerator, and the denominator."""
        terms = [term.as_coeff_Mul(rational=True) for term in expression.as_ordered_terms()]
        denominator = math.lcm(*[int(factor.q) for factor, _ in terms])
        scaled = [(int(factor * denominator), rest) for factor, rest in terms]
        scaled.sort(key=lambda term: term[0] < 0)  # terms to add come first, terms to subtract last
        code = self._term(*scaled[0])
        for factor, rest in scaled[1:]:
            code = (*code, *self._term(abs(factor), rest), p.SUBTRACT if factor < 0 else p.ADD)
        return code, denominator

    def _term(self, factor: int, rest: Any) -> Code:
        if rest.is_Integer:
            return constant(factor * int(rest))
        factors = [self.code(item) for item in rest.as_ordered_factors()]
        return joined(p.MULTIPLY, factors if factor == 1 else [*factors, constant(factor)])

    def divisor(self, expression: Any) -> Code:
        """Return code for a divisor. Its factors must be positive, as torch assumed when it simplified the division."""
        for factor in expression.as_ordered_factors():
            base = factor.as_base_exp()[0]
            if not base.is_positive:
                self.conditions.append((*constant(1), *self.code(base), p.LESS_EQUAL))
        return self.code(expression)

    # ---- floating point --------------------------------------------------------------------------------------------

    def _relation(self, expression: Any, op: int, swapped: bool) -> Code:
        left, right = reversed(expression.args) if swapped else expression.args
        if not (floating(left) or floating(right)):
            return (*self.code(left), *self.code(right), op)
        (a, over_a), (b, over_b) = self.double(left), self.double(right)
        return (*_times(a, over_b), *_times(b, over_a), op)

    def double(self, expression: Any) -> tuple[Code, int]:
        """Return code for the numerator of a double, and its denominator, which is a power of two.

        Raises:
            NoCodeError: it may be a number of another form, or one that is rounded when computed in doubles.
        """
        kind = type(expression).__name__
        if not floating(expression):
            return self._bounded(self.code(expression)), 1
        if kind == "Float":
            value = Fraction(float(expression))
            if value.denominator > _EXACT or abs(value.numerator) > _EXACT:
                raise NoCodeError(f"{expression} has too many digits")
            return constant(value.numerator), value.denominator
        if kind == "ToFloat":
            return self.double(expression.args[0])
        if kind in ("Mul", "Add"):
            parts = [self.double(item) for item in expression.args]
            return self._product(parts) if kind == "Mul" else self._sum(parts)
        if kind in ("IntTrueDiv", "FloatTrueDiv"):
            return self._halved(expression)
        raise NoCodeError(f"{expression} ({kind}) is computed in floating point")

    def _product(self, parts: list[tuple[Code, int]]) -> tuple[Code, int]:
        factors = [code for code, _ in parts if code != constant(1)]
        code = self._bounded(joined(p.MULTIPLY, factors or [constant(1)]))
        return code, math.prod(denominator for _, denominator in parts)

    def _sum(self, parts: list[tuple[Code, int]]) -> tuple[Code, int]:
        common = max(denominator for _, denominator in parts)
        limit = _EXACT // len(parts)  # sums in any order stay exact in doubles
        terms = [self._bounded(_times(code, common // denominator), limit) for code, denominator in parts]
        return joined(p.ADD, terms), common

    def _halved(self, expression: Any) -> tuple[Code, int]:
        (numerator, over), (divisor, under) = map(self.double, expression.args)
        value = divisor[1] if len(divisor) == 2 and divisor[0] == p.CONSTANT else 0
        if value <= 0 or value & (value - 1):
            raise NoCodeError(f"{expression} is computed in floating point")
        return self._bounded(_times(numerator, under)), over * value

    def quotient(self, expression: Any) -> tuple[Code, Code]:
        """Return two pieces of code whose quotient rounds up or down to the same number as the double ``expression``."""
        if type(expression).__name__ not in ("IntTrueDiv", "FloatTrueDiv"):
            numerator, denominator = self.double(expression)
            return numerator, constant(denominator)
        # the quotient is rounded once, by less than its distance from the next whole number
        (numerator, over), (divisor, under) = map(self.double, expression.args)
        return self._bounded(_times(numerator, under)), _times(divisor, over)

    def rounded(self, expression: Any) -> tuple[Code, Code]:
        """Return code for the argument of a rounding operation, rounded down and rounded up."""
        (inner,) = expression.args
        if floating(inner):
            numerator, denominator = self.quotient(inner)
        else:
            numerator, common = self.fraction(inner)
            denominator = constant(common)
        down = (*numerator, *denominator, p.FLOOR_DIVIDE)
        opposite = (*constant(0), *numerator, p.SUBTRACT, *denominator, p.FLOOR_DIVIDE)
        return down, (*constant(0), *opposite, p.SUBTRACT)

    def _bounded(self, code: Code, limit: int = _EXACT) -> Code:
        if len(code) == 2 and code[0] == p.CONSTANT and abs(code[1]) <= limit:
            return code
        self.conditions += [(*constant(-limit), *code, p.LESS_EQUAL), (*code, *constant(limit), p.LESS_EQUAL)]
        return code


def floating(expression: Any) -> bool:
    """Return whether an expression is a floating-point number."""
    kind = type(expression).__name__
    return kind in _FLOATS or (kind not in _ROUNDINGS and any(floating(item) for item in expression.args))


def _times(code: Code, factor: int) -> Code:
    return code if factor == 1 else (*code, *constant(factor), p.MULTIPLY)


# ---- the operations -------------------------------------------------------------------------------------------------

_Rule = Callable[[Translator, Any], Code]


def _fold(op: int) -> _Rule:
    return lambda to, expression: joined(op, [to.code(item) for item in expression.args])


def _divided(op: int) -> _Rule:
    def rule(to: Translator, expression: Any) -> Code:
        base, divisor = expression.args
        return (*to.code(base), *to.divisor(divisor), op)

    return rule


def _power(to: Translator, expression: Any) -> Code:
    base, exponent = expression.args
    if not (exponent.is_Integer and 1 <= int(exponent) <= _MAX_FACTORS):
        raise NoCodeError(f"the power {expression} has no code")
    return joined(p.MULTIPLY, [to.code(base)] * int(exponent))


def _shift(op: int) -> _Rule:
    def rule(to: Translator, expression: Any) -> Code:
        base, by = expression.args
        if not (by.is_Integer and 0 <= int(by) < 63):
            raise NoCodeError(f"the shift {expression} has no code")
        return (*to.code(base), *constant(2 ** int(by)), op)

    return rule


def _modular_indexing(to: Translator, expression: Any) -> Code:
    base, divisor, modulus = expression.args
    return (*to.code(base), *to.divisor(divisor), p.FLOOR_DIVIDE, *to.divisor(modulus), p.MODULO)


def _divide_up(to: Translator, expression: Any) -> Code:
    base, divisor = expression.args
    opposite = (*constant(0), *to.code(base), p.SUBTRACT)
    return (*constant(0), *opposite, *to.divisor(divisor), p.FLOOR_DIVIDE, p.SUBTRACT)


def _absolute(to: Translator, expression: Any) -> Code:
    code = to.code(expression.args[0])
    return (*code, *constant(0), *code, p.SUBTRACT, p.MAXIMUM)


def _truncated(to: Translator, expression: Any) -> Code:
    down, up = to.rounded(expression)
    return (*constant(0), *down, p.LESS_EQUAL, *down, *up, p.SELECT)


def _piecewise(to: Translator, expression: Any) -> Code:
    *pieces, (last, always) = expression.args
    if always != True:  # noqa: E712  (sympy's true)
        raise NoCodeError(f"{expression} is not defined everywhere")
    code = to.code(last)
    for value, condition in reversed(pieces):
        code = (*to.code(condition), *to.code(value), *code, p.SELECT)
    return code


_RULES: dict[str, _Rule] = {
    "Add": lambda to, e: to.whole(e),
    "Mul": lambda to, e: to.whole(e),
    "Pow": _power,
    "PowByNatural": _power,
    "FloorDiv": _divided(p.FLOOR_DIVIDE),
    "CleanDiv": _divided(p.FLOOR_DIVIDE),
    "CeilDiv": _divide_up,
    "Mod": _divided(p.MODULO),
    "PythonMod": _divided(p.MODULO),
    "ModularIndexing": _modular_indexing,
    "LShift": _shift(p.MULTIPLY),
    "RShift": _shift(p.FLOOR_DIVIDE),
    "Max": _fold(p.MAXIMUM),
    "Min": _fold(p.MINIMUM),
    "Abs": _absolute,
    "Identity": lambda to, e: to.code(e.args[0]),
    "FloorToInt": lambda to, e: to.rounded(e)[0],
    "CeilToInt": lambda to, e: to.rounded(e)[1],
    "TruncToInt": _truncated,
    "floor": lambda to, e: to.rounded(e)[0],
    "ceiling": lambda to, e: to.rounded(e)[1],
    "Where": lambda to, e: (*to.code(e.args[0]), *to.code(e.args[1]), *to.code(e.args[2]), p.SELECT),
    "ITE": lambda to, e: (*to.code(e.args[0]), *to.code(e.args[1]), *to.code(e.args[2]), p.SELECT),
    "Piecewise": _piecewise,
    "And": _fold(p.AND),
    "Or": _fold(p.OR),
    "Not": lambda to, e: (*to.code(e.args[0]), p.NOT),
    "BooleanTrue": lambda _, e: constant(1),
    "BooleanFalse": lambda _, e: constant(0),
}
