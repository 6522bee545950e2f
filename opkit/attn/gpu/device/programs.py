"""Masks, biases and dropout in Triton: what the programs of :mod:`opkit.attn.masks.program` mean for the logits of a tile.

A program arrives as a tuple of constants, so each one is compiled to what it says and to nothing else. Its tensors come in a
tuple of slots; a slot is a pointer and four strides, by batch, head, query and key, 0 for what it does not depend on. Numbers
that change with the lengths of sequences, such as the ends of bands, come in a tuple of their own: for these nothing is
compiled anew. :mod:`opkit.attn.gpu.plans` makes all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.masks import program

AND, OR, NOT = tl.constexpr(program.AND), tl.constexpr(program.OR), tl.constexpr(program.NOT)
BAND, SEGMENTS, LENGTH = tl.constexpr(program.BAND), tl.constexpr(program.SEGMENTS), tl.constexpr(program.LENGTH)
DENSE, BIAS_DENSE = tl.constexpr(program.DENSE), tl.constexpr(program.BIAS_DENSE)
BIAS_ALIBI = tl.constexpr(program.BIAS_ALIBI)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def element(slots, slot: tl.constexpr, b, h, i, j, inside):
    """A slot's elements at queries ``i`` and keys ``j``, which broadcast to a tile; 0 where not ``inside``."""
    start = b.to(tl.int64) * slots[slot][1] + h.to(tl.int64) * slots[slot][2]
    return tl.load(slots[slot][0] + start + (i * slots[slot][3] + j * slots[slot][4]), mask=inside, other=0)


@triton.jit
def number(slots, slot: tl.constexpr, b, h):
    """The one element that a batch and a head have in a slot."""
    return tl.load(slots[slot][0] + b.to(tl.int64) * slots[slot][1] + h.to(tl.int64) * slots[slot][2])


@triton.jit
def of_queries(slots, slot: tl.constexpr, b, h, i, queries):
    """A slot's elements of queries ``i``; 0 of those from ``queries`` on."""
    return element(slots, slot, b, h, i, 0, i < queries)


@triton.jit
def of_keys(slots, slot: tl.constexpr, b, h, j, keys):
    """A slot's elements of keys ``j``; 0 of those from ``keys`` on."""
    return element(slots, slot, b, h, 0, j, j < keys)


@triton.jit
def visible(
    PROGRAM: tl.constexpr, slots, numbers, b, h, i, j, queries, keys,
    OF_QUERIES: tl.constexpr = of_queries, OF_KEYS: tl.constexpr = of_keys,
):  # fmt: skip
    """Which of the keys ``j`` each query of ``i`` sees: bool, a tile. Those from ``queries`` and ``keys`` on are not there.

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
        else:
            offset = OF_QUERIES(slots, PROGRAM[at][1], b, h, i, queries)
            stack = stack + (_between(j - i - offset, numbers, PROGRAM[at][2]),)
    return stack[0]


@triton.jit
def _between(distance, numbers, first: tl.constexpr):
    return (distance >= numbers[first]) & (distance <= numbers[first + 1])


@triton.jit
def biased(x, PROGRAM: tl.constexpr, slots, numbers, b, h, i, j, queries, keys, shift):
    """``x``, logits of a tile, and each term of a bias's program. ``shift``: all keys less all queries."""
    inside = (i < queries) & (j < keys)
    for at in tl.static_range(len(PROGRAM)):
        if PROGRAM[at][0] == BIAS_DENSE:
            x += element(slots, PROGRAM[at][1], b, h, i, j, inside).to(tl.float32)
        elif PROGRAM[at][0] == BIAS_ALIBI:
            x -= number(slots, PROGRAM[at][1], b, h) * tl.abs(i + shift - j).to(tl.float32)
        else:
            wide = numbers[PROGRAM[at][3]]
            x += element(slots, PROGRAM[at][1], b, h, i, j // wide, inside).to(tl.float32)
            x += element(slots, PROGRAM[at][2], b, h, i, j % wide, inside).to(tl.float32)
    return x


@triton.jit
def kept(seed, threshold, row, i, j):
    """Which probabilities dropout keeps, (rows, columns): those whose word of Philox is not below ``threshold``.

    ``row`` is batch * heads + head, ``i`` the queries (rows,), ``j`` the first key of each four, (columns / 4,); see
    :func:`opkit.attn.philox.retained`.
    """
    quads = (j // 4).to(tl.uint32)[None, :] + tl.zeros([i.shape[0], 1], tl.uint32)
    w0, w1, w2, w3 = _words(seed, row, i, quads)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return words.reshape(i.shape[0], 4 * j.shape[0]).to(tl.int64) >= threshold


@triton.jit
def kept_each(seed, threshold, row, i, j):
    """As :func:`kept`, for keys ``j``, (columns,), that need not come in fours: four times the work."""
    quads = (j // 4).to(tl.uint32)[None, :] + tl.zeros([i.shape[0], 1], tl.uint32)
    w0, w1, w2, w3 = _words(seed, row, i, quads)
    place = (j % 4)[None, :]
    word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
    return word.to(tl.int64) >= threshold


@triton.jit
def _words(seed, row, i, quads):
    """The four words of Philox for each of ``quads``, (rows, columns)."""
    key = (tl.load(seed) & 0xFFFFFFFF) | ((tl.load(seed + 1) & 0xFFFFFFFF) << 32)
    rows = tl.zeros_like(quads) + i.to(tl.uint32)[:, None]
    heads = tl.zeros_like(quads) + row.to(tl.uint32)
    return tl.philox(key, quads, rows, heads, tl.zeros_like(quads))
