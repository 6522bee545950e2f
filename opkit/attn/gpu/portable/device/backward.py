"""The backward kernels in plain Triton: the gradients of keys and values by tiles of keys, those of queries by tiles of queries.

Probabilities are computed again from the log-sum-exp (Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135). No
sum is shared among programs, so that nothing depends on their order: gradients are the same in every run. That costs seven
products for each pair of tiles where five would do if the gradient of queries were added up in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.tile import (
    retained,
    rows_of,
    seen,
    slopes_before,
    store_rows,
    tiles_of_keys,
    tiles_of_queries,
    unbiased,
)
from opkit.attn.gpu.portable.device.backward_rows import (
    apart_of,
    bases_of,
    exact_sums,
    folded_bases,
    is_large,
    loaded,
    slopes_of_logits,
)
from opkit.attn.gpu.portable.device.forward import RUN_TIME


@triton.jit
def _clean(x, PARTIAL: tl.constexpr):
    """Zeros for what is not finite: times the zero of what is hidden it would be NaN."""
    if PARTIAL:
        return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)
    return x


@triton.jit
def _slopes(
    s, products, base, rest, delta, drawn, slots, numbers, b, h, i, j, queries, limit, shift, lower, upper, scale, softcap,
    rescale,
    MASK: tl.constexpr, BIAS: tl.constexpr, BANDED: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr,
    DROPPED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Return the weights of values, and the gradients of products of queries and keys before ``scale``."""
    weights, slopes, t = slopes_of_logits(
        s, products, base, rest, delta, drawn, slots, numbers, b, h, i, j, queries, limit, shift, scale, softcap, rescale,
        BIAS, CAPPED, FOLDED, DROPPED,
    )  # fmt: skip
    if len(BIAS) > 0:
        x, _ = unbiased(s, scale, softcap, CAPPED)
        slopes, _ = slopes_before(slopes, x, BIAS, 0, 0, slots, numbers, b, h, i, j, queries, limit, shift)
    if CAPPED:
        slopes *= 1.0 - t * t
    if PARTIAL:
        shown = seen(slots, numbers, b, h, i, j, queries, limit, lower, upper, MASK, BANDED)
        weights, slopes = tl.where(shown, weights, 0.0), tl.where(shown, slopes, 0.0)
    return weights, slopes


@triton.jit(do_not_specialize=(*RUN_TIME, "kv_heads"))
def attention_of_keys(
    q, k, v, gradient, lse, apart, delta, of_k, of_v, seed, lengths, tiles, counts,
    q_stride_0, q_stride_1, q_stride_2, k_stride_0, k_stride_1, k_stride_2, v_stride_0, v_stride_1, v_stride_2,
    gradient_stride_0, gradient_stride_1, gradient_stride_2, of_k_stride_0, of_k_stride_1, of_k_stride_2,
    of_v_stride_0, of_v_stride_1, of_v_stride_2, lengths_stride_0,
    tiles_stride_0, tiles_stride_1, tiles_stride_2, counts_stride_0, counts_stride_1, counts_stride_2,
    t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3, t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3,
    t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3, t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3,
    t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3, t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3,
    f0, f0_stride_0, f0_stride_1, f0_stride_2, f0_stride_3, f1, f1_stride_0, f1_stride_1, f1_stride_2, f1_stride_3,
    f2, f2_stride_0, f2_stride_1, f2_stride_2, f2_stride_3, f3, f3_stride_0, f3_stride_1, f3_stride_2, f3_stride_3,
    f4, f4_stride_0, f4_stride_1, f4_stride_2, f4_stride_3, f5, f5_stride_0, f5_stride_1, f5_stride_2, f5_stride_3,
    n0, n1, n2, n3, n4, n5, n6, n7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15, m16, m17, m18, m19, m20, m21, m22, m23,
    programs, kv_heads, group, queries, keys, lower, upper, scale, softcap, threshold, rescale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, BANDED: tl.constexpr, LISTED: tl.constexpr, CAPPED: tl.constexpr,
    FOLDED: tl.constexpr, DROPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys ``KEYS * program_id(0)`` and those after them, of key head ``program_id(1)``.

    ``lse`` and ``delta`` are contiguous.
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
    tile, first = tl.program_id(0), tl.program_id(0) * KEYS
    b, hk = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    j = first + tl.arange(0, KEYS)
    k += b.to(tl.int64) * k_stride_0 + hk.to(tl.int64) * k_stride_1
    v += b.to(tl.int64) * v_stride_0 + hk.to(tl.int64) * v_stride_1
    k0, values = rows_of(k, k_stride_2, j, keys, 0, D0, D, True), rows_of(v, v_stride_2, j, keys, 0, E0, E, True)
    k1 = k0
    if D1 > 0:
        k1 = rows_of(k, k_stride_2, j, keys, D0, D1, D, True)
    dk0, dk1 = tl.zeros([KEYS, D0], tl.float32), tl.zeros([KEYS, D1 if D1 > 0 else 16], tl.float32)
    dv = tl.zeros([KEYS, E0], tl.float32)

    limit = keys
    if lengths is not None:
        limit = tl.minimum(tl.maximum(tl.load(lengths + b * lengths_stride_0), 0), keys)
    low, high = lower, upper
    if not BANDED:
        low, high = -keys - queries, keys + queries
    start, begin, end, stop = tiles_of_queries(
        first, tl.minimum(first + KEYS, keys) - 1, low, high, queries, limit, ROWS
    )
    if len(MASK) > 0:  # without lists of tiles each one that the bands leave is asked
        begin, end = start, start
    full, partial, total, last = end - begin, begin - start, stop - start, start
    shift = keys - queries
    for g in range(0, group):
        h = hk * group + g
        row = b * (kv_heads * group) + h
        q_at = q + b.to(tl.int64) * q_stride_0 + h.to(tl.int64) * q_stride_1
        gradient_at = gradient + b.to(tl.int64) * gradient_stride_0 + h.to(tl.int64) * gradient_stride_1
        at_rows, apart_at = row.to(tl.int64) * queries, apart_of(apart, row, queries)
        tiles_at = tiles
        if LISTED:
            tiles_at += b * tiles_stride_0 + h * tiles_stride_1 + tile * tiles_stride_2
            counts_at = counts + b * counts_stride_0 + h * counts_stride_1 + tile * counts_stride_2
            full, total = tl.load(counts_at), tl.load(counts_at + 1)
            last = tl.cdiv(queries, ROWS) - 1
        for t in tl.range(0, full):
            if LISTED:
                n = tl.load(tiles_at + t)
            else:
                n = begin + t
            dk0, dk1, dv = _keys_step(
                n, dk0, dk1, dv, k0, k1, values, q_at, gradient_at, q_stride_2, gradient_stride_2, lse + at_rows, apart_at,
                delta + at_rows, seed, slots, numbers, b, h, row, j, first, queries, limit, shift, lower, upper,
                scale, softcap, threshold, rescale, D, D0, D1, E, E0, MASK, BIAS, BANDED, CAPPED, FOLDED, DROPPED, ROWS, KEYS,
                PRECISION, False, False,
            )  # fmt: skip
        for t in tl.range(0, total - full):
            if LISTED:
                n = tl.load(tiles_at + last - t)
            else:
                n = tl.where(t < partial, start + t, end + t - partial)
            dk0, dk1, dv = _keys_step(
                n, dk0, dk1, dv, k0, k1, values, q_at, gradient_at, q_stride_2, gradient_stride_2, lse + at_rows, apart_at,
                delta + at_rows, seed, slots, numbers, b, h, row, j, first, queries, limit, shift, lower, upper,
                scale, softcap, threshold, rescale, D, D0, D1, E, E0, MASK, BIAS, BANDED, CAPPED, FOLDED, DROPPED, ROWS, KEYS,
                PRECISION, True, False,
            )  # fmt: skip
        if FOLDED:  # noqa: SIM102 - the one is compiled, the other asked
            if tl.load(apart_at + 2 * queries) != 0.0:
                for t in tl.range(0, total, num_stages=1):
                    if LISTED:
                        n = tl.load(tiles_at + tl.where(t < full, t, last - t + full))
                    else:
                        n = start + t
                    dk0, dk1, dv = _keys_step(
                        n, dk0, dk1, dv, k0, k1, values, q_at, gradient_at, q_stride_2, gradient_stride_2, lse + at_rows,
                        apart_at, delta + at_rows, seed, slots, numbers, b, h, row, j, first, queries, limit, shift, lower,
                        upper, scale, softcap, threshold, rescale, D, D0, D1, E, E0, MASK, BIAS, BANDED, CAPPED, False, DROPPED,
                        ROWS, KEYS, PRECISION, True, True,
                    )  # fmt: skip

    of_k += b.to(tl.int64) * of_k_stride_0 + hk.to(tl.int64) * of_k_stride_1
    of_v += b.to(tl.int64) * of_v_stride_0 + hk.to(tl.int64) * of_v_stride_1
    store_rows(of_k, of_k_stride_2, j, keys, dk0 * scale, 0, D0, D)
    store_rows(of_v, of_v_stride_2, j, keys, dv, 0, E0, E)
    if D1 > 0:
        store_rows(of_k, of_k_stride_2, j, keys, dk1 * scale, D0, D1, D)


@triton.jit
def _keys_step(
    n, dk0, dk1, dv, k0, k1, values, q, gradient, q_row, gradient_row, lse, apart, delta, seed,
    slots, numbers, b, h, row, j, first, queries, limit, shift, lower, upper, scale, softcap, threshold, rescale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, BANDED: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr,
    DROPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, PARTIAL: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """One tile of queries: the gradients of keys and values so far. Tiles of logits are (keys, queries) here.

    ``LATE``: of the rows alone that were left out where logits are ``FOLDED``.
    """
    i = n * ROWS + tl.arange(0, ROWS)
    q0 = rows_of(q, q_row, i, queries, 0, D0, D, PARTIAL)
    q1 = q0
    s = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
    if D1 > 0:
        q1 = rows_of(q, q_row, i, queries, D0, D1, D, PARTIAL)
        s = tl.dot(k1, tl.trans(q1), s, input_precision=PRECISION)
    upstream = rows_of(gradient, gradient_row, i, queries, 0, E0, E, PARTIAL)
    products = tl.dot(values, tl.trans(upstream), input_precision=PRECISION)
    deltas = loaded(delta, i, queries, 0.0, PARTIAL)
    if FOLDED:
        bases = folded_bases(loaded(lse, i, queries, float("inf"), PARTIAL))
        rests = bases
    else:
        bases, rests = (
            bases_of(loaded(apart, i, queries, float("inf"), PARTIAL)),
            loaded(apart + queries, i, queries, 0.0, PARTIAL),
        )
        if LATE:
            large = is_large(loaded(lse, i, queries, float("inf"), PARTIAL))
            bases, rests = tl.where(large, bases, float("inf")), tl.where(large, rests, 0.0)
    drawn = bases
    if DROPPED:
        drawn = tl.trans(retained(seed, threshold, row, i, first + 4 * tl.arange(0, KEYS // 4)))
    p, slopes = _slopes(
        s, products, bases[None, :], rests[None, :], deltas[None, :], drawn, slots, numbers, b, h, i[None, :], j[:, None],
        queries, limit, shift, lower, upper, scale, softcap, rescale, MASK, BIAS, BANDED, CAPPED, FOLDED, DROPPED, PARTIAL,
    )  # fmt: skip
    p, slopes = p.to(upstream.dtype), slopes.to(q0.dtype)
    dv = tl.dot(p, upstream, dv, input_precision=PRECISION)
    dk0 = tl.dot(slopes, _clean(q0, PARTIAL), dk0, input_precision=PRECISION)
    if D1 > 0:
        dk1 = tl.dot(slopes, _clean(q1, PARTIAL), dk1, input_precision=PRECISION)
    return dk0, dk1, dv


@triton.jit(do_not_specialize=RUN_TIME)
def attention_of_queries(
    q, k, v, gradient, lse, delta, of_q, apart, sinks, seed, lengths, tiles, counts,
    q_stride_0, q_stride_1, q_stride_2, k_stride_0, k_stride_1, k_stride_2, v_stride_0, v_stride_1, v_stride_2,
    gradient_stride_0, gradient_stride_1, gradient_stride_2, of_q_stride_0, of_q_stride_1, of_q_stride_2, lengths_stride_0,
    tiles_stride_0, tiles_stride_1, tiles_stride_2, counts_stride_0, counts_stride_1, counts_stride_2,
    t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3, t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3,
    t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3, t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3,
    t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3, t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3,
    f0, f0_stride_0, f0_stride_1, f0_stride_2, f0_stride_3, f1, f1_stride_0, f1_stride_1, f1_stride_2, f1_stride_3,
    f2, f2_stride_0, f2_stride_1, f2_stride_2, f2_stride_3, f3, f3_stride_0, f3_stride_1, f3_stride_2, f3_stride_3,
    f4, f4_stride_0, f4_stride_1, f4_stride_2, f4_stride_3, f5, f5_stride_0, f5_stride_1, f5_stride_2, f5_stride_3,
    n0, n1, n2, n3, n4, n5, n6, n7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15, m16, m17, m18, m19, m20, m21, m22, m23,
    programs, heads, group, queries, keys, lower, upper, scale, softcap, threshold, rescale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, BANDED: tl.constexpr, LISTED: tl.constexpr, CAPPED: tl.constexpr,
    FOLDED: tl.constexpr, DROPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries ``ROWS * program_id(0)`` and those after them, of head ``program_id(1)``; of bands the last tiles come first."""
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
    tile = tl.program_id(0)
    if BANDED:
        tile = tl.num_programs(0) - 1 - tile
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row, first = b * heads + h, tile * ROWS
    i = first + tl.arange(0, ROWS)
    q += b.to(tl.int64) * q_stride_0 + h.to(tl.int64) * q_stride_1
    gradient += b.to(tl.int64) * gradient_stride_0 + h.to(tl.int64) * gradient_stride_1
    k += b.to(tl.int64) * k_stride_0 + (h // group).to(tl.int64) * k_stride_1
    v += b.to(tl.int64) * v_stride_0 + (h // group).to(tl.int64) * v_stride_1
    q0 = rows_of(q, q_stride_2, i, queries, 0, D0, D, True)
    upstream = rows_of(gradient, gradient_stride_2, i, queries, 0, E0, E, True)
    q1 = q0
    if D1 > 0:
        q1 = rows_of(q, q_stride_2, i, queries, D0, D1, D, True)
    at_rows = row.to(tl.int64) * queries
    deltas = loaded(delta + at_rows, i, queries, 0.0, True)

    limit = keys
    if lengths is not None:
        limit = tl.minimum(tl.maximum(tl.load(lengths + b * lengths_stride_0), 0), keys)
    if LISTED:
        tiles += b * tiles_stride_0 + h * tiles_stride_1 + tile * tiles_stride_2
        counts += b * counts_stride_0 + h * counts_stride_1 + tile * counts_stride_2
        full, total = tl.load(counts), tl.load(counts + 1)
        begin = full * 0
        start, end, partial, last = begin, begin, begin, tl.cdiv(keys, KEYS) - 1
    else:
        low, high = lower, upper
        if not BANDED:
            low, high = -keys - queries, keys + queries
        start, begin, end, stop = tiles_of_keys(first, tl.minimum(first + ROWS, queries) - 1, low, high, limit, KEYS)
        if len(MASK) > 0:  # without lists of tiles each one that the bands leave is asked
            begin, end = start, start
        full, partial, total, last = end - begin, begin - start, stop - start, start
    dq0, dq1 = tl.zeros([ROWS, D0], tl.float32), tl.zeros([ROWS, D1 if D1 > 0 else 16], tl.float32)
    shift = keys - queries
    first_tile, end_tile = start, start + total
    if LISTED:
        first_tile, end_tile = begin, tl.cdiv(keys, KEYS)
    sums, apart_at = loaded(lse + at_rows, i, queries, float("inf"), True), apart_of(apart, row, queries)
    if FOLDED:
        bases = folded_bases(sums)
        rests = bases
    else:
        bases, rests = exact_sums(
            sums, q0, q1, k, k_stride_2, sinks, slots, numbers, b, h, i, first_tile, end_tile, queries, limit, shift, lower,
            upper, scale, softcap, D, D0, D1, MASK, BIAS, BANDED, CAPPED, ROWS, KEYS, PRECISION,
        )  # fmt: skip
        tl.store(apart_at + i, bases, mask=i < queries)
        tl.store(apart_at + queries + i, rests, mask=i < queries)
        bases = bases_of(bases)
    for t in tl.range(0, full):
        if LISTED:
            n = tl.load(tiles + t)
        else:
            n = begin + t
        dq0, dq1 = _queries_step(
            n, dq0, dq1, q0, q1, upstream, k, v, k_stride_2, v_stride_2, bases, rests, deltas, seed, slots, numbers, b, h, row,
            i, queries, limit, shift, lower, upper, scale, softcap, threshold, rescale, D, D0, D1, E, E0, MASK, BIAS, BANDED,
            CAPPED, FOLDED, DROPPED, KEYS, PRECISION, False,
        )  # fmt: skip
    for t in tl.range(0, total - full):
        if LISTED:
            n = tl.load(tiles + last - t)
        else:
            n = tl.where(t < partial, start + t, end + t - partial)
        dq0, dq1 = _queries_step(
            n, dq0, dq1, q0, q1, upstream, k, v, k_stride_2, v_stride_2, bases, rests, deltas, seed, slots, numbers, b, h, row,
            i, queries, limit, shift, lower, upper, scale, softcap, threshold, rescale, D, D0, D1, E, E0, MASK, BIAS, BANDED,
            CAPPED, FOLDED, DROPPED, KEYS, PRECISION, True,
        )  # fmt: skip
    if FOLDED:
        sums = loaded(lse + at_rows, i, queries, float("inf"), True)  # not kept meanwhile
        if tl.max(is_large(sums).to(tl.int32), 0) > 0:
            bases, rests = exact_sums(
                sums, q0, q1, k, k_stride_2, sinks, slots, numbers, b, h, i, first_tile, end_tile, queries, limit, shift, lower,
                upper, scale, softcap, D, D0, D1, MASK, BIAS, BANDED, CAPPED, ROWS, KEYS, PRECISION,
            )  # fmt: skip
            tl.store(apart_at + i, bases, mask=i < queries)
            tl.store(apart_at + queries + i, rests, mask=i < queries)
            tl.store(apart_at + 2 * queries, 1.0)
            bases = tl.where(is_large(sums), bases, float("inf"))
            for n in tl.range(first_tile, end_tile, num_stages=1):
                dq0, dq1 = _queries_step(
                    n, dq0, dq1, q0, q1, upstream, k, v, k_stride_2, v_stride_2, bases, rests, deltas, seed, slots, numbers, b,
                    h, row, i, queries, limit, shift, lower, upper, scale, softcap, threshold, rescale, D, D0, D1, E, E0, MASK,
                    BIAS, BANDED, CAPPED, False, DROPPED, KEYS, PRECISION, True,
                )  # fmt: skip

    of_q += b.to(tl.int64) * of_q_stride_0 + h.to(tl.int64) * of_q_stride_1
    store_rows(of_q, of_q_stride_2, i, queries, dq0 * scale, 0, D0, D)
    if D1 > 0:
        store_rows(of_q, of_q_stride_2, i, queries, dq1 * scale, D0, D1, D)


@triton.jit
def _queries_step(
    n, dq0, dq1, q0, q1, upstream, k, v, k_row, v_row, bases, rests, deltas, seed, slots, numbers, b, h, row, i,
    queries, limit, shift, lower, upper, scale, softcap, threshold, rescale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, BANDED: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr,
    DROPPED: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the gradient of queries so far."""
    j = n * KEYS + tl.arange(0, KEYS)
    k0 = rows_of(k, k_row, j, limit, 0, D0, D, PARTIAL)
    k1 = k0
    s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    if D1 > 0:
        k1 = rows_of(k, k_row, j, limit, D0, D1, D, PARTIAL)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
    values = rows_of(v, v_row, j, limit, 0, E0, E, PARTIAL)
    products = tl.dot(upstream, tl.trans(values), input_precision=PRECISION)
    drawn = bases
    if DROPPED:
        drawn = retained(seed, threshold, row, i, n * KEYS + 4 * tl.arange(0, KEYS // 4))
    _, slopes = _slopes(
        s, products, bases[:, None], rests[:, None], deltas[:, None], drawn, slots, numbers, b, h, i[:, None], j[None, :],
        queries, limit, shift, lower, upper, scale, softcap, rescale, MASK, BIAS, BANDED, CAPPED, FOLDED, DROPPED, PARTIAL,
    )  # fmt: skip
    slopes = slopes.to(k0.dtype)
    dq0 = tl.dot(slopes, _clean(k0, PARTIAL), dq0, input_precision=PRECISION)
    if D1 > 0:
        dq1 = tl.dot(slopes, _clean(k1, PARTIAL), dq1, input_precision=PRECISION)
    return dq0, dq1
