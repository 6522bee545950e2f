"""The forward kernel in plain Triton: any GPU, dtype, head size, mask, bias.

A program has one tile of queries of one head and goes over the tiles of keys that it sees, first over those that it sees wholly,
for which no mask is evaluated, then over the others (Dao, "FlashAttention-2", 2023, https://arxiv.org/abs/2307.08691). The
softmax is online, a query that sees nothing gives zeros. ``FOLDED``: logits are products times ``scale``, and products are what
is compared. Differences are taken before they are multiplied: of large logits a product's rounding would not be that of the
maximum's. ``ORDERED``: it goes over tiles in order and treats all of them alike, so that what a query gives does not depend, to
the last bit, on the other queries of its tile.

FLOPs: ``2 * (d + d_v)`` for each pair of a query and a key of a live tile; bytes: the queries and results once, keys and values
once for each tile of queries, from L2 where those of one head fit there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.tile import (
    FP8_SCALE,
    LOG2E,
    columns_of,
    from_fp8,
    logits,
    retained,
    rows_of,
    seen,
    store_rows,
    tiles_of_keys,
    widened,
)

LN2 = tl.constexpr(0.6931471805599453)
RUN_TIME = (
    *("programs", "heads", "group", "queries", "keys", "lower", "upper", "threshold"),
    *("lse_stride_0", "lse_stride_1", "lengths_stride_0"),
    *(f"{of}_stride_{k}" for of in ("tiles", "counts") for k in range(3)),
    *(f"n{i}" for i in range(8)),
    *(f"m{i}" for i in range(24)),
    *(f"{of}{i}_stride_{k}" for of in "tf" for i in range(6) for k in range(3)),
)  # fmt: skip
"""Numbers whose values are not compiled in: they change with the batch and with sequences."""
PAGED_RUN_TIME = ("programs", "tall", "heads", "group", "pages", "width", "lower", "upper", "table_stride_0")


@triton.jit(do_not_specialize=RUN_TIME)
def attention_forward(
    q, k, v, q_by, k_by, v_by, out, lse, sinks, seed, lengths, tiles, counts,
    q_stride_0, q_stride_1, q_stride_2, k_stride_0, k_stride_1, k_stride_2, v_stride_0, v_stride_1, v_stride_2,
    out_stride_0, out_stride_1, out_stride_2, lse_stride_0, lse_stride_1, lengths_stride_0,
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
    FOLDED: tl.constexpr, DROPPED: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Queries ``ROWS * program_id(0)`` and those after them, of head ``program_id(1)``; of bands the last tiles come first.

    ``q_by``, ``k_by`` and ``v_by``, (batch, key heads) and contiguous, are what elements are multiplied by, or None. ``FP8`` is
    as :func:`opkit.attn.gpu.device.tile.widened` has it.
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
    tile = tl.program_id(0)
    if BANDED:
        tile = tl.num_programs(0) - 1 - tile
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    first = tile * ROWS
    i = first + tl.arange(0, ROWS)
    q += b.to(tl.int64) * q_stride_0 + h.to(tl.int64) * q_stride_1
    k += b.to(tl.int64) * k_stride_0 + (h // group).to(tl.int64) * k_stride_1
    v += b.to(tl.int64) * v_stride_0 + (h // group).to(tl.int64) * v_stride_1
    q0 = widened(rows_of(q, q_stride_2, i, queries, 0, D0, D, True), FP8, False)
    q1 = q0
    if D1 > 0:
        q1 = widened(rows_of(q, q_stride_2, i, queries, D0, D1, D, True), FP8, False)
    of_head = b * (heads // group) + h // group
    if q_by is not None:
        scale *= tl.load(q_by + of_head) * tl.load(k_by + of_head)

    limit = keys
    if lengths is not None:
        limit = tl.minimum(tl.maximum(tl.load(lengths + b * lengths_stride_0), 0), keys)
    if LISTED:
        tiles += b * tiles_stride_0 + h * tiles_stride_1 + tile * tiles_stride_2
        counts += b * counts_stride_0 + h * counts_stride_1 + tile * counts_stride_2
        full, total = tl.load(counts), tl.load(counts + 1)
        begin = full * 0
        partial = begin
        last = tl.cdiv(keys, KEYS) - 1
        whole, taken = full, begin
        if ORDERED:
            full = begin
    else:
        low, high = lower, upper
        if not BANDED:
            low, high = -keys - queries, keys + queries
        rows_end = tl.minimum(first + ROWS, queries) - 1
        start, begin, end, stop = tiles_of_keys(first, rows_end, low, high, limit, KEYS)
        if len(MASK) > 0 or (ORDERED and not FOLDED):  # without lists of tiles each one that the bands leave is asked
            begin, end = start, start
        full, partial = end - begin, begin - start
        total, last = stop - start, start
        whole, taken = full, full

    m, l = started(sinks, h, scale, ROWS, FOLDED)
    acc = tl.zeros([ROWS, E0], tl.float32)
    row = b * heads + h
    shift = keys - queries
    if ORDERED and not LISTED:
        for t in tl.range(0, partial):
            m, l, acc = _step(
                start + t, m, l, acc, q0, q1, k, v, k_stride_2, v_stride_2, seed, slots, numbers, b, h, row, i, queries, limit,
                shift, lower, upper, scale, softcap, threshold, rescale, D, D0, D1, E, E0, MASK, BIAS, BANDED, CAPPED, FOLDED,
                DROPPED, ORDERED, KEYS, PRECISION, FP8, True,
            )  # fmt: skip
        total, partial = total - partial, partial * 0
    for t in tl.range(0, full):
        if LISTED:
            n = tl.load(tiles + t)
        else:
            n = begin + t
        m, l, acc = _step(
            n, m, l, acc, q0, q1, k, v, k_stride_2, v_stride_2, seed, slots, numbers, b, h, row, i, queries, limit, shift,
            lower, upper, scale, softcap, threshold, rescale, D, D0, D1, E, E0, MASK, BIAS, BANDED, CAPPED, FOLDED, DROPPED,
            ORDERED, KEYS, PRECISION, FP8, False,
        )  # fmt: skip
    for t in tl.range(0, total - full):
        if LISTED and ORDERED:
            n, taken = _next(tiles, taken, whole, last, t, total)
        elif LISTED:
            n = tl.load(tiles + last - t)
        else:
            n = tl.where(t < partial, start + t, end + t - partial)
        m, l, acc = _step(
            n, m, l, acc, q0, q1, k, v, k_stride_2, v_stride_2, seed, slots, numbers, b, h, row, i, queries, limit, shift,
            lower, upper, scale, softcap, threshold, rescale, D, D0, D1, E, E0, MASK, BIAS, BANDED, CAPPED, FOLDED, DROPPED,
            ORDERED, KEYS, PRECISION, FP8, True,
        )  # fmt: skip

    factor = 1.0 / tl.where(l == 0, 1.0, l)
    if v_by is not None:
        factor *= tl.load(v_by + of_head)
    out += b.to(tl.int64) * out_stride_0 + h.to(tl.int64) * out_stride_1
    store_rows(out, out_stride_2, i, queries, acc * factor[:, None], 0, E0, E)
    lse += b.to(tl.int64) * lse_stride_0 + h * lse_stride_1
    tl.store(lse + i, sum_of(m, l, scale, FOLDED), mask=i < queries)


@triton.jit
def started(sinks, h, scale, ROWS: tl.constexpr, FOLDED: tl.constexpr):
    """Return the greatest logit and the sum of a row that has seen nothing but its head's sink."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        m = tl.zeros([ROWS], tl.float32) + tl.load(sinks + h).to(tl.float32) / (scale if FOLDED else 1.0)
    return m, tl.where(m == float("-inf"), 0.0, 1.0)


@triton.jit
def sum_of(m, l, scale, FOLDED: tl.constexpr):
    """Return the log-sum-exp of rows, of their greatest logits and their sums."""
    return m * (scale if FOLDED else 1.0) + tl.log2(l) * LN2


@triton.jit
def _next(tiles, taken, whole, last, t, total):
    """Return the next tile in order of two lists, each in order: the first from its front on, ``taken`` of it so far."""
    wholly = tl.load(tiles + taken, mask=taken < whole, other=1 << 30)
    partly = tl.load(tiles + last - (t - taken), mask=t - taken < total - whole, other=1 << 30)
    return tl.minimum(wholly, partly), taken + (wholly < partly).to(tl.int32)


@triton.jit
def _step(
    n, m, l, acc, q0, q1, k, v, k_row, v_row, seed, slots, numbers, b, h, row, i, queries, limit, shift,
    lower, upper, scale, softcap, threshold, rescale,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr,
    MASK: tl.constexpr, BIAS: tl.constexpr, BANDED: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr,
    DROPPED: tl.constexpr, ORDERED: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the greatest logits, the sums and the results so far, not yet divided by the sums."""
    j = n * KEYS + tl.arange(0, KEYS)
    s = tl.dot(q0, widened(columns_of(k, k_row, j, limit, 0, D0, D, PARTIAL), FP8, False), input_precision=PRECISION)
    if D1 > 0:
        k1 = widened(columns_of(k, k_row, j, limit, D0, D1, D, PARTIAL), FP8, False)
        s = tl.dot(q1, k1, s, input_precision=PRECISION)
    m, l, decay, p, shown = weights_of(
        s, m, l, slots, numbers, b, h, i, j, queries, limit, shift, lower, upper, scale, softcap, MASK, BIAS, BANDED, CAPPED,
        FOLDED, ORDERED, PARTIAL,
    )  # fmt: skip
    if DROPPED:
        p = tl.where(retained(seed, threshold, row, i, n * KEYS + 4 * tl.arange(0, KEYS // 4)), p * rescale, 0.0)
    values = widened(rows_of(v, v_row, j, limit, 0, E0, E, PARTIAL), FP8, True)
    return m, l, weighed(acc * decay[:, None], p, values, shown, PRECISION, PARTIAL)


@triton.jit
def weights_of(
    s, m, l, slots, numbers, b, h, i, j, queries, limit, shift, lower, upper, scale, softcap,
    MASK: tl.constexpr, BIAS: tl.constexpr, BANDED: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr,
    ORDERED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """From a tile of products: the greatest logits, the sums, what earlier sums are times, weights, and what is seen."""
    shown = s
    if not FOLDED:
        s, _ = logits(
            s, scale, softcap, slots, numbers, b, h, i[:, None], j[None, :], queries, limit, shift, BIAS, CAPPED
        )
    if PARTIAL:
        shown = seen(slots, numbers, b, h, i[:, None], j[None, :], queries, limit, lower, upper, MASK, BANDED)
        s = tl.where(shown, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    base = top
    if PARTIAL or len(BIAS) > 0:
        base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    unit = scale * LOG2E if FOLDED else LOG2E
    decay = tl.exp2((m - base) * unit)
    p = tl.exp2((s - base[:, None]) * unit)
    if ORDERED:  # a compiler that fuses here and not there, or sums a row in another order, must not change a bit
        return top, tl.fma(l, decay, _sum(p)), decay, p, shown
    return top, l * decay + tl.sum(p, 1), decay, p, shown


@triton.jit
def _sum(x):
    """Return the sums of rows of at most 64, by halves: of two numbers there is but one sum, in whichever threads they are."""
    for _ in tl.static_range(6):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def weighed(acc, p, v, shown, PRECISION: tl.constexpr, PARTIAL: tl.constexpr):
    """``acc + p @ v``. What is not finite in a partly visible tile reaches the queries that see it, as NaN, and no others."""
    if PARTIAL:
        odd = ~(tl.abs(v.to(tl.float32)) < float("inf"))
        v = tl.where(odd, 0.0, v).to(v.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        if tl.max(odd.to(tl.int32)) > 0:
            met = tl.dot(shown.to(tl.float16), odd.to(tl.float16))
            acc = tl.where(met > 0, float("nan"), acc)
        return acc
    return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)


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
