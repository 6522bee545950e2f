"""The order of a group's loops: the outermost is the one with the largest stride, and neighbours are merged where possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.index import ZERO, Axis, Index, axis


@dataclasses.dataclass
class LoopDim:
    """A loop: its axis's position in the space, its extent, and its stride in each access (None: not linear)."""

    position: int
    extent: Index
    moves: list[Index | None]
    reduced: bool


def loop_order(
    space: Sequence[Index], reduced: frozenset[int], found: Sequence[Index], sizes: Mapping[str, int]
) -> list[LoopDim]:
    """Return the loops, outermost first, merged where that changes no access."""
    every = [
        LoopDim(k, extent, [at.coefficient(Axis(k, extent)) for at in found], k in reduced)
        for k, extent in enumerate(space)
    ]
    every.sort(key=lambda dim: (dim.reduced, *_distance(dim, sizes)))
    return _merged(every)


def _distance(dim: LoopDim, sizes: Mapping[str, int]) -> tuple[float, int]:
    """Sort the farthest apart first; the first access that moves along the axis decides, stores before loads."""
    steps = [abs(estimate(move, sizes)) for move in dim.moves if move is not None and move != 0]
    return (-max(steps) if steps else 0.0, dim.position)


def _merged(every: Sequence[LoopDim]) -> list[LoopDim]:
    found: list[LoopDim] = []
    for dim in reversed(every):
        last = found[-1] if found else None
        if last is not None and _are_one_loop(dim, last):
            found[-1] = LoopDim(last.position, dim.extent * last.extent, last.moves, last.reduced)
        else:
            found.append(dim)
    return found[::-1]


def _are_one_loop(outer: LoopDim, inner: LoopDim) -> bool:
    if outer.reduced != inner.reduced:
        return False
    pairs = zip(outer.moves, inner.moves, strict=True)
    return all(a is not None and b is not None and a == b * inner.extent for a, b in pairs)


def numbered(space: Sequence[Index], loops: Sequence[LoopDim]) -> tuple[list[Axis], dict[Axis, Index]]:
    """Return the loops' axes, numbered outermost first, and what each axis of the space is in them."""
    axes = [Axis(k, dim.extent) for k, dim in enumerate(loops)]
    by_position = {dim.position: axis(k, dim.extent) for k, dim in enumerate(loops)}
    return axes, {Axis(k, extent): by_position.get(k, ZERO) for k, extent in enumerate(space)}
