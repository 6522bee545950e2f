"""This module writes calls of libraries' functions in separate loops over a strip, since calls prevent vectorisation.

Functions of runs are called once for a strip. Else:

double t3[512], t4[512];
for (int64_t a0 = c0; a0 < u0; ++a0) t3[a0 - c0] = p_x[a0] * 2;    // before it, as vectors
for (int64_t a0 = c0; a0 < u0; ++a0) t4[a0 - c0] = c_0(t3[a0 - c0]);
for (int64_t a0 = c0; a0 < u0; ++a0) p_y[a0] = t4[a0 - c0] + 1;    // after it, as vectors
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from opkit.compiler.emit import callees, near
from opkit.compiler.emit.blocks import CScope, CWriter
from opkit.compiler.emit.types import C_TYPES
from opkit.compiler.ir.expr import Callee, Expr, rewrite
from opkit.compiler.ir.kernel import Let, Loop, Scratch, Statement, Store, Update


def declare(writer: CWriter, functions: Sequence[Callee]) -> None:
    """Declare the functions as pointers from the runtime's table."""
    for callee in functions:
        writer.line(callees.pointer(callee, writer.callees[callee]))


def hoisted_calls(body: Sequence[Statement], roots: Sequence[Expr]) -> dict[Expr, Expr]:
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
        max_length: the greatest length.
    """

    loop: str
    at: str
    count: str
    max_length: int


def write(scope: CScope, calls: Mapping[Expr, Expr], strip: Strip) -> None:
    """Write the calls of a strip, and notes where their values are."""
    for call, alone in calls.items():
        if alone not in scope.spelled:
            _write(scope, alone, strip)
        scope.spelled[call], scope.reads[call] = scope.spelled[alone], frozenset()


def _write(scope: CScope, call: Expr, strip: Strip) -> None:
    """A loop for the arguments, and one that calls or, of a function of runs, a call."""
    kinds = callees.taken(call.data) or ["number"] * len(call.args)
    needed = [arg for arg, kind in zip(call.args, kinds, strict=True) if kind == "elements" or _varies(arg, kind)]
    rows = {arg: _array(scope.writer, arg.dtype, strip.max_length) for arg in dict.fromkeys(needed)}
    _fill(scope, rows, strip)
    result = _array(scope.writer, call.dtype, strip.max_length)
    if call.data.run_parameters:
        number = scope.writer.callees[call.data]
        arguments = [rows[a] if k == "elements" else scope.value(a) for a, k in zip(call.args, kinds, strict=True)]
        scope.writer.line(callees.run(call.data, number, arguments, result, strip.count))
    else:
        spelled = scope.spelled | {arg: row + strip.at for arg, row in rows.items()}
        known = CScope(scope.writer, spelled, scope.reads | dict.fromkeys(rows, frozenset[str]()), {})
        scope.writer.line(f"{strip.loop} {result}{strip.at} = {known.value(call)};")
    scope.spelled[call], scope.reads[call] = result + strip.at, frozenset()


def _varies(arg: Expr, kind: str) -> bool:
    return kind == "number" and arg.op != "const"


def _fill(scope: CScope, rows: Mapping[Expr, str], strip: Strip) -> None:
    """The loop for the arguments."""
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


def _array(writer: CWriter, dtype: str, length: int) -> str:
    writer.names += 1
    writer.line(f"{C_TYPES[dtype]} t{writer.names}[{length}] __attribute__((aligned(64)));")
    return f"t{writer.names}"


def far_clauses(writer: CWriter, roots: Sequence[Expr]) -> str:
    """Return the clauses for what is noted of arguments that are too large."""
    types = near.of(node for root in roots for node in root.walk()) if writer.near else ()
    return "".join(f" reduction(|:far_{t})" for t in sorted(types))
