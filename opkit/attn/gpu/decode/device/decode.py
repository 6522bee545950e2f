"""Decoding attention on GPUs: few queries, whose time goes to reading keys and values. A kernel split over the keys.

A *tile* is up to ``ROWS`` rows, a row being one query of one of the heads that share a head of keys; the queries of a
sequence come one after the other, each with all its heads. The keys that a tile sees are divided evenly among ``splits``
programs in blocks of ``BLOCK``; where there is more than one, a second kernel merges what they found, in the order of the
splits, so that results are the same each time (Dao et al., "Flash-Decoding for long-context inference", 2023). Softmax is
online and in base 2. A head size is read in two parts: the largest power of two in it, and the rest, padded.

Programs of masks and biases are those of :mod:`opkit.attn.gpu.device.tile`. Keys that no row of a tile sees are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from opkit.attn.gpu.decode.device.rows import (
    banded,
    elements_of,
    finite,
    met,
    odd_ones,
    queries_of,
    scales_of,
    store,
)
from opkit.attn.gpu.device.tile import FP8_SCALE, biased, visible

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


RUN_TIME = (
    *("batch", "slots", "splits", "kv_heads", "queries", "keys", "pages", "lower", "upper"),
    *("lse_b", "lse_h", "lse_t", "table_b", "lengths_stride_0"),
    *(f"n{i}" for i in range(8)),
    *(f"m{i}" for i in range(24)),
    *(f"{of}{i}_stride_{k}" for of in "tf" for i in range(6) for k in range(3)),
)
"""Numbers whose values are not compiled in: they change with the batch, with sequences and with pages."""


@triton.jit(do_not_specialize=RUN_TIME)
def decode(
    q, k, v, out, lse, sinks, partial, table, lengths, starts, k_scale, v_scale,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t, lse_b, lse_h, lse_t,
    table_b, lengths_stride_0, ks_b, ks_h, ks_t, vs_b, vs_h, vs_t,
    t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3, t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3,
    t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3, t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3,
    t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3, t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3,
    f0, f0_stride_0, f0_stride_1, f0_stride_2, f0_stride_3, f1, f1_stride_0, f1_stride_1, f1_stride_2, f1_stride_3,
    f2, f2_stride_0, f2_stride_1, f2_stride_2, f2_stride_3, f3, f3_stride_0, f3_stride_1, f3_stride_2, f3_stride_3,
    f4, f4_stride_0, f4_stride_1, f4_stride_2, f4_stride_3, f5, f5_stride_0, f5_stride_1, f5_stride_2, f5_stride_3,
    n0, n1, n2, n3, n4, n5, n6, n7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15, m16, m17, m18, m19, m20, m21, m22, m23,
    batch, slots, splits, kv_heads, queries, keys, pages, lower, upper, scale, softcap,
    GROUP: tl.constexpr, D: tl.constexpr, D_WIDE: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, DV_WIDE: tl.constexpr, DV_REST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, PAGE: tl.constexpr, BATCH: tl.constexpr, SHARED: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, MIXED: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    FP8: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
    NEGATIVE: tl.constexpr, PDL: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One split of one tile.

    ``q``, ``out`` and ``lse`` are (batch, heads, queries, size), or of pages (queries of all sequences, heads, size), with
    ``_b`` unused; ``k`` and ``v`` (batch, kv heads, keys, size), or (pages, places of a page, kv heads, size) with ``_b`` of
    a page. ``slots`` are those of tiles for a head of keys. ``partial`` is float32: of each tile and split the unnormalised
    result of ``ROWS`` rows, their maxima and their sums; with ``SPLIT`` results go there, to be merged.

    ``PAGE`` is 0 for contiguous keys. ``SHARED``: values are the first columns of keys. ``MIXED``: a tile may have queries that
    see different keys. ``WHOLE``: there is no band, and ``BLOCK`` divides the keys. ``NEGATIVE``: the scale is, and ``scale``
    its magnitude, which is not 0. ``PDL``: this kernel may have been started before what it depends on has ended, and so may
    the next one. ``MASK`` and ``BIAS`` are programs; in pages they are of positions. ``lengths`` of contiguous keys are None or
    (batch,). ``APART``: rows of a tile may see different keys by the mask.
    """
    held = (
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
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0) % (slots * kv_heads)
    split = tl.program_id(0) // (slots * kv_heads)
    head, slot = tile % kv_heads, tile // kv_heads
    b, token, count, length, first = place_of(
        starts, lengths, slot, slots, batch, queries, keys, GROUP, ROWS, BATCH, PAGE > 0
    )
    shift = length - count if PAGE > 0 else 0
    if PAGE == 0 and lengths is not None:
        length = _within(tl.load(lengths + b * lengths_stride_0), keys)
    if first >= count * GROUP:
        return
    q += b * q_b * (PAGE == 0) + token * q_t + head * GROUP * q_h
    out += b * out_b * (PAGE == 0) + token * out_t + head * GROUP * out_h
    lse += b * lse_b * (PAGE == 0) + token * lse_t + head * GROUP * lse_h

    r = tl.arange(0, ROWS)
    row = first + r
    i = row // GROUP
    valid = r < count * GROUP - first  # not of ``row``, which would be kept in a register for it
    at_q = q + i * q_t + (row % GROUP) * q_h
    earliest = first // GROUP + shift
    latest = tl.minimum(first + ROWS, count * GROUP) - 1
    latest = latest // GROUP + shift
    begin = tl.maximum(earliest + lower, 0) // BLOCK * BLOCK
    end = tl.where(lower <= upper, tl.minimum(latest + upper + 1, length), 0)
    blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
    share = tl.maximum(tl.cdiv(blocks, splits), 1)
    used = tl.maximum(tl.cdiv(blocks, share), 1)
    if SPLIT:
        WIDE: tl.constexpr = DV_WIDE + DV_REST
        partial += (tile * splits + split) * (ROWS * (WIDE + 2))
        if split >= used:
            tl.store(partial + ROWS * WIDE + r, float("-inf"))
            return
    block, stop = split * share, tl.minimum((split + 1) * share, blocks)
    whole = tl.maximum(tl.cdiv(tl.maximum(latest + lower - begin, 0), BLOCK), block)
    broken = tl.minimum(tl.maximum(tl.minimum(earliest + upper + 1, length) - begin, 0) // BLOCK, stop)
    whole = tl.minimum(whole, stop)
    broken = tl.maximum(broken, whole)

    if PAGE > 0:
        table += b * table_b
    else:
        k += b * k_b
        v += b * v_b
    k += head * k_h
    v += head * v_h
    q0 = queries_of(at_q, valid, 0, D_WIDE, D, COMPUTE, NEGATIVE)
    q1 = q0
    if D_REST > 0:
        q1 = queries_of(at_q, valid, D_WIDE, D_REST, D, COMPUTE, NEGATIVE)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc0 = tl.zeros((ROWS, DV_WIDE), tl.float32)
    acc1 = tl.zeros((ROWS, DV_REST if DV_REST > 0 else 16), tl.float32)
    position, of_row = i + shift, head * GROUP + row % GROUP
    if PAGE > 0:  # programs count positions
        queries = tl.maximum(length, 1)
        keys = queries
    if K_SCALED:
        k_scale += head * ks_h
    if V_SCALED:
        v_scale += head * vs_h
    hidden = tl.maximum(earliest + lower, 0)  # keys before it are hidden from all rows, as those from ``end`` on
    if not MIXED or earliest == latest:
        whole, broken = block, stop
    for n in tl.range(whole, broken, num_stages=STAGES):
        top, total, acc0, acc1 = _attend(
            q0, q1, k, v, table, k_scale, v_scale, top, total, acc0, acc1, begin + n * BLOCK, position, hidden, end,
            held, numbers, b, of_row, valid, queries, keys, lower, upper, scale, softcap, pages,
            k_b, k_t, v_b, v_t, ks_b, ks_t, vs_b, vs_t,
            D, D_WIDE, D_REST, DV, DV_WIDE, DV_REST, BLOCK, PAGE, SHARED, CAPPED, K_SCALED, V_SCALED, FP8, COMPUTE,
            PRECISION, not WHOLE, False, MASK, BIAS, APART,
        )  # fmt: skip
    if MIXED:
        SMALL: tl.constexpr = min(BLOCK, 512 // COMPUTE.primitive_bitwidth)  # what is not pipelined is in registers
        before = (whole - block) * (BLOCK // SMALL)
        after = tl.cdiv(tl.minimum(stop * BLOCK, end - begin) - broken * BLOCK, SMALL)
        for n in tl.range(0, before + tl.maximum(after, 0), num_stages=1):
            start = tl.where(n < before, block * BLOCK + n * SMALL, broken * BLOCK + (n - before) * SMALL)
            top, total, acc0, acc1 = _attend(
                q0, q1, k, v, table, k_scale, v_scale, top, total, acc0, acc1, begin + start, position, hidden, end,
                held, numbers, b, of_row, valid, queries, keys, lower, upper, scale, softcap, pages,
                k_b, k_t, v_b, v_t, ks_b, ks_t, vs_b, vs_t,
                D, D_WIDE, D_REST, DV, DV_WIDE, DV_REST, SMALL, PAGE, SHARED, CAPPED, K_SCALED, V_SCALED, FP8, COMPUTE,
                PRECISION, True, True, MASK, BIAS, APART,
            )  # fmt: skip

    top *= _factor(scale, CAPPED or len(BIAS) > 0, FP8)
    at_out = out + i * out_t + (row % GROUP) * out_h
    at_lse = lse + i * lse_t + (row % GROUP) * lse_h
    if SPLIT:
        tl.store(partial + ROWS * WIDE + r, top)
        tl.store(partial + ROWS * (WIDE + 1) + r, total)
        store(partial + r * WIDE, acc0, valid, 0, DV_WIDE, WIDE)
        if DV_REST > 0:
            store(partial + r * WIDE, acc1, valid, DV_WIDE, DV_REST, WIDE)
    else:
        top, total, factor = finished(top, total, sinks + head * GROUP + row % GROUP, valid, SINKS)
        tl.store(at_lse, natural(top, total), mask=valid)
        store(at_out, acc0 * factor[:, None], valid, 0, DV_WIDE, DV)
        if DV_REST > 0:
            store(at_out, acc1 * factor[:, None], valid, DV_WIDE, DV_REST, DV)


@triton.jit
def place_of(
    starts, lengths, slot, slots, batch, queries, keys, GROUP: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Of a slot: the sequence, its first query in memory, how many there are, the sequence's length, the slot's first row."""
    if PAGED:
        b, token, count, length, first = _sequence(starts, lengths, slot, batch, queries, keys, GROUP, ROWS, BATCH)
    else:
        tiles = slots // batch
        b, token, count, length, first = slot // tiles, 0, queries, keys, (slot % tiles) * ROWS
    return b, token, count, length, first


@triton.jit
def _sequence(starts, lengths, slot, batch, tokens, keys, GROUP: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr):
    """Return the sequence of a slot, its first query and how many, its length, and the slot's first row.

    Sequence b has the slots from ``starts[b] * GROUP // ROWS + b`` on, which are enough for its rows.
    """
    each = tl.arange(0, BATCH)
    there = each < batch
    first = _within(tl.load(starts + each, mask=there, other=0), tokens)
    after = _within(tl.load(starts + each + 1, mask=there, other=0), tokens)
    length = _within(tl.load(lengths + each, mask=there, other=0), keys)
    base = first * GROUP // ROWS + each
    b = tl.maximum(tl.sum((there & (base <= slot)).to(tl.int32), 0) - 1, 0)
    mine = each == b
    begin, end = tl.sum(tl.where(mine, first, 0), 0), tl.sum(tl.where(mine, after, 0), 0)
    row = (slot - tl.sum(tl.where(mine, base, 0), 0)) * ROWS
    return b, begin, tl.maximum(end - begin, 0), tl.sum(tl.where(mine, length, 0), 0), row


@triton.jit
def _within(x, most):
    return tl.minimum(tl.maximum(x, 0), most).to(tl.int32)


@triton.jit
def _attend(
    q0, q1, k, v, table, k_scale, v_scale, top, total, acc0, acc1, start, position, begin, end,
    held, numbers, b, h, valid, queries, keys, lower, upper, scale, softcap, pages,
    k_b, k_t, v_b, v_t, ks_b, ks_t, vs_b, vs_t,
    D: tl.constexpr, D_WIDE: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_WIDE: tl.constexpr,
    DV_REST: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, SHARED: tl.constexpr, CAPPED: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, FP8: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, MIXED: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Go over one block of keys.

    ``MASKED``: those before ``begin`` and from ``end`` on are hidden from all rows; ``MIXED``: others from some rows.
    """
    j = start + tl.arange(0, BLOCK)
    inside = (j >= begin) & (j < end)
    shown = inside[None, :]
    if MIXED:
        shown &= banded(j[None, :] - position[:, None], lower, upper)
    if len(MASK) > 0:
        shown &= visible(MASK, held, numbers, b, h[:, None], position[:, None], j[None, :], queries, keys)
        shown &= valid[:, None]
        inside = tl.max(shown.to(tl.int32), 0) > 0
    if PAGE > 0:
        place, within = j // PAGE, j % PAGE
        page = tl.load(table + place, mask=inside, other=0) if MASKED else tl.load(table + place)
        page = tl.minimum(tl.maximum(page, 0), pages - 1)
        at_k, at_v = page * k_b + within * k_t, page * v_b + within * v_t
        at_ks, at_vs = page * ks_b + within * ks_t, page * vs_b + within * vs_t
    else:
        at_k, at_v, at_ks, at_vs = j * k_t, j * v_t, j, j

    k0 = elements_of(k, at_k, inside, 0, D_WIDE, D, MASKED, FP8, COMPUTE)
    s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    if D_REST > 0:
        k1 = elements_of(k, at_k, inside, D_WIDE, D_REST, D, MASKED, FP8, COMPUTE)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
    if K_SCALED:
        s *= scales_of(k_scale, at_ks, inside, MASKED)[None, :]
    NATURAL: tl.constexpr = CAPPED or len(BIAS) > 0
    factor = _factor(scale, NATURAL, FP8)
    if NATURAL:
        s *= _factor(scale, False, FP8) * LN2
    if CAPPED:
        s = _capped(s, softcap)
    if len(BIAS) > 0:
        s = biased(s, BIAS, held, numbers, b, h[:, None], position[:, None], j[None, :], queries, keys, keys - queries)
    if MASKED:
        s = tl.where(shown, s, float("-inf"))

    higher = tl.maximum(top, tl.max(s, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2((s - base[:, None]) * factor)  # of large logits a product's rounding would not be that of the maximum's
    fade = tl.exp2((top - base) * factor)
    total = total * fade + tl.sum(p, 1)
    acc0 *= fade[:, None]
    if V_SCALED:
        p *= scales_of(v_scale, at_vs, inside, MASKED)[None, :]
        if APART:
            p = tl.where(shown, p, 0.0)
    if FP8:
        p *= FP8_SCALE
    p = p.to(COMPUTE)
    v0 = k0
    if not SHARED:
        v0 = elements_of(v, at_v, inside, 0, DV_WIDE, DV, MASKED, FP8, COMPUTE)
    SOME: tl.constexpr = MIXED or APART
    acc0 = tl.dot(p, finite(v0, SOME), acc0, input_precision=PRECISION)
    if APART:
        acc0 = met(acc0, shown, v0)
    if DV_REST > 0:
        acc1 *= fade[:, None]
        v1 = elements_of(v, at_v, inside, DV_WIDE, DV_REST, DV, MASKED, FP8, COMPUTE)
        acc1 = tl.dot(p, finite(v1, SOME), acc1, input_precision=PRECISION)
        if APART:
            acc1 = met(acc1, shown, v1)
    if MIXED and not APART:
        odd = tl.max(tl.max((tl.abs(v0.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, 1), 0)
        if DV_REST > 0:
            odd += tl.max(tl.max((tl.abs(v1.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, 1), 0)
        if odd > 0:
            acc0 = odd_ones(acc0, p, v, at_v, j, inside, position, lower, upper, 0, DV_WIDE, DV, BLOCK, FP8)
            if DV_REST > 0:
                acc1 = odd_ones(acc1, p, v, at_v, j, inside, position, lower, upper, DV_WIDE, DV_REST, DV, BLOCK, FP8)
    return higher, total, acc0, acc1


@triton.jit
def _factor(scale, NATURAL: tl.constexpr, FP8: tl.constexpr):
    """Return what logits are times, that they be exponents of 2; ``NATURAL``: they are those of the natural base."""
    if NATURAL:
        return LOG2E
    return scale * (LOG2E * FP8_SCALE if FP8 else LOG2E)


@triton.jit
def _capped(x, softcap):
    """``softcap * tanh(x / softcap)``."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E / softcap))
    t = (1.0 - e) / (1.0 + e)
    return softcap * tl.where(x < 0, -t, t)


@triton.jit
def finished(top, total, sinks, valid, SINKS: tl.constexpr):
    """Maxima and sums with the sinks', and what results are to be multiplied by."""
    if SINKS:
        sink = tl.load(sinks, mask=valid, other=float("-inf")).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - base)
        total = total * fade + tl.exp2(sink - base)
        return higher, total, tl.where(total == 0, 0.0, fade / total)
    return top, total, tl.where(total == 0, 0.0, 1.0 / total)


@triton.jit
def natural(top, total):
    return tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * LN2)
