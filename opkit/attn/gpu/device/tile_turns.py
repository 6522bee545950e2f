"""In which turn tiles of keys add to the gradient of a block of queries, in Triton: the last keys first."""

from __future__ import annotations

import triton
import triton.language as tl

RUN_TIME = ("own", "others")  #: arguments whose value no kernel is compiled for


@triton.jit(do_not_specialize=RUN_TIME)
def tile_turns(tiles, counts, theirs, their_counts, turns, own, others, SOME: tl.constexpr):
    """Of each tile in the list of tile ``program_id(0)`` how many of the tiles in its list are greater than ``program_id(0)``.

    ``tiles`` and ``counts`` are as :func:`opkit.attn.gpu.device.tile_lists.tile_lists` writes them, ``theirs`` and
    ``their_counts`` the lists the other way round; ``turns`` is as ``tiles``, and written where there is a tile.
    ``program_id(1)`` is batch * heads + head. All are contiguous.
    """
    mine, row, theirs, their_counts = _place(theirs, their_counts, own, others)
    whole, total = tl.load(counts + 2 * row), tl.load(counts + 2 * row + 1)
    for start in range(0, others, SOME):
        place = start + tl.arange(0, SOME)
        there = (place < whole) | ((place >= others - total + whole) & (place < others))
        tile = tl.load(tiles + row * others + place, mask=there, other=0)
        turn = _greater(theirs, their_counts, tile, there, mine, own, SOME)
        tl.store(turns + row * others + place, turn, mask=there)


@triton.jit(do_not_specialize=RUN_TIME)
def tile_visits(tiles, counts, theirs, their_counts, visits, own, others, SOME: tl.constexpr):
    """The list of tile ``program_id(0)`` in order, with turns: of each tile in it, the least first, two numbers.

    They are twice the tile, and one more if it is partly visible; and its turn, as :func:`tile_turns` counts it. ``visits`` has
    room for all others, and is written from its front on.
    """
    mine, row, theirs, their_counts = _place(theirs, their_counts, own, others)
    tiles += row * others
    whole, total = tl.load(counts + 2 * row), tl.load(counts + 2 * row + 1)
    for start in range(0, total, SOME):
        step = start + tl.arange(0, SOME)
        there = step < total
        tile = tl.load(tiles + _index(step, whole, others), mask=there, other=0)
        less = tl.zeros([SOME], tl.int32)
        for first in range(0, total, SOME):
            other = first + tl.arange(0, SOME)
            each = tl.load(tiles + _index(other, whole, others), mask=other < total, other=others)
            less += tl.sum((each[None, :] < tile[:, None]).to(tl.int32), 1)
        to = visits + 2 * (row * others + less)
        tl.store(to, 2 * tile + (step >= whole).to(tl.int32), mask=there)
        tl.store(to + 1, _greater(theirs, their_counts, tile, there, mine, own, SOME), mask=there)


@triton.jit
def _place(theirs, their_counts, own, others):
    """The tile, its number among all, and the lists of the other tiles of its batch and head, with their counts."""
    mine, outer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    return mine, outer * own + mine, theirs + outer * others * own, their_counts + outer * others * 2


@triton.jit
def _index(step, whole, count):
    """Where in a list with room for ``count`` its tile ``step`` is: whole ones are at its front, others at its back."""
    return tl.where(step < whole, step, count - 1 - step + whole)


@triton.jit
def _greater(theirs, their_counts, tile, there, mine, own, SOME: tl.constexpr):
    """How many tiles in the list of each ``tile`` are greater than ``mine``."""
    whole = tl.load(their_counts + 2 * tile, mask=there, other=0)
    total = tl.load(their_counts + 2 * tile + 1, mask=there, other=0)
    found = tl.zeros([SOME], tl.int32)
    for first in range(0, tl.max(total, 0), SOME):
        step = (first + tl.arange(0, SOME))[None, :]
        seen = step < total[:, None]
        each = tl.load(theirs + tile[:, None] * own + _index(step, whole[:, None], own), mask=seen, other=0)
        found += tl.sum((seen & (each > mine)).to(tl.int32), 1)
    return found
