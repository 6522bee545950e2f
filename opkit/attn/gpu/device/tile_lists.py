"""Triton kernels that find which tiles and keys a mask leaves visible.

``tile_lists`` lists for each tile of queries the tiles of keys that it sees, or the reverse. A mask's program is evaluated for
whole tiles, as a pair of answers for each: whether some pair of a query and a key may be visible, and whether all are. The first
may be true too often and the second false too often, never the reverse; ``NOT`` swaps them. For bands and segments the answers
follow from the least and the greatest number in a tile; for a tensor of bools ``tile_states`` computes them first. Of a mask
with a user's function ``mask_states`` computes those of all that it says, and for kernels that read a mask as bits these bits.

``tile_turns`` and ``tile_visits`` compute the order in which tiles of keys add to the gradient of a block of queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.tile import AND, BAND, DENSE, FUNCTION, LENGTH, NOT, OR, SEGMENTS, element, number, seen
from opkit.attn.gpu.portable.device.forward import RUN_TIME

UNKNOWN = FUNCTION  #: in a program for tiles: nothing is known of what a mask says there
LEAST, MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
ANY, ALL = tl.constexpr(1), tl.constexpr(2)
NO_BITS, ALL_FALSE, ALL_TRUE = (
    tl.constexpr(-1),
    tl.constexpr(-2),
    tl.constexpr(-3),
)  # places of tiles that have no words
_WORD = tl.constexpr(16)
STATES_RUN_TIME = ("heads", "rows", "columns", "x_stride_0", "x_stride_1", "x_stride_2")
ORDER_RUN_TIME = ("own", "others")  #: arguments whose value no kernel is compiled for


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
    """Return whether some and all pairs are visible in the tiles that begin at queries ``i`` and keys ``j``, (n,) or (1,)."""
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
        elif PROGRAM[at][0] == UNKNOWN:
            stack = stack + ((i == i) & (j == j), (i != i) & (j == j))
        elif PROGRAM[at][0] == DENSE:
            stack = stack + _states_of(slots, PROGRAM[at][1], b, h, i // ROWS, j // KEYS, (i < queries) & (j < limit))
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
    """Return the least and the greatest number of each tile that begins at ``at``."""
    place = at[:, None] + tl.arange(0, TILE)[None, :]
    i, j = (place, 0) if OF_QUERIES else (0, place)
    found = element(slots, slot, b, h, i, j, place < count)
    return tl.min(tl.where(place < count, found, MOST), 1), tl.max(tl.where(place < count, found, LEAST), 1)


@triton.jit
def _states_of(slots, slot: tl.constexpr, b, h, row, column, inside):
    """Return what :func:`opkit.attn.gpu.device.tile_lists.tile_states` wrote of the tiles in ``row`` and ``column``."""
    state = element(slots, slot, b, h, row, column, inside)
    return ((state & ANY) != 0, (state & ALL) != 0)


@triton.jit(do_not_specialize=STATES_RUN_TIME)
def tile_states(
    x, x_stride_0, x_stride_1, x_stride_2, x_stride_3, states, heads, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``ANY`` where tile ``program_id(0)`` of ``x`` has a true element, and ``ALL`` where it has no other, or both.

    ``states`` is (batch, heads, tiles of rows, tiles of columns), contiguous, ``x`` (batch, heads, rows, columns).
    ``program_id(1)`` is batch * heads + head. ``STEP`` divides ``ROWS``.
    """
    wide = tl.cdiv(columns, COLUMNS)
    i, j = tl.program_id(0) // wide * ROWS, tl.program_id(0) % wide * COLUMNS
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    x += b.to(tl.int64) * x_stride_0 + h.to(tl.int64) * x_stride_1
    x += i.to(tl.int64) * x_stride_2 + j.to(tl.int64) * x_stride_3
    high, broad = tl.minimum(rows - i, ROWS), tl.minimum(columns - j, COLUMNS)
    even = (x_stride_2 % _WORD == 0) & (x.to(tl.int64) % _WORD == 0) & (broad == COLUMNS)
    if even:
        count = _count(
            tl.multiple_of(x, _WORD), x_stride_2 // _WORD * _WORD, x_stride_3, high, COLUMNS, ROWS, COLUMNS, STEP
        )
    else:
        count = _count(x, x_stride_2, x_stride_3, high, broad, ROWS, COLUMNS, STEP)
    state = tl.where(count > 0, ANY, 0) | tl.where(count == high * broad, ALL, 0)
    tl.store(states + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0), state.to(tl.uint8))


@triton.jit
def _count(x, stride, stride_of_columns, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Return how many of the first elements of ``x`` are true: of its first rows the first columns."""
    column = tl.arange(0, COLUMNS)
    count = tl.zeros([STEP, COLUMNS], tl.int32)
    for first in tl.static_range(0, ROWS, STEP):
        row = first + tl.arange(0, STEP)
        at = x + row.to(tl.int64)[:, None] * stride + column[None, :] * stride_of_columns
        count += tl.load(at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0).to(tl.int1).to(tl.int32)
    return tl.sum(tl.sum(count, 1), 0)


@triton.jit(do_not_specialize=(*RUN_TIME, "room"))
def mask_states(
    states, places, words, count_of_words, room, lengths, lengths_stride_0,
    t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3, t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3,
    t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3, t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3,
    t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3, t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3,
    f0, f0_stride_0, f0_stride_1, f0_stride_2, f0_stride_3, f1, f1_stride_0, f1_stride_1, f1_stride_2, f1_stride_3,
    f2, f2_stride_0, f2_stride_1, f2_stride_2, f2_stride_3, f3, f3_stride_0, f3_stride_1, f3_stride_2, f3_stride_3,
    f4, f4_stride_0, f4_stride_1, f4_stride_2, f4_stride_3, f5, f5_stride_0, f5_stride_1, f5_stride_2, f5_stride_3,
    n0, n1, n2, n3, n4, n5, n6, n7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15, m16, m17, m18, m19, m20, m21, m22, m23,
    tiles, programs, heads, queries, keys, lower, upper,
    MASK: tl.constexpr, OF_TILES: tl.constexpr, BANDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr,
    BY_KEYS: tl.constexpr,
):  # fmt: skip
    """As :func:`tile_states`, of all that a mask says. ``heads`` are those with states.

    ``OF_TILES`` is the mask's program for whole tiles; those of which it says enough are not evaluated. ``STEP`` divides
    ``ROWS``; it is a multiple of 32 ``BY_KEYS``.

    With ``places`` what is visible in tiles of which that is not all or nothing is written too, as bits, for up to ``room``
    tiles in any order: ``places``, like ``states``, has a tile's place in ``words``, or ``NO_BITS``, or ``ALL_FALSE``, or
    ``ALL_TRUE``. Keys that are not there are not visible; queries may be. ``words`` is (room, ROWS, KEYS / 32), or (room, KEYS,
    ROWS / 32) ``BY_KEYS``, contiguous. Of 32 elements, that of number n is bit 8 * (n % 8 // 2) + 2 * (n // 8) + n % 2: a thread
    of Hopper's products has the elements of one byte.
    """
    slots = (
        (t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3), (t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3),
        (t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3), (t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3),
        (t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3), (t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3),
        (f0, f0_stride_0, f0_stride_1, f0_stride_2, f0_stride_3), (f1, f1_stride_0, f1_stride_1, f1_stride_2, f1_stride_3),
        (f2, f2_stride_0, f2_stride_1, f2_stride_2, f2_stride_3), (f3, f3_stride_0, f3_stride_1, f3_stride_2, f3_stride_3),
        (f4, f4_stride_0, f4_stride_1, f4_stride_2, f4_stride_3), (f5, f5_stride_0, f5_stride_1, f5_stride_2, f5_stride_3),
    )  # fmt: skip
    numbers = (
        n0, n1, n2, n3, n4, n5, n6, n7,
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15, m16, m17, m18, m19, m20, m21, m22, m23,
    )  # fmt: skip
    wide = tl.cdiv(keys, KEYS)
    first, begin = tl.program_id(0) // wide * ROWS, tl.program_id(0) % wide * KEYS
    j = begin + tl.arange(0, KEYS)[None, :]
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    limit = keys
    if lengths is not None:
        limit = tl.minimum(tl.maximum(tl.load(lengths + b * lengths_stride_0), 0), keys)
    one = tl.zeros([1], tl.int32)
    some, every = _state(
        OF_TILES, slots, numbers, b, h, first + one, begin + one, queries, limit, lower, upper, BANDED, ROWS, KEYS
    )
    whole = tl.max(every.to(tl.int32), 0) * (begin + KEYS <= limit).to(tl.int32)
    count, all_of = whole, 1
    packed = tl.zeros([ROWS // STEP, STEP * KEYS // 32], tl.int32)
    steps, flat = tl.arange(0, ROWS // STEP)[:, None], tl.arange(0, STEP * KEYS // 32)[None, :]
    if (tl.max(some.to(tl.int32), 0) > 0) & (whole == 0):
        all_of = 0
        for at in range(0, ROWS, STEP):
            i = first + at + tl.arange(0, STEP)[:, None]
            found = seen(slots, numbers, b, h, i, j, queries, limit, lower, upper, MASK, BANDED)
            count += tl.sum(tl.sum(found.to(tl.int32), 1), 0)
            all_of += tl.sum(tl.sum(((i < queries) & (j < keys)).to(tl.int32), 1), 0)
            if places is not None:
                packed = tl.where(
                    steps == at // STEP,
                    tl.reshape(_bits_of(found, STEP, KEYS, BY_KEYS), [1, STEP * KEYS // 32]),
                    packed,
                )
    state = tl.where(count > 0, ANY, 0) | tl.where(count == all_of, ALL, 0)
    tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(states + tile, state.to(tl.uint8))
    if places is not None:
        place = tl.where(count > 0, ALL_TRUE, ALL_FALSE)
        if (count > 0) & ((count < all_of) | (begin + KEYS > keys)):
            place = tl.atomic_add(count_of_words, 1)
            place = tl.where(place < room, place, NO_BITS)
        tl.store(places + tile, place)
        if BY_KEYS:
            to = flat % KEYS * (ROWS // 32) + steps * (STEP // 32) + flat // KEYS
        else:
            to = steps * (STEP * KEYS // 32) + flat
        tl.store(words + place.to(tl.int64) * (ROWS * KEYS // 32) + to, packed, mask=place >= 0)


@triton.jit
def _bits_of(found, ROWS: tl.constexpr, KEYS: tl.constexpr, BY_KEYS: tl.constexpr):
    """Return bools in words as :func:`function_states` says: (ROWS, KEYS / 32), or (ROWS / 32, KEYS) ``BY_KEYS``."""
    n = tl.arange(0, 32)
    bit = tl.full([32], 1, tl.int32) << (n % 8 // 2 * 8 + n // 8 * 2 + n % 2)
    if BY_KEYS:
        words = tl.sum(tl.where(tl.reshape(found, [ROWS // 32, 32, KEYS]), bit[None, :, None], 0), 1)
    else:
        words = tl.sum(tl.where(tl.reshape(found, [ROWS, KEYS // 32, 32]), bit[None, None, :], 0), 2)
    return words


@triton.jit(do_not_specialize=ORDER_RUN_TIME)
def tile_turns(tiles, counts, theirs, their_counts, turns, own, others, SOME: tl.constexpr):
    """Of each tile in the list of tile ``program_id(0)`` how many of the tiles in its list are greater than ``program_id(0)``.

    ``tiles`` and ``counts`` are as :func:`opkit.attn.gpu.device.tile_lists.tile_lists` writes them, ``theirs`` and
    ``their_counts`` the lists the other way round; ``turns`` is as ``tiles``, and written where there is a tile.
    ``program_id(1)`` is batch * heads + head. All are contiguous.
    """
    mine, row, theirs, their_counts = _place_of(theirs, their_counts, own, others)
    whole, total = tl.load(counts + 2 * row), tl.load(counts + 2 * row + 1)
    for start in range(0, others, SOME):
        place = start + tl.arange(0, SOME)
        there = (place < whole) | ((place >= others - total + whole) & (place < others))
        tile = tl.load(tiles + row * others + place, mask=there, other=0)
        turn = _greater(theirs, their_counts, tile, there, mine, own, SOME)
        tl.store(turns + row * others + place, turn, mask=there)


@triton.jit(do_not_specialize=ORDER_RUN_TIME)
def tile_visits(tiles, counts, theirs, their_counts, visits, own, others, SOME: tl.constexpr):
    """The list of tile ``program_id(0)`` in order, with turns: of each tile in it, the least first, two numbers.

    They are twice the tile, and one more if it is partly visible; and its turn, as :func:`tile_turns` counts it. ``visits`` has
    room for all others, and is written from its front on.
    """
    mine, row, theirs, their_counts = _place_of(theirs, their_counts, own, others)
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
def _place_of(theirs, their_counts, own, others):
    """Return the tile, its number among all, and the lists of the other tiles of its batch and head, with their counts."""
    mine, outer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    return mine, outer * own + mine, theirs + outer * others * own, their_counts + outer * others * 2


@triton.jit
def _index(step, whole, count):
    """Return where in a list with room for ``count`` its tile ``step`` is: whole ones are at its front, others at its back."""
    return tl.where(step < whole, step, count - 1 - step + whole)


@triton.jit
def _greater(theirs, their_counts, tile, there, mine, own, SOME: tl.constexpr):
    """Return how many tiles in the list of each ``tile`` are greater than ``mine``."""
    whole = tl.load(their_counts + 2 * tile, mask=there, other=0)
    total = tl.load(their_counts + 2 * tile + 1, mask=there, other=0)
    found = tl.zeros([SOME], tl.int32)
    for first in range(0, tl.max(total, 0), SOME):
        step = (first + tl.arange(0, SOME))[None, :]
        seen = step < total[:, None]
        each = tl.load(theirs + tile[:, None] * own + _index(step, whole[:, None], own), mask=seen, other=0)
        found += tl.sum((seen & (each > mine)).to(tl.int32), 1)
    return found
