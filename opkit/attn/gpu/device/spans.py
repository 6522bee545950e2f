"""Which others each row sees under segments whose numbers are in order, in Triton: a span of them, found by bisection.

Numbers of packed documents rise, and those of padding at the end may fall once below the first. Of others that lie otherwise a
row's segment may be in several places: then nothing is said.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=("rows", "count", "rounds"))
def spans(
    own, own_stride_0, own_stride_1, others, others_stride_0, others_stride_1, spans, ranges, rows, count, rounds,
    TILES: tl.constexpr, TILE: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The spans of the rows of ``TILES`` tiles of batch ``program_id(1)``, and the ranges of these tiles.

    ``own`` has a number for each of ``rows`` rows, ``others`` for each of ``count`` others, at least one. ``spans`` is (batch,
    rows, 2): a row sees others from the first number on and before the second, (0, count) if they are not in order. ``ranges`` is
    (batch, tiles, 4): some row sees others from the first number on and before the second, all rows from the third on and before
    the fourth; (-1, 0, ..) if the others or the rows are not in order. Both are contiguous. ``rounds`` halvings leave nothing of
    ``count``.
    """
    batch = tl.program_id(1)
    own += batch.to(tl.int64) * own_stride_0
    others += batch.to(tl.int64) * others_stride_0
    fall, falls = _falls(others, others_stride_1, count, SOME)
    least, last = tl.load(others), tl.load(others + (count - 1) * others_stride_1)
    in_order = (falls == 0) | ((falls == 1) & (last < least))
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    row = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = row < rows
    mine = tl.load(own + row * own_stride_1, mask=inside, other=0)
    after = tl.load(own + (row + 1) * own_stride_1, mask=row + 1 < rows, other=0)
    tail = (falls == 1) & (mine < least)
    begin, stop = tl.where(tail, fall, 0), tl.where(tail | (falls == 0), count, fall)
    first = _bisected(others, others_stride_1, begin, stop, mine, rounds, False)
    end = _bisected(others, others_stride_1, begin, stop, mine, rounds, True)
    some = inside & (first < end)
    first, end = tl.where(some, first, 0), tl.where(some, end, 0)
    place = (batch.to(tl.int64) * rows + row) * 2
    tl.store(spans + place, tl.where(in_order, first, 0), mask=inside)
    tl.store(spans + place + 1, tl.where(in_order, end, count), mask=inside)
    beside = (row + 1 < rows) & ((row + 1) % TILE > 0)
    own_falls = tl.sum((beside & (mine > after)).to(tl.int32), 1)
    least_first, greatest_end = tl.min(tl.where(some, first, MOST), 1), tl.max(end, 1)
    said = in_order & (own_falls <= 1)
    count_of_tiles = tl.cdiv(rows, TILE)
    ranges += (batch.to(tl.int64) * count_of_tiles + tile) * 4
    there = tile < count_of_tiles
    tl.store(ranges, tl.where(said, tl.minimum(least_first, greatest_end), -1), mask=there)
    tl.store(ranges + 1, tl.where(said, greatest_end, 0), mask=there)
    greatest_first = tl.max(tl.where(inside, tl.where(some, first, MOST), 0), 1)
    least_end = tl.min(tl.where(inside, end, MOST), 1)
    tl.store(ranges + 2, tl.where(said, greatest_first, MOST), mask=there)
    tl.store(ranges + 3, tl.where(said, least_end, 0), mask=there)


@triton.jit
def _falls(numbers, stride, count, SOME: tl.constexpr):
    """Where numbers fall last, and how often."""
    fall, falls = 0, 0
    for start in range(0, count, SOME):
        at = start + tl.arange(0, SOME)
        here = tl.load(numbers + at * stride, mask=at + 1 < count, other=0)
        falling = (at + 1 < count) & (here > tl.load(numbers + (at + 1) * stride, mask=at + 1 < count, other=0))
        fall = tl.maximum(fall, tl.max(tl.where(falling, at + 1, 0), 0))
        falls += tl.sum(falling.to(tl.int32), 0)
    return fall, falls


@triton.jit
def _bisected(numbers, stride, begin, stop, wanted, rounds, BEYOND: tl.constexpr):
    """The first of the rising numbers from ``begin`` on and before ``stop`` that is not less than ``wanted``, or is greater."""
    for _ in range(rounds):
        middle = (begin + stop) // 2
        found = tl.load(numbers + middle * stride, mask=begin < stop, other=0)
        less = (found <= wanted) if BEYOND else (found < wanted)
        begin, stop = (
            tl.where((begin < stop) & less, middle + 1, begin),
            tl.where((begin < stop) & (less == 0), middle, stop),
        )
    return begin
