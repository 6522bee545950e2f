"""Random numbers of a loop, drawn before it into a row: a quarter of the work of drawing each where it is used."""

from __future__ import annotations

from collections.abc import Iterable

from opkit.compiler.emit.blocks import Scope
from opkit.compiler.ir import expr
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Axis, Value


def of(axis: Axis, roots: Iterable[Expr]) -> list[Expr]:
    """The random numbers among a loop's expressions whose counts follow one another along its axis."""
    nodes = dict.fromkeys(node for root in roots for node in root.walk() if node.op == "random" and node.dtype == "f32")
    return [node for node in nodes if _follow(node, axis)]


def _follow(node: Expr, axis: Axis) -> bool:
    computed = any(isinstance(leaf, Value) for leaf in node.data.leaves())
    return not computed and node.data.coefficient(axis) == 1 and all(_stays(part, axis) for part in node.args[0].walk())


def _stays(part: Expr, axis: Axis) -> bool:
    """Whether a part of a seed is the same for the whole loop."""
    return part.op != "var" and all(axis not in at.axes() for at in expr.indices(part))


def fill(scope: Scope, node: Expr, row: str, elements: str) -> None:
    """The call that fills a row; the axis stands at the beginning of the stretch."""
    seed, count = scope.value(node.args[0]), scope.index(node.data)
    scope.writer.line(f"opk_random_row({seed}, {count}, {elements}, {row});")
