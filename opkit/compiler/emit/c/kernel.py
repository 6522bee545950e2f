"""This module writes a kernel as C: a function over a part of its parallel iterations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from opkit.compiler.emit.analysis import changed_by, postorder, roots_of
from opkit.compiler.emit.c import blocks, expressions, prefetch, strips
from opkit.compiler.emit.c.blocks import CScope, CWriter, marks_nan
from opkit.compiler.emit.c.expressions import C_TYPES, NARROW, apply, convert, number, variable_type
from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES, dtype, is_float
from opkit.compiler.ir.expr import Callee, Expr
from opkit.compiler.ir.index import Axis, Index, Value
from opkit.compiler.ir.kernel import (
    Accumulator,
    Kernel,
    Let,
    Loop,
    Scratch,
    Statement,
    Store,
    Update,
    callees,
    parallel,
)
from opkit.compiler.ir.ops import REDUCTIONS, neutral

_STACK = 1 << 16  # bytes of scratch memory that a function may have on its stack
_CLAUSES = {"add": "+", "mul": "*", "or": "|", "and": "&", "max": "max", "min": "min"}
_BOOLEAN = {"add": "or", "max": "or", "mul": "and", "min": "and"}
_POSITIONED = ("argmax", "argmin")


def function(
    kernel: Kernel,
    name: str,
    exclusive: bool = True,
    types: frozenset[str] = frozenset(),
    order: Mapping[Callee, int] | None = None,
) -> str:
    """Return the kernel over the iterations from ``begin`` to ``end``.

    Args:
        kernel: the kernel.
        name: the function's name.
        exclusive: whether no two arguments share memory.
        types: the types whose functions for arguments near zero it calls (:mod:`opkit.compiler.emit.c.blocks`); it then returns
            whether an argument was too large.
        order: the numbers of library functions in the runtime's table.
    """
    loops, body = parallel(kernel)
    writer = CWriter(
        near=types,
        dtypes={a.buffer: a.dtype for a in kernel.arguments},
        streamed=strips.streamed_buffers(kernel),
        prefetches=prefetch.prefetches(loops, body),
        callees=order or {},
    )
    for callee in dict.fromkeys(callees(kernel.body)):
        writer.line(blocks.declare_callee(callee, writer.callees[callee]))
    flags = [f"far_{t}" for t in sorted(types)]
    for t, flag in zip(sorted(types), flags, strict=True):
        writer.line(f"{blocks.FAR_FLAGS[t]} {flag} = 0;")
    large = list(_large(kernel.body))
    _allocate(writer, large)
    _iterations(CScope(writer, {}, {}, {}), loops, body, frozenset(s.name for s in large))
    if writer.fails or large:
        writer.lines.append("end:;")
    for scratch in large:
        writer.line(f"free(m_{scratch.name});")
    if writer.streamed:
        writer.line("opk_streamed();")
    if flags:
        writer.line(f"return {' | '.join(f'({flag} != 0)' for flag in flags)};")
    result = "int" if flags else "void"
    return "\n".join(
        [f"static __attribute__((noinline)) {result} {_signature(kernel, name, exclusive)} {{", *writer.lines, "}"]
    )


def _signature(kernel: Kernel, name: str, exclusive: bool) -> str:
    star = "*restrict" if exclusive else "*"
    pointers = [f"{'' if a.written else 'const '}{C_TYPES[a.dtype]} {star} p_{a.buffer}" for a in kernel.arguments]
    sizes = [f"const int64_t n_{size}" for size in kernel.sizes]
    rest = ["struct opkit_runtime *runtime", "const int64_t begin", "const int64_t end"]
    return f"{name}({', '.join([*pointers, *sizes, *rest])})"


# ---- loops -----------------------------------------------------------------------------------------------------------


def _iterations(scope: CScope, loops: Sequence[Loop], body: Sequence[Statement], large: frozenset[str]) -> None:
    """Write the parallel loops as one: the first iteration is split into axes, which then count like an odometer."""
    if not loops:
        return _block(scope, body, large)
    axes, writer = [f"a{loop.axis.number}" for loop in loops], scope.writer
    if len(loops) == 1:
        return _over(scope, loops[0], "begin", "end", large)
    extents = [writer.name("int64_t", scope.index(loop.axis.extent)) for loop in loops]
    writer.line("int64_t rest = begin;")
    for axis, extent in reversed(list(zip(axes, extents, strict=True))):
        writer.line(f"int64_t {axis} = rest % {extent}; rest /= {extent};")
    _odometer(scope, axes, extents, loops[-1], large)
    return None


def _odometer(scope: CScope, axes: list[str], extents: list[str], innermost: Loop, large: frozenset[str]) -> None:
    *outer, inner = axes
    scope.writer.line("for (int64_t left = end - begin; left > 0;) {")
    scope.writer.line(f"  const int64_t until = left < {extents[-1]} - {inner} ? {inner} + left : {extents[-1]};")
    scope.writer.line(f"  left -= until - {inner};")
    scope.writer.depth += 1
    _over(scope, innermost, inner, "until", large)
    scope.writer.depth -= 1
    carry = " ".join(f"if (++{a} == {e}) {{ {a} = 0;" for a, e in reversed(list(zip(outer, extents, strict=False))))
    scope.writer.line(f"  {inner} = 0; {carry} {'}' * len(outer)}")
    scope.writer.line("}")


def _loop(scope: CScope, loop: Loop, large: frozenset[str]) -> None:
    changed = changed_by(loop.body)
    scope.forget(changed)
    for row in scope.writer.prefetches.before if loop is scope.writer.prefetches.within else ():
        scope.writer.line(row.text(scope.index(row.at), "0", str(row.length)))
    _over(scope, loop, "0", scope.index(loop.axis.extent), large)
    scope.forget(changed)


def _over(scope: CScope, loop: Loop, first: str, last: str, large: frozenset[str]) -> None:
    """Write a loop over a part of its axis; if ``first`` is the axis's name, from its current value on."""
    a, writer, roots = f"a{loop.axis.number}", scope.writer, roots_of(loop.body)
    for check in _outer_checks(loop, roots):
        scope.value(check, named=True)
    rows = strips.strip_rows(loop, roots, writer)
    if rows:
        scope, first, last = strips.begin_strip(scope, loop.axis, rows, first, last)
    vectorised = _vectorises(scope, loop)

    def write(within: CScope) -> None:
        if vectorised:
            writer.line(f"SIMD(omp simd{_clauses(writer, loop)}{strips.far_clauses(writer, roots)})")
        writer.line(f"for ({'' if first == a else f'int64_t {a} = {first}'}; {a} < {last}; ++{a}) {{")
        for row in prefetch.parts_of_rows(loop):
            writer.line("  " + row.text(within.index(row.at), "0", str(row.length)))
        _inside(within, loop.body, large, loop.stop)
        writer.line("}")

    masks = _outer_masks(loop.axis, roots) if vectorised and not rows else []
    if masks:
        _where_all(scope, masks, write)
    else:
        write(scope)
    if rows:
        strips.end_strip(scope, loop.axis, rows)


def _outer_checks(loop: Loop, roots: Sequence[Expr]) -> list[Expr]:
    """Return the checks that are the same in all iterations of a loop, and are computed: before it, they let it be vectorised."""
    if loop.stop is not None or not loop.axis.extent.constant:  # a loop without iterations checks nothing
        return []
    changed = changed_by(loop.body)

    def is_same(node: Expr) -> bool:
        varies = node.op in ("var", "random", "call") or (node.op == "load" and node.data[0] in changed)
        return not varies and not any(loop.axis in at.leaves() for at in expr.indices(node))

    checks = dict.fromkeys(node for root in roots for node in postorder(root) if node.op in expr.CHECKS)
    return [check for check in checks if all(map(is_same, postorder(check)))]


def _outer_masks(axis: Axis, roots: Sequence[Expr]) -> list[Expr]:
    """Return the masks of loads that are the same for all values of an axis."""
    masks = dict.fromkeys(node.args[0] for root in roots for node in root.walk() if node.op == "load" and node.args)
    return [mask for mask in masks if mask.op != "const" and all(_is_outside(node, axis) for node in mask.walk())]


def _is_outside(node: Expr, axis: Axis) -> bool:
    leaves = [leaf for at in expr.indices(node) for leaf in at.leaves()]
    return node.op not in (*expr.CHECKS, "load", "var", "random", "call") and not any(
        leaf == axis or isinstance(leaf, Value) for leaf in leaves
    )


def _where_all(scope: CScope, masks: Sequence[Expr], write: Callable[[CScope], None]) -> None:
    """Write a loop twice: once for where all of these masks are true, since loads that may not happen are not vectorised."""
    writer = scope.writer
    writer.line(f"if ({' & '.join(scope.value(mask, named=True) for mask in masks)}) {{")
    write(dataclasses.replace(scope, spelled={**scope.spelled, **dict.fromkeys(masks, blocks.TRUE)}))
    writer.line("} else {")
    write(dataclasses.replace(scope, spelled=dict(scope.spelled)))
    writer.line("}")


def _vectorises(scope: CScope, loop: Loop) -> bool:
    """Return whether a loop gets ``omp simd``: its iterations are independent, and nothing jumps out of it."""
    updated = [scope.writer.accumulators[s.name] for s in loop.body if isinstance(s, Update)]
    return (
        loop.how == "vector"
        and loop.stop is None
        and not any(isinstance(s, Loop) or (isinstance(s, Store) and s.atomic) for s in loop.body)
        and not any(a.reduction in _POSITIONED or a.dtype in NARROW for a in updated)
        and not any(scope.fails(root) for root in roots_of(loop.body))
    )


def _clauses(writer: CWriter, loop: Loop) -> str:
    clauses: dict[str, None] = {}
    for accumulator in (writer.accumulators[s.name] for s in loop.body if isinstance(s, Update)):
        op = REDUCTIONS[accumulator.reduction][0]
        sign = _CLAUSES[_BOOLEAN.get(op, op) if accumulator.dtype == "b1" else op]
        clauses[f" reduction({sign}:v_{accumulator.name})"] = None
        if marks_nan(accumulator):
            clauses[f" reduction(|:v_{accumulator.name}_nan)"] = None
    return "".join(clauses)


def _inside(
    scope: CScope, body: Sequence[Statement], large: frozenset[str], stop: tuple[Index, Index] | None = None
) -> None:
    """Write the body of a loop."""
    inner = scope.within(roots_of(body))
    scope.writer.depth += 1
    if stop is not None:
        scope.writer.line(f"if ({inner.index(stop[0])} >= {inner.index(stop[1])}) break;")
    _statements(inner, body, large)
    scope.writer.depth -= 1


def _block(scope: CScope, body: Sequence[Statement], large: frozenset[str]) -> None:
    _statements(scope.within(roots_of(body)), body, large)


# ---- statements ------------------------------------------------------------------------------------------------------


def _statements(scope: CScope, body: Sequence[Statement], large: frozenset[str]) -> None:
    for statement in body:
        if isinstance(statement, Loop):
            _loop(scope, statement, large)
        elif isinstance(statement, Scratch):
            _scratch(scope, statement, large)
        else:
            _SIMPLE[type(statement)](scope, statement)


def _let(scope: CScope, let: Let) -> None:
    text = scope.value(let.value)
    scope.writer.line(f"const {variable_type(let.value.dtype)} v_{let.name} = {text};")
    if let.value.op not in ("const", "var"):
        scope.spelled[let.value] = f"v_{let.name}"


def _scratch(scope: CScope, scratch: Scratch, large: frozenset[str]) -> None:
    if scratch.name not in large:
        length = max(1, scratch.length.constant or 0)
        scope.writer.line(f"{C_TYPES[scratch.dtype]} p_{scratch.name}[{length}] __attribute__((aligned(64)));")


def _store(scope: CScope, store: Store) -> None:
    text = scope.value(store.value)
    memory, at = scope.rows.get(store.buffer) or (f"p_{store.buffer}", scope.index(store.at))
    element, kind = f"{memory}[{at}]", store.value.dtype
    if store.atomic and store.update is not None:
        scope.writer.line(f"opk_atomic_{store.update}_{kind}(&{element}, {text});")
    elif store.update is not None:
        scope.writer.line(f"{element} = {apply(store.update, kind, [element, text], kind)};")
    else:
        scope.writer.line(f"{element} = {text};")
    scope.forget(frozenset({store.buffer}))


def _accumulator(scope: CScope, accumulator: Accumulator) -> None:
    """Declare an accumulator. Truth values are an int, whose vectors are as wide as those of the compared values."""
    scope.writer.accumulators[accumulator.name] = accumulator
    ctype = "int" if accumulator.dtype == "b1" else C_TYPES[accumulator.dtype]
    scope.writer.line(
        f"{ctype} v_{accumulator.name} = {number(neutral(accumulator.reduction, accumulator.dtype), accumulator.dtype)};"
    )
    if marks_nan(accumulator):
        scope.writer.line(f"int v_{accumulator.name}_nan = 0;")
    if accumulator.reduction in _POSITIONED:
        scope.writer.line(f"int64_t v_{accumulator.name}_at = {number(2**63 - 1, 'i64')};")


def _update(scope: CScope, update: Update) -> None:
    accumulator = scope.writer.accumulators[update.name]
    x, v = scope.value(update.value, named=True), f"v_{update.name}"
    if accumulator.reduction in _POSITIONED:
        _position(scope, update, accumulator, x)
    elif marks_nan(accumulator):
        scope.writer.line(f"{v} = {x} {'>' if accumulator.reduction == 'max' else '<'} {v} ? {x} : {v};")
        scope.writer.line(f"{v}_nan |= {x} != {x};")
    else:
        op = REDUCTIONS[accumulator.reduction][0]
        scope.writer.line(f"{v} = {apply(op, accumulator.dtype, [v, x], accumulator.dtype)};")
    scope.forget(frozenset({update.name, f"{update.name}_at"}))


def _position(scope: CScope, update: Update, accumulator: Accumulator, x: str) -> None:
    """Update an extreme and its position: the lowest position wins, and NaN counts as the most extreme value."""
    assert update.at is not None, update.name
    v, at = f"v_{update.name}", scope.writer.name("int64_t", scope.index(update.at))
    compared = DTYPES[accumulator.dtype].compute
    a, b = convert(x, accumulator.dtype, compared), convert(v, accumulator.dtype, compared)
    sign = ">" if accumulator.reduction == "argmax" else "<"
    beyond, equal = f"({a} {sign} {b})", f"({a} == {b})"
    if is_float(compared):
        beyond = f"({beyond} | (({a} != {a}) & ({b} == {b})))"
        equal = f"({equal} | (({a} != {a}) & ({b} != {b})))"
    scope.writer.line(f"if ({beyond} | ({equal} & ({at} < {v}_at))) {{ {v} = {x}; {v}_at = {at}; }}")


_SIMPLE = {Let: _let, Store: _store, Accumulator: _accumulator, Update: _update}


# ---- scratch memory --------------------------------------------------------------------------------------------------


def _large(body: Iterable[Statement]) -> Iterable[Scratch]:
    """Yield the scratch memory that is no array of the stack."""
    for s in body:
        if isinstance(s, Loop):
            yield from _large(s.body)
        elif isinstance(s, Scratch) and (
            s.length.constant is None or s.length.constant * dtype(s.dtype).bytes > _STACK
        ):
            yield s


def _allocate(writer: CWriter, large: Sequence[Scratch]) -> None:
    """Allocate scratch memory, aligned to 64 bytes by hand: malloc and free are the only functions used of C's library."""
    for s in large:
        writer.line(f"void *m_{s.name} = 0;")
    for s in large:
        length, ctype = expressions.index_text(s.length, expressions.nested_text), C_TYPES[s.dtype]
        writer.line(f"const int64_t b_{s.name} = ({length}) * (int64_t)sizeof({ctype});")
        writer.line(f"if (!(m_{s.name} = malloc((unsigned long)b_{s.name} + 64))) {{")
        writer.line(f"  opkit_fail(runtime, 2, b_{s.name}, 0); goto end; }}")
        writer.line(f"{ctype} *restrict p_{s.name} = ({ctype} *)(((uint64_t)m_{s.name} + 63) & ~63UL);")
