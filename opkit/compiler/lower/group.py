"""A group of steps that become one kernel: their shared iteration space, and the conditions for steps to join.

The axes of the space are either *kept* or *reduced*. A reduction is over all reduced axes; its results, and values computed from
them alone, have one value for each value of the kept axes ("a row"). Other steps have one for each point. A kernel passes over a
row several times: a step that needs the result of a reduction is one *phase* later.

The space is the coarsest list of extents whose products are each step's axes. A step over (8, 128, 3072) and one over
(1024, 3072) visit the same elements in the same order; they share the space (8, 128, 3072), in which the second one's first axis
is ``a0 * 128 + a1``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.index import Axis, Index, Value, axis, contiguous, flat, index, product
from opkit.compiler.ir.program import Compute, roots
from opkit.compiler.lower.target import PLAIN, LoweringTarget

MAX_MEMBERS = 96
MAX_BUFFERS = 48


@dataclasses.dataclass
class Member:
    """A step in a group.

    Attributes:
        step: what is computed.
        rows: whether it has one value for each row, and not one for each point. A reduction visits every point.
        phase: the number of reductions that come before it.
        axes: its axes as indices over the group's space.
        target: the coordinates that it writes to, over the group's space.
    """

    step: Compute
    rows: bool
    phase: int = 0
    axes: dict[Axis, Index] = dataclasses.field(default_factory=dict)
    target: tuple[Index, ...] = ()


@dataclasses.dataclass
class Group:
    """Steps that become one kernel, in order.

    Attributes:
        space: the extents of the axes.
        reduced: the positions of those that reductions go over.
        members: the steps, by the buffer that they write.
        loads: the buffers that are read from outside, or before they are written; a step may read what it overwrites.
        closed: whether no step may join.
        target: the machine.
        adjacent: the reductions, of any group, whose rows lie next to each other in memory, so that a program takes several.
    """

    space: Extents = ()
    reduced: frozenset[int] = frozenset()
    members: dict[str, Member] = dataclasses.field(default_factory=dict)
    loads: dict[str, None] = dataclasses.field(default_factory=dict)
    closed: bool = False
    target: LoweringTarget = PLAIN
    adjacent: frozenset[str] = frozenset()

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(k for k in range(len(self.space)) if k not in self.reduced)

    @property
    def phases(self) -> int:
        return 1 + max(member.phase for member in self.members.values())

    @property
    def overwritten(self) -> set[str]:
        """The buffers whose points are all read and then written."""
        return {name for name in self.loads.keys() & self.members.keys() if not _per_row(self.members[name])}

    def has_few_rows(self) -> bool:
        """Return whether the rows are too few to divide among threads, and long enough for that to matter."""
        rows = product(self.space[k] for k in self.kept).constant
        length = product(self.space[k] for k in self.reduced).constant
        few, long, tiles = self.target.few_rows, self.target.long_row, self.target.tiles
        if tiles is not None and not self.adjacent.isdisjoint(self.members):
            few, long = few * tiles.adjacent_rows, tiles.long_column
        elif tiles is not None and length is not None and length >= tiles.reread_row:
            few = max(few, 2 * tiles.programs)
        return rows is not None and rows <= few and (length is None or length >= long)


def start(step: Compute, target: LoweringTarget, adjacent: frozenset[str]) -> Group:
    """Return a group of one."""
    group = Group(closed=_alone(step) is not None, target=target, adjacent=adjacent)
    space = tuple(e for e in step.axes if e != 1)
    reduced = _reduced_with(group, step, space)
    assert reduced is not None
    placed = _place([Member(step, rows=False)], space, reduced)
    assert placed is not None
    _settle(group, space, reduced, {}, placed[0])
    return group


def join(group: Group, step: Compute) -> str | None:
    """Add a step and return None, or return the reason why it cannot join and leave the group unchanged."""
    reason = _alone(step) or ("it runs by itself" if group.closed else None) or _limits(group, step)
    if reason is not None:
        return reason
    for rows in (False, True):
        space = _space(group, step, rows)
        if space is None:
            continue
        reason = _enter(group, step, rows, space)
        if reason is None:
            return None
    return reason or "their loops differ"


def copied(group: Group) -> Group:
    """Return a copy of a group: steps that join the copy do not join the original."""
    return dataclasses.replace(group, members=dict(group.members), loads=dict(group.loads))


def alike(group: Group, other: Group) -> bool:
    """Return whether two groups may merge: they have equally many points, and equally many rows if both reduce."""
    same = product(group.space) == product(other.space)
    if group.reduced and other.reduced:
        return same and _rows(group) == _rows(other)
    return same


def _rows(group: Group) -> Index:
    return product(group.space[k] for k in group.kept)


def _alone(step: Compute) -> str | None:
    if step.update is not None:
        return "a scatter runs by itself"
    if step.reduction is not None and step.reduction.startswith("scan"):
        return "a scan runs by itself"
    if any(isinstance(leaf, Value) for at in step.target for leaf in at.leaves()):
        return "it writes to places that are computed"
    return None


def _limits(group: Group, step: Compute) -> str | None:
    if len(group.members) >= MAX_MEMBERS:
        return f"the kernel has {MAX_MEMBERS} steps"
    if len(group.loads) + len(group.members) >= MAX_BUFFERS * 2:
        return "the kernel has too many buffers"
    return "both write to it" if step.buffer in group.members else None


def _space(group: Group, step: Compute, rows: bool) -> Extents | None:
    """Return the group's space, refined so that the step's axes are products of its axes (of the kept ones, for ``rows``)."""
    if not rows:
        return refined(group.space, step.axes)
    if not group.reduced or step.reduction is not None:
        return None
    kept = refined(tuple(group.space[k] for k in group.kept), step.axes)
    if kept is None:
        return None
    # each kept axis is a product of neighbours in the refined list; the positions of reduced ones do not change
    parts = runs([group.space[k] for k in group.kept], kept)
    assert parts is not None
    pieces = {k: [kept[p] for p in part] for k, part in zip(group.kept, parts, strict=True)}
    return tuple(e for k, extent in enumerate(group.space) for e in pieces.get(k, [extent]))


def _enter(group: Group, step: Compute, rows: bool, space: Extents) -> str | None:
    reduced = _reduced_with(group, step, space)
    if reduced is None:
        return "they reduce over other axes"
    members = _placed(group, space, reduced)
    added = _place([Member(step, rows)], space, reduced)
    if members is None or added is None:
        return "their loops differ"
    (new,) = added
    reason = _misaligned(group, new, members)
    if reason is not None:
        return reason
    if new.phase and dataclasses.replace(group, space=space, reduced=reduced).has_few_rows() and not rows:
        return "the rows before it are too few to divide among threads"
    _settle(group, space, reduced, members, new)
    return None


def _placed(group: Group, space: Extents, reduced: frozenset[int]) -> dict[str, Member] | None:
    """Return the members in another space; those of a group whose space stays are where they are."""
    if space == group.space:  # members with one value for each row exist only once the reduced axes are known
        return group.members
    placed = _place(list(group.members.values()), space, reduced)
    return None if placed is None else {member.step.buffer: member for member in placed}


def _settle(group: Group, space: Extents, reduced: frozenset[int], members: dict[str, Member], new: Member) -> None:
    group.space, group.reduced, group.members = space, reduced, members
    for load in loads_of(new.step):
        if load.data[0] not in group.members:
            group.loads.setdefault(load.data[0])
    group.members[new.step.buffer] = new


# ---- places ----------------------------------------------------------------------------------------------------------


def _reduced_with(group: Group, step: Compute, space: Extents) -> frozenset[int] | None:
    """Return the positions that reductions go over, with the step's: the same for all of them, or None."""
    steps = [step, *(m.step for m in group.members.values() if m.step.reduced)][: 2 if group.reduced else 1]
    found = [_positions(each, space) for each in steps if each.reduced]
    if any(positions is None or positions != found[0] for positions in found):
        return None
    return found[0] if found else frozenset()


def _positions(step: Compute, space: Extents) -> frozenset[int] | None:
    """Return the positions of the axes that a step reduces."""
    placed = runs(step.axes, space)
    return None if placed is None else frozenset(p for k in step.reduced for p in placed[k])


def _place(members: Sequence[Member], space: Extents, reduced: frozenset[int] = frozenset()) -> list[Member] | None:
    """Return the members in a space; None if the axes of one are not products of the space's."""
    kept = [k for k in range(len(space)) if k not in reduced]
    found = []
    for member in members:
        positions = kept if member.rows else list(range(len(space)))
        placed = runs(member.step.axes, [space[k] for k in positions])
        if placed is None:
            return None
        where = [[positions[p] for p in run] for run in placed]
        axes = substitution(member.step.axes, where, space)
        target = tuple(at.substitute(axes) for at in member.step.target)
        found.append(dataclasses.replace(member, axes=axes, target=target))
    return found


def loads_of(step: Compute) -> list[Expr]:
    """Return the loads of a step, also those that compute indices."""
    return list(dict.fromkeys(node for root in roots(step) for node in _loads(root)))


@functools.lru_cache(maxsize=1 << 12)
def _loads(root: Expr) -> tuple[Expr, ...]:
    return tuple(node for node in root.walk() if node.op == "load")


def _misaligned(group: Group, new: Member, members: dict[str, Member]) -> str | None:
    """Return the reason why the step cannot read from the group, or None after setting its phase."""
    for load in loads_of(new.step):
        buffer, coordinates = load.data
        if buffer not in members or buffer == new.step.buffer:
            continue
        made = members[buffer]
        if load.args:
            return f"it reads {buffer} where a mask allows it"
        if tuple(c.substitute(new.axes) for c in coordinates) != made.target:
            return f"it reads {buffer} at other places than those that are written"
        new.phase = max(new.phase, made.phase + (_per_row(made) and not new.rows))
    return _overwritten(group, new, members)


def _per_row(member: Member) -> bool:
    return member.rows or member.step.reduction is not None


def _overwritten(group: Group, new: Member, members: dict[str, Member]) -> str | None:
    """Return the reason why the step must not overwrite a buffer that the group reads, or None."""
    buffer = new.step.buffer
    if buffer not in group.loads:
        return None
    for member in (*members.values(), new):
        for load in loads_of(member.step):
            if load.data[0] == buffer:
                places = tuple(c.substitute(member.axes) for c in load.data[1])
                if places != new.target or load.args or (_per_row(new) and not member.rows):
                    return f"{buffer} is overwritten while other parts of it are read"
    return None


Extents = tuple[Index, ...]


def refined(a: Extents, b: Extents) -> Extents | None:
    """Return the coarsest list of extents such that both lists are products of neighbours in it; None if there is none.

    >>> refined((index(8), index(128), index(6)), (index(1024), index(6)))
    (8, 128, 6)
    >>> refined((index(4),), (index(6),)) is None
    True
    """
    left, right = [e for e in a if e != 1], [e for e in b if e != 1]
    found: list[Index] = []
    while left and right:
        x, y = left.pop(), right.pop()
        step, rest_x, rest_y = _step(x, y)
        if step is None:
            return None
        found.append(step)
        left += rest_x
        right += rest_y
    return None if left or right else tuple(reversed(found))


def _step(x: Index, y: Index) -> tuple[Index | None, list[Index], list[Index]]:
    """Return the smaller of two innermost extents, and the quotients that remain of each."""
    if x == y:
        return x, [], []
    if _divides(x, y):
        return x, [], [y // x]
    return (y, [x // y], []) if _divides(y, x) else (None, [], [])


def _divides(a: Index, b: Index) -> bool:
    return a == b or (len(a.terms) == 1 and a != 0 and b != 0 and b % a == 0)


def runs(axes: Sequence[Index], space: Sequence[Index]) -> list[list[int]] | None:
    """Return for each axis the neighbouring positions of the space whose product it is; None if there are none.

    >>> runs([index(1024), index(1), index(6)], [index(8), index(128), index(6)])
    [[0, 1], [], [2]]
    """
    position, found = 0, []
    for extent in axes:
        run: list[int] = []
        covered = index(1)
        while covered != extent:
            if position == len(space) or not _divides(covered * space[position], extent):
                return None
            covered = covered * space[position]
            run.append(position)
            position += 1
        found.append(run)
    return found if position == len(space) else None


def substitution(axes: Sequence[Index], placed: Sequence[Sequence[int]], space: Sequence[Index]) -> dict[Axis, Index]:
    """Return each axis as an index over the axes of the space; it is the product of those at the positions ``placed``."""
    found: dict[Axis, Index] = {}
    for number, (extent, run) in enumerate(zip(axes, placed, strict=True)):
        extents = [space[k] for k in run]
        found[Axis(number, extent)] = flat([axis(k, space[k]) for k in run], contiguous(extents))
    return found
