"""Calls of libraries' functions in a loop: in loops of their own over a stretch, for no vector is made around a call.

double t3[512], t4[512];
for (int64_t a0 = c0; a0 < u0; ++a0) t3[a0 - c0] = p_x[a0] * 2;    // before it, as vectors
for (int64_t a0 = c0; a0 < u0; ++a0) t4[a0 - c0] = c_0(t3[a0 - c0]);
for (int64_t a0 = c0; a0 < u0; ++a0) p_y[a0] = t4[a0 - c0] + 1;    // after it, as vectors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opkit.compiler.emit import near
from opkit.compiler.emit.blocks import Scope, Writer
from opkit.compiler.emit.types import C_TYPES, variable_type
from opkit.compiler.ir.callee import Callee
from opkit.compiler.ir.expr import Expr, rewrite
from opkit.compiler.ir.kernel import Let, Loop, Scratch, Statement, Store, Update


def declare(writer: Writer, functions: Sequence[Callee]) -> None:
    """Takes the functions from the runtime's table."""
    for callee in functions:
        number, taken = writer.callees[callee], ", ".join(variable_type(t) for t in callee.arguments)
        result = variable_type(callee.result)
        pointer = f"({result} (*)({taken}))runtime->functions[{number}]"
        writer.line(f"{result} (*const c_{number})({taken}) = {pointer};")


def first_of_all(body: Sequence[Statement], roots: Sequence[Expr]) -> dict[Expr, Expr]:
    """The calls of a loop's body, each with what it is without the body's variables; none where they cannot go first.

    They can where the body begins with all its variables, and they read nothing that it overwrites but through those.
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


def write(scope: Scope, calls: Mapping[Expr, Expr], loop: str, at: str, length: int) -> None:
    """Writes the calls of a stretch, and notes where their values are; ``loop`` is the head of a loop over it."""
    for call, alone in calls.items():
        if alone not in scope.spelled:
            _write(scope, alone, loop, at, length)
        scope.spelled[call], scope.reads[call] = scope.spelled[alone], frozenset()


def _write(scope: Scope, call: Expr, loop: str, at: str, length: int) -> None:
    """Two loops: one for the arguments, one that calls."""
    writer = scope.writer
    arguments = [arg for arg in dict.fromkeys(call.args) if arg.op != "const"]
    arrays = {arg: _array(writer, arg.dtype, length) + at for arg in arguments}
    if arrays:
        inside = scope.within(arguments)
        writer.line("" if any(map(scope.fails, arguments)) else f"SIMD(omp simd{noted(writer, arguments)})")
        writer.line(f"{loop} {{")
        writer.depth += 1
        for arg, element in arrays.items():
            writer.line(f"{element} = {inside.value(arg)};")
        writer.depth -= 1
        writer.line("}")
    result = _array(writer, call.dtype, length) + at
    known = Scope(writer, {**scope.spelled, **arrays}, scope.reads | dict.fromkeys(arrays, frozenset[str]()), {})
    writer.line(f"{loop} {result} = {known.value(call)};")
    scope.spelled[call], scope.reads[call] = result, frozenset()


def _array(writer: Writer, dtype: str, length: int) -> str:
    writer.names += 1
    writer.line(f"{C_TYPES[dtype]} t{writer.names}[{length}] __attribute__((aligned(64)));")
    return f"t{writer.names}"


def noted(writer: Writer, roots: Sequence[Expr]) -> str:
    """The clauses for what is noted of arguments that are too large."""
    types = near.of(node for root in roots for node in root.walk()) if writer.near else ()
    return "".join(f" reduction(|:far_{t})" for t in sorted(types))
