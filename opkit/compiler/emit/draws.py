"""Random numbers of a loop, drawn before it, a stretch at a time: a quarter of the work of drawing each where it is used.

for (int64_t c0 = begin; c0 < end; c0 += 512) {
  const int64_t u0 = end - c0 < 512 ? end : c0 + 512;
  float r1[512];
  { const int64_t a0 = c0; opk_random_row(p_seed[0], a0, u0 - c0, r1); }
  for (int64_t a0 = c0; a0 < u0; ++a0) p_y[a0] = r1[a0 - c0];
}
"""

from __future__ import annotations

from collections.abc import Iterable

from opkit.compiler.emit.blocks import Scope
from opkit.compiler.ir import expr
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Axis, Value
from opkit.compiler.ir.kernel import Loop

_STRETCH = 512  # numbers: 2 KiB of the stack, and a stretch's overhead is little beside them


def of(loop: Loop, roots: Iterable[Expr]) -> list[Expr]:
    """The random numbers among a loop's own expressions whose counts follow one another along its axis."""
    if loop.stop is not None or any(isinstance(statement, Loop) for statement in loop.body):
        return []
    nodes = dict.fromkeys(node for root in roots for node in root.walk() if node.op == "random" and node.dtype == "f32")
    return [node for node in nodes if _follow(node, loop.axis)]


def _follow(node: Expr, axis: Axis) -> bool:
    computed = any(isinstance(leaf, Value) for leaf in node.data.leaves())
    return not computed and node.data.coefficient(axis) == 1 and all(_stays(part, axis) for part in node.args[0].walk())


def _stays(part: Expr, axis: Axis) -> bool:
    """Whether a part of a seed is the same for the whole loop."""
    return part.op != "var" and all(axis not in at.axes() for at in expr.indices(part))


def begin(scope: Scope, axis: Axis, drawn: Iterable[Expr], first: str, last: str) -> tuple[Scope, str, str]:
    """Open the loop over stretches: the scope of a stretch, and where its part of the axis begins and ends."""
    writer, a, c, u = scope.writer, *(f"{letter}{axis.number}" for letter in "acu")
    writer.line(f"for (int64_t {c} = {first}; {c} < {last}; {c} += {_STRETCH}) {{")
    writer.depth += 1
    writer.line(f"const int64_t {u} = {last} - {c} < {_STRETCH} ? {last} : {c} + {_STRETCH};")
    inner = scope.within(())
    for node in drawn:
        writer.names += 1
        row = f"r{writer.names}"
        writer.line(f"float {row}[{_STRETCH}] __attribute__((aligned(64)));")
        _row(scope.within(()), node, f"const int64_t {a} = {c};", f"{u} - {c}, {row}")
        inner.spelled[node] = f"{row}[{a} - {c}]"
        inner.reads[node] = frozenset()
    return inner, c, u


def _row(scope: Scope, node: Expr, axis: str, rest: str) -> None:
    """The call that fills a row, where the axis stands at the beginning of the stretch."""
    scope.writer.line("{")
    scope.writer.depth += 1
    scope.writer.line(axis)
    seed, count = scope.value(node.args[0]), scope.index(node.data)
    scope.writer.line(f"opk_random_row({seed}, {count}, {rest});")
    scope.writer.depth -= 1
    scope.writer.line("}")


def end(scope: Scope) -> None:
    """Close the loop over stretches."""
    scope.writer.depth -= 1
    scope.writer.line("}")
