"""Decide which steps share a kernel, in one pass over the program, in time linear in its steps.

Groups and extern calls are in the order in which they will run. A step may join any group that comes no earlier than everything
it reads. So it tries the last group that it reads from, then the last one of the same size that reads something it reads too
(which saves a pass over it), and else starts a new group. A step that reads from two groups merges them, if nothing in between
needs the earlier one. What a step reads from another group than its own passes through memory, so the step computes it itself if
it is cheap and reads few elements: where it reads from several groups or calls, or its source's group refuses it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from opkit.compiler.ir.access import estimate, rows_are_adjacent
from opkit.compiler.ir.expr import Expr, const
from opkit.compiler.ir.index import Div, Index, Mod, index, product
from opkit.compiler.ir.kernel import FusionRefusal
from opkit.compiler.ir.program import Buffer, Compute, Extern, Program, ScalarItem, Strided, reads
from opkit.compiler.lower import group as groups
from opkit.compiler.lower.group import Group, loads_of
from opkit.compiler.lower.inlining import Parts, invertible, substituted
from opkit.compiler.lower.rewrites import cost
from opkit.compiler.lower.target import PLAIN, LoweringTarget

Entry = Group | Extern

MAX_RECOMPUTED_DEPTH = 32  # steps, each of which reads the one before, that are recomputed in another
MIN_DIVISIONS = 64  # a buffer each of whose elements is read so often is not computed again if that needs a division
COST_OF_CHOICE = 2  # of one more part, such as of a concatenation, by which an element may be computed
SMALL = 1 << 12  # elements that a GPU computes in less time than a launch takes


@dataclasses.dataclass
class Fused:
    """The groups and extern calls in order, and the steps that were not fused."""

    entries: list[Entry]
    refusals: list[FusionRefusal]


def fuse(program: Program, target: LoweringTarget = PLAIN) -> Fused:
    """Put every step into a group."""
    fuser = _Fuser(program, target)
    for step in program.steps:
        fuser.add(step)
    return Fused([entry for entry in fuser.entries if entry is not None], fuser.refusals)


class _Fuser:
    def __init__(self, program: Program, target: LoweringTarget) -> None:
        self.program, self.target = program, target
        self.entries: list[Entry | None] = []  # None: merged into a later one
        self.refusals: list[FusionRefusal] = []
        self.last_writer: dict[str, int] = {}  # the last entry that writes a buffer
        self.read: dict[str, set[int]] = {}  # the entries that read it
        self.needed: dict[int, int] = {}  # the first later entry that must come after an entry
        self.latest: dict[Index, int] = {}  # the last group over a number of points
        self.parts: dict[str, list[Compute]] = {}  # the steps that fill a buffer, unless a call writes to it too
        called = {name for step in program.steps if isinstance(step, Extern) for name in program.writes(step)}
        for step in program.steps:
            if isinstance(step, Compute) and step.buffer not in called:
                self.parts.setdefault(step.buffer, []).append(step)
        self.parts = {name: parts for name, parts in self.parts.items() if _fill(parts, program.buffers[name])}
        self.uses = Counter(name for step in program.steps for name in program.reads(step))
        returned = [output.buffer for output in program.outputs if isinstance(output, Strided | ScalarItem)]
        returned = program.with_parts(returned)
        self.uses.update(returned)
        call_inputs = [name for step in program.steps if isinstance(step, Extern) for name in program.reads(step)]
        self.stored = {*returned, *call_inputs}  # buffers that are in memory in any case
        self.sizes = program.sizes
        self.sources = self._sources()
        reductions = (step for step in program.steps if isinstance(step, Compute) and step.reduced and target.tiles)
        self.adjacent = frozenset(step.buffer for step in reductions if _rows_are_adjacent(step, program))
        self.before_rows = _before_rows(program, self.adjacent) if target.tiles else frozenset[str]()

    def add(self, step: Compute | Extern) -> None:
        if isinstance(step, Extern):
            self.entries.append(step)
            self._note(step, len(self.entries) - 1)
        else:
            self._place(_of_one(step))

    def _place(self, step: Compute, tries: int = MAX_RECOMPUTED_DEPTH) -> None:
        after = self._after(step)
        if self._merge_sources(step, after):
            return None
        near = self._without_far_sources(step, after) if tries else step
        if near is not step:
            return self._place(near, tries - 1)
        for at in self._candidates(step, after):
            entry = self.entries[at]
            assert isinstance(entry, Group)
            reason = self._separate(entry, step) or groups.join(entry, step)
            if reason is None:
                self._note(step, at)
                return None
            if at == after:
                self.refusals.append(FusionRefusal(next(reversed(entry.members)), step.buffer, reason))
                made_there = [name for name in reads(step) if name in entry.members]
                cheaper = self._recomputing(step, made_there, 2) if tries else step
                if cheaper is not step:
                    return self._place(cheaper, tries - 1)
        self.entries.append(groups.start(step, self.target, self.adjacent))
        self._note(step, len(self.entries) - 1)
        return None

    def _candidates(self, step: Compute, after: int) -> list[int]:
        found = [after] if after >= 0 and isinstance(self.entries[after], Group) else []
        similar = self.latest.get(product(step.axes), -1)
        if similar > after and (self._is_small(step) or self._shares(step, self.entries[similar])):
            found.append(similar)
        return found

    def _is_small(self, step: Compute) -> bool:
        """Return whether a launch of a GPU takes longer than computing the step."""
        points = product(step.axes).constant
        return self.target.tiles is not None and points is not None and points <= SMALL

    def _shares(self, step: Compute, entry: Entry | None) -> bool:
        """Return whether a step reads something that a group reads or writes, or shares memory with a buffer of the group's."""
        assert isinstance(entry, Group)
        memories = (self.program.buffers[name].memory for name in (*reads(step), step.buffer))
        neighbours = (part for memory in memories for part in self.program.parts.get(memory, ()))
        return any(name in entry.loads or name in entry.members for name in (*reads(step), *neighbours))

    def _after(self, step: Compute) -> int:
        """Return the first entry that the step may join: the last that writes what it reads, or uses what it overwrites."""
        sources = [self.last_writer.get(name, -1) for name in reads(step)]
        overwritten = (step.buffer, *self.program.overlapping(step.buffer))
        users = [at for name in overwritten for at in (self.last_writer.get(name, -1), *self.read.get(name, ()))]
        return max([-1, *sources, *users])

    def _note(self, step: Compute | Extern, at: int) -> None:
        for name in self.program.reads(step):
            self._comes_after(at, self.last_writer.get(name, at))
            self.read.setdefault(name, set()).add(at)
        written = self.program.writes(step)
        for name in (*written, *(other for each in written for other in self.program.overlapping(each))):
            for earlier in (self.last_writer.get(name, at), *self.read.get(name, ())):
                self._comes_after(at, earlier)
            self.last_writer[name] = at
        if isinstance(step, Compute):
            self.latest[product(step.axes)] = at

    def _comes_after(self, at: int, earlier: int) -> None:
        """Note that an entry must stay after an earlier one."""
        if earlier != at:
            self.needed[earlier] = min(self.needed.get(earlier, at), at)

    # ---- two groups into one ---------------------------------------------------------------------------------------

    def _merge_sources(self, step: Compute, after: int) -> bool:
        """Merge earlier groups that the step reads from, and the step, into the last of them; return whether any was merged."""
        sources = sorted(
            {at for name in reads(step) if 0 <= (at := self.last_writer.get(name, -1)) < after}, reverse=True
        )
        into = self.entries[after] if sources else None
        merged = False
        for at in sources:
            if isinstance(into, Group) and (both := self._merged(at, into, after, step)) is not None:
                self._move(at, after)
                into = self.entries[after] = both
                merged = True
        if merged:
            assert isinstance(into, Group)
            assert groups.join(into, step) is None
            self._note(step, after)
        return merged

    def _merged(self, at: int, into: Group, after: int, step: Compute) -> Group | None:
        """Return the group of an earlier group's steps and a later one's, or None if they and ``step`` cannot share a kernel."""
        entry = self.entries[at]
        if not isinstance(entry, Group) or self.needed.get(at, after + 1) <= after or not groups.alike(entry, into):
            return None
        if self._separate(entry, step) or self._separate(into, step):
            return None
        both = groups.copied(into)
        if any(groups.join(both, each.step) is not None for each in entry.members.values()):
            return None
        return both if groups.join(groups.copied(both), step) is None else None

    def _move(self, at: int, after: int) -> None:
        """Transfer what an entry writes, reads and precedes to a later one."""
        entry = self.entries[at]
        assert isinstance(entry, Group)
        self.entries[at] = None
        self.last_writer |= {name: after for name, last in self.last_writer.items() if last == at}
        for name in {*entry.loads, *entry.members} & self.read.keys():
            if at in self.read[name]:
                self.read[name] = self.read[name] - {at} | {after}
        if at in self.needed:
            self.needed[after] = min(self.needed.pop(at), self.needed.get(after, len(self.entries)))
        sizes = {product(member.step.axes) for member in entry.members.values()}
        self.latest.update((size, after) for size in sizes if self.latest.get(size) == at)

    def _separate(self, entry: Group, step: Compute) -> str | None:
        """Return why a step stays apart from a group.

        One may write to memory that the other reads or writes by the name of a view. And of a reduction of columns and one of
        rows, only one can share a kernel with the steps that both need. Rows fit into a tile, so what comes after their
        reduction can join, too.
        """
        written = self.program.overlapping(step.buffer)
        read = [other for name in reads(step) for other in self.program.overlapping(name)]
        if any(name in entry.loads or name in entry.members for name in written) or any(
            n in entry.members for n in read
        ):
            return "one of them writes to memory of which the other has a view"
        if step.buffer in self.adjacent and not self.before_rows.isdisjoint(entry.members):
            return "a reduction over other axes follows"
        return None

    # ---- recomputation ---------------------------------------------------------------------------------------------

    def _without_far_sources(self, step: Compute, after: int) -> Compute:
        """Return the step with what it reads of several entries, or of one that it cannot join, computed in it."""
        sources = {name: at for name in reads(step) if (at := self.last_writer.get(name, -1)) >= 0}
        far = [name for name in sources if name not in self.stored and {*sources.values()} != {after}]
        return self._recomputing(step, far, 1 if self.target.recompute_pairs else 0)

    def _recomputing(self, step: Compute, names: Iterable[str], uses: int) -> Compute:
        """Return the step with those of its sources computed in it that are cheap, and read few elements.

        That is one for each element; two if the source is not in memory in any case, and has at most so many ``uses``.
        """
        inlined = {
            name: parts
            for name in names
            if (parts := self._recomputable(name, step))
            and len(self.sources[name]) <= (2 if self.uses[name] <= uses and name not in self.stored else 1)
        }
        return substituted(step, inlined) if inlined else step

    def _sources(self) -> dict[str, frozenset[str]]:
        """Return the buffers of which each element of a buffer needs an element of its own, if it is recomputed.

        Where pairs are recomputed, so are those of them that are not in memory, and what these are computed from counts.
        """
        found: dict[str, frozenset[str]] = {}
        pairs = self.target.recompute_pairs
        for name, parts in self.parts.items():
            of_parts = []
            for part in parts if invertible(parts, masked=False) else ():
                wide = {load.data[0] for load in loads_of(part) if _is_wide(load, part)}
                near = {each for each in wide - self.stored if pairs and each in found and len(found[each]) <= 2}
                of_parts.append(frozenset(wide - near).union(*(found[each] for each in near)))
            found[name] = max(of_parts, key=len, default=frozenset({name}))
        return found

    def _recomputable(self, name: str, step: Compute) -> Parts | None:
        """Return the steps that fill a buffer if ``step`` may recompute its elements, else None."""
        parts = self.parts.get(name)
        masked = any(load.args for load in loads_of(step) if load.data[0] == name)
        if parts is None or not invertible(parts, masked) or any(map(self._changed, parts)):
            return None
        if any(_reads_what_it_overwrites(step, name, part) for part in parts):
            return None
        points = sum((product(p.axes) for p in parts), index(0))
        alone = self.uses[name] == 1 and points == product(step.axes)
        return parts if alone or self._cheap(name, parts, step, points) else None

    def _cheap(self, name: str, parts: Parts, step: Compute, points: Index) -> bool:
        """Return whether recomputing takes few operations for an element.

        A buffer that no other step needs is then not computed at all: if few of its elements are read (of a row the one that a
        target names), they may be expensive.
        """
        places = sum(load.data[0] == name for load in loads_of(step))
        times = places * estimate(product(step.axes), self.sizes) / max(1.0, estimate(points, self.sizes))
        others = self.uses[name] > 1 or name in self.stored
        if self.target.tiles is None and times >= MIN_DIVISIONS and any(map(_divides, parts)):
            return False
        each = sum(cost(part.body) for part in parts) + COST_OF_CHOICE * (len(parts) - 1)
        return (max(1.0, times) if others else times) * each <= self.target.max_recomputed_cost

    def _changed(self, producer: Compute) -> bool:
        """Return whether a later step overwrites something that the step reads."""
        at = self.last_writer[producer.buffer]
        if any(self.last_writer.get(name, -1) > at for name in reads(producer)):
            return True
        entry = self.entries[at]
        members = [*entry.members] if isinstance(entry, Group) else []
        return producer.buffer in members and not set(members[members.index(producer.buffer) :]).isdisjoint(
            reads(producer)
        )


def _fill(parts: Parts, buffer: Buffer) -> bool:
    """Return whether steps write to as many elements as a buffer has; of an input they may write to some only."""
    points = (product(n for k, n in enumerate(part.axes) if k not in part.reduced) for part in parts)
    return buffer.role == "made" or sum(points, index(0)) == product(buffer.shape)


def _divides(part: Compute) -> bool:
    """Return whether where a step reads depends on a quotient: compilers do not make vectors of such loads, or gather them."""
    atoms = (atom for load in loads_of(part) for at in load.data[1] for atom in at.atoms())
    return any(isinstance(atom, Div | Mod) for atom in atoms)


def _reads_what_it_overwrites(step: Compute, name: str, part: Compute) -> bool:
    """Return whether a step that recomputes ``part`` would read elements that it overwrites at other points."""
    read = [load.data[1] for load in loads_of(part) if load.data[0] == step.buffer]
    used = [load.data[1] for load in loads_of(step) if load.data[0] == name]
    return bool(read) and any(at != own for own, places in ((part.target, read), (step.target, used)) for at in places)


def _is_wide(load: Expr, step: Compute) -> bool:
    """Return whether a step reads a different element at every point."""
    read = product(axis.extent for axis in {a for at in load.data[1] for a in at.axes()})
    return read == product(step.axes)


def _rows_are_adjacent(step: Compute, program: Program) -> bool:
    """Return whether the rows that a step reduces lie next to each other in memory."""
    found = [program.buffers[load.data[0]].place(load.data[1]) for load in loads_of(step)]
    axes = [step.axis(k) for k in range(len(step.axes))]
    kept = (axis for k, axis in enumerate(axes) if k not in step.reduced and axis.extent != 1)
    reduced = [axes[k] for k in step.reduced]
    return any(all(rows_are_adjacent(found, row, column) for column in reduced) for row in kept)


def _before_rows(program: Program, adjacent: frozenset[str]) -> frozenset[str]:
    """Return the buffers whose elements flow, point by point, into a reduction whose rows do not lie next to each other."""
    found: set[tuple[str, Index]] = set()
    for step in reversed(program.steps):
        if isinstance(step, Compute):
            points = product(step.axes)
            if (step.reduction is not None and step.buffer not in adjacent) or (step.buffer, points) in found:
                found |= {(name, points) for name in reads(step)}
    return frozenset(name for name, _ in found)


def _of_one(step: Compute) -> Compute:
    """Return a reduction of single elements as the element itself."""
    if step.reduction is None or any(step.axes[k] != 1 for k in step.reduced):
        return step
    body = const(0, "i64") if step.reduction.startswith("arg") else step.body
    return dataclasses.replace(step, body=body, reduction=None, reduced=frozenset())
