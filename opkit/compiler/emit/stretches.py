"""Loops cut into stretches: what a stretch needs is made in a row before it, what it makes is moved from a row after it.

The rows stay in the processor's first cache.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opkit.compiler.emit import calls, draws, streams
from opkit.compiler.emit.ahead import Asked
from opkit.compiler.emit.blocks import Scope, Writer
from opkit.compiler.emit.types import C_TYPES
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Axis
from opkit.compiler.ir.kernel import Loop, Store

_LENGTH = 512  # elements: a few KiB of the stack, and what a stretch costs is little beside them


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a loop has rows for.

    Attributes:
        drawn: random numbers.
        called: calls of libraries' functions; see ``calls.first_of_all``.
        moved: results that are written past the caches.
        asked: of the next row, the part that the next row's stretch will read.
    """

    drawn: Sequence[Expr] = ()
    called: Mapping[Expr, Expr] = dataclasses.field(default_factory=dict[Expr, Expr])
    moved: Sequence[Store] = ()
    asked: Sequence[Asked] = ()

    def __bool__(self) -> bool:
        return bool(self.drawn or self.called or self.moved or self.asked)


def of(loop: Loop, roots: Sequence[Expr], writer: Writer) -> Rows:
    """What an innermost loop with these expressions of its own has rows for."""
    if loop.stop is not None or any(isinstance(statement, Loop) for statement in loop.body):
        return Rows()
    called = {} if loop.how == "plain" else calls.first_of_all(loop.body, roots)
    asked = writer.ahead.spread if loop is writer.ahead.within else ()
    return Rows(draws.of(loop.axis, roots), called, streams.of(loop, roots, writer.streamed), asked)


def begin(scope: Scope, axis: Axis, rows: Rows, first: str, last: str) -> tuple[Scope, str, str]:
    """Open the loop over stretches: the scope of a stretch, and where its part of the axis begins and ends."""
    writer, (a, c, u) = scope.writer, _names(axis)
    writer.line(f"for (int64_t {c} = {first}; {c} < {last}; {c} += {_LENGTH}) {{")
    writer.depth += 1
    writer.line(f"const int64_t {u} = {last} - {c} < {_LENGTH} ? {last} : {c} + {_LENGTH};")
    inner = scope.within(())
    for asked in rows.asked:
        writer.line(asked.text(scope.index(asked.at), c, u))
    for node in rows.drawn:
        row = _row(scope, "float")
        _at_begin(scope, axis, draws.fill, node, row)
        inner.spelled[node] = f"{row}[{a} - {c}]"
        inner.reads[node] = frozenset()
    stretch = calls.Stretch(f"for (int64_t {a} = {c}; {a} < {u}; ++{a})", f"[{a} - {c}]", f"{u} - {c}", _LENGTH)
    calls.write(inner, rows.called, stretch)
    for store in rows.moved:
        inner.rows[store.buffer] = _row(scope, C_TYPES[writer.dtypes[store.buffer]]), f"{a} - {c}"
    return inner, c, u


def end(scope: Scope, axis: Axis, rows: Rows) -> None:
    """Close the loop over stretches; ``scope`` is that of a stretch."""
    for store in rows.moved:
        _at_begin(scope, axis, streams.move, store, scope.rows[store.buffer][0])
    scope.writer.depth -= 1
    scope.writer.line("}")


def _names(axis: Axis) -> tuple[str, str, str]:
    """The axis itself, and where a stretch begins and ends."""
    return f"a{axis.number}", f"c{axis.number}", f"u{axis.number}"


def _row(scope: Scope, ctype: str) -> str:
    scope.writer.names += 1
    name = f"r{scope.writer.names}"
    scope.writer.line(f"{ctype} {name}[{_LENGTH}] __attribute__((aligned(64)));")
    return name


def _at_begin(scope: Scope, axis: Axis, write: Callable[[Scope, Any, str, str], None], what: Any, row: str) -> None:
    """A block in which the axis stands at the beginning of the stretch."""
    a, c, u = _names(axis)
    scope.writer.line("{")
    scope.writer.depth += 1
    scope.writer.line(f"const int64_t {a} = {c};")
    write(scope.within(()), what, row, f"{u} - {c}")
    scope.writer.depth -= 1
    scope.writer.line("}")
