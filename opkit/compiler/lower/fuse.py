"""Which steps share a kernel. One pass over the program, in time linear in its steps.

Groups and extern calls stand in the order in which they will run. A step may join any group that comes no earlier than
everything it reads; so it tries the last one that it reads from, then the last one of the same size that reads
something it reads too (which saves a pass over it), and else begins a group. What a refusing group computes cheaply, the
step computes again for itself rather than reading it from memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from opkit.compiler.ir.expr import const
from opkit.compiler.ir.index import Index, index, product
from opkit.compiler.ir.program import Compute, Extern, Item, Program, Strided, reads, writes
from opkit.compiler.ir.schedule import Refusal
from opkit.compiler.lower import group as groups
from opkit.compiler.lower.group import Group, loads_of
from opkit.compiler.lower.inline import Parts, cost, invertible, substituted

Entry = Group | Extern

CHEAP = 6  # what may be computed again rather than read; see ``inline.cost``


@dataclasses.dataclass
class Fused:
    """The groups and extern calls in order, and what was refused."""

    entries: list[Entry]
    refusals: list[Refusal]


def fuse(program: Program) -> Fused:
    """Put every step into a group."""
    fuser = _Fuser(program)
    for step in program.steps:
        fuser.add(step)
    return Fused(fuser.entries, fuser.refusals)


class _Fuser:
    def __init__(self, program: Program) -> None:
        self.entries: list[Entry] = []
        self.refusals: list[Refusal] = []
        self.made: dict[str, int] = {}  # the last entry that writes a buffer
        self.read: dict[str, int] = {}  # the last entry that reads it
        self.latest: dict[Index, int] = {}  # the last group over so many points
        self.parts: dict[str, list[Compute]] = {}  # the steps that make a buffer, unless a call writes to it too
        called = {name for step in program.steps if isinstance(step, Extern) for name in writes(step)}
        for step in program.steps:
            if isinstance(step, Compute) and step.buffer not in called:
                self.parts.setdefault(step.buffer, []).append(step)
        self.uses = Counter(name for step in program.steps for name in reads(step))
        self.uses.update(output.buffer for output in program.outputs if isinstance(output, Strided | Item))

    def add(self, step: Compute | Extern) -> None:
        if isinstance(step, Extern):
            self.entries.append(step)
            self._note(step, len(self.entries) - 1)
        else:
            self._place(_of_one(step))

    def _place(self, step: Compute, tries: int = 3) -> None:
        after = self._after(step)
        for at in self._candidates(step, after):
            entry = self.entries[at]
            assert isinstance(entry, Group)
            reason = groups.join(entry, step)
            if reason is None:
                self._note(step, at)
                return None
            if at == after:
                self.refusals.append(Refusal(next(reversed(entry.members)), step.buffer, reason))
                cheaper = self._computing_again(step, entry) if tries else step
                if cheaper is not step:
                    return self._place(cheaper, tries - 1)
        self.entries.append(groups.start(step))
        self._note(step, len(self.entries) - 1)
        return None

    def _candidates(self, step: Compute, after: int) -> list[int]:
        found = [after] if after >= 0 and isinstance(self.entries[after], Group) else []
        similar = self.latest.get(product(step.axes), -1)
        if similar > after and self._shares(step, self.entries[similar]):
            found.append(similar)
        return found

    def _shares(self, step: Compute, entry: Entry) -> bool:
        assert isinstance(entry, Group)
        return any(name in entry.loads or name in entry.members for name in reads(step))

    def _after(self, step: Compute) -> int:
        """The first entry that the step may join: the last that makes what it reads or uses what it overwrites."""
        sources = [self.made.get(name, -1) for name in reads(step)]
        before = [self.made.get(step.buffer, -1), self.read.get(step.buffer, -1)]
        return max([-1, *sources, *before])

    def _note(self, step: Compute | Extern, at: int) -> None:
        for name in reads(step):
            self.read[name] = max(self.read.get(name, -1), at)
        for name in writes(step):
            self.made[name] = at
        if isinstance(step, Compute):
            self.latest[product(step.axes)] = at

    # ---- computing again -------------------------------------------------------------------------------------------

    def _computing_again(self, step: Compute, entry: Group) -> Compute:
        """The step with what the group computes cheaply computed by itself."""
        inlined = {name: made for name in reads(step) if name in entry.members and (made := self._again(name, step))}
        return substituted(step, inlined) if inlined else step

    def _again(self, name: str, step: Compute) -> Parts | None:
        """The steps that make a buffer, if another one may compute its elements for itself."""
        parts = self.parts.get(name)
        masked = any(load.args for load in loads_of(step) if load.data[0] == name)
        if parts is None or not invertible(parts, masked) or any(map(self._changed, parts)):
            return None
        alone = self.uses[name] == 1 and sum((product(p.axes) for p in parts), index(0)) == product(step.axes)
        return parts if alone or sum(cost(part.body) for part in parts) <= CHEAP else None

    def _changed(self, made: Compute) -> bool:
        """Whether something that the step reads is overwritten by another one."""
        return any(self.made.get(name, -1) > self.made[made.buffer] for name in reads(made))


def _of_one(step: Compute) -> Compute:
    """A reduction of single elements as the element itself."""
    if step.reduction is None or any(step.axes[k] != 1 for k in step.reduced):
        return step
    body = const(0, "i64") if step.reduction.startswith("arg") else step.body
    return dataclasses.replace(step, body=body, reduction=None, reduced=frozenset())
