"""The statements and expressions of a kernel as lines of Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opkit.compiler.emit.analysis import changed_by, children, own_reads, postorder, roots_of, values
from opkit.compiler.emit.triton.expressions import (
    ATOMICS,
    NARROW,
    NotEmittable,
    applied,
    constant,
    converted,
    reducer,
)
from opkit.compiler.emit.triton.reductions import ReductionWriter, held
from opkit.compiler.emit.triton.tiles import Tiles, accesses, grid, scan, softmax
from opkit.compiler.emit.triton.values import Known, Named, forget
from opkit.compiler.ir.expr import Expr, indices
from opkit.compiler.ir.index import Axis, is_nonnegative, product
from opkit.compiler.ir.kernel import Accumulator, Kernel, Let, Loop, Scratch, Statement, Store, Update, walk
from opkit.compiler.ir.ops import neutral

MIN_WHOLE_STEPS = 4  # of a long row, for which its last step is worth another copy of the loop


class Writer(ReductionWriter):
    """Writes the body of a function for one choice of tiles."""

    def __init__(self, kernel: Kernel, tile: Tiles) -> None:
        super().__init__(tile)
        self.in_row: str | None = None  # which columns there are of a persistent tile
        self.exact = not _is_narrow(kernel)
        self.by_value = frozenset(a.buffer for a in kernel.arguments if a.by_value)
        self.loops, self.body = grid(kernel)
        self.passes = sum(isinstance(s, Loop) and s.how == "vector" for s in self.body)  # that are left
        self.several = self.passes > 1
        nodes = (node for s in walk(kernel.body) for root in _expressions(s) for node in root.walk())
        self.read = {node.data[0] for node in nodes if node.op == "load"}

    def write(self) -> list[str]:
        """Return the lines.

        Raises:
            NotEmittable: the kernel has something that Triton cannot express here.
        """
        if any(isinstance(s, Scratch) for s in walk(self.body)):
            raise NotEmittable("it keeps values of a row in memory of the thread")
        self._grid()
        known: Known = {}
        scanned = scan(self.body)
        if scanned is not None:
            self._scan(scanned)
        else:
            self._statements(self.body, known)
        return self.lines

    # ---- the tile's points -------------------------------------------------------------------------------------------

    def _grid(self) -> None:
        tile, across = self.tile, self.tile.across
        program = "tl.program_id(0)" + (".to(tl.int64)" if tile.wide else "")
        rows = [loop for loop in self.loops if loop is not across]
        points = product(loop.axis.extent for loop in rows)
        if across is not None:
            self._write(f"programs = ({self._plain(across.axis.extent)} + (RBLOCK - 1)) // RBLOCK")
            self._write(f"program = {program}")
            self._columns(across.axis, "(program % programs) * RBLOCK + ")
            self.columns = True
            program = "(program // programs)"
        self._write(f"row = {program} * XBLOCK + tl.arange(0, XBLOCK)" + ("[:, None]" if tile.r else ""))
        if points.constant is None or points.constant % tile.x:
            self._write(f"in_row = row < {self._plain(points)}")
            self.in_x = "in_row"
        rest = "row"
        for loop in reversed(rows):
            name, extent = f"a{loop.axis.number}", self._plain(loop.axis.extent)
            self.axes[loop.axis.number] = Named(name, x=True)
            self._write(f"{name} = {rest}" if loop is rows[0] else f"{name} = {rest} % ({extent})")
            if loop is not rows[0]:
                self._write(f"row{loop.axis.number} = {rest} // ({extent})")
                rest = f"row{loop.axis.number}"

    def _columns(self, axis: Axis, begin: str, whole: bool = False) -> None:
        """Write the columns of the tile from ``begin`` on, a sum's first operand, and which of these there are, if not all."""
        name, kind = f"a{axis.number}", ".to(tl.int64)" if self.tile.wide else ""
        self._write(f"{name} = {begin}tl.arange(0, RBLOCK)[None, :]{kind}")
        self.axes[axis.number] = Named(name, r=True)
        self.in_r = None
        if not whole and (not axis.extent.constant or axis.extent.constant % self.tile.r):
            self._write(f"in_{name} = {name} < {self._plain(axis.extent)}")
            self.in_r = f"in_{name}"

    # ---- statements --------------------------------------------------------------------------------------------------

    def _statements(self, body: Sequence[Statement], known: Known) -> None:
        open_accumulators: dict[str, Accumulator] = {}
        stored: set[str] = set()
        if not self.tile.persistent:
            body, online = softmax(body)
            self.online |= online
            self.passes -= bool(online)
        for s in body:
            if isinstance(s, Accumulator):
                self._accumulator(s, self._updated_in_columns(s.name, body))
                open_accumulators[s.name] = s
            elif isinstance(s, Loop):
                self._loop(s, known, stored)
                changed = changed_by([s]) & open_accumulators.keys()
                for name in sorted(changed, key=lambda name: (name not in self.online, name)):
                    if self.variables[name].r:
                        self._reduce(open_accumulators.pop(name))
                forget(known, changed_by([s]))
            elif isinstance(s, Let):
                self.variables[s.name] = self._expression(s.value, known)
            elif isinstance(s, Store):
                self._store(s, known)
                stored.add(s.buffer)
            elif isinstance(s, Update):
                self._update(s, known)
            else:
                raise NotEmittable(f"a {type(s).__name__}")

    def _loop(self, loop: Loop, known: Known, stored: set[str]) -> None:
        """Write a loop. What the threads of a program pass on to each other by way of memory is separated by barriers."""
        changed = changed_by(loop.body)
        shared = changed & self.read
        if loop.how == "vector" and loop.axis.extent == 0:
            return
        if shared or stored & self.read:
            self._write("tl.debug_barrier()")
        if loop.how == "vector" and self.tile.persistent:
            self._whole_row(loop, known)
            return
        forget(known, changed)
        outside, before = dict(self.variables), (self.in_r, self.running, self.columns)
        if loop.stop is not None:
            name = self._name()
            self._write(f"{name} = {'(row >= 0)' if self.running is None else self.running.text}")
            self.running = Named(name, x=True)
        depth = self.depth
        if loop.how == "vector":
            self._before(loop, known)
            self.passes -= 1
        for write_head in self._heads(loop):
            write_head()
            inner = dict(known)
            if loop.stop is not None and self.running is not None:
                first, second = (self._place(at, inner).text for at in loop.stop)
                self._write(f"{self.running.text} = {self.running.text} & ({first} < {second})")
            self._statements(loop.body, inner)
            if shared and loop.how != "vector":
                self._write("tl.debug_barrier()")
            self.depth = depth
            self.in_r, self.running, self.columns = before
            self.variables = {name: self.variables[name] for name in outside}
        self.eviction = ""

    def _whole_row(self, loop: Loop, known: Known) -> None:
        """Write a loop over columns that is one tile."""
        if loop.axis.number not in self.axes:
            self._columns(loop.axis, "")
            self.in_row = self.in_r
        self.in_r, self.columns = self.in_row, True
        self._statements(loop.body, known)
        self.in_r, self.columns = None, False

    def _heads(self, loop: Loop) -> list[Callable[[], None]]:
        """Return functions that write the heads of the loops for one loop: a long row's last step, with a mask, is apart.

        That halves the time of a softmax of 50,257 elements. A loop that accesses no memory is better left as it is: as two, that
        of a cross-entropy's gradient took three times as long on an H200.
        """
        if loop.how != "vector":
            return [lambda: self._one_by_one(loop)]
        length, step = loop.axis.extent.constant or 0, self.tile.r
        splits = loop.stop is None and self.tile.x == 1 and any(loop.axis in at.axes() for at in accesses(loop.body))
        if not splits or length % step == 0 or length < MIN_WHOLE_STEPS * step:
            return [lambda: self._steps(loop, f"range(0, {self._plain(loop.axis.extent)}, RBLOCK)")]
        end = length // step * step
        return [
            lambda: self._steps(loop, f"range(0, {end}, RBLOCK)", True),
            lambda: self._steps(loop, f"range({end}, {length}, RBLOCK)"),
        ]

    def _one_by_one(self, loop: Loop) -> None:
        self._write(f"for a{loop.axis.number} in range({self._plain(loop.axis.extent)}):")
        self.axes[loop.axis.number] = Named(f"a{loop.axis.number}")
        self.depth += 1

    def _steps(self, loop: Loop, begins: str, whole: bool = False) -> None:
        """Write the head of a loop over columns, and the columns of each of its steps; ``whole``: none needs a mask."""
        o = f"o{loop.axis.number}"
        self._write(f"for {o} in {begins}:")
        self.depth += 1
        self._columns(loop.axis, f"{o} + ", whole)
        self.columns = True
        kept = "evict_last" if self.passes else "evict_first"
        self.eviction = f", eviction_policy='{kept}'" if self.several else ""

    def _before(self, loop: Loop, known: Known) -> None:
        """Write the values in a loop over columns that are the same in each of them, if there are columns."""
        if not is_nonnegative(loop.axis.extent - 1):
            return
        changed = changed_by(loop.body) | {s.name for s in loop.body if isinstance(s, Let)}
        varying: set[Expr] = set()
        for node in (node for root in roots_of(loop.body) for node in postorder(self._short(root), known)):
            along = any(loop.axis in at.axes() for at in indices(node))
            if along or not changed.isdisjoint(own_reads(node)) or not varying.isdisjoint(children(node)):
                varying.add(node)
            else:
                self._expression(node, known)

    def _scan(self, loop: Loop) -> None:
        """Write a scan of rows: in each step along a row, the tile's own scan, combined with what came before it."""
        accumulator, (update, *stores) = self.body[0], loop.body
        assert isinstance(accumulator, Accumulator)
        assert isinstance(update, Update)
        self._accumulator(accumulator, columns=False)
        name, kind, start = update.name, held(accumulator.dtype), neutral(update.reduction, accumulator.dtype)
        combine = reducer(update.reduction, kind)
        known: Known = {}
        if not self.tile.persistent:
            self._write(f"for o in range(0, {self._plain(loop.axis.extent)}, RBLOCK):")
            self.depth += 1
        self._columns(loop.axis, "" if self.tile.persistent else "o + ")
        value = converted(self._expression(update.value, known).text, update.value.dtype, kind)
        filled = f"tl.where({self.in_r or 'True'}, {value}, {constant(start, kind)})"
        tile = self._name()
        self._write(f"{tile} = tl.broadcast_to({filled}, [XBLOCK, RBLOCK])")
        self._write(f"{tile}_scan = {combine}({name}, tl.associative_scan({tile}, 1, {combine}))")
        if not self.tile.persistent:
            self._write(f"{name} = {combine}({name}, tl.reduce({tile}, 1, {combine})[:, None])")
        self.variables[name] = Named(f"{tile}_scan", True, True)
        self.columns = True
        self._statements(stores, known)
        self.depth = 1

    def _store(self, s: Store, known: Known) -> None:
        value, place = self._expression(s.value, known), self._place(s.at, known)
        at = place.along(value, Named("", True, self.columns))
        pointer = f"{s.buffer} + {self._spread(place, at.x, at.r)}"
        mask = self._mask(at)
        if s.buffer in self.read and self.tile.r and not self.columns:  # several threads have read the element of a row
            self._write("tl.debug_barrier()")
        if s.update is None:
            self._write(f"tl.store({pointer}, {value.text}{mask})")
        elif s.atomic:
            if s.update not in ATOMICS:
                raise NotEmittable(f"an atomic {s.update}")
            self._write(f"{ATOMICS[s.update]}({pointer}, {value.text}{mask}, sem='relaxed')")
        else:
            old = self._name()
            loaded = f"tl.load({pointer}{mask})"
            self._write(f"{old} = {f'({loaded} != 0)' if s.value.dtype == 'b1' else loaded}")
            self._write("tl.debug_barrier()")
            self._write(f"tl.store({pointer}, {applied(s.update, s.value.dtype, [old, value.text])}{mask})")
            self._write("tl.debug_barrier()")
        forget(known, {s.buffer})


def _is_narrow(kernel: Kernel) -> bool:
    """Return whether the results are narrow floats; sums of what is computed from these may also be of float32."""
    sums = {s.name for s in walk(kernel.body) if isinstance(s, Accumulator) and s.reduction == "sum"}
    stores = [s for s in walk(kernel.body) if isinstance(s, Store)]
    others = [s.value for s in stores if s.value.dtype not in NARROW]
    sums_of_f32 = all(value.op == "var" and value.data in sums and value.dtype == "f32" for value in others)
    return sums_of_f32 and any(a.dtype in NARROW for a in kernel.arguments)


def _expressions(s: Statement) -> list[Expr]:
    if not isinstance(s, Let | Store | Update):
        return []
    return [s.value, *(values(s.at) if isinstance(s, Store | Update) and s.at is not None else [])]
