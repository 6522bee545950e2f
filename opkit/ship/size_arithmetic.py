"""This module translates Python expressions of sizes, as the compiler writes them, to C."""

from __future__ import annotations

import ast
from collections.abc import Sequence

FUNCTIONS = """
static inline int64_t opk_floordiv(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
static inline int64_t opk_rem(int64_t a, int64_t b) { return a - opk_floordiv(a, b) * b; }
static inline int64_t opk_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t opk_max(int64_t a, int64_t b) { return a > b ? a : b; }
"""
"""The functions that the C calls."""


def c_text(text: str, sizes: Sequence[str]) -> str:
    """Return an expression of sizes as C, in which size number n is ``sizes[n]``.

    Raises:
        ValueError: it has something else than integer arithmetic.

    >>> c_text("min(64, 64*s27)//2", ["s27"])
    'opk_floordiv(opk_min(64L, (64L * sizes[0])), 2L)'
    """
    return _Translation(sizes).text(ast.parse(text, mode="eval").body)


_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_CALLS = {ast.FloorDiv: "opk_floordiv", ast.Mod: "opk_rem"}


class _Translation:
    def __init__(self, sizes: Sequence[str]) -> None:
        self.sizes = sizes

    def text(self, node: ast.expr) -> str:
        """Return an expression as C.

        Raises:
            ValueError: it has something else than integer arithmetic.
        """
        match node:
            case ast.Constant(value=int(number)):
                return f"{int(number)}L"
            case ast.Name(id=name) if name in self.sizes:
                return f"sizes[{self.sizes.index(name)}]"
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{self.text(operand)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return f"({self.text(left)} {_OPERATIONS[type(op)]} {self.text(right)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _CALLS:
                return f"{_CALLS[type(op)]}({self.text(left)}, {self.text(right)})"
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return f"({self.text(left)} {_COMPARISONS[type(op)]} {self.text(right)})"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self.text(test)} ? {self.text(body)} : {self.text(orelse)})"
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=[first, *others]):
                found = self.text(first)
                for each in others:
                    found = f"opk_{name}({found}, {self.text(each)})"
                return found
            case _:
                raise ValueError(f"it computes a size by {ast.unparse(node)}")
