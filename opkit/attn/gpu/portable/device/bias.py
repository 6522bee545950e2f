"""The gradient of a tensor of a bias, in plain Triton: a tile of it is a program's own, so that nothing is shared among programs.

A logit has the place (batch, head, query, row, column), of which the last two are its key: key ``row * wide + column``, for the
keys that are an image (relative positions); else there is one row. The tensor depends on some of the five, which are those
of the program, and its gradient is the sum over the others of that of the logits, which is computed again tile by tile as in
:mod:`opkit.attn.gpu.portable.device.backward`. Where a tensor has few elements, several programs share out the sum for a tile
of it, and what they found is added up afterwards, in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.tile import (
    called,
    columns_of,
    retained,
    retained_each,
    rows_of,
    seen,
    slopes_before,
    unbiased,
)
from opkit.attn.gpu.portable.device.backward_rows import bases_of, exact_sums, loaded, slopes_of_logits
from opkit.attn.gpu.portable.device.forward import RUN_TIME


@triton.jit(do_not_specialize=(*RUN_TIME, "batch", "high", "wide", "own", "shares"))
def attention_of_bias(
    q, k, v, gradient, lse, delta, of_bias, sinks, seed, lengths,
    q_stride_0, q_stride_1, q_stride_2, k_stride_0, k_stride_1, k_stride_2, v_stride_0, v_stride_1, v_stride_2,
    gradient_stride_0, gradient_stride_1, gradient_stride_2, lengths_stride_0,
    t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3, t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3,
    t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3, t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3,
    t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3, t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3,
    f0, f0_stride_0, f0_stride_1, f0_stride_2, f0_stride_3, f1, f1_stride_0, f1_stride_1, f1_stride_2, f1_stride_3,
    f2, f2_stride_0, f2_stride_1, f2_stride_2, f2_stride_3, f3, f3_stride_0, f3_stride_1, f3_stride_2, f3_stride_3,
    f4, f4_stride_0, f4_stride_1, f4_stride_2, f4_stride_3, f5, f5_stride_0, f5_stride_1, f5_stride_2, f5_stride_3,
    n0, n1, n2, n3, n4, n5, n6, n7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15, m16, m17, m18, m19, m20, m21, m22, m23,
    own, programs, shares, batch, heads, group, queries, keys, high, wide, lower, upper, scale, softcap, threshold, rescale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, BANDED: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr,
    DROPPED: tl.constexpr, BY_BATCH: tl.constexpr, BY_HEAD: tl.constexpr, BY_QUERY: tl.constexpr, BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr, IMAGE: tl.constexpr, DISTANCES: tl.constexpr, DIAGONAL: tl.constexpr, TERM: tl.constexpr,
    PART: tl.constexpr, PLACE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of ``of_bias``, contiguous (shares, batch, heads, queries, high, wide), 1 where it does not depend on one of them.

    ``program_id(0)`` counts its tiles by query, row and column, ``program_id(1)`` its batches and heads, ``program_id(2)`` the
    shares. ``IMAGE``: there is more than one row. ``DISTANCES``: it is times minus the distance of query and key, as in ALiBi.
    ``TERM`` is the term's place in the program. ``PART``: the derivative of a user's function by what it reads of the tensor;
    ``PLACE``: where that is, if the sums are added there, in no order. ``DIAGONAL``: the sums are those of distances, and tiles
    are square; ``program_id(0)`` counts diagonals of them, each of which has two tiles of distances.
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
    tiles, across = tl.cdiv(queries, ROWS), tl.cdiv(wide, KEYS)
    at, diagonal = tl.program_id(0), tl.program_id(0) - (tiles - 1)
    if DIAGONAL:
        at, across = at * 0, across * 0 + 1
    my_column, column_count, at = _mine(at, across, BY_COLUMN)
    my_row, row_count, at = _mine(at, high, BY_ROW)
    my_tile, tile_count, at = _mine(at, tiles, BY_QUERY)
    my_head, head_count, at = _mine(tl.program_id(1), heads, BY_HEAD)
    my_batch, batch_count, at = _mine(at, batch, BY_BATCH)

    acc = tl.zeros([ROWS, KEYS], tl.float32)
    shift = keys - queries
    total = (batch_count * head_count).to(tl.int64) * tile_count * row_count * column_count
    for n in tl.range(tl.program_id(2).to(tl.int64), total, shares):
        turn, rest = n % column_count, n // column_count
        first_column = (my_column + turn).to(tl.int32) * KEYS
        turn, rest = rest % row_count, rest // row_count
        start = (my_row + turn).to(tl.int32) * wide
        turn, rest = rest % tile_count, rest // tile_count
        first = (my_tile + turn).to(tl.int32) * ROWS
        h = (my_head + rest % head_count).to(tl.int32)
        b = (my_batch + rest // head_count).to(tl.int32)
        limit = keys
        if lengths is not None:
            limit = tl.minimum(tl.maximum(tl.load(lengths + b * lengths_stride_0), 0), keys)
        if DIAGONAL:
            first_column = first + diagonal * KEYS
        column = first_column + tl.arange(0, KEYS)
        j = tl.where(column < wide, start + column, keys)  # beyond the row: as beyond all keys
        live = (start + first_column < limit) & (first_column >= 0)
        if BANDED:
            live &= start + tl.minimum(first_column + KEYS, wide) - 1 - first >= lower
            live &= start + first_column - tl.minimum(first + ROWS, queries) + 1 <= upper
        if len(MASK) > 0:
            i = first + tl.arange(0, ROWS)
            if live:
                shown = seen(slots, numbers, b, h, i[:, None], j[None, :], queries, limit, lower, upper, MASK, BANDED)
                live = tl.max(tl.max(shown.to(tl.int32), 1), 0) > 0
        if live:
            acc = _added(
                acc, q, k, v, gradient, lse, delta, sinks, q_stride_0, q_stride_1, q_stride_2, k_stride_0, k_stride_1, k_stride_2,
                v_stride_0, v_stride_1, v_stride_2, gradient_stride_0, gradient_stride_1, gradient_stride_2, seed, slots,
                numbers, b, h, heads, group, first, j, start + first_column, queries, limit, shift, lower, upper, scale, softcap,
                threshold, rescale, D, D0, D1, E, E0, MASK, BIAS, BANDED, CAPPED, FOLDED, DROPPED,
                IMAGE, DISTANCES, TERM, PART, ROWS, KEYS, PRECISION,
            )  # fmt: skip

    size_h, size_i = (heads if BY_HEAD else 1), (queries if BY_QUERY else 1)
    size_r, size_c = (high if BY_ROW else 1), (wide if BY_COLUMN else 1)
    place = (tl.program_id(2).to(tl.int64) * (batch if BY_BATCH else 1) + my_batch) * size_h + my_head
    i, column = my_tile * ROWS + tl.arange(0, ROWS), my_column * KEYS + tl.arange(0, KEYS)
    if DIAGONAL:
        step = tl.arange(0, 2 * KEYS)
        to = ((place * tl.num_programs(0) + tl.program_id(0)) * 2) * KEYS + step
        tl.store(of_bias + to, _by_distance(acc, step, KEYS))
    elif PLACE is not None:
        inside = (i < queries)[:, None] & (column < wide)[None, :]
        to = called(PLACE, my_head, slots, numbers, my_batch, my_head, i[:, None], column[None, :], queries, keys)
        tl.atomic_add(of_bias + tl.broadcast_to(to, acc.shape), acc, mask=inside & (acc != 0.0), sem="relaxed")
    elif BY_QUERY:
        at_rows = (((place * size_i + i) * size_r + my_row) * size_c)[:, None]
        if BY_COLUMN:
            inside = (i < queries)[:, None] & (column < wide)[None, :]
            tl.store(of_bias + at_rows + column[None, :], acc.to(of_bias.dtype.element_ty), mask=inside)
        else:
            found = tl.sum(acc, 1)[:, None]
            tl.store(of_bias + at_rows, found.to(of_bias.dtype.element_ty), mask=(i < queries)[:, None])
    else:
        start = (place * size_r + my_row) * size_c
        if BY_COLUMN:
            tl.store(of_bias + start + column, tl.sum(acc, 0).to(of_bias.dtype.element_ty), mask=column < wide)
        else:
            tl.store(of_bias + start, tl.sum(tl.sum(acc, 1), 0).to(of_bias.dtype.element_ty))


@triton.jit
def _by_distance(x, step, KEYS: tl.constexpr):
    """Return the sums of a square tile's diagonals: of step KEYS - 1 the main one's, and one later those of later columns."""
    column = step[None, :] - (KEYS - 1) + tl.arange(0, KEYS)[:, None]
    inside = (column >= 0) & (column < KEYS)
    return tl.sum(tl.where(inside, tl.gather(x, tl.where(inside, column, 0), 1), 0.0), 0)


@triton.jit
def _mine(at, count, MINE: tl.constexpr):
    """Return the index of a dimension, how many the sum goes over, and what is left of ``at``."""
    if MINE:
        return at % count, count * 0 + 1, at // count
    return at * 0, count, at


@triton.jit
def _added(
    acc, q, k, v, gradient, lse, delta, sinks, q_stride_0, q_stride_1, q_stride_2, k_stride_0, k_stride_1, k_stride_2,
    v_stride_0, v_stride_1, v_stride_2, gradient_stride_0, gradient_stride_1, gradient_stride_2, seed, slots,
    numbers, b, h, heads, group, first, j, first_key, queries, limit, shift, lower, upper, scale, softcap, threshold, rescale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, BANDED: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr,
    DROPPED: tl.constexpr, IMAGE: tl.constexpr, DISTANCES: tl.constexpr, TERM: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``acc`` and the gradients of the logits of queries from ``first`` on and keys ``j``, or times minus their distances."""
    i = first + tl.arange(0, ROWS)
    row = b * heads + h
    q += b.to(tl.int64) * q_stride_0 + h.to(tl.int64) * q_stride_1
    gradient += b.to(tl.int64) * gradient_stride_0 + h.to(tl.int64) * gradient_stride_1
    k += b.to(tl.int64) * k_stride_0 + (h // group).to(tl.int64) * k_stride_1
    v += b.to(tl.int64) * v_stride_0 + (h // group).to(tl.int64) * v_stride_1
    q0 = rows_of(q, q_stride_2, i, queries, 0, D0, D, True)
    q1 = q0
    s = tl.dot(q0, columns_of(k, k_stride_2, j, limit, 0, D0, D, True), input_precision=PRECISION)
    if D1 > 0:
        q1 = rows_of(q, q_stride_2, i, queries, D0, D1, D, True)
        s = tl.dot(q1, columns_of(k, k_stride_2, j, limit, D0, D1, D, True), s, input_precision=PRECISION)
    products = tl.dot(
        rows_of(gradient, gradient_stride_2, i, queries, 0, E0, E, True),
        columns_of(v, v_stride_2, j, limit, 0, E0, E, True),
        input_precision=PRECISION,
    )
    at = row.to(tl.int64) * queries
    bases, rests = exact_sums(
        loaded(lse + at, i, queries, float("inf"), True), q0, q1, k, k_stride_2, sinks, slots, numbers, b, h, i, 0,
        tl.cdiv(limit, KEYS), queries, limit, shift, lower, upper, scale, softcap, D, D0, D1, MASK, BIAS, BANDED, CAPPED, ROWS,
        KEYS, PRECISION,
    )  # fmt: skip
    bases, deltas = bases_of(bases), loaded(delta + at, i, queries, 0.0, True)
    drawn = bases
    if DROPPED:
        if IMAGE:
            drawn = retained_each(seed, threshold, row, i, j)
        else:
            drawn = retained(seed, threshold, row, i, first_key + 4 * tl.arange(0, KEYS // 4))
    _, slopes, _ = slopes_of_logits(
        s, products, bases[:, None], rests[:, None], deltas[:, None], drawn, slots, numbers, b, h, i[:, None], j[None, :],
        queries, limit, shift, scale, softcap, rescale, BIAS, CAPPED, FOLDED, DROPPED,
    )  # fmt: skip
    shown = seen(slots, numbers, b, h, i[:, None], j[None, :], queries, limit, lower, upper, MASK, BANDED)
    x, _ = unbiased(s, scale, softcap, CAPPED)
    slopes, x = slopes_before(
        slopes, x, BIAS, TERM + 1, TERM, slots, numbers, b, h, i[:, None], j[None, :], queries, limit, shift
    )
    if PART is not None:
        slopes *= called(PART, x, slots, numbers, b, h, i[:, None], j[None, :], queries, limit)
    if DISTANCES:
        slopes *= -tl.abs(i[:, None] + shift - j[None, :]).to(tl.float32)
    return acc + tl.where(shown, slopes, 0.0)
