"""Make one expression of the steps of a program that computes one element."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from opkit.attn.functions.expression import INDEX, load
from opkit.compiler.ir import expr
from opkit.compiler.ir.expr import Expr, rewrite
from opkit.compiler.ir.index import Div, Index, Mod, Value, value


class Inlining:
    """Makes one expression of the steps of a program."""

    def __init__(self, steps: dict[str, Any], inputs: dict[str, str], captured: Callable[[str], str]) -> None:
        self.steps = steps
        self.inputs = inputs
        self.captured = captured
        self.bounds: set[Expr] = set()  # indices that the program checks

    def element(self, buffer: str) -> Expr:
        """Return the only element of a buffer."""
        return self._load(buffer, [expr.const(0, "i64")] * len(self.steps[buffer].axes) if buffer in self.steps else [])

    def _load(self, buffer: str, at: list[Expr], dtype: str = "") -> Expr:
        if buffer in self.inputs:
            return expr.var(self.inputs[buffer], dtype)
        if buffer not in self.steps:
            return load(self.captured(buffer), dtype, *at)
        step = self.steps[buffer]
        axes = {leaf: each for index, each in zip(step.target, at, strict=True) for leaf in index.axes()}
        return self._body(step.body, axes)

    def _body(self, root: Expr, axes: dict[Any, Expr]) -> Expr:
        substituted = root.substitute({axis: value(each) for axis, each in axes.items()})
        return rewrite(substituted, self._node)

    def _node(self, node: Expr) -> Expr:
        if node.op == "load":
            return self._load(node.data[0], [self._index(at) for at in node.data[1]], node.dtype)
        if node.op == "index":
            return self._index(node.data)
        if node.op in ("bound", "nonzero"):
            self.bounds.add(node.args[0])
            return node.args[0]
        if node.op == "where" and node.args[0].op == "le" and node.args[0].args[1] in self.bounds:
            return node.args[1]  # the check of an index into a dimension of one element
        return node

    def _index(self, index: Index) -> Expr:
        """Return an index as an expression of i64."""
        total: Expr | None = None
        for monomial, factor in index.terms.items():
            parts = [self._atom(atom) for atom in monomial]
            parts += [expr.const(factor, "i64")] if factor != 1 or not parts else []
            term = functools.reduce(lambda a, b: expr.op("mul", a, b), parts)
            total = term if total is None else expr.op("add", total, term)
        return total if total is not None else expr.const(0, "i64")

    def _atom(self, atom: Any) -> Expr:
        if isinstance(atom, Value):
            return _plain(rewrite(atom.expr, self._node))
        if isinstance(atom, (Div, Mod)):
            parts = self._index(atom.dividend), self._index(atom.divisor)
            return expr.op("floordiv" if isinstance(atom, Div) else "rem", *parts)
        raise AssertionError(f"{atom} in the index of a function of one element")


def _plain(at: Expr) -> Expr:
    """Return an index without a conversion from ``INDEX``, which all coordinates may have."""
    return at.args[0] if at.op == "cast" and at.args[0].op == "var" and at.args[0].dtype == INDEX else at


def narrowed(root: Expr) -> Expr:
    """Return an expression that computes in float32 what it computes in float64, as attention of narrower queries does."""

    def change(node: Expr) -> Expr:
        if node.dtype != "f64":
            return node
        if node.op == "load":
            return expr.cast(node, "f32")
        if node.op == "cast":
            return expr.cast(node.args[0], "f32")
        return expr.make(node.op, "f32", node.args, node.data)

    return rewrite(root, change)
