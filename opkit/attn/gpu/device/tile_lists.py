"""Which tiles a mask leaves, in Triton: of each tile of queries the tiles of keys that it sees, or the other way round.

A mask's program is evaluated for whole tiles, as a pair of answers for each: whether some pair of a query and a key may be seen,
and whether all are. The first may say yes too often and the second no, never the other way round; ``NOT`` swaps them. Of bands
and documents the answer follows from the least and the greatest number of a tile; a tensor of bools is in its slot as what
:mod:`opkit.attn.gpu.device.tile_states` found of its tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.programs import AND, BAND, DENSE, LENGTH, NOT, OR, SEGMENTS, element, number
from opkit.attn.gpu.device.tile_states import ALL, ANY
from opkit.attn.gpu.portable.device.forward import RUN_TIME

LEAST, MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=RUN_TIME)
def tile_lists(
    tiles, counts, lengths, lengths_stride_0,
    t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3, t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3,
    t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3, t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3,
    t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3, t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3,
    n0, n1, n2, n3, n4, n5, n6, n7,
    programs, heads, queries, keys, lower, upper,
    MASK: tl.constexpr, BANDED: tl.constexpr, BY_KEYS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The list of tile ``program_id(0)``: whole tiles from its front on, partly visible ones from its back, and their counts.

    ``tiles`` is (batch, heads, own tiles, other tiles) and ``counts`` (batch, heads, own tiles, 2), the first number the whole
    ones, the second all; both contiguous. ``program_id(1)`` is batch * heads + head.
    """
    slots = (
        (t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3), (t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3),
        (t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3), (t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3),
        (t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3), (t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3),
    )  # fmt: skip
    numbers = (n0, n1, n2, n3, n4, n5, n6, n7)
    own, b, h = tl.program_id(0), tl.program_id(1) // heads, tl.program_id(1) % heads
    limit = keys
    if lengths is not None:
        limit = tl.minimum(tl.maximum(tl.load(lengths + b * lengths_stride_0), 0), keys)
    others = tl.cdiv(queries, ROWS) if BY_KEYS else tl.cdiv(keys, KEYS)
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + own
    tiles += row * others
    whole, partly = 0, 0
    for start in range(0, others, SOME):
        other = start + tl.arange(0, SOME)
        mine = own + tl.zeros([1], tl.int32)
        i, j = (other * ROWS, mine * KEYS) if BY_KEYS else (mine * ROWS, other * KEYS)
        some, every = _state(MASK, slots, numbers, b, h, i, j, queries, limit, lower, upper, BANDED, ROWS, KEYS)
        full = (every & (i + ROWS <= queries)) if BY_KEYS else every
        full = full & (j + KEYS <= limit) & (other < others)
        part = some & (full == 0) & (other < others)
        ranks, places = tl.cumsum(full.to(tl.int32), 0), tl.cumsum(part.to(tl.int32), 0)
        tl.store(tiles + whole + ranks - 1, other, mask=full)
        tl.store(tiles + others - partly - places, other, mask=part)
        whole += tl.sum(full.to(tl.int32), 0)
        partly += tl.sum(part.to(tl.int32), 0)
    tl.store(counts + 2 * row, whole)
    tl.store(counts + 2 * row + 1, whole + partly)


@triton.jit
def _state(
    PROGRAM: tl.constexpr, slots, numbers, b, h, i, j, queries, limit, lower, upper,
    BANDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Whether some and whether all pairs are seen of the tiles that begin at queries ``i`` and keys ``j``, (n,) or (1,) each."""
    i_end, j_end = tl.minimum(i + ROWS, queries) - 1, tl.minimum(j + KEYS, limit) - 1
    some = (i < queries) & (j < limit)
    every = some
    if BANDED:
        here, there = _band(j - i_end, j_end - i, lower, upper)
        some, every = some & here, every & there
    stack = ()
    for at in tl.static_range(len(PROGRAM)):
        if PROGRAM[at][0] == AND:
            stack = stack[:-4] + (stack[-4] & stack[-2], stack[-3] & stack[-1])
        elif PROGRAM[at][0] == OR:
            stack = stack[:-4] + (stack[-4] | stack[-2], stack[-3] | stack[-1])
        elif PROGRAM[at][0] == NOT:
            stack = stack[:-2] + (stack[-1] == 0, stack[-2] == 0)
        elif PROGRAM[at][0] == BAND:
            stack = stack + _band(j - i_end, j_end - i, numbers[PROGRAM[at][1]], numbers[PROGRAM[at][1] + 1])
        elif PROGRAM[at][0] == SEGMENTS:
            low, high = _ends(slots, PROGRAM[at][1], b, h, i, queries, ROWS, True)
            least, most = _ends(slots, PROGRAM[at][2], b, h, j, limit, KEYS, False)
            stack = stack + ((low <= most) & (least <= high), (low == high) & (least == most) & (low == least))
        elif PROGRAM[at][0] == LENGTH:
            length = number(slots, PROGRAM[at][1], b, h)
            stack = stack + ((j < length) & (i == i), (j_end < length) & (i == i))
        elif PROGRAM[at][0] == DENSE:
            stack = stack + _found(slots, PROGRAM[at][1], b, h, i // ROWS, j // KEYS, (i < queries) & (j < limit))
        else:
            low, high = _ends(slots, PROGRAM[at][1], b, h, i, queries, ROWS, True)
            stack = stack + _band(
                j - i_end - high, j_end - i - low, numbers[PROGRAM[at][2]], numbers[PROGRAM[at][2] + 1]
            )
    if len(PROGRAM) > 0:
        some, every = some & stack[0], every & stack[1]
    return some, every


@triton.jit
def _band(least, most, lower, upper):
    """Of tiles whose distances are ``least`` to ``most``."""
    return ((most >= lower) & (least <= upper), (least >= lower) & (most <= upper))


@triton.jit
def _ends(slots, slot: tl.constexpr, b, h, at, count, TILE: tl.constexpr, OF_QUERIES: tl.constexpr):
    """The least and the greatest number of each tile that begins at ``at``."""
    place = at[:, None] + tl.arange(0, TILE)[None, :]
    i, j = (place, 0) if OF_QUERIES else (0, place)
    found = element(slots, slot, b, h, i, j, place < count)
    return tl.min(tl.where(place < count, found, MOST), 1), tl.max(tl.where(place < count, found, LEAST), 1)


@triton.jit
def _found(slots, slot: tl.constexpr, b, h, row, column, inside):
    """What :func:`opkit.attn.gpu.device.tile_states.tile_states` wrote of the tiles in ``row`` and ``column``."""
    state = element(slots, slot, b, h, row, column, inside)
    return ((state & ANY) != 0, (state & ALL) != 0)
