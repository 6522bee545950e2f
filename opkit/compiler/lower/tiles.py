"""Make kernels of tiles from a group, for GPUs: rows with one loop over all reduced axes, scatters that are atomic.

A reduction whose rows are too few for the GPU is cut into parts: one kernel reduces the parts, a second one their results. Which
elements lie next to each other decides how many rows share a program: one for long rows, ``adjacent_rows`` of rows that are next
to each other (the sum of a matrix along its columns).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from opkit.compiler.ir.access import estimate, rows_are_adjacent
from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.expr import CHECKS, Expr, const, indices, load, op, position, var, where
from opkit.compiler.ir.index import Axis, Index, axis, contiguous, flat, index, product
from opkit.compiler.ir.kernel import Accumulator, Loop, Statement, Store, Update
from opkit.compiler.ir.ops import neutral
from opkit.compiler.ir.program import Buffer
from opkit.compiler.lower.inlining import masked
from opkit.compiler.lower.statements import Phase, Statements, expressions, over_axes, read_before_write
from opkit.compiler.lower.target import LoweringTarget, TileSizes

ALIGNED = 16  # elements that the length of a part is a multiple of, so that loads can be of several elements


@dataclasses.dataclass
class Rows:
    """The rows of a group.

    Attributes:
        kept: the axes of the rows, outermost first.
        reduced: the axis along a row.
        places: what each axis of the group's space is in them.
    """

    kept: list[Axis]
    reduced: Axis
    places: dict[Axis, Index]


def rows_of(space: Sequence[Index], kept: Sequence[tuple[int, Index]], reduced: Sequence[tuple[int, Index]]) -> Rows:
    """Return the rows for the positions and extents of loops, outermost first."""
    axes = [Axis(number, extent) for number, (_, extent) in enumerate(kept)]
    along = Axis(len(axes), product(extent for _, extent in reduced))
    places = dict.fromkeys((Axis(k, extent) for k, extent in enumerate(space)), index(0))
    places |= {Axis(k, space[k]): axis(a.number, a.extent) for a, (k, _) in zip(axes, kept, strict=True)}
    places |= split(axis(along.number, along.extent), reduced, space)
    return Rows(axes, along, places)


def split(at: Index, loops: Sequence[tuple[int, Index]], space: Sequence[Index]) -> dict[Axis, Index]:
    """Return what the axes of loops are at a position in all of them."""
    found: dict[Axis, Index] = {}
    for number, (k, extent) in reversed(list(enumerate(loops))):
        found[Axis(k, space[k])] = at % extent if number else at
        at = at // extent
    return found


def row_kernel(rows: Rows, phases: Sequence[Phase]) -> tuple[Statement, ...]:
    """Return the loops over rows, with one vector loop along a row for each phase."""
    body: list[Statement] = []
    for phase in phases:
        body += phase.accumulators
        if phase.points:
            body.append(Loop(rows.reduced, tuple(read_before_write(phase.points)), "vector"))
        body += phase.rows
    return around(rows.kept, body)


def around(axes: Sequence[Axis], body: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return parallel loops around statements."""
    made = tuple(body)
    for each in reversed(axes):
        made = (Loop(each, made, "parallel"),)
    return made


def has_atomic(update: str, dtype: str) -> bool:
    """Return whether GPUs update elements atomically; their maximum and minimum of floats ignore NaN."""
    if is_float(dtype):
        return update == "add"
    return update in ("add", "max", "min") and DTYPES[dtype].bytes >= 4


# ---- reductions in parts -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Parts:
    """The kernels of a reduction in parts, as statements, with the buffers between them and their names in the kernels."""

    first: tuple[Statement, ...]
    second: tuple[Statement, ...]
    partial: list[Buffer]
    pointers: dict[str, str]


def parts(
    rows: Rows, phases: Sequence[Phase], sizes: Mapping[str, int], target: LoweringTarget, tiles: TileSizes
) -> tuple[int, bool] | None:
    """Return the number of parts of each row, and whether rows lie next to each other; None if a row stays whole."""
    if len(phases) > 1 or any(a.reduction.startswith("arg") for a in phases[0].accumulators):
        return None
    count = estimate(product(a.extent for a in rows.kept), sizes)
    length = estimate(rows.reduced.extent, sizes)
    adjacent = bool(rows.kept) and rows_are_adjacent(_elements(phases[0]), rows.kept[-1], rows.reduced)
    if count * length <= target.long_row or (adjacent and length <= tiles.long_column):
        return None
    busy = math.ceil(count / tiles.adjacent_rows) if adjacent else count
    least = tiles.min_column_part if adjacent else target.min_part
    found = int(min(2 * tiles.programs / max(1.0, busy), length / least, target.max_parts))
    if found < 2:
        return None
    may_mask = all(isinstance(s, Update) and _may_be_masked(s.value) for s in phases[0].points)
    whole = rows.reduced.extent.constant or 1
    equal = [n for n in range(found, 1, -1) if whole % n == 0]
    aligned = [n for n in equal if n > found * 3 // 4 and (adjacent or whole // n % ALIGNED == 0)]
    best = next(iter([*aligned, *([found] if may_mask else equal)]), None)
    return None if best is None else (best, adjacent)


def _elements(phase: Phase) -> list[Index]:
    """Return the places of the elements that a pass reads and writes."""
    stored = [s.at for s in phase.points if isinstance(s, Store)]
    nodes = dict.fromkeys(node for s in phase.points for root in expressions(s) for node in root.walk())
    return stored + [at for node in nodes if node.op == "load" for at in indices(node)]


def _may_be_masked(root: Expr) -> bool:
    return not any(node.op in CHECKS for node in root.walk())


def in_parts(name: str, rows: Rows, phase: Phase, content: Statements, count: int, adjacent: bool) -> Parts:
    """Return a kernel that reduces ``count`` parts of each row, and one that reduces their results."""
    along = rows.reduced
    whole = along.extent
    length = whole // count if whole % count == 0 else (whole + (ALIGNED * count - 1)) // (ALIGNED * count) * ALIGNED
    part, within = Axis(along.number, index(count)), Axis(along.number + 1, length)
    at_part = axis(part.number, count)
    place = at_part * length + axis(within.number, length)
    (moved,) = over_axes([phase], {along: place})
    points = moved.points if whole % count == 0 else _masked(moved.points, place, whole)
    total = product(a.extent for a in rows.kept)
    row = flat([axis(a.number, a.extent) for a in rows.kept], contiguous([a.extent for a in rows.kept]))
    at = at_part * total + row if adjacent else row * count + at_part
    partial = partial_results(name, phase.accumulators, total * count, at)
    order = [part, *rows.kept] if adjacent else [*rows.kept, part]
    first = around(order, [*phase.accumulators, Loop(within, tuple(points), "vector"), *partial.stores])
    second = around(rows.kept, [*phase.accumulators, Loop(part, tuple(partial.updates), "vector"), *phase.rows])
    return Parts(first, second, partial.buffers, {**content.pointers, **partial.pointers})


@dataclasses.dataclass
class PartialResults:
    """The results of the parts of rows: their buffers, and the statements that store them and that reduce them."""

    buffers: list[Buffer]
    pointers: dict[str, str]
    stores: list[Statement]
    updates: list[Statement]


def partial_results(name: str, accumulators: Sequence[Accumulator], count: Index, at: Index) -> PartialResults:
    """Return the ``count`` partial results of each accumulator; ``at`` is the place of a part's."""
    buffers = [Buffer(f"{name}_{a.name}", a.dtype, (count,), (index(1),)) for a in accumulators]
    pointers = {b.name: f"q{k}" for k, b in enumerate(buffers)}
    named = list(zip(pointers.values(), accumulators, strict=True))
    stores = [Store(q, at, var(a.name, a.dtype)) for q, a in named]
    updates = [Update(a.name, a.reduction, load(q, a.dtype, at)) for q, a in named]
    return PartialResults(buffers, pointers, [*stores], [*updates])


def _masked(points: Sequence[Statement], place: Index, whole: Index) -> list[Statement]:
    """Return updates that leave out what is past the end of a row."""
    inside = op("lt", position(place), position(whole))
    found: list[Statement] = []
    for s in points:
        assert isinstance(s, Update)
        empty = const(neutral(s.reduction, s.value.dtype), s.value.dtype)
        found.append(dataclasses.replace(s, value=where(inside, masked(s.value, inside), empty)))
    return found
