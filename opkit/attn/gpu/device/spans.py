"""A Triton kernel that finds by bisection which keys each query sees under segments in order, or which queries each key."""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.tile_lists import LEAST, MOST


@triton.jit(do_not_specialize=("rows", "room", "count", "rounds", "lower", "upper"))
def spans(
    own, own_stride_0, own_stride_1, others, others_stride_0, others_stride_1, lengths, lengths_stride_0,
    spans, ranges, rows, room, count, rounds, lower, upper,
    TILES: tl.constexpr, TILE: tl.constexpr, SOME: tl.constexpr, OF_ROWS: tl.constexpr,
):  # fmt: skip
    """The spans of the rows of ``TILES`` tiles of batch ``program_id(1)``, and the ranges of these tiles.

    ``own`` has a number for each of ``rows`` rows, ``others`` for each of ``count`` others, at least one. ``ranges`` is (batch,
    tiles, 4): some row sees others from the first number on and before the second, all rows from the third on and before the
    fourth; (-1, 0, ..) if the others or the rows are not in order. ``spans`` is (batch, ``room``, 2): a row sees others from the
    first number on and before the second, within a band and lengths: others ``lower`` to ``upper`` places further, and of the
    rows, or others unless ``OF_ROWS``, so many. If the others are not in order a span is what these leave, and the first number
    has its sign bit set. Both are contiguous. ``rounds`` halvings leave nothing of ``count``.
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
    adjacent = (row + 1 < rows) & ((row + 1) % TILE > 0)
    own_falls = tl.sum((adjacent & (mine > after)).to(tl.int32), 1)
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
    first, end = tl.where(in_order, first, 0), tl.where(in_order, end, count)
    first, end = tl.maximum(first, row + lower), tl.minimum(end, row + upper + 1)
    if lengths is not None:
        length = tl.load(lengths + batch * lengths_stride_0)
        end = tl.where(row < length, end, 0) if OF_ROWS else tl.minimum(end, length)
    some = inside & (first < end)
    place = (batch.to(tl.int64) * room + row) * 2
    tl.store(spans + place, tl.where(some, first, 0) | tl.where(in_order, 0, LEAST), mask=row < room)
    tl.store(spans + place + 1, tl.where(some, end, 0), mask=row < room)


@triton.jit
def _falls(numbers, stride, count, SOME: tl.constexpr):
    """Return where numbers fall last, and how often."""
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
    """Return the first of the rising numbers in ``begin`` to ``stop`` that is not less than ``wanted``, or is greater."""
    for _ in range(rounds):
        middle = (begin + stop) // 2
        found = tl.load(numbers + middle * stride, mask=begin < stop, other=0)
        less = (found <= wanted) if BEYOND else (found < wanted)
        begin, stop = (
            tl.where((begin < stop) & less, middle + 1, begin),
            tl.where((begin < stop) & (less == 0), middle, stop),
        )
    return begin
