"""Turn a group into kernels, each of which is a loop nest: one kernel, or two if a long reduction is divided among threads.

The outermost loop is the one with the largest stride. Neighbouring axes are merged into one loop if every access allows it.
Without reductions the innermost loop is the vector loop and the others are parallel. With reductions the kept axes are parallel
and the reduced ones inside; if elements are contiguous along a kept axis (a sum of rows), that axis is cut into blocks and each
block is a vector of accumulators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.dtypes import PARTS
from opkit.compiler.ir.expr import Expr, const, load, rewrite
from opkit.compiler.ir.index import ZERO, Axis, Index, Value, axis, contiguous, flat, index, product
from opkit.compiler.ir.kernel import (
    How,
    Kernel,
    KernelArgument,
    KernelLaunch,
    Let,
    Loop,
    Scratch,
    Statement,
    Store,
    Update,
)
from opkit.compiler.ir.ops import REDUCTIONS, neutral
from opkit.compiler.ir.program import Buffer, Compute
from opkit.compiler.lower import tiles
from opkit.compiler.lower.group import Group, Member, loads_of
from opkit.compiler.lower.loop_order import LoopDim, loop_order, numbered
from opkit.compiler.lower.statements import (
    Phase,
    Statements,
    accesses,
    expressions,
    names_of_sizes,
    over_axes,
    read_before_write,
    statements,
    touched,
)
from opkit.compiler.lower.target import LoweringTarget, TileSizes

MIN_BLOCK = 16  # elements of a block of accumulators
MAX_BLOCK = 512
WORK_PER_THREAD = 1 << 15  # operations that are worth a thread
CALL_COST = 64  # operations that a call of a library's function counts for


@dataclasses.dataclass
class Nests:
    """The launches of a group, and the buffers that only they use."""

    launches: list[KernelLaunch]
    buffers: list[Buffer]


def nests(
    group: Group,
    buffers: Mapping[str, Buffer],
    stored: set[str],
    sizes: Mapping[str, int],
    name: str,
    target: LoweringTarget,
) -> Nests:
    """Return the kernels of a group; ``sizes`` are expected sizes, ``stored`` the buffers that other steps need."""
    vector = None if target.tiles else _vector_axis(group, buffers, sizes)
    by_columns = target.tiles is not None or vector is not None
    content = statements(group, buffers, stored, by_columns, target)
    loops = loop_order(group.space, group.reduced, accesses(content.phases), sizes)
    first = next(iter(group.members.values())).step
    kernels = _Kernels(group, buffers, content, sizes, name, target)
    targets = (at for member in group.members.values() for at in member.target)
    computed_target = any(isinstance(leaf, Value) for at in targets for leaf in at.leaves())
    if target.tiles and kernels.in_any_order(first, computed_target):
        return kernels.scatter(loops)
    if first.update is not None or (first.reduction or "").startswith("scan") or computed_target:
        return kernels.in_order(loops)
    if not any(phase.accumulators for phase in content.phases):
        return kernels.pointwise(loops)
    if target.tiles:
        return kernels.tiles(loops, target.tiles)
    if vector is not None:
        return kernels.columns(vector)
    return kernels.rows(loops)


def _vector_axis(group: Group, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> int | None:
    """Return the kept axis along which most elements are contiguous, if they are more than along any reduced axis."""
    if not group.reduced or any((m.step.reduction or "").startswith(("arg", "scan")) for m in group.members.values()):
        return None
    contiguous_elements = dict.fromkeys(range(len(group.space)), 0.0)
    for member in group.members.values():
        for at, stride in _external_reads(group, member, buffers):
            elements = estimate(product(a.extent for a in at.axes()), sizes)
            for k, extent in enumerate(group.space):
                contiguous_elements[k] += elements * (at.coefficient(Axis(k, extent)) == stride)
    kept = max(group.kept, key=contiguous_elements.__getitem__, default=None)
    most_reduced = max((contiguous_elements[k] for k in group.reduced), default=0)
    if kept is None or contiguous_elements[kept] <= most_reduced:
        return None
    extent = group.space[kept].constant
    return kept if extent is None or extent >= MIN_BLOCK else None


def _external_reads(group: Group, member: Member, buffers: Mapping[str, Buffer]) -> list[tuple[Index, int]]:
    """Return where a step reads buffers from outside of the group, each with the stride of contiguous elements there."""
    found: list[tuple[Index, int]] = []
    for node in loads_of(member.step):
        buffer, coordinates = node.data
        if buffer not in group.members:
            at = buffers[buffer].place([c.substitute(member.axes) for c in coordinates])
            found.append((at, 2 if buffers[buffer].whole else 1))
    return found


class _Kernels:
    def __init__(
        self,
        group: Group,
        buffers: Mapping[str, Buffer],
        content: Statements,
        sizes: Mapping[str, int],
        name: str,
        target: LoweringTarget,
    ) -> None:
        self.group, self.buffers, self.content, self.sizes, self.name = group, buffers, content, sizes, name
        self.target = target

    # ---- kinds of kernels --------------------------------------------------------------------------------------------

    def pointwise(self, loops: list[LoopDim]) -> Nests:
        """Return one vector loop inside parallel ones; a single loop is parallel."""
        axes, phases = self._over(loops)
        last = len(axes) - 1
        body = nested(
            axes, read_before_write(phases[0].points), lambda k: "vector" if k == last and last > 0 else "parallel"
        )
        return Nests([self.launch(body, _grain(axes[-1:] if last > 0 else [], phases, self.sizes))], [])

    def rows(self, loops: list[LoopDim]) -> Nests:
        """Return a kernel of rows, or two if the rows are long and few."""
        reduced = [dim for dim in loops if dim.reduced]
        kept = [dim for dim in loops if not dim.reduced]
        cut = self._cut(kept, reduced)
        if cut is not None:
            return self._in_parts(kept, reduced, cut)
        axes, phases = self._over([*kept, *reduced])
        outer, inner = axes[: len(kept)], axes[len(kept) :]
        body = row_loops(outer, inner, phases, self.content.scratch)
        return Nests([self.launch(body, _grain(inner, phases, self.sizes))], [])

    def scatter(self, loops: list[LoopDim]) -> Nests:
        """Return a kernel that stores to computed places in any order."""
        axes, (phase,) = self._over(loops)
        stores = [dataclasses.replace(s, atomic=s.update is not None) for s in phase.points if isinstance(s, Store)]
        return Nests([self.launch(tiles.around(axes, stores), 1)], [])

    def in_any_order(self, step: Compute, computed_target: bool) -> bool:
        """Return whether the stores of a step may run in any order: they are atomic, or the last one need not win."""
        if (step.reduction or "").startswith("scan") or any(node.data[0] == step.buffer for node in loads_of(step)):
            return False
        atomic = step.update is not None and tiles.has_atomic(step.update, self._dtype(step.buffer))
        return atomic or (step.update is None and computed_target)

    def tiles(self, loops: list[LoopDim], chosen: TileSizes) -> Nests:
        """Return a kernel of rows with one loop over all reduced axes, or two if the rows are long and few."""
        kept, reduced = ([(d.position, d.extent) for d in loops if d.reduced == wanted] for wanted in (False, True))
        rows = tiles.rows_of(self.group.space, kept, reduced)
        phases = over_axes(self.content.phases, rows.places)
        cut = tiles.parts(rows, phases, self.sizes, self.target, chosen)
        if cut is None:
            return Nests([self.launch(tiles.row_kernel(rows, phases), 1)], [])
        parts = tiles.in_parts(self.name, rows, phases[0], self.content, *cut)
        launches = [self.launch(body, 1, parts.pointers) for body in (parts.first, parts.second)]
        return Nests(launches, parts.partial)

    def columns(self, vector: int) -> Nests:
        """Return a kernel of blocks of neighbouring rows, and one for the last block if it is shorter."""
        space, reduced_axes = self.group.space, self.group.reduced
        found = accesses(self.content.phases)
        # the vector's axis is not merged with the kept ones
        kept = [d for d in loop_order(space, reduced_axes | {vector}, found, self.sizes) if not d.reduced]
        reduced = [d for d in loop_order(space, reduced_axes, found, self.sizes) if d.reduced]
        block, rest = _block(space[vector])
        blocks = (space[vector] - rest) // block
        launches = [self._blocks(vector, kept, reduced, ZERO, blocks, block)]
        if rest != 0:
            launches.append(self._blocks(vector, kept, reduced, space[vector] - rest, index(1), rest))
        return Nests(launches, [])

    def _blocks(
        self, vector: int, kept: list[LoopDim], reduced: list[LoopDim], begin: Index, blocks: Index, block: Index
    ) -> KernelLaunch:
        """Return the kernel for ``blocks`` blocks of columns from ``begin`` on."""
        space = self.group.space
        axes, places = numbered(space, [*kept, *reduced])
        cut, lane = Axis(len(axes), blocks), Axis(len(axes) + 1, block)
        places[Axis(vector, space[vector])] = begin + axis(cut.number, blocks) * block + axis(lane.number, block)
        phases = over_axes(self.content.phases, places)
        outer, inner = [*axes[: len(kept)], *([cut] if blocks != 1 else [])], axes[len(kept) :]
        body = column_loops(outer, lane, inner, phases)
        return self.launch(body, _grain([lane, *inner], phases, self.sizes))

    def in_order(self, loops: list[LoopDim]) -> Nests:
        """Return a scan, or stores to computed places: one element after the other along the axes that decide where."""
        free = _free(self.group) - self.group.reduced
        outer_loops = [dim for dim in loops if dim.position in free]
        axes, (phase,) = self._over([*outer_loops, *(dim for dim in loops if dim.position not in free)])
        outer, inner = axes[: len(outer_loops)], axes[len(outer_loops) :]
        body = [*phase.accumulators, *nested(inner, phase.points, lambda k: "plain")]
        return Nests([self.launch(nested(outer, body, lambda k: "parallel"), _grain(inner, [phase], self.sizes))], [])

    def _over(self, loops: Sequence[LoopDim]) -> tuple[list[Axis], list[Phase]]:
        """Return the axes of loops, numbered outermost first, and the phases over them."""
        axes, places = numbered(self.group.space, loops)
        return axes, over_axes(self.content.phases, places)

    # ---- a long reduction of few rows ----------------------------------------------------------------------------------

    def _cut(self, kept: list[LoopDim], reduced: list[LoopDim]) -> int | None:
        """Return the number of parts into which the outermost reduced loop is cut, or None."""
        phases = self.content.phases
        if not self.group.has_few_rows() or len(phases) > 1 or self.content.scratch or not reduced:
            return None
        if any(a.reduction.startswith("arg") for a in phases[0].accumulators):
            return None
        extent = reduced[0].extent.constant
        inside = estimate(product(dim.extent for dim in reduced[1:]), self.sizes)
        if extent is None or extent * inside < 2 * self.target.min_part:
            return None
        most = min(self.target.max_parts, int(extent * inside // self.target.min_part))
        return next((parts for parts in range(most, 1, -1) if extent % parts == 0), None)

    def _in_parts(self, kept: list[LoopDim], reduced: list[LoopDim], parts: int) -> Nests:
        """Return a kernel that reduces each part, and one that reduces the results of the parts."""
        space, first = self.group.space, reduced[0]
        length = first.extent // parts
        axes, places = numbered(space, [*kept, *reduced])
        part, within = Axis(len(axes), index(parts)), Axis(len(axes) + 1, length)
        at_part = axis(part.number, parts)
        places[Axis(first.position, space[first.position])] = at_part * length + axis(within.number, length)
        (phase,) = over_axes(self.content.phases, places)
        outer, inner = axes[: len(kept)], [within, *axes[len(kept) + 1 :]]
        rows = product(a.extent for a in outer)
        at = flat([axis(a.number, a.extent) for a in outer], contiguous([a.extent for a in outer])) * parts + at_part
        partial = tiles.partial_results(self.name, phase.accumulators, rows * parts, at)
        pointers = {**self.content.pointers, **partial.pointers}
        first_body = row_loops([*outer, part], inner, [Phase(phase.accumulators, phase.points, partial.stores)], [])
        second_body = row_loops(outer, [part], [Phase(phase.accumulators, partial.updates, phase.rows)], [])
        grain = _grain(inner, [phase], self.sizes)
        launches = [self.launch(first_body, grain, pointers), self.launch(second_body, 1 << 20, pointers)]
        return Nests(launches, partial.buffers)

    # ---- the kernel itself ---------------------------------------------------------------------------------------------

    def launch(self, body: Sequence[Statement], grain: int, pointers: Mapping[str, str] | None = None) -> KernelLaunch:
        """Return the kernel of statements and its launch; ``pointers`` are buffers with their names in the kernel."""
        pointers = pointers or self.content.pointers
        read, stored = touched(body)
        used = [(buffer, pointer) for buffer, pointer in pointers.items() if pointer in read | stored]
        numbers = {b for b, _ in used if b in self.buffers and self.buffers[b].role == "number"}
        arguments = tuple(KernelArgument(p, self._dtype(b), p in stored, by_value=b in numbers) for b, p in used)
        sizes = tuple(sorted(names_of_sizes(body)))
        origins = tuple(dict.fromkeys(m.step.origin for m in self.group.members.values()))
        kernel = Kernel(self.name, arguments, sizes, tuple(body), grain, origins)
        return KernelLaunch(kernel, tuple(buffer for buffer, _ in used), sizes)

    def _dtype(self, buffer: str) -> str:
        if buffer in self.buffers:
            dtype = self.buffers[buffer].dtype
            return PARTS.get(dtype, dtype)
        return next(
            a.dtype for phase in self.content.phases for a in phase.accumulators if buffer.endswith(f"_{a.name}")
        )


def _free(group: Group) -> set[int]:
    """Return the axes that are a coordinate of the target by themselves: different values write to different elements."""
    axes = {axis(k, extent): k for k, extent in enumerate(group.space) if extent != 1}
    return {axes[at] for member in group.members.values() for at in member.target if at in axes}


def _block(extent: Index) -> tuple[Index, Index]:
    """Return the elements of a block of accumulators, and the remainder, which is 0 if a good block divides the extent."""
    whole = extent.constant
    if whole is None or whole <= MIN_BLOCK:
        return extent, ZERO
    most = min(MAX_BLOCK, max(2 * MIN_BLOCK, whole // 8))  # a cache line at least, of narrow floats also
    best = max((b for b in range(1, most + 1) if whole % b == 0), key=lambda b: (b % MIN_BLOCK == 0, b))
    if 2 * best < most:
        if whole <= 2 * most:
            return extent, ZERO
        best = most // MIN_BLOCK * MIN_BLOCK
    return index(best), index(whole % best)


# ---- loops around statements ---------------------------------------------------------------------------------------


def nested(axes: Sequence[Axis], body: Sequence[Statement], how: Callable[[int], How]) -> tuple[Statement, ...]:
    """Return nested loops; ``how`` says how the k-th runs."""
    made = tuple(body)
    for k in reversed(range(len(axes))):
        made = (Loop(axes[k], made, how(k)),)
    return made


def row_loops(
    kept: Sequence[Axis], reduced: Sequence[Axis], phases: Sequence[Phase], scratch: Sequence[Scratch]
) -> tuple[Statement, ...]:
    """Return parallel loops over rows, with the passes over each row inside."""
    body: list[Statement] = list(scratch)
    for phase in phases:
        how = "plain" if any(a.reduction.startswith("arg") for a in phase.accumulators) else "vector"
        last = len(reduced) - 1
        body += phase.accumulators
        if phase.points:
            body += nested(
                reduced, read_before_write(phase.points), lambda k, how=how, last=last: how if k == last else "plain"
            )
        body += phase.rows
    return nested(kept, body, lambda k: "parallel")


def column_loops(
    kept: Sequence[Axis], block: Axis, reduced: Sequence[Axis], phases: Sequence[Phase]
) -> tuple[Statement, ...]:
    """Return parallel loops over blocks of neighbouring rows; a value of a row is an element of a vector."""
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
            body += vector(
                [Store(a.name, at, const(neutral(a.reduction, a.dtype), a.dtype)) for a in phase.accumulators]
            )
        if phase.points:
            body += nested(reduced, vector([changed(s) for s in phase.points]), lambda k: "plain")
        if phase.rows:
            body += vector([changed(s) for s in phase.rows])
    return nested(kept, body, lambda k: "parallel")


def _grain(inner: Sequence[Axis], phases: Sequence[Phase], sizes: Mapping[str, int]) -> int:
    """Return the number of iterations of the parallel loops that are worth a thread."""
    walked = [node for phase in phases for s in phase.points for root in expressions(s) for node in root.walk()]
    nodes = sum(CALL_COST if node.op == "call" else 1 for node in walked)
    points = estimate(product(a.extent for a in inner), sizes)
    return max(1, int(WORK_PER_THREAD / max(1.0, points * max(1, nodes) / 4)))
