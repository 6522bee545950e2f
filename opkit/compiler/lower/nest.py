"""This module turns a group into kernels: one, or two if a long reduction is divided among threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from opkit.compiler.ir.dtypes import PARTS
from opkit.compiler.ir.expr import load
from opkit.compiler.ir.index import Axis, Index, Size, Value, axis, index, product
from opkit.compiler.ir.kernel import Accumulator, Kernel, KernelArgument, Loop, Scratch, Statement, Store, Update, walk
from opkit.compiler.ir.program import Buffer
from opkit.compiler.ir.schedule import KernelLaunch
from opkit.compiler.lower import loops
from opkit.compiler.lower.group import Group, Member, loads_of
from opkit.compiler.lower.iteration_space import number
from opkit.compiler.lower.loops import LoopDim
from opkit.compiler.lower.statements import Phase, Statements, statements

CHUNKS = 64  # the most parts into which one long reduction is cut
SHORTEST = 1 << 12  # elements of a part
NARROWEST = 16  # elements of a block of accumulators


@dataclasses.dataclass
class Nests:
    """The launches of a group, and the buffers that only they use."""

    launches: list[KernelLaunch]
    buffers: list[Buffer]


def nests(group: Group, buffers: Mapping[str, Buffer], stored: set[str], sizes: Mapping[str, int], name: str) -> Nests:
    """Return the kernels of a group; ``sizes`` are expected sizes, ``stored`` the buffers that other steps need."""
    vector = _vector_axis(group, buffers, sizes)
    written = statements(group, buffers, stored, by_columns=vector is not None)
    every = loops.dims(group.space, group.reduced, loops.accesses(written.phases), sizes)
    only = next(iter(group.members.values())).step
    writer = _Kernels(group, buffers, written, sizes, name)
    if only.update is not None or (only.reduction or "").startswith("scan") or _computed_target(group):
        return writer.in_order(every)
    if not any(phase.accumulators for phase in written.phases):
        return writer.pointwise(every)
    if vector is not None:
        return writer.columns(vector)
    return writer.rows(every)


def _computed_target(group: Group) -> bool:
    return any(isinstance(leaf, Value) for m in group.members.values() for at in m.target for leaf in at.leaves())


def _vector_axis(group: Group, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> int | None:
    """Return the kept axis along which most elements are contiguous, if they are more than along any reduced axis."""
    if not group.reduced or any((m.step.reduction or "").startswith(("arg", "scan")) for m in group.members.values()):
        return None
    found: dict[int, float] = dict.fromkeys(range(len(group.space)), 0.0)
    for member in group.members.values():
        for at, apart in _places(group, member, buffers):
            elements = number(product(a.extent for a in at.axes()), sizes)
            for k, extent in enumerate(group.space):
                found[k] += elements * (at.coefficient(Axis(k, extent)) == apart)
    kept = max(group.kept, key=found.__getitem__, default=None)
    if kept is None or found[kept] <= max((found[k] for k in group.reduced), default=0):
        return None
    extent = group.space[kept].constant
    return kept if extent is None or extent >= NARROWEST else None


def _places(group: Group, member: Member, buffers: Mapping[str, Buffer]) -> list[tuple[Index, int]]:
    """Return the places where a step reads buffers from outside of the group, and the strides of its neighbours there."""
    found: list[tuple[Index, int]] = []
    for node in loads_of(member.step):
        buffer, coordinates = node.data
        if buffer not in group.members:
            moved = [c.substitute(member.axes) for c in coordinates]
            found.append((buffers[buffer].place(moved), 2 if buffers[buffer].whole else 1))
    return found


class _Kernels:
    def __init__(
        self, group: Group, buffers: Mapping[str, Buffer], written: Statements, sizes: Mapping[str, int], name: str
    ) -> None:
        self.group, self.buffers, self.written, self.sizes, self.name = group, buffers, written, sizes, name

    # ---- kinds of kernels --------------------------------------------------------------------------------------------

    def pointwise(self, every: list[LoopDim]) -> Nests:
        axes, moved = loops.numbered(self.group.space, every)
        phases = loops.moved_phases(self.written.phases, moved)
        grain = loops.grain(axes[:-1], axes[-1:] if len(axes) > 1 else [], phases, self.sizes)
        return Nests([self.launch(loops.pointwise(axes, phases[0].points), grain)], [])

    def rows(self, every: list[LoopDim]) -> Nests:
        reduced = [dim for dim in every if dim.reduced]
        kept = [dim for dim in every if not dim.reduced]
        cut = self._cut(kept, reduced)
        if cut is not None:
            return self._in_parts(kept, reduced, cut)
        axes, moved = loops.numbered(self.group.space, [*kept, *reduced])
        phases = loops.moved_phases(self.written.phases, moved)
        outer, inner = axes[: len(kept)], axes[len(kept) :]
        grain = loops.grain(outer, inner, phases, self.sizes)
        return Nests([self.launch(loops.rows(outer, inner, phases, self.written.scratch), grain)], [])

    def columns(self, vector: int) -> Nests:
        space, group = self.group.space, self.group
        found = loops.accesses(self.written.phases)
        others = frozenset({*group.reduced, vector})
        every = loops.dims(space, others, found, self.sizes)  # the vector's axis is not merged with the kept ones
        block, rest = _block(space[vector])
        kept = [dim for dim in every if not dim.reduced]
        reduced = [d for d in loops.dims(space, group.reduced, found, self.sizes) if d.reduced]
        blocks = (space[vector] - rest) // block
        launches = [self._blocks(vector, kept, reduced, index(0), blocks, block)]
        if rest != 0:
            launches.append(self._blocks(vector, kept, reduced, space[vector] - rest, index(1), rest))
        return Nests(launches, [])

    def _blocks(
        self, vector: int, kept: list[LoopDim], reduced: list[LoopDim], begin: Index, blocks: Index, block: Index
    ) -> KernelLaunch:
        """Return the kernel for ``blocks`` blocks of columns from ``begin`` on."""
        space = self.group.space
        axes = [Axis(k, dim.extent) for k, dim in enumerate([*kept, *reduced])]
        cut, lane = Axis(len(axes), blocks), Axis(len(axes) + 1, block)
        moved = {Axis(k, extent): index(0) for k, extent in enumerate(space)}
        for k, dim in enumerate([*kept, *reduced]):
            moved[Axis(dim.position, space[dim.position])] = axis(k, dim.extent)
        moved[Axis(vector, space[vector])] = begin + axis(cut.number, blocks) * block + axis(lane.number, block)
        phases = loops.moved_phases(self.written.phases, moved)
        outer = [*axes[: len(kept)], *([cut] if blocks != 1 else [])]
        body = loops.columns(outer, lane, axes[len(kept) :], phases)
        return self.launch(body, loops.grain(outer, [lane, *axes[len(kept) :]], phases, self.sizes))

    def in_order(self, every: list[LoopDim]) -> Nests:
        """Return a scan, or stores to computed places: one element after the other along the axes that decide where."""
        scanned = self.group.reduced
        free = [d for d in every if d.position in _free(self.group) and d.position not in scanned]
        rest = [d for d in every if d not in free]
        axes, moved = loops.numbered(self.group.space, [*free, *rest])
        (phase,) = loops.moved_phases(self.written.phases, moved)
        outer, inner = axes[: len(free)], axes[len(free) :]
        body = [*phase.accumulators, *loops.nest(inner, phase.points, lambda k: "plain")]
        grain = loops.grain(outer, inner, [phase], self.sizes)
        return Nests([self.launch(loops.nest(outer, body, lambda k: "parallel"), grain)], [])

    # ---- a long reduction of few rows ----------------------------------------------------------------------------------

    def _cut(self, kept: list[LoopDim], reduced: list[LoopDim]) -> int | None:
        """Return the number of parts into which the outermost reduced loop is cut, or None."""
        phases = self.written.phases
        if not self.group.has_few_rows() or len(phases) > 1 or self.written.scratch or not reduced:
            return None
        if any(a.reduction.startswith("arg") for a in phases[0].accumulators):
            return None
        extent = reduced[0].extent.constant
        inside = number(product(dim.extent for dim in reduced[1:]), self.sizes)
        if extent is None or extent * inside < 2 * SHORTEST:
            return None
        most = min(CHUNKS, int(extent * inside // SHORTEST))
        return next((parts for parts in range(most, 1, -1) if extent % parts == 0), None)

    def _in_parts(self, kept: list[LoopDim], reduced: list[LoopDim], parts: int) -> Nests:
        (phase,) = self.written.phases
        space, first = self.group.space, reduced[0]
        length = first.extent // parts
        axes, moved = loops.numbered(space, [*kept, *reduced])
        part, within = Axis(len(axes), index(parts)), Axis(len(axes) + 1, length)
        at = len(kept)
        moved[Axis(first.position, space[first.position])] = axis(part.number, parts) * length + axis(
            within.number, length
        )
        (phase,) = loops.moved_phases([phase], moved)
        outer, inner = axes[:at], [within, *axes[at + 1 :]]
        row = loops.flat_of(outer)
        partial = [
            Buffer(
                f"{self.name}_{a.name}",
                a.dtype,
                (product(x.extent for x in outer), index(parts)),
                (index(parts), index(1)),
            )
            for a in phase.accumulators
        ]
        names = {a.name: f"q{k}" for k, a in enumerate(phase.accumulators)}
        stores: list[Statement] = [
            Store(names[a.name], row * parts + axis(part.number, parts), loops.var(a.name, a.dtype))
            for a in phase.accumulators
        ]
        pointers = {**self.written.pointers, **{b.name: q for b, q in zip(partial, names.values(), strict=True)}}
        first_body = loops.rows([*outer, part], inner, [Phase(phase.accumulators, phase.points, stores)], [])
        grain = loops.grain([*outer, part], inner, [phase], self.sizes)
        updates: list[Statement] = [
            Update(a.name, a.reduction, load(names[a.name], a.dtype, row * parts + axis(part.number, parts)))
            for a in phase.accumulators
        ]
        second_body = loops.rows(outer, [part], [Phase(phase.accumulators, updates, phase.rows)], [])
        return Nests([self.launch(first_body, grain, pointers), self.launch(second_body, 1 << 20, pointers)], partial)

    # ---- the kernel itself ---------------------------------------------------------------------------------------------

    def launch(self, body: Sequence[Statement], grain: int, pointers: Mapping[str, str] | None = None) -> KernelLaunch:
        pointers = pointers or self.written.pointers
        read, stored = _touched(body)
        used = [(buffer, pointer) for buffer, pointer in pointers.items() if pointer in read | stored]
        arguments = tuple(KernelArgument(p, self._dtype(b, body, p), p in stored) for b, p in used)
        sizes = tuple(sorted(_sizes(body)))
        origins = tuple(dict.fromkeys(m.step.origin for m in self.group.members.values()))
        return KernelLaunch(
            Kernel(self.name, arguments, sizes, tuple(body), grain, origins), tuple(b for b, _ in used), sizes
        )

    def _dtype(self, buffer: str, body: Sequence[Statement], pointer: str) -> str:
        if buffer in self.buffers:
            dtype = self.buffers[buffer].dtype
            return PARTS.get(dtype, dtype)
        return next(
            a.dtype for phase in self.written.phases for a in phase.accumulators if buffer.endswith(f"_{a.name}")
        )


def _free(group: Group) -> set[int]:
    """Return the axes that are a coordinate of the target by themselves: different values write to different elements."""
    axes = {axis(k, extent): k for k, extent in enumerate(group.space) if extent != 1}
    return {axes[at] for member in group.members.values() for at in member.target if at in axes}


def _block(extent: Index) -> tuple[Index, Index]:
    """Return the elements of a block of accumulators, and the remainder, which is 0 if a good block divides the extent."""
    whole = extent.constant
    if whole is None or whole <= NARROWEST:
        return extent, index(0)
    most = min(loops.BLOCK, max(2 * NARROWEST, whole // 8))  # a cache line at least, of narrow floats also
    best = max((b for b in range(1, most + 1) if whole % b == 0), key=lambda b: (b % NARROWEST == 0, b))
    if 2 * best < most:
        if whole <= 2 * most:
            return extent, index(0)
        best = most // NARROWEST * NARROWEST
    return index(best), index(whole % best)


def _touched(body: Sequence[Statement]) -> tuple[set[str], set[str]]:
    """Return the pointers that statements read and write."""
    read: set[str] = set()
    stored: set[str] = set()
    for statement in walk(body):
        if isinstance(statement, Store):
            stored.add(statement.buffer)
        if not isinstance(statement, Loop | Scratch | Accumulator):
            read |= {node.data[0] for root in loops.roots(statement) for node in root.walk() if node.op == "load"}
    return read, stored


def _sizes(body: Sequence[Statement]) -> set[str]:
    found: list[Index] = []
    for statement in walk(body):
        if isinstance(statement, Loop):
            found.append(statement.axis.extent)
        elif isinstance(statement, Scratch):
            found.append(statement.length)
        elif not isinstance(statement, Accumulator):
            found += loops.accesses([Phase(points=[statement])])
    names: set[str] = set()
    for at in found:
        names |= _names(at)
    return names


def _names(at: Index) -> set[str]:
    found: set[str] = set()
    for leaf in at.leaves():
        if isinstance(leaf, Axis):
            found |= _names(leaf.extent)
        elif isinstance(leaf, Size):
            found.add(leaf.name)
    return found
