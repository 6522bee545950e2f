"""This module converts torch's symbolic integers to indices of the IR: each sympy expression once, then from a cache."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch

from opkit.compiler.capture import torch_private as private
from opkit.compiler.ir.index import Index, index, size

_EXPECTED = 16  # for sizes that depend on data


class SymbolicSizes:
    """The symbols of one graph.

    Attributes:
        values: the value of each symbol when the graph was captured, by name.
        computed: Python expressions in terms of the symbols for sizes that the IR has no arithmetic for, by name.
    """

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.computed: dict[str, str] = {}
        self._known: dict[Any, Index] = {}

    def index(self, number: Any) -> Index:
        """Return an int or SymInt as an index."""
        if type(number) is int:
            return index(number)
        if not number.node.is_symbolic():
            return index(int(number))
        expression = private.expression(number)
        if private.depends_on_float(expression):
            return index(int(number))  # a guard: the graph serves this size only
        found = self._known.get(expression)
        if found is None:
            found = self._known[expression] = self._converted(private.replaced(number), number)
        return found

    def stride(self, number: Any) -> Index:
        """Return a stride as an index, with ``n`` for each ``Max(1, n)`` that torch writes there for a size of 0.

        They differ for tensors without elements only, and layouts are recognised by products of sizes.
        """
        if type(number) is int or not number.node.is_symbolic():
            return self.index(number)
        expression = private.replaced(number)
        plain = expression.replace(_is_at_least_one, lambda most: next(a for a in most.args if a != 1))
        known = plain == expression or private.depends_on_float(plain)
        return self.index(number) if known else self._converted(plain, number)

    def _converted(self, expression: Any, number: Any) -> Index:
        if isinstance(expression, sympy.Symbol):
            return self._symbol(expression, number)
        if isinstance(expression, sympy.Integer):
            return index(int(expression))
        rule = _RULES.get(type(expression))
        if rule is None or not _in_integers(expression):
            return self._computed(expression, number)
        arguments = [int(a) if isinstance(a, sympy.Integer) else self._converted(a, number) for a in expression.args]
        return index(rule(*arguments))

    def _symbol(self, symbol: sympy.Symbol, number: Any) -> Index:
        value = private.example(symbol, number)
        self.values[symbol.name] = _EXPECTED if value is None else value
        return size(symbol.name, max(private.least(symbol, number), 0))

    def _computed(self, expression: sympy.Expr, number: Any) -> Index:
        """Return a new size for an expression that is neither polynomial nor quotient, such as the maximum of two sizes."""
        for symbol in sorted(expression.free_symbols, key=str):
            self._symbol(symbol, number)  # pyright: ignore[reportArgumentType]
        text = private.python_text(expression)
        names = {known: name for name, known in self.computed.items()}
        name = names.setdefault(text, f"computed{len(self.computed)}")
        self.computed[name] = text
        value: Any = expression.xreplace({s: sympy.Integer(self.values[str(s)]) for s in expression.free_symbols})
        self.values[name] = int(value)
        return size(name, 0)


def _in_integers(expression: sympy.Expr) -> bool:
    """Return whether an expression is valid in an index: integer parts, no negative exponents, positive divisors."""
    if isinstance(expression, sympy.Pow | _functions.PowByNatural):
        return expression.args[1].is_Integer and bool(expression.args[1] >= 0)  # pyright: ignore[reportOperatorIssue]
    if type(expression) in _DIVISIONS:
        return all(a.is_positive for a in expression.args[1:])
    return not any(a.is_Rational and not a.is_Integer for a in expression.args)


_functions = private.sympy_functions


def _is_at_least_one(expression: Any) -> bool:
    """Return whether an expression is ``Max(1, n)``."""
    return isinstance(expression, (_functions.Max, sympy.Max)) and len(expression.args) == 2 and 1 in expression.args


_DIVISIONS: dict[type, Callable[..., Any]] = {
    _functions.FloorDiv: lambda a, b: index(a) // b,
    _functions.CleanDiv: lambda a, b: index(a) // b,
    _functions.Mod: lambda a, b: index(a) % b,
    _functions.PythonMod: lambda a, b: index(a) % b,
    _functions.CeilDiv: lambda a, b: (index(a) + b - 1) // b,
    _functions.ModularIndexing: lambda a, divisor, modulus: (index(a) // divisor) % modulus,
}
_RULES: dict[type, Callable[..., Any]] = {
    sympy.Add: lambda *of: functools.reduce(operator.add, of),
    sympy.Mul: lambda *of: functools.reduce(operator.mul, of),
    sympy.Pow: lambda base, exponent: functools.reduce(operator.mul, [base] * exponent, 1),
    _functions.PowByNatural: lambda base, exponent: functools.reduce(operator.mul, [base] * exponent, 1),
    _functions.Identity: lambda a: a,
    **_DIVISIONS,
}

FLOAT_ARITHMETIC: dict[Any, str] = {
    torch.ops.aten._local_scalar_dense.default: "aten._local_scalar_dense.default",
    **{getattr(operator, name): f"float.{name}" for name in ("add", "sub", "mul", "pow", "neg", "abs")},
    operator.truediv: "float.div", torch.sym_float: "float.float", torch.sym_max: "float.max", torch.sym_min: "float.min",
    private.sym_sqrt: "float.sqrt",
}  # fmt: skip
"""The targets of nodes that compute Python floats, by the functions of an FX graph."""
