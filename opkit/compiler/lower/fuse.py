"""Which steps share a kernel. One pass over the program, in time linear in its steps.

Groups and extern calls stand in the order in which they will run. A step may join any group that comes no earlier than
everything it reads; so it tries the last one that it reads from, then the last one of the same size that reads
something it reads too (which saves a pass over it), and else begins a group. What a refusing group computes cheaply, the
step computes again for itself rather than reading it from memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

from opkit.compiler.ir.expr import Expr, cast, const, indices, moved, rewrite
from opkit.compiler.ir.index import Axis, Index, Value, product, value
from opkit.compiler.ir.program import Compute, Extern, Item, Program, Strided, reads, writes
from opkit.compiler.ir.schedule import Refusal
from opkit.compiler.lower import group as groups
from opkit.compiler.lower.group import Group, loads_of

Entry = Group | Extern

# what computing a node costs, against reading an element from memory, which is about CHEAP
_FREE = frozenset({"const", "index", "load", "cast", "var", "bitcast"})
_QUICK = frozenset(
    {*["add", "sub", "mul", "neg", "abs", "min", "max", "where", "lt", "le", "eq", "ne", "and", "or", "xor", "not"]}
)
_DEAR = 10
CHEAP = 6


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
        self.steps: dict[str, Compute | None] = {}  # the one step that makes a buffer; None where several do
        for step in program.steps:
            for name in writes(step):
                self.steps[name] = step if isinstance(step, Compute) and name not in self.steps else None
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

    def _again(self, name: str, step: Compute) -> Compute | None:
        made = self.steps.get(name)
        masked = any(load.args for load in loads_of(step) if load.data[0] == name)
        if made is None or masked or not _invertible(made) or self._changed(made):
            return None
        alone = self.uses[name] == 1 and product(made.axes) == product(step.axes)
        return made if alone or cost(made.body) <= CHEAP else None

    def _changed(self, made: Compute) -> bool:
        """Whether something that the step reads is overwritten by another one."""
        return any(self.made.get(name, -1) > self.made[made.buffer] for name in reads(made))


def _invertible(made: Compute) -> bool:
    """Whether each element is computed from its coordinates alone: a pointwise step that fills its buffer."""
    if made.reduction or made.update:
        return False
    return all(list(at.terms.values()) in ([], [1]) and len(at.atoms()) == len(at.axes()) for at in made.target)


def _of_one(step: Compute) -> Compute:
    """A reduction of single elements as the element itself."""
    if step.reduction is None or any(step.axes[k] != 1 for k in step.reduced):
        return step
    body = const(0, "i64") if step.reduction.startswith("arg") else step.body
    return dataclasses.replace(step, body=body, reduction=None, reduced=frozenset())


def cost(root: Expr) -> int:
    """What computing an expression costs."""
    return sum(0 if node.op in _FREE else 1 if node.op in _QUICK else _DEAR for node in root.walk())


def substituted(step: Compute, inlined: dict[str, Compute]) -> Compute:
    """The step with the bodies of others in place of what it loads from them."""
    return dataclasses.replace(step, body=_inline(step.body, inlined))


def _inline(root: Expr, inlined: dict[str, Compute]) -> Expr:
    def change(node: Expr) -> Expr:
        node = with_values(node, lambda inner: _inline(inner, inlined))
        if node.op == "load" and node.data[0] in inlined:
            made = inlined[node.data[0]]
            return made.body.substitute(_axes_for(made, node.data[1]))
        return lossless(node)

    return rewrite(root, change)


def _axes_for(made: Compute, coordinates: tuple[Index, ...]) -> dict[Axis, Index]:
    """The axes of a pointwise step for an element that it wrote: its target is its axes."""
    return {axis: c for at, c in zip(made.target, coordinates, strict=True) for axis in at.axes()}


def with_values(node: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """A node with the expressions that its own indices are computed from changed."""
    leaves = {leaf for at in indices(node) for leaf in at.leaves() if isinstance(leaf, Value)}
    return moved(node, {leaf: value(change(leaf.expr)) for leaf in leaves}) if leaves else node


def lossless(node: Expr) -> Expr:
    """A conversion back from a narrow float that only stood between two steps is left out."""
    if node.op != "cast":
        return node
    (inner,) = node.args
    if inner.op == "cast" and not inner.data and inner.dtype in ("bf16", "f16") and inner.args[0].dtype == node.dtype:
        return inner.args[0]
    return cast(inner, node.dtype, bool(node.data))
