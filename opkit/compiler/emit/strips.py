"""This module cuts loops into strips: inputs of a strip are computed in rows before it, and results are moved from rows after it.

The rows stay in the L1 cache.

for (int64_t c0 = begin; c0 < end; c0 += 512) {
  const int64_t u0 = end - c0 < 512 ? end : c0 + 512;
  float r1[512];
  float r2[512];
  { const int64_t a0 = c0; opk_random_row(p_seed[0], a0, u0 - c0, r1); }
  for (int64_t a0 = c0; a0 < u0; ++a0) r2[a0 - c0] = r1[a0 - c0];
  { const int64_t a0 = c0; opk_stream(p_y + (a0), r2, (u0 - c0) * (int64_t)sizeof *r2); }
}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opkit.compiler.emit import calls, streaming_stores
from opkit.compiler.emit.blocks import CScope, CWriter
from opkit.compiler.emit.prefetch import PrefetchedRow
from opkit.compiler.emit.types import C_TYPES
from opkit.compiler.ir import expr
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Axis, Value
from opkit.compiler.ir.kernel import Loop, Store

_LENGTH = 512  # elements: a few KiB of the stack, and the overhead of a strip is small in comparison


@dataclasses.dataclass(frozen=True)
class StripRows:
    """The rows of a loop.

    Attributes:
        drawn: random numbers that are drawn before a strip.
        called: calls of libraries' functions before a strip; see ``calls.hoisted_calls``.
        moved: results that are written past the caches after a strip.
        prefetched: rows whose part for the next row's strip is prefetched.
    """

    drawn: Sequence[Expr] = ()
    called: Mapping[Expr, Expr] = dataclasses.field(default_factory=dict[Expr, Expr])
    moved: Sequence[Store] = ()
    prefetched: Sequence[PrefetchedRow] = ()

    def __bool__(self) -> bool:
        return bool(self.drawn or self.called or self.moved or self.prefetched)


def of(loop: Loop, roots: Sequence[Expr], writer: CWriter) -> StripRows:
    """Return the rows of an innermost loop with these expressions."""
    if loop.stop is not None or any(isinstance(statement, Loop) for statement in loop.body):
        return StripRows()
    called = {} if loop.how == "plain" else calls.hoisted_calls(loop.body, roots)
    prefetched = writer.prefetches.by_strip if loop is writer.prefetches.within else ()
    return StripRows(_drawn(loop.axis, roots), called, streaming_stores.of(loop, roots, writer.streamed), prefetched)


def begin(scope: CScope, axis: Axis, rows: StripRows, first: str, last: str) -> tuple[CScope, str, str]:
    """Open the loop over strips: the scope of a strip, and where its part of the axis begins and ends."""
    writer, (a, c, u) = scope.writer, _names(axis)
    writer.line(f"for (int64_t {c} = {first}; {c} < {last}; {c} += {_LENGTH}) {{")
    writer.depth += 1
    writer.line(f"const int64_t {u} = {last} - {c} < {_LENGTH} ? {last} : {c} + {_LENGTH};")
    inner = scope.within(())
    for prefetched in rows.prefetched:
        writer.line(prefetched.text(scope.index(prefetched.at), c, u))
    for node in rows.drawn:
        row = _row(scope, "float")
        _at_begin(scope, axis, _fill_drawn, node, row)
        inner.spelled[node] = f"{row}[{a} - {c}]"
        inner.reads[node] = frozenset()
    strip = calls.Strip(f"for (int64_t {a} = {c}; {a} < {u}; ++{a})", f"[{a} - {c}]", f"{u} - {c}", _LENGTH)
    calls.write(inner, rows.called, strip)
    for store in rows.moved:
        inner.rows[store.buffer] = _row(scope, C_TYPES[writer.dtypes[store.buffer]]), f"{a} - {c}"
    return inner, c, u


def end(scope: CScope, axis: Axis, rows: StripRows) -> None:
    """Close the loop over strips; ``scope`` is that of a strip."""
    for store in rows.moved:
        _at_begin(scope, axis, streaming_stores.move, store, scope.rows[store.buffer][0])
    scope.writer.depth -= 1
    scope.writer.line("}")


def _names(axis: Axis) -> tuple[str, str, str]:
    """Return the variables of the axis, and of the begin and end of a strip."""
    return f"a{axis.number}", f"c{axis.number}", f"u{axis.number}"


def _row(scope: CScope, ctype: str) -> str:
    scope.writer.names += 1
    name = f"r{scope.writer.names}"
    scope.writer.line(f"{ctype} {name}[{_LENGTH}] __attribute__((aligned(64)));")
    return name


def _at_begin(scope: CScope, axis: Axis, write: Callable[[CScope, Any, str, str], None], what: Any, row: str) -> None:
    """Write a block in which the axis is at the beginning of the strip."""
    a, c, u = _names(axis)
    scope.writer.line("{")
    scope.writer.depth += 1
    scope.writer.line(f"const int64_t {a} = {c};")
    write(scope.within(()), what, row, f"{u} - {c}")
    scope.writer.depth -= 1
    scope.writer.line("}")


# ---- random numbers ---------------------------------------------------------------------------------------------------


def _drawn(axis: Axis, roots: Iterable[Expr]) -> list[Expr]:
    """Return the random numbers among a loop's expressions whose counts follow one another along its axis."""
    nodes = dict.fromkeys(node for root in roots for node in root.walk() if node.op == "random" and node.dtype == "f32")
    return [node for node in nodes if _follow(node, axis)]


def _follow(node: Expr, axis: Axis) -> bool:
    computed = any(isinstance(leaf, Value) for leaf in node.data.leaves())
    return not computed and node.data.coefficient(axis) == 1 and all(_stays(part, axis) for part in node.args[0].walk())


def _stays(part: Expr, axis: Axis) -> bool:
    """Return whether a part of a seed is the same for the whole loop."""
    return part.op != "var" and all(axis not in at.axes() for at in expr.indices(part))


def _fill_drawn(scope: CScope, node: Expr, row: str, elements: str) -> None:
    """Write the call that fills a row with random numbers; the axis is at the beginning of the strip."""
    seed, count = scope.value(node.args[0]), scope.index(node.data)
    scope.writer.line(f"opk_random_row({seed}, {count}, {elements}, {row});")
