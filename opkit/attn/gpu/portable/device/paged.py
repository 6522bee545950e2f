"""The forward kernel over pages, as :mod:`opkit.attn.gpu.portable.device.forward` computes it with ``ORDERED``, to the last bit.

Queries of all sequences lie one after another, those of each being its last. A program has one tile of the queries of one
sequence and head, and finds the tiles of its keys through the page table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.tile import FP8_SCALE, from_fp8, rows_of, store_rows, tiles_of_keys
from opkit.attn.gpu.portable.device.forward import started, sum_of, weighed, weights_of

PAGED_RUN_TIME = ("programs", "tall", "heads", "group", "pages", "width", "lower", "upper", "table_stride_0")


@triton.jit(do_not_specialize=PAGED_RUN_TIME)
def attention_forward_paged(
    q, k, v, out, lse, sinks, table, lengths, starts, k_scale, v_scale,
    q_stride_0, q_stride_1, k_stride_0, k_stride_1, k_stride_2, v_stride_0, v_stride_1, v_stride_2, out_stride_0, out_stride_1,
    lse_stride_0, lse_stride_1, table_stride_0,
    k_scale_stride_0, k_scale_stride_1, k_scale_stride_2, v_scale_stride_0, v_scale_stride_1, v_scale_stride_2,
    tall, programs, heads, group, pages, width, lower, upper, scale, softcap,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr, FOLDED: tl.constexpr, FP8: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tile ``program_id(0)`` of the queries of sequence ``program_id(1) // heads`` and of head ``program_id(1) % heads``.

    ``q``, ``out`` and ``lse`` are (queries of all sequences, heads, ...), ``k`` and ``v`` (pages, ``PAGE`` keys, key heads,
    size); ``COMPUTE`` is the dtype of products; ``FP8``: pages are the bytes of float8_e4m3fn.
    """
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    hk = (h // group).to(tl.int64)
    before = tl.load(starts + b).to(tl.int64)
    queries = (tl.load(starts + b + 1) - before).to(tl.int32)
    limit = tl.minimum(tl.maximum(tl.load(lengths + b), 0), width * PAGE).to(tl.int32)
    first = tl.program_id(0) * ROWS
    i = first + tl.arange(0, ROWS)
    q += before * q_stride_0 + h.to(tl.int64) * q_stride_1
    q0 = rows_of(q, q_stride_0, i, queries, 0, D0, D, True).to(COMPUTE)
    q1 = q0
    if D1 > 0:
        q1 = rows_of(q, q_stride_0, i, queries, D0, D1, D, True).to(COMPUTE)
    k += hk * k_stride_2
    v += hk * v_stride_2
    table += b.to(tl.int64) * table_stride_0

    shift = limit - queries
    low, high = lower + shift, upper + shift
    start, begin, end, stop = tiles_of_keys(first, tl.minimum(first + ROWS, queries) - 1, low, high, limit, KEYS)
    if not FOLDED:
        begin, end = start, start
    if first >= queries:
        begin, end, stop = start, start, start
    m, l = started(sinks, h, scale, ROWS, FOLDED)
    acc = tl.zeros([ROWS, E0], tl.float32)
    for n in tl.range(start, begin):
        m, l, acc = _paged_step(
            n, m, l, acc, q0, q1, k, v, table, k_scale, v_scale, hk, k_stride_0, k_stride_1, v_stride_0, v_stride_1,
            k_scale_stride_0, k_scale_stride_1, k_scale_stride_2, v_scale_stride_0, v_scale_stride_1, v_scale_stride_2,
            b, h, i, queries, limit, shift, low, high, scale, softcap, pages, D, D0, D1, E, E0, PAGE, CAPPED, FOLDED, FP8,
            COMPUTE, KEYS, PRECISION, True,
        )  # fmt: skip
    for n in tl.range(begin, end):
        m, l, acc = _paged_step(
            n, m, l, acc, q0, q1, k, v, table, k_scale, v_scale, hk, k_stride_0, k_stride_1, v_stride_0, v_stride_1,
            k_scale_stride_0, k_scale_stride_1, k_scale_stride_2, v_scale_stride_0, v_scale_stride_1, v_scale_stride_2,
            b, h, i, queries, limit, shift, low, high, scale, softcap, pages, D, D0, D1, E, E0, PAGE, CAPPED, FOLDED, FP8,
            COMPUTE, KEYS, PRECISION, False,
        )  # fmt: skip
    for n in tl.range(end, stop):
        m, l, acc = _paged_step(
            n, m, l, acc, q0, q1, k, v, table, k_scale, v_scale, hk, k_stride_0, k_stride_1, v_stride_0, v_stride_1,
            k_scale_stride_0, k_scale_stride_1, k_scale_stride_2, v_scale_stride_0, v_scale_stride_1, v_scale_stride_2,
            b, h, i, queries, limit, shift, low, high, scale, softcap, pages, D, D0, D1, E, E0, PAGE, CAPPED, FOLDED, FP8,
            COMPUTE, KEYS, PRECISION, True,
        )  # fmt: skip

    factor = 1.0 / tl.where(l == 0, 1.0, l)
    out += before * out_stride_0 + h.to(tl.int64) * out_stride_1
    store_rows(out, out_stride_0, i, queries, acc * factor[:, None], 0, E0, E)
    lse += before * lse_stride_0 + h.to(tl.int64) * lse_stride_1
    tl.store(lse + i * lse_stride_0, sum_of(m, l, scale, FOLDED), mask=i < queries)


@triton.jit
def _paged_step(
    n, m, l, acc, q0, q1, k, v, table, k_scale, v_scale, hk, k_stride_0, k_stride_1, v_stride_0, v_stride_1,
    k_scale_stride_0, k_scale_stride_1, k_scale_stride_2, v_scale_stride_0, v_scale_stride_1, v_scale_stride_2,
    b, h, i, queries, limit, shift, low, high, scale, softcap, pages,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr, FOLDED: tl.constexpr, FP8: tl.constexpr, COMPUTE: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the greatest logits, the sums and the results so far, not yet divided by the sums."""
    j = n * KEYS + tl.arange(0, KEYS)
    inside = j < limit
    page = tl.load(table + j // PAGE, mask=inside, other=0)
    page = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
    at_k, at_v = page * k_stride_0 + (j % PAGE) * k_stride_1, page * v_stride_0 + (j % PAGE) * v_stride_1
    k_factor, v_factor = 1.0, 1.0
    if k_scale is not None:
        at = k_scale + page * k_scale_stride_0 + (j % PAGE) * k_scale_stride_1 + hk * k_scale_stride_2
        k_factor = tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if v_scale is not None:
        at = v_scale + page * v_scale_stride_0 + (j % PAGE) * v_scale_stride_1 + hk * v_scale_stride_2
        v_factor = tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]
    k0 = _paged(k, at_k[None, :], inside[None, :], k_factor, 0, D0, D, k_scale is not None, FP8, COMPUTE, True)
    s = tl.dot(q0, k0, input_precision=PRECISION)
    if D1 > 0:
        k1 = _paged(k, at_k[None, :], inside[None, :], k_factor, D0, D1, D, k_scale is not None, FP8, COMPUTE, True)
        s = tl.dot(q1, k1, s, input_precision=PRECISION)
    m, l, decay, p, shown = weights_of(
        s, m, l, (), (), b, h, i, j, queries, limit, shift, low, high, scale, softcap, (), (), True, CAPPED, FOLDED, True,
        PARTIAL,
    )  # fmt: skip
    values = _paged(v, at_v[:, None], inside[:, None], v_factor, 0, E0, E, v_scale is not None, FP8, COMPUTE, False)
    return m, l, weighed(acc * decay[:, None], p, values, shown, PRECISION, PARTIAL)


@triton.jit
def _paged(
    x, at, inside, factor, FIRST: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, SCALED: tl.constexpr,
    FP8: tl.constexpr, COMPUTE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Elements from ``FIRST`` on of rows of pages times ``factor``, (rows, WIDE) or transposed; zeros beyond what is there."""
    column = FIRST + (tl.arange(0, WIDE)[:, None] if TRANSPOSED else tl.arange(0, WIDE)[None, :])
    found = tl.load(x + at + column, mask=inside & (column < SIZE), other=0)
    if FP8:
        found = from_fp8(found).to(tl.float32) * FP8_SCALE
    if SCALED:
        found = found.to(tl.float32) * factor
    return found.to(COMPUTE)
