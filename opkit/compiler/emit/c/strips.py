"""This module cuts loops into strips: inputs of a strip are computed in rows before it, and results are moved from rows after it.

The rows stay in the L1 cache::

    for (int64_t c0 = begin; c0 < end; c0 += 512) {
      const int64_t u0 = end - c0 < 512 ? end : c0 + 512;
      float r1[512], r2[512];
      double r3[512], r4[512];
      { const int64_t a0 = c0; opk_random_row(p_seed[0], a0, u0 - c0, r1); }         // random numbers
      for (int64_t a0 = c0; a0 < u0; ++a0) r3[a0 - c0] = p_x[a0] * 2;                // arguments of a call, as vectors
      for (int64_t a0 = c0; a0 < u0; ++a0) r4[a0 - c0] = c_0(r3[a0 - c0]);           // calls, which prevent vectorisation
      for (int64_t a0 = c0; a0 < u0; ++a0) r2[a0 - c0] = r4[a0 - c0] + r1[a0 - c0];  // the loop itself, as vectors
      { const int64_t a0 = c0; opk_stream(p_y + (a0), r2, (u0 - c0) * (int64_t)sizeof *r2); }
    }

A library function of runs is called once for a strip. The last line writes a large result past the caches, which it does not fit
into anyway: a store first reads its cache line, while a streaming store does not, and evicts nothing. The processor combines such
stores by lines, so the results of a strip are moved together.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opkit.compiler.emit.analysis import values
from opkit.compiler.emit.c import blocks
from opkit.compiler.emit.c.blocks import CScope, CWriter
from opkit.compiler.emit.c.expressions import C_TYPES
from opkit.compiler.emit.c.functions import is_elementary_function
from opkit.compiler.emit.c.prefetch import PrefetchedRow
from opkit.compiler.ir import expr
from opkit.compiler.ir.expr import Expr, rewrite
from opkit.compiler.ir.index import Axis
from opkit.compiler.ir.kernel import Kernel, Let, Loop, Scratch, Statement, Store, Update, walk

_MIN_STREAMED = 128  # iterations of a loop whose results are moved
_LENGTH = 512  # elements: a few KiB of the stack, and the overhead of a strip is small in comparison


@dataclasses.dataclass(frozen=True)
class StripRows:
    """The rows of a loop.

    Attributes:
        drawn: random numbers that are drawn before a strip.
        called: calls of libraries' functions before a strip; see ``_hoisted_calls``.
        moved: results that are written past the caches after a strip.
        prefetched: rows whose part for the next row's strip is prefetched.
    """

    drawn: Sequence[Expr] = ()
    called: Mapping[Expr, Expr] = dataclasses.field(default_factory=dict[Expr, Expr])
    moved: Sequence[Store] = ()
    prefetched: Sequence[PrefetchedRow] = ()

    def __bool__(self) -> bool:
        return bool(self.drawn or self.called or self.moved or self.prefetched)


def strip_rows(loop: Loop, roots: Sequence[Expr], writer: CWriter) -> StripRows:
    """Return the rows of an innermost loop with these expressions."""
    if loop.stop is not None or any(isinstance(statement, Loop) for statement in loop.body):
        return StripRows()
    called = {} if loop.how == "plain" else _hoisted_calls(loop.body, roots)
    prefetched = writer.prefetches.by_strip if loop is writer.prefetches.within else ()
    return StripRows(_drawn(loop.axis, roots), called, _moved_stores(loop, roots, writer.streamed), prefetched)


def begin_strip(scope: CScope, axis: Axis, rows: StripRows, first: str, last: str) -> tuple[CScope, str, str]:
    """Open the loop over strips: the scope of a strip, and where its part of the axis begins and ends."""
    writer, (a, c, u) = scope.writer, _names(axis)
    writer.line(f"for (int64_t {c} = {first}; {c} < {last}; {c} += {_LENGTH}) {{")
    writer.depth += 1
    writer.line(f"const int64_t {u} = {last} - {c} < {_LENGTH} ? {last} : {c} + {_LENGTH};")
    inner = scope.within(())
    for prefetched in rows.prefetched:
        writer.line(prefetched.text(scope.index(prefetched.at), c, u))
    for node in rows.drawn:
        row = _row(writer, "f32")
        _at_begin(scope, axis, _fill_drawn, node, row)
        inner.spelled[node] = f"{row}[{a} - {c}]"
        inner.reads[node] = frozenset()
    strip = Strip(f"for (int64_t {a} = {c}; {a} < {u}; ++{a})", f"[{a} - {c}]", f"{u} - {c}")
    _write_calls(inner, rows.called, strip)
    for store in rows.moved:
        inner.rows[store.buffer] = _row(writer, writer.dtypes[store.buffer]), f"{a} - {c}"
    return inner, c, u


def end_strip(scope: CScope, axis: Axis, rows: StripRows) -> None:
    """Close the loop over strips; ``scope`` is that of a strip."""
    for store in rows.moved:
        _at_begin(scope, axis, _write_move, store, scope.rows[store.buffer][0])
    scope.writer.depth -= 1
    scope.writer.line("}")


def _names(axis: Axis) -> tuple[str, str, str]:
    """Return the variables of the axis, and of the begin and end of a strip."""
    return f"a{axis.number}", f"c{axis.number}", f"u{axis.number}"


def _row(writer: CWriter, dtype: str) -> str:
    """Declare a row, and return its name."""
    writer.names += 1
    writer.line(f"{C_TYPES[dtype]} r{writer.names}[{_LENGTH}] __attribute__((aligned(64)));")
    return f"r{writer.names}"


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
    return [node for node in nodes if _is_consecutive(node, axis)]


def _is_consecutive(node: Expr, axis: Axis) -> bool:
    """Return whether the counts of a random number follow one another along an axis, and the seed does not change."""
    if values(node.data) or node.data.coefficient(axis) != 1:
        return False
    return all(
        part.op != "var" and all(axis not in at.axes() for at in expr.indices(part)) for part in node.args[0].walk()
    )


def _fill_drawn(scope: CScope, node: Expr, row: str, elements: str) -> None:
    """Write the call that fills a row with random numbers; the axis is at the beginning of the strip."""
    seed, count = scope.value(node.args[0]), scope.index(node.data)
    scope.writer.line(f"opk_random_row({seed}, {count}, {elements}, {row});")


# ---- calls of library functions --------------------------------------------------------------------------------------


def _hoisted_calls(body: Sequence[Statement], roots: Sequence[Expr]) -> dict[Expr, Expr]:
    """Return the calls of a loop's body, each with its variables resolved; none if they cannot be moved before the loop.

    They can if the body begins with all its variables, and they read nothing that it overwrites except through these.
    """
    calls = [node for root in roots for node in root.walk() if node.op == "call"]
    kinds = [type(s) for s in body]
    if not calls or {Loop, Scratch} & {*kinds} or Let in kinds[kinds.count(Let) :]:
        return {}
    stored = {s.buffer for s in body if isinstance(s, Store)}
    if any(node.op == "load" and node.data[0] in stored for call in calls for node in call.walk()):
        return {}
    lets: dict[str, Expr] = {}
    for s in body:
        if isinstance(s, Let):
            lets[s.name] = _resolved(s.value, lets)
    found = {call: _resolved(call, lets) for call in calls}
    clear = not any(node.op == "var" and node.data in lets for call in found.values() for node in call.walk())
    own = {s.name for s in body if isinstance(s, Update)}
    return found if clear and not any(n.op == "var" and n.data in own for c in calls for n in c.walk()) else {}


def _resolved(root: Expr, lets: Mapping[str, Expr]) -> Expr:
    return rewrite(root, lambda node: lets.get(node.data, node) if node.op == "var" else node)


@dataclasses.dataclass(frozen=True)
class Strip:
    """A part of a loop.

    Attributes:
        loop: the head of a loop over it.
        at: where in a row of its own an element is.
        count: its length.
    """

    loop: str
    at: str
    count: str


def _write_calls(scope: CScope, calls: Mapping[Expr, Expr], strip: Strip) -> None:
    """Write the calls of a strip, and record where their values are."""
    for call, alone in calls.items():
        if alone not in scope.spelled:
            _write_call(scope, alone, strip)
        scope.spelled[call], scope.reads[call] = scope.spelled[alone], frozenset()


def _write_call(scope: CScope, call: Expr, strip: Strip) -> None:
    """Write a loop that computes the arguments, then a loop of calls, or one call of a function of runs."""
    kinds = blocks.argument_kinds(call.data) or ["number"] * len(call.args)
    needed = [
        arg
        for arg, kind in zip(call.args, kinds, strict=True)
        if kind == "elements" or (kind == "number" and arg.op != "const")
    ]
    rows = {arg: _row(scope.writer, arg.dtype) for arg in dict.fromkeys(needed)}
    _fill_arguments(scope, rows, strip)
    result = _row(scope.writer, call.dtype)
    if call.data.run_parameters:
        number = scope.writer.callees[call.data]
        arguments = [rows[a] if k == "elements" else scope.value(a) for a, k in zip(call.args, kinds, strict=True)]
        scope.writer.line(blocks.run_call(call.data, number, arguments, result, strip.count))
    else:
        spelled = scope.spelled | {arg: row + strip.at for arg, row in rows.items()}
        known = CScope(scope.writer, spelled, scope.reads | dict.fromkeys(rows, frozenset[str]()), {})
        scope.writer.line(f"{strip.loop} {result}{strip.at} = {known.value(call)};")
    scope.spelled[call], scope.reads[call] = result + strip.at, frozenset()


def _fill_arguments(scope: CScope, rows: Mapping[Expr, str], strip: Strip) -> None:
    """Write the loop that computes the arguments."""
    writer, arguments = scope.writer, list(rows)
    if not rows:
        return
    inside = scope.within(arguments)
    writer.line("" if any(map(scope.fails, arguments)) else f"SIMD(omp simd{far_clauses(writer, arguments)})")
    writer.line(f"{strip.loop} {{")
    writer.depth += 1
    for arg, row in rows.items():
        writer.line(f"{row}{strip.at} = {inside.value(arg)};")
    writer.depth -= 1
    writer.line("}")


def far_clauses(writer: CWriter, roots: Sequence[Expr]) -> str:
    """Return the clauses for the flags that record arguments which are too large."""
    types = blocks.types_with_near_form(node for root in roots for node in root.walk()) if writer.near else ()
    return "".join(f" reduction(|:far_{t})" for t in sorted(types))


# ---- streaming stores ------------------------------------------------------------------------------------------------


def streamed_buffers(kernel: Kernel) -> frozenset[str]:
    """Return the arguments that are written past the caches: those marked ``streamed`` that it writes once and never reads."""
    marked = frozenset(a.buffer for a in kernel.arguments if a.streamed)
    if not marked:
        return marked
    every = list(walk(kernel.body))
    stores = Counter(s.buffer for s in every if isinstance(s, Store))
    nodes = (node for s in every if isinstance(s, Let | Store | Update) for node in s.value.walk())
    return frozenset(name for name in marked if stores[name] == 1) - {n.data[0] for n in nodes if n.op == "load"}


def _moved_stores(loop: Loop, roots: Iterable[Expr], streamed: frozenset[str]) -> list[Store]:
    """Return the stores of a loop that fill a row of such a buffer; none if the loop computes elementary functions."""
    extent = loop.axis.extent.constant
    if not streamed or (extent is not None and extent < _MIN_STREAMED):
        return []
    if any(is_elementary_function(node) for root in roots for node in root.walk()):
        return []
    stores = [s for s in loop.body if isinstance(s, Store) and s.buffer in streamed and s.update is None]
    return [s for s in stores if not values(s.at) and s.at.coefficient(loop.axis) == 1]


def _write_move(scope: CScope, store: Store, row: str, elements: str) -> None:
    """Write the call that moves a row to its place; the axis is at the beginning of the strip."""
    at = scope.index(store.at)
    scope.writer.line(f"opk_stream(p_{store.buffer} + ({at}), {row}, ({elements}) * (int64_t)sizeof *{row});")
