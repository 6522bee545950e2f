"""Triton functions that the forward and backward kernels share, for a tile of logits.

First masks, biases and dropout: the meaning of the programs of :mod:`opkit.attn.masks.program`. A program arrives as a tuple of
constants, so each one is compiled to what it says and to nothing else. Its tensors come in a tuple of slots; a slot is a pointer
and four strides, by batch, head, query and key, 0 for what it does not depend on. Numbers that change with the lengths of
sequences, such as the ends of bands, come in a tuple of their own, and nothing is compiled again when they change.
:mod:`opkit.attn.gpu.plans` computes all of them.

Then loads and stores of rows, logits, and ranges of tiles. The size ``D`` of a head of keys is read in one part or two, ``D0``
and ``D1``, each a power of two as Triton requires, and that of values, ``E``, in one, ``E0``: see
:func:`opkit.attn.gpu.blocks.parts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.masks import program

AND, OR, NOT = tl.constexpr(program.AND), tl.constexpr(program.OR), tl.constexpr(program.NOT)
BAND, SEGMENTS, LENGTH = tl.constexpr(program.BAND), tl.constexpr(program.SEGMENTS), tl.constexpr(program.LENGTH)
DENSE, BIAS_DENSE = tl.constexpr(program.DENSE), tl.constexpr(program.BIAS_DENSE)
BIAS_ALIBI, BIAS_FUNCTION = tl.constexpr(program.BIAS_ALIBI), tl.constexpr(program.BIAS_FUNCTION)
FUNCTION = tl.constexpr(program.FUNCTION)
LOG2E = tl.constexpr(1.4426950408889634)
FP8_SCALE = tl.constexpr(256.0)  #: the factor that :func:`from_fp8` leaves out


@triton.jit
def element(slots, slot: tl.constexpr, b, h, i, j, inside):
    """Return a slot's elements at queries ``i`` and keys ``j``, which broadcast to a tile; 0 where not ``inside``."""
    start = b.to(tl.int64) * slots[slot][1] + h.to(tl.int64) * slots[slot][2]
    return tl.load(slots[slot][0] + start + (i * slots[slot][3] + j * slots[slot][4]), mask=inside, other=0)


@triton.jit
def number(slots, slot: tl.constexpr, b, h):
    """Return the one element that a batch and a head have in a slot."""
    return tl.load(slots[slot][0] + b.to(tl.int64) * slots[slot][1] + h.to(tl.int64) * slots[slot][2])


@triton.jit
def of_queries(slots, slot: tl.constexpr, b, h, i, queries):
    """Return a slot's elements of queries ``i``; 0 of those from ``queries`` on."""
    return element(slots, slot, b, h, i, 0, i < queries)


@triton.jit
def of_keys(slots, slot: tl.constexpr, b, h, j, keys):
    """Return a slot's elements of keys ``j``; 0 of those from ``keys`` on."""
    return element(slots, slot, b, h, 0, j, j < keys)


@triton.jit
def visible(
    PROGRAM: tl.constexpr, slots, numbers, b, h, i, j, queries, keys,
    OF_QUERIES: tl.constexpr = of_queries, OF_KEYS: tl.constexpr = of_keys,
):  # fmt: skip
    """Return which of the keys ``j`` each query of ``i`` sees: bool, a tile. There are ``queries`` and ``keys`` of them.

    ``OF_QUERIES`` and ``OF_KEYS`` read what a slot has for each of them.
    """
    stack = ()
    for at in tl.static_range(len(PROGRAM)):
        if PROGRAM[at][0] == AND:
            stack = stack[:-2] + (stack[-1] & stack[-2],)
        elif PROGRAM[at][0] == OR:
            stack = stack[:-2] + (stack[-1] | stack[-2],)
        elif PROGRAM[at][0] == NOT:
            stack = stack[:-1] + (stack[-1] == 0,)
        elif PROGRAM[at][0] == BAND:
            stack = stack + (_between(j - i, numbers, PROGRAM[at][1]),)
        elif PROGRAM[at][0] == SEGMENTS:
            mine = OF_QUERIES(slots, PROGRAM[at][1], b, h, i, queries)
            theirs = OF_KEYS(slots, PROGRAM[at][2], b, h, j, keys)
            stack = stack + (mine == theirs,)
        elif PROGRAM[at][0] == LENGTH:
            stack = stack + ((j + 0 * i) < number(slots, PROGRAM[at][1], b, h),)
        elif PROGRAM[at][0] == DENSE:
            found = element(slots, PROGRAM[at][1], b, h, i, j, (i < queries) & (j < keys))
            stack = stack + (found != 0,)
        elif PROGRAM[at][0] == FUNCTION:
            stack = stack + (called(PROGRAM[at][1], b, slots, numbers, b, h, i, j, queries, keys),)
        else:
            offset = OF_QUERIES(slots, PROGRAM[at][1], b, h, i, queries)
            stack = stack + (_between(j - i - offset, numbers, PROGRAM[at][2]),)
    return stack[0]


@triton.jit
def called(FUNCTION: tl.constexpr, score, slots, numbers, b, h, i, j, queries, keys):
    """Return the result of a user's function; of queries and keys that are not there, that of the last ones."""
    return FUNCTION(score, slots, numbers, b, h, tl.minimum(i, queries - 1), tl.minimum(j, tl.maximum(keys, 1) - 1))


@triton.jit
def _between(distance, numbers, first: tl.constexpr):
    return (distance >= numbers[first]) & (distance <= numbers[first + 1])


@triton.jit
def biased(x, PROGRAM: tl.constexpr, slots, numbers, b, h, i, j, queries, keys, shift):
    """``x``, logits of a tile, after each term of a bias's program. ``shift``: all keys less all queries."""
    for at in tl.static_range(len(PROGRAM)):
        x = _with_term(x, PROGRAM, at, slots, numbers, b, h, i, j, queries, keys, shift)
    return x


@triton.jit
def _with_term(x, PROGRAM: tl.constexpr, AT: tl.constexpr, slots, numbers, b, h, i, j, queries, keys, shift):
    inside = (i < queries) & (j < keys)
    if PROGRAM[AT][0] == BIAS_FUNCTION:
        x = tl.broadcast_to(called(PROGRAM[AT][1], x, slots, numbers, b, h, i, j, queries, keys), x.shape)
    elif PROGRAM[AT][0] == BIAS_DENSE:
        x += element(slots, PROGRAM[AT][1], b, h, i, j, inside).to(tl.float32)
    elif PROGRAM[AT][0] == BIAS_ALIBI:
        x -= number(slots, PROGRAM[AT][1], b, h) * tl.abs(i + shift - j).to(tl.float32)
    else:
        wide = numbers[PROGRAM[AT][3]]
        x += element(slots, PROGRAM[AT][1], b, h, i, j // wide, inside).to(tl.float32)
        x += element(slots, PROGRAM[AT][2], b, h, i, j % wide, inside).to(tl.float32)
    return x


@triton.jit
def slopes_before(
    slopes,
    x,
    PROGRAM: tl.constexpr,
    FIRST: tl.constexpr,
    TERM: tl.constexpr,
    slots,
    numbers,
    b,
    h,
    i,
    j,
    queries,
    keys,
    shift,
):
    """``slopes`` times the derivatives of terms from ``FIRST`` on by logits; and the logits before ``TERM``.

    From the gradients of the logits after a bias's program this makes those of the logits before the term ``FIRST``. ``x`` are
    the logits before the program.
    """
    before = x
    for at in tl.static_range(len(PROGRAM)):
        if at == TERM:
            before = x
        if PROGRAM[at][0] == BIAS_FUNCTION and at >= FIRST:
            if PROGRAM[at][2] == 0:
                slopes *= 0.0
            else:
                slopes *= called(PROGRAM[at][2], x, slots, numbers, b, h, i, j, queries, keys)
        x = _with_term(x, PROGRAM, at, slots, numbers, b, h, i, j, queries, keys, shift)
    return slopes, before


@triton.jit
def retained(seed, threshold, row, i, j):
    """Return which probabilities dropout keeps, (rows, columns): those whose word of Philox is not below ``threshold``.

    ``row`` is batch * heads + head, ``i`` the queries (rows,), ``j`` the first key of each four, (columns / 4,); see
    :func:`opkit.attn.reference.retained`.
    """
    quads = (j // 4).to(tl.uint32)[None, :] + tl.zeros([i.shape[0], 1], tl.uint32)
    w0, w1, w2, w3 = _words(seed, row, i, quads)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return words.reshape(i.shape[0], 4 * j.shape[0]).to(tl.int64) >= threshold


@triton.jit
def retained_each(seed, threshold, row, i, j):
    """As :func:`retained`, for keys ``j``, (columns,), that need not come in fours: four times the work."""
    quads = (j // 4).to(tl.uint32)[None, :] + tl.zeros([i.shape[0], 1], tl.uint32)
    w0, w1, w2, w3 = _words(seed, row, i, quads)
    place = (j % 4)[None, :]
    word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
    return word.to(tl.int64) >= threshold


@triton.jit
def _words(seed, row, i, quads):
    """Return the four words of Philox for each of ``quads``, (rows, columns)."""
    key = (tl.load(seed) & 0xFFFFFFFF) | ((tl.load(seed + 1) & 0xFFFFFFFF) << 32)
    rows = tl.zeros_like(quads) + i.to(tl.uint32)[:, None]
    heads = tl.zeros_like(quads) + row.to(tl.uint32)
    return tl.philox(key, quads, rows, heads, tl.zeros_like(quads))


@triton.jit
def rows_of(x, stride, at, count, FIRST: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, BOUNDED: tl.constexpr):
    """Elements ``FIRST`` to ``FIRST + WIDE`` of the rows ``at``: (rows, WIDE), zeros beyond ``count`` rows and ``SIZE``."""
    column = FIRST + tl.arange(0, WIDE)
    pointers = x + at[:, None] * stride + column[None, :]
    if FIRST + WIDE > SIZE:
        if BOUNDED:
            return tl.load(pointers, mask=(at < count)[:, None] & (column < SIZE)[None, :], other=0.0)
        return tl.load(pointers, mask=(column < SIZE)[None, :], other=0.0)
    if BOUNDED:
        return tl.load(pointers, mask=(at < count)[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def columns_of(
    x, stride, at, count, FIRST: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, BOUNDED: tl.constexpr
):
    """As :func:`rows_of`, transposed: (WIDE, rows)."""
    column = FIRST + tl.arange(0, WIDE)
    pointers = x + at[None, :] * stride + column[:, None]
    if FIRST + WIDE > SIZE:
        if BOUNDED:
            return tl.load(pointers, mask=(at < count)[None, :] & (column < SIZE)[:, None], other=0.0)
        return tl.load(pointers, mask=(column < SIZE)[:, None], other=0.0)
    if BOUNDED:
        return tl.load(pointers, mask=(at < count)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def widened(x, FP8: tl.constexpr, ALWAYS: tl.constexpr):
    """Elements as they are multiplied: of "e4m3" and "e5m2", which come as bytes, float16, to the last bit.

    Of "native" float8, which the tensor cores multiply, float16 too where ``ALWAYS``; of "" what they are.
    """
    found = x
    if FP8 == "e4m3":
        found = from_fp8(x) * FP8_SCALE
    if FP8 == "e5m2":
        found = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    if FP8 == "native" and ALWAYS:
        found = x.to(tl.float16)
    return found


@triton.jit
def from_fp8(x):
    """Bytes of float8_e4m3fn as float16 without their factor of 256: the exponents' biases differ by 8."""
    wide = x.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    bits = tl.where((wide & 0x7F) == 0x7F, 0x7E00, bits)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def store_rows(x, stride, at, count, value, FIRST: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr):
    """Write ``value``, (rows, WIDE), to elements from ``FIRST`` on of the rows ``at``."""
    column = FIRST + tl.arange(0, WIDE)
    inside = (at < count)[:, None] & (column < SIZE)[None, :]
    tl.store(x + at[:, None] * stride + column[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def capped(x, softcap):
    """``softcap * tanh(x / softcap)``, and the tanh."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E / softcap))
    t = (1.0 - e) / (1.0 + e)
    t = tl.where(x < 0, -t, t)
    return times(t, softcap), t


@triton.jit
def times(x, factor):
    """Products that are rounded, whatever is added to them: fused, a large logit would differ from itself as the maximum."""
    return tl.fma(x, tl.zeros_like(x) + factor, tl.zeros_like(x))


@triton.jit
def unbiased(s, scale, softcap, CAPPED: tl.constexpr):
    """From products to logits before biases; and the tanh of the cap."""
    s = times(s, scale)
    t = s
    if CAPPED:
        s, t = capped(s, softcap)
    return s, t


@triton.jit
def logits(
    s, scale, softcap, slots, numbers, b, h, i, j, queries, limit, shift, BIAS: tl.constexpr, CAPPED: tl.constexpr
):
    """From products to logits, before a mask; and the tanh of the cap."""
    s, t = unbiased(s, scale, softcap, CAPPED)
    return biased(s, BIAS, slots, numbers, b, h, i, j, queries, limit, shift), t


@triton.jit
def seen(slots, numbers, b, h, i, j, queries, limit, lower, upper, MASK: tl.constexpr, BANDED: tl.constexpr):
    """Return which keys of a partly visible tile are seen: inside of the sequences, of the band and of the mask's program."""
    found = (i < queries) & (j < limit)
    if BANDED:
        found &= (j - i >= lower) & (j - i <= upper)
    if len(MASK) > 0:
        found &= visible(MASK, slots, numbers, b, h, i, j, queries, limit)
    return found


@triton.jit
def tiles_of_keys(first, last, lower, upper, limit, TILE: tl.constexpr):
    """Tiles of keys that queries ``first`` to ``last`` see: begin, begin of the fully visible ones, their end, end."""
    begin = tl.maximum(first + lower, 0) // TILE
    end = tl.maximum(tl.cdiv(tl.minimum(last + upper + 1, limit), TILE), begin)
    full = tl.minimum(tl.cdiv(tl.maximum(last + lower, 0), TILE), end)
    full_end = tl.minimum(tl.maximum(tl.minimum(first + upper + 1, limit) // TILE, full), end)
    return begin, tl.maximum(full, begin), tl.maximum(full_end, tl.maximum(full, begin)), end


@triton.jit
def tiles_of_queries(first, last, lower, upper, queries, limit, TILE: tl.constexpr):
    """Tiles of queries that see keys ``first`` to ``last``; full ones are whole tiles that see keys below ``limit``."""
    begin = tl.maximum(first - upper, 0) // TILE
    end = tl.maximum(tl.cdiv(tl.minimum(last - lower + 1, queries), TILE), begin)
    end = tl.where(first < limit, end, begin)
    full = tl.minimum(tl.cdiv(tl.maximum(last - upper, 0), TILE), end)
    full = tl.maximum(tl.where(last < limit, full, end), begin)
    full_end = tl.maximum(tl.minimum(first - lower + 1, queries), 0) // TILE
    return begin, full, tl.minimum(tl.maximum(full_end, full), end), end
