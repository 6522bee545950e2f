"""Turn a group into statements: for each phase those for each point, and those for each row after the pass.

Steps have no loops of their own here. A step's expression replaces the loads of its result in other steps of the same phase. A
value that a later phase needs is recomputed if that is cheap, and else stored in a row buffer. Since every phase may read the
group's inputs, a step that overwrites one does so in the last phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr, cast, indices, load, rewrite, var
from opkit.compiler.ir.index import Axis, Index, Symbol, Value, axis, contiguous, flat, product, value
from opkit.compiler.ir.kernel import Accumulator, Let, Loop, Scratch, Statement, Store, Update, walk
from opkit.compiler.ir.program import Buffer, Compute
from opkit.compiler.lower.group import Group, Member
from opkit.compiler.lower.inlining import lossless, with_values
from opkit.compiler.lower.rewrites import cost
from opkit.compiler.lower.target import LoweringTarget

MAX_RECOMPUTED_COST = 4  # a value that costs more, or reads more than two elements, is stored for a later phase
MAX_ROW_ELEMENTS = 1 << 16  # of a row buffer; a longer one would not stay in the processor's cache


@dataclasses.dataclass
class Phase:
    """One pass over the rows.

    Attributes:
        accumulators: the accumulators of the reductions of the pass.
        points: the statements for each point, in order.
        rows: the statements for each row after the pass.
    """

    accumulators: list[Accumulator] = dataclasses.field(default_factory=list)
    points: list[Statement] = dataclasses.field(default_factory=list)
    rows: list[Statement] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Statements:
    """A group as statements.

    Attributes:
        phases: the phases in order.
        scratch: the row buffers, which pass values from one phase to a later one.
        pointers: the program's buffers, with their names in the kernel.
        written: the buffers that the kernel writes.
    """

    phases: list[Phase]
    scratch: list[Scratch]
    pointers: dict[str, str]
    written: set[str]


def statements(
    group: Group, buffers: Mapping[str, Buffer], stored: set[str], by_columns: bool, target: LoweringTarget
) -> Statements:
    """Return the statements of a group; ``stored`` are the buffers that something outside it reads.

    ``by_columns``: many rows are computed at once, so that there are no row buffers. In tiles, values of an earlier phase are
    always recomputed: either they are still in registers, or other threads have stored them.
    """
    return _StatementWriter(group, buffers, stored, by_columns, target).write()


class _StatementWriter:
    def __init__(
        self, group: Group, buffers: Mapping[str, Buffer], stored: set[str], by_columns: bool, target: LoweringTarget
    ) -> None:
        self.target = target
        self.group, self.buffers, self.stored, self.by_columns = group, buffers, stored, by_columns
        self.pointers: dict[str, str] = {}
        self.written: set[str] = set()
        self.names = {buffer: f"v{k}" for k, buffer in enumerate(group.members)}
        self.row_buffers: dict[str, Scratch] = {}
        self.done: dict[tuple[str, int], Expr] = {}
        self.overwritten = group.overwritten & stored

    def write(self) -> Statements:
        phases = [Phase() for _ in range(self.group.phases)]
        for number in reversed(range(len(phases))):  # a later phase decides what an earlier one stores
            self._phase(phases[number], number)
        return Statements(phases, list(self.row_buffers.values()), self.pointers, self.written)

    def _phase(self, phase: Phase, number: int) -> None:
        for name, member in self.group.members.items():
            if number + 1 == self.group.phases and name in self.overwritten:
                phase.points.append(self._store(name, member, self.value(name, number)))
            if member.phase != number:
                continue
            if member.step.reduction is not None:
                self._reduction(phase, name, member)
            elif member.rows:
                self._row(phase, name, member)
            else:
                self._point(phase, name, member)

    def _point(self, phase: Phase, name: str, member: Member) -> None:
        if name in self.stored - self.overwritten:
            phase.points.append(self._store(name, member, self.value(name, member.phase)))
        if name in self.row_buffers:
            row_buffer = self.row_buffers[name]
            phase.points.append(Store(row_buffer.name, self._in_row(), _unrounded(self.value(name, member.phase))))

    def _reduction(self, phase: Phase, name: str, member: Member) -> None:
        step, variable = member.step, self.names[name]
        assert step.reduction is not None
        if step.reduction.startswith("scan:"):
            return self._scan(phase, name, member)
        at = self._reduced_position(member) if step.reduction.startswith("arg") else None
        value = cast(self._body(member, member.phase), self._accumulated(step))
        phase.accumulators.append(Accumulator(variable, value.dtype, step.reduction))
        phase.points.append(Update(variable, step.reduction, value, at))
        if name in self.stored:
            phase.rows.append(self._store(name, member, self.value(name, member.phase)))
        return None

    def _scan(self, phase: Phase, name: str, member: Member) -> None:
        variable, reduction = self.names[name], str(member.step.reduction).removeprefix("scan:")
        value = cast(self._body(member, member.phase), self._accumulated(member.step))
        phase.accumulators.append(Accumulator(variable, value.dtype, reduction))
        phase.points += [Update(variable, reduction, value), self._store(name, member, var(variable, value.dtype))]

    def _row(self, phase: Phase, name: str, member: Member) -> None:
        body = self._body(member, member.phase)
        phase.rows.append(Let(self.names[name], _unrounded(body)))
        if name in self.stored:
            phase.rows.append(self._store(name, member, self.value(name, member.phase)))

    def _reduced_position(self, member: Member) -> Index:
        """Return the position of a point along the reduced axes of the step."""
        step = member.step
        reduced = sorted(step.reduced)
        extents = [step.axes[k] for k in reduced]
        places = [member.axes.get(step.axis(k), axis(k, 1)) for k in reduced]
        return flat(places, contiguous(extents))

    def _store(self, name: str, member: Member, value: Expr) -> Store:
        self.written.add(self.buffers[name].memory)
        at = self._places(self.buffers[name].place(member.target), member)
        return Store(self._pointer(name), at, cast(value, self.buffers[name].dtype), member.step.update)

    def _places(self, target: Index, member: Member) -> Index:
        """Return the index that a step stores to, with the expressions in its coordinates resolved."""
        found = {leaf: leaf.expr for leaf in target.leaves() if isinstance(leaf, Value)}
        places = {leaf: value(self._resolved(expr, member, member.phase)) for leaf, expr in found.items()}
        return target.substitute(places) if places else target

    def _pointer(self, name: str) -> str:
        return self.pointers.setdefault(self.buffers[name].memory, f"p{len(self.pointers)}")

    # ---- values ----------------------------------------------------------------------------------------------------

    def value(self, name: str, phase: int) -> Expr:
        """Return the value of a step of the group for a later step of that phase."""
        member = self.group.members[name]
        dtype = self.buffers[name].dtype
        if member.step.reduction is not None:
            position = member.step.reduction.startswith("arg")
            variable = self.names[name]
            return cast(
                var(f"{variable}_at", "i64") if position else var(variable, self._accumulated(member.step)), dtype
            )
        if member.rows:
            return cast(var(self.names[name], _unrounded(self._body(member, member.phase)).dtype), dtype)
        if (name, phase) not in self.done:
            self.done[name, phase] = self._at_point(name, member, phase)
        return self.done[name, phase]

    def _at_point(self, name: str, member: Member, phase: int) -> Expr:
        body = self._body(member, phase)
        if phase == member.phase or self.target.tiles:
            return body
        loads = sum(node.op == "load" for node in body.walk())
        if cost(body) <= MAX_RECOMPUTED_COST and loads <= 2:
            return body
        length = product(self.group.space[k] for k in self.group.reduced)
        if name in self.stored - self.overwritten and body.dtype == _unrounded(body).dtype:
            return load(self._pointer(name), body.dtype, self.buffers[name].place(member.target))
        if (length.constant or MAX_ROW_ELEMENTS + 1) > MAX_ROW_ELEMENTS or self.by_columns:
            return body
        wide = _unrounded(body).dtype
        row_buffer = self.row_buffers.setdefault(name, Scratch(f"s{self.names[name]}", wide, length))
        return cast(load(row_buffer.name, wide, self._in_row()), body.dtype)

    def _in_row(self) -> Index:
        """Return the position of a point in its row."""
        reduced = sorted(self.group.reduced)
        extents = [self.group.space[k] for k in reduced]
        return flat([axis(k, self.group.space[k]) for k in reduced], contiguous(extents))

    def _body(self, member: Member, phase: int) -> Expr:
        """Return a step's expression over the group's space, with loads from the group replaced by values."""
        return self._resolved(member.step.body.substitute(member.axes), member, phase)

    def _resolved(self, root: Expr, member: Member, phase: int) -> Expr:
        names = list(self.group.members)

        def change(node: Expr) -> Expr:
            node = with_values(node, lambda inner: self._resolved(inner, member, phase))
            if node.op != "load":
                return lossless(node)
            buffer, coordinates = node.data
            if buffer in names and names.index(buffer) < names.index(
                member.step.buffer
            ):  # else the step reads old values
                return self.value(buffer, phase)
            at = self.buffers[buffer].place(coordinates)
            return load(self._pointer(buffer), node.dtype, at, mask=node.args[0] if node.args else None)

        return rewrite(root, change)

    def _accumulated(self, step: Compute) -> str:
        """Return the type of a reduction's accumulator: on CPUs float64 for sums and products of float32.

        There it is no slower: dependent additions take as long for vectors of either type.
        """
        adds = str(step.reduction).removeprefix("scan:") in ("sum", "prod")
        return "f64" if self.target.wide_sums and adds and step.body.dtype == "f32" else step.body.dtype


def _unrounded(value: Expr) -> Expr:
    """Return a value without its last conversion to a narrow float, if that only connects two steps."""
    if value.op == "cast" and not value.data and value.dtype in ("bf16", "f16"):
        return value.args[0]
    return cast(value, DTYPES[value.dtype].compute)


# ---- statements over other axes, and what they use -------------------------------------------------------------------


def over_axes(phases: Iterable[Phase], axes: Mapping[Axis, Index]) -> list[Phase]:
    """Return phases with other indices for their axes."""
    return [
        Phase(p.accumulators, [_over_axes(s, axes) for s in p.points], [_over_axes(s, axes) for s in p.rows])
        for p in phases
    ]


def _over_axes(statement: Statement, axes: Mapping[Axis, Index]) -> Statement:
    """Return a statement of a point or row with other indices for its axes."""
    if isinstance(statement, Let):
        return dataclasses.replace(statement, value=statement.value.substitute(axes))
    if isinstance(statement, Store):
        return dataclasses.replace(statement, value=statement.value.substitute(axes), at=statement.at.substitute(axes))
    assert isinstance(statement, Update)
    at = None if statement.at is None else statement.at.substitute(axes)
    return dataclasses.replace(statement, value=statement.value.substitute(axes), at=at)


def accesses(phases: Iterable[Phase]) -> list[Index]:
    """Return every index of the statements, each once; stores first."""
    found: dict[Index, None] = {}
    all_of = [s for phase in phases for s in (*phase.points, *phase.rows)]
    for statement in all_of:
        if isinstance(statement, Store):
            found.setdefault(statement.at)
    for statement in all_of:
        for root in expressions(statement):
            for node in root.walk():
                for at in indices(node):
                    found.setdefault(at)
        if isinstance(statement, Update) and statement.at is not None:
            found.setdefault(statement.at)
    return list(found)


def expressions(statement: Statement) -> list[Expr]:
    """Return the expressions of a statement."""
    assert isinstance(statement, Let | Store | Update)
    inside = [statement.at] if isinstance(statement, Store) else []
    values = [leaf.expr for at in inside for leaf in at.leaves() if isinstance(leaf, Value)]
    return [statement.value, *values]


def read_before_write(points: Sequence[Statement]) -> list[Statement]:
    """Return statements that read the elements that they overwrite into variables first."""
    written = {s.buffer for s in points if isinstance(s, Store)}
    read: dict[Expr, Expr] = {}
    for statement in points:
        for root in expressions(statement):
            for node in root.walk():
                if node.op == "load" and node.data[0] in written:
                    read.setdefault(node, var(f"old{len(read)}", node.dtype))
    if not read:
        return list(points)
    lets = [Let(variable.data, node) for node, variable in read.items()]

    def renamed(node: Expr) -> Expr:
        return read.get(node, node)

    changed = (s for s in points if isinstance(s, Let | Store | Update))
    return [*lets, *(dataclasses.replace(s, value=rewrite(s.value, renamed)) for s in changed)]


def touched(body: Sequence[Statement]) -> tuple[set[str], set[str]]:
    """Return the pointers that statements read and write."""
    read: set[str] = set()
    stored: set[str] = set()
    for statement in walk(body):
        if isinstance(statement, Store):
            stored.add(statement.buffer)
        if not isinstance(statement, Loop | Scratch | Accumulator):
            read |= {node.data[0] for root in expressions(statement) for node in root.walk() if node.op == "load"}
    return read, stored


def names_of_sizes(body: Sequence[Statement]) -> set[str]:
    found: list[Index] = []
    for statement in walk(body):
        if isinstance(statement, Loop):
            found.append(statement.axis.extent)
        elif isinstance(statement, Scratch):
            found.append(statement.length)
        elif not isinstance(statement, Accumulator):
            found += accesses([Phase(points=[statement])])
    names: set[str] = set()
    for at in found:
        names |= _names_in(at)
    return names


def _names_in(at: Index) -> set[str]:
    found: set[str] = set()
    for leaf in at.leaves():
        if isinstance(leaf, Axis):
            found |= _names_in(leaf.extent)
        elif isinstance(leaf, Symbol):
            found.add(leaf.name)
    return found
