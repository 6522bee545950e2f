"""This module builds the loops around a group's statements: it orders and merges them, and makes them parallel or vector loops.

The outermost axis is the one with the largest stride. Neighbouring axes are merged into one loop if every access allows it.
Without reductions the innermost loop is the vector loop and the others are parallel. With reductions the kept axes are parallel
and the reduced ones inside; if elements are contiguous along a kept axis (a sum of rows), that axis is cut into blocks and each
block is a vector of accumulators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr, const, indices, load, rewrite
from opkit.compiler.ir.expr import var as var
from opkit.compiler.ir.index import Axis, Index, Value, axis, contiguous, flat, index, product
from opkit.compiler.ir.kernel import Let, Loop, Scratch, Statement, Store, Update
from opkit.compiler.ir.ops import REDUCTIONS
from opkit.compiler.lower.iteration_space import number
from opkit.compiler.lower.statements import Phase

WORK = 1 << 15  # operations that are worth a thread
CALL = 64  # operations that a call of a library's function counts for
BLOCK = 512  # the elements of a block of accumulators, at most


@dataclasses.dataclass
class LoopDim:
    """A loop: its axis's position in the space, its extent, and its stride in each access (None: not linear)."""

    position: int
    extent: Index
    moves: list[Index | None]
    reduced: bool


def accesses(phases: Iterable[Phase]) -> list[Index]:
    """Return every index of the statements, each once; stores first."""
    found: dict[Index, None] = {}
    all_of = [s for phase in phases for s in (*phase.points, *phase.rows)]
    for statement in all_of:
        if isinstance(statement, Store):
            found.setdefault(statement.at)
    for statement in all_of:
        for root in roots(statement):
            for node in root.walk():
                for at in indices(node):
                    found.setdefault(at)
        if isinstance(statement, Update) and statement.at is not None:
            found.setdefault(statement.at)
    return list(found)


def roots(statement: Statement) -> list[Expr]:
    """Return the expressions of a statement."""
    assert isinstance(statement, Let | Store | Update)
    inside = [statement.at] if isinstance(statement, Store) else []
    values = [leaf.expr for at in inside for leaf in at.leaves() if isinstance(leaf, Value)]
    return [statement.value, *values]


def dims(
    space: Sequence[Index], reduced: frozenset[int], found: Sequence[Index], sizes: Mapping[str, int]
) -> list[LoopDim]:
    """Return the loops, outermost first, merged where that changes no access."""
    every = [
        LoopDim(k, extent, [at.coefficient(Axis(k, extent)) for at in found], k in reduced)
        for k, extent in enumerate(space)
    ]
    every.sort(key=lambda dim: (dim.reduced, *_distance(dim, sizes)))
    return _merged(every)


def _distance(dim: LoopDim, sizes: Mapping[str, int]) -> tuple[float, int]:
    """Sort the farthest apart first; the first access that moves along the axis decides, stores before loads."""
    steps = [abs(number(move, sizes)) for move in dim.moves if move is not None and move != 0]
    return (-max(steps) if steps else 0.0, dim.position)


def _merged(every: Sequence[LoopDim]) -> list[LoopDim]:
    found: list[LoopDim] = []
    for dim in reversed(every):
        if found and _one_loop(dim, found[-1]):
            last = found.pop()
            found.append(LoopDim(last.position, dim.extent * last.extent, last.moves, last.reduced))
        else:
            found.append(dim)
    return found[::-1]


def _one_loop(outer: LoopDim, inner: LoopDim) -> bool:
    if outer.reduced != inner.reduced:
        return False
    pairs = zip(outer.moves, inner.moves, strict=True)
    return all(a is not None and b is not None and a == b * inner.extent for a, b in pairs)


# ---- statements over other axes ----------------------------------------------------------------------------------------


def moved(statement: Statement, axes: Mapping[Axis, Index]) -> Statement:
    """Return a statement of a point or row with other indices for its axes."""
    if isinstance(statement, Let):
        return dataclasses.replace(statement, value=statement.value.substitute(axes))
    if isinstance(statement, Store):
        return dataclasses.replace(statement, value=statement.value.substitute(axes), at=statement.at.substitute(axes))
    assert isinstance(statement, Update)
    at = None if statement.at is None else statement.at.substitute(axes)
    return dataclasses.replace(statement, value=statement.value.substitute(axes), at=at)


def moved_phases(phases: Iterable[Phase], axes: Mapping[Axis, Index]) -> list[Phase]:
    """Phases with other indices for their axes."""
    return [Phase(p.accumulators, [moved(s, axes) for s in p.points], [moved(s, axes) for s in p.rows]) for p in phases]


def numbered(space: Sequence[Index], loops: Sequence[LoopDim]) -> tuple[list[Axis], dict[Axis, Index]]:
    """Return the loops' axes, numbered outermost first, and what each axis of the space is in them."""
    axes = [Axis(k, dim.extent) for k, dim in enumerate(loops)]
    by_position = {dim.position: axis(k, dim.extent) for k, dim in enumerate(loops)}
    return axes, {Axis(k, extent): by_position.get(k, index(0)) for k, extent in enumerate(space)}


def flat_of(axes: Sequence[Axis]) -> Index:
    """Return where an iteration is among all of these loops."""
    return flat([axis(a.number, a.extent) for a in axes], contiguous([a.extent for a in axes]))


# ---- nests -----------------------------------------------------------------------------------------------------------


def nest(axes: Sequence[Axis], body: Sequence[Statement], how: Callable[[int], str]) -> tuple[Statement, ...]:
    """Return nested loops; ``how`` says how the k-th runs."""
    made = tuple(body)
    for k in reversed(range(len(axes))):
        made = (Loop(axes[k], made, how(k)),)  # pyright: ignore[reportArgumentType]
    return made


def pointwise(axes: Sequence[Axis], points: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return every axis but the last is parallel; the last is the vector, and parallel too if it is the only one."""
    last = len(axes) - 1
    return nest(axes, _read_first(points), lambda k: "vector" if k == last and last > 0 else "parallel")


def rows(
    kept: Sequence[Axis], reduced: Sequence[Axis], phases: Sequence[Phase], scratch: Sequence[Scratch]
) -> tuple[Statement, ...]:
    """Rows in parallel, each with its passes."""
    body: list[Statement] = list(scratch)
    for phase in phases:
        how = "plain" if any(a.reduction.startswith("arg") for a in phase.accumulators) else "vector"
        last = len(reduced) - 1
        body += phase.accumulators
        if phase.points:
            body += nest(
                reduced, _read_first(phase.points), lambda k, how=how, last=last: how if k == last else "plain"
            )
        body += phase.rows
    return nest(kept, body, lambda k: "parallel")


def columns(
    kept: Sequence[Axis], block: Axis, reduced: Sequence[Axis], phases: Sequence[Phase]
) -> tuple[Statement, ...]:
    """Blocks of neighbouring rows in parallel; what belongs to a row is an element of a vector."""
    held = {a.name: a for phase in phases for a in phase.accumulators}
    lets = {s.name: s.value.dtype for phase in phases for s in phase.rows if isinstance(s, Let)}
    dtypes = {name: a.dtype for name, a in held.items()} | lets
    at = axis(block.number, block.extent)

    def element(node: Expr) -> Expr:
        return load(node.data, node.dtype, at) if node.op == "var" and node.data in dtypes else node

    def changed(statement: Statement) -> Statement:
        if isinstance(statement, Let):
            return Store(statement.name, at, rewrite(statement.value, element))
        if isinstance(statement, Update):
            return Store(statement.name, at, rewrite(statement.value, element), REDUCTIONS[statement.reduction][0])
        assert isinstance(statement, Store)
        return dataclasses.replace(statement, value=rewrite(statement.value, element))

    def vector(body: Sequence[Statement]) -> tuple[Statement, ...]:
        return (Loop(block, tuple(body), "vector"),)

    body: list[Statement] = [Scratch(name, dtype, block.extent) for name, dtype in dtypes.items()]
    for phase in phases:
        if phase.accumulators:
            body += vector([Store(a.name, at, neutral(a.reduction, a.dtype)) for a in phase.accumulators])
        if phase.points:
            body += nest(reduced, vector([changed(s) for s in phase.points]), lambda k: "plain")
        if phase.rows:
            body += vector([changed(s) for s in phase.rows])
    return nest(kept, body, lambda k: "parallel")


def neutral(reduction: str, dtype: str) -> Expr:
    """Return the neutral value of a reduction."""
    row = DTYPES[dtype]
    bits = 8 * row.bytes - row.signed
    least = {"float": float("-inf"), "int": -(2**bits) if row.signed else 0, "bool": False}
    greatest = {"float": float("inf"), "int": 2**bits - 1, "bool": True}
    values = {"zero": 0, "one": 1, "least": least.get(row.kind), "greatest": greatest.get(row.kind)}
    return const(values[REDUCTIONS[reduction][1]], dtype)  # pyright: ignore[reportArgumentType]


def _read_first(points: Sequence[Statement]) -> list[Statement]:
    """Read elements that are overwritten into variables first, if a buffer is both read and written."""
    written = {s.buffer for s in points if isinstance(s, Store)}
    read: dict[Expr, Expr] = {}
    for statement in points:
        for root in roots(statement):
            for node in root.walk():
                if node.op == "load" and node.data[0] in written:
                    read.setdefault(node, var(f"old{len(read)}", node.dtype))
    if not read:
        return list(points)
    lets = [Let(variable.data, node) for node, variable in read.items()]
    return [*lets, *(_with_values(s, read) for s in points)]


def _with_values(statement: Statement, known: Mapping[Expr, Expr]) -> Statement:
    assert isinstance(statement, Let | Store | Update)
    return dataclasses.replace(statement, value=rewrite(statement.value, lambda node: known.get(node, node)))


def grain(kept: Sequence[Axis], inner: Sequence[Axis], phases: Sequence[Phase], sizes: Mapping[str, int]) -> int:
    """Return the number of iterations of the parallel loops that are worth a thread."""
    walked = [node for phase in phases for s in phase.points for root in roots(s) for node in root.walk()]
    nodes = sum(CALL if node.op == "call" else 1 for node in walked)
    points = number(product(a.extent for a in inner), sizes)
    return max(1, int(WORK / max(1.0, points * max(1, nodes) / 4)))
