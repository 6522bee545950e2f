"""The accumulators of a kernel as lines of Triton: one value for each place of the tile, reduced after a loop over columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opkit.compiler.emit.analysis import changed_by
from opkit.compiler.emit.triton.expressions import NARROW, applied, computed, converted, number, reducer
from opkit.compiler.emit.triton.tiles import Tiles
from opkit.compiler.emit.triton.values import Known, Named, ValueWriter, forget
from opkit.compiler.ir.kernel import Accumulator, Loop, Statement, Update, walk
from opkit.compiler.ir.ops import REDUCTIONS, neutral

LOWEST = {"f32": -3.4028234663852886e38, "f64": -1.7976931348623157e308}  # so that what exceeds it is never NaN
LAST = 2**63 - 1  # the position of an accumulator that has seen nothing


class ReductionWriter(ValueWriter):
    """Writes accumulators.

    Attributes:
        tile: the tiles.
        online: the maximum that a sum of exponentials is computed together with.
    """

    def __init__(self, tile: Tiles) -> None:
        super().__init__()
        self.tile = tile
        self.online: dict[str, str] = {}

    def _updated_in_columns(self, name: str, body: Iterable[Statement]) -> bool:
        vectors = (s for s in walk(body) if isinstance(s, Loop) and s.how == "vector")
        return any(name in changed_by(s.body) for s in vectors)

    def _accumulator(self, s: Accumulator, columns: bool) -> None:
        shape = "[XBLOCK, RBLOCK]" if columns else "[XBLOCK, 1]" if self.tile.r else "[XBLOCK]"
        first = LOWEST[s.dtype] if s.name in self.online.values() else neutral(s.reduction, s.dtype)
        self._write(f"{s.name} = tl.full({shape}, {number(first, s.dtype)}, {computed(s.dtype)})")
        if s.reduction.startswith("arg"):
            self._write(f"{s.name}_at = tl.full({shape}, {LAST}, tl.int64)")
            self.variables[f"{s.name}_at"] = Named(f"{s.name}_at", True, columns)
        self.variables[s.name] = Named(s.name, True, columns)
        self.accumulators[s.name] = s

    def _update(self, s: Update, known: Known) -> None:
        accumulator = self.accumulators[s.name]
        value = converted(self._expression(s.value, known).text, s.value.dtype, held(accumulator.dtype))
        masks = [m for m in (self.in_r, self.running and self.running.text) if m]
        old = s.name
        if masks and old in {*self.online, *self.online.values()}:
            value, masks = f"tl.where({' & '.join(masks)}, {value}, float('-inf'))", []
        if s.reduction.startswith("arg"):
            assert s.at is not None
            self._position(s.reduction, value, self._place(s.at, known).text, old, masks)
        else:
            if old in self.online:
                combined = f"opk_online_sum({old}, {self.online[old]}, {value})"
            else:
                combined = applied(REDUCTIONS[s.reduction][0], held(accumulator.dtype), [old, value])
            self._write(f"{old} = tl.where({' & '.join(masks)}, {combined}, {old})" if masks else f"{old} = {combined}")
        forget(known, {s.name, f"{s.name}_at"})

    def _position(self, reduction: str, value: str, at: str, old: str, masks: Sequence[str]) -> None:
        """Update an extreme and its position: the lowest position wins, and NaN counts as the most extreme value."""
        if self.accumulators[old].dtype == "b1":
            value, last = f"{value}.to(tl.int32)", f"{old}.to(tl.int32)"
        else:
            last = old
        beyond = (
            f"({value} {'>' if reduction == 'argmax' else '<'} {last}) | (({value} != {value}) & ({last} == {last}))"
        )
        same = f"({value} == {last}) | (({value} != {value}) & ({last} != {last}))"
        first = self._name()
        self._write(f"{first} = {' & '.join([*masks, ''])}(({beyond}) | (({same}) & ({at} < {old}_at)))")
        self._write(f"{old}_at = tl.where({first}, {at}, {old}_at)")
        self._write(f"{old} = tl.where({first}, {value}, {last}).to({computed(self.accumulators[old].dtype)})")

    def _reduce(self, s: Accumulator) -> None:
        """Combine the columns of an accumulator."""
        name = s.name
        if name in self.online:
            each = self.online[name]
            self._write(f"{name} = {name} * tl.exp({each} - tl.reduce({each}, 1, opk_max_nan)[:, None])")
            self._write(f"{name} = tl.reduce({name}, 1, opk_add)[:, None]")
            self._write(f"{each} = tl.where({name} == 0, float('-inf'), {each})")  # then all are -inf
            self._write(f"{name} = tl.where({name} == 0, float('nan'), {name})")
        elif s.reduction.startswith("arg"):
            best = self._name()
            self._write(f"{best} = tl.reduce({name}, 1, {reducer(s.reduction[3:], held(s.dtype))})[:, None]")
            same = f"({name} == {best}) | (({name} != {name}) & ({best} != {best}))"
            self._write(f"{name}_at = tl.min(tl.where({same}, {name}_at, {LAST}), 1)[:, None]")
            self._write(f"{name} = {best}")
            self.variables[f"{name}_at"] = Named(f"{name}_at", x=True)
        else:
            self._write(f"{name} = tl.reduce({name}, 1, {reducer(s.reduction, held(s.dtype))})[:, None]")
        self.variables[name] = Named(name, x=True)


def held(dtype: str) -> str:
    """Return the type in which an accumulator is held."""
    return "f32" if dtype in NARROW else dtype
