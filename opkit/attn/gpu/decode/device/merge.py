"""Merging the splits of :mod:`opkit.attn.gpu.decode.device.decode`: a program for each row.

Merging by the last program of a tile to end, in the same launch, was slower: what one program merges alone is read at the
speed of one multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from opkit.attn.gpu.decode.device.decode import RUN_TIME, finished, natural, place_of
from opkit.attn.gpu.device.tile import LOG2E
from opkit.attn.gpu.portable.device.forward import LN2


@triton.jit(do_not_specialize=(*RUN_TIME, "height"))
def merge(
    partial, out, lse, sinks, lengths, starts, out_b, out_h, out_t, lse_b, lse_h, lse_t,
    batch, slots, splits, kv_heads, height, queries, keys, GROUP: tl.constexpr, DV: tl.constexpr, DV_WIDE: tl.constexpr,
    DV_REST: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr, PAGED: tl.constexpr, BATCH: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The result of one row from those of its splits.

    There are ``height`` rows to a tile, at most ``ROWS``; ``MOST`` is the power of two that is no less than ``splits``.
    """
    WIDE: tl.constexpr = DV_WIDE + DV_REST
    tile, r = tl.program_id(0) // height, tl.program_id(0) % height
    head, slot = tile % kv_heads, tile // kv_heads
    b, token, count, _, first = place_of(starts, lengths, slot, slots, batch, queries, keys, GROUP, ROWS, BATCH, PAGED)
    if PDL:  # by each program: none may end before what the kernel depends on
        gdc_wait()
        gdc_launch_dependents()
    row = first + r
    if row >= count * GROUP:
        return
    query, h = token + row // GROUP, head * GROUP + row % GROUP
    s = tl.arange(0, MOST)
    partial += tile * splits * (ROWS * (WIDE + 2))
    at = partial + s * (ROWS * (WIDE + 2)) + ROWS * WIDE + r
    tops = tl.load(at, mask=s < splits, other=float("-inf"))
    totals = tl.load(at + ROWS, mask=s < splits, other=0.0)
    AT_ONCE: tl.constexpr = MOST * (DV_WIDE + DV_REST) <= 16384
    if AT_ONCE:  # before the maxima are known, so that there is one wait
        found0 = _results(partial + r * WIDE, s, splits, 0, DV_WIDE, WIDE, ROWS)
        found1 = found0
        if DV_REST > 0:
            found1 = _results(partial + r * WIDE, s, splits, DV_WIDE, DV_REST, WIDE, ROWS)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(tops - base)
    total = tl.sum(tl.where(tops == float("-inf"), 0.0, totals * weights), 0)
    top, total, factor = finished(top, total, sinks + h, True, SINKS)
    tl.store(lse + b * lse_b * (1 - PAGED) + query * lse_t + h * lse_h, natural(top, total))
    at_out = out + b * out_b * (1 - PAGED) + query * out_t + h * out_h
    if AT_ONCE:
        _write(at_out, _weighted(found0, tops, weights) * factor, 0, DV_WIDE, DV)
        if DV_REST > 0:
            _write(at_out, _weighted(found1, tops, weights) * factor, DV_WIDE, DV_REST, DV)
    else:
        _write(at_out, _summed(partial, r, base, splits, 0, DV_WIDE, WIDE, ROWS) * factor, 0, DV_WIDE, DV)
        if DV_REST > 0:
            _write(
                at_out, _summed(partial, r, base, splits, DV_WIDE, DV_REST, WIDE, ROWS) * factor, DV_WIDE, DV_REST, DV
            )


@triton.jit
def _results(partial, s, splits, FIRST: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return a row's results of some splits, ``PART`` elements from ``FIRST`` on."""
    column = FIRST + tl.arange(0, PART)
    at = partial + s[:, None] * (ROWS * (WIDE + 2)) + column[None, :]
    return tl.load(at, mask=(s < splits)[:, None], other=0.0)


@triton.jit
def _weighted(found, tops, weights):
    """Their weighted sum; splits that saw nothing have written none."""
    return tl.sum(tl.where((tops == float("-inf"))[:, None], 0.0, found * weights[:, None]), 0)


@triton.jit
def _summed(partial, r, base, splits, FIRST: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return the same of all splits, some at a time."""
    EACH: tl.constexpr = 8192 // PART
    acc = tl.zeros((PART,), tl.float32)
    for each in range(0, splits, EACH):
        s = each + tl.arange(0, EACH)
        at = partial + s * (ROWS * (WIDE + 2)) + ROWS * WIDE + r
        tops = tl.load(at, mask=s < splits, other=float("-inf"))
        found = _results(partial + r * WIDE, s, splits, FIRST, PART, WIDE, ROWS)
        acc += _weighted(found, tops, tl.exp2(tops - base))
    return acc


@triton.jit
def _write(at, x, FIRST: tl.constexpr, PART: tl.constexpr, DV: tl.constexpr):
    column = FIRST + tl.arange(0, PART)
    tl.store(at + column, x.to(at.dtype.element_ty), mask=column < DV)


@triton.jit(do_not_specialize=("rows",))
def merge_parts(
    out0, out1, out2, out3, out4, out5, out6, out7, lse0, lse1, lse2, lse3, lse4, lse5, lse6, lse7, out, lse, rows,
    COUNT: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows ``ROWS * program_id(0)`` and those after them, of ``COUNT`` parts; all tensors are contiguous."""
    outs = (out0, out1, out2, out3, out4, out5, out6, out7)
    lses = (lse0, lse1, lse2, lse3, lse4, lse5, lse6, lse7)
    i, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    inside = (i < rows)[:, None] & (column < D)[None, :]
    at = i[:, None] * D + column[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    for part in tl.static_range(COUNT):
        power = tl.load(lses[part] + i, mask=i < rows, other=float("-inf"))
        higher = tl.maximum(top, power)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight, fade = tl.exp2((power - base) * LOG2E), tl.exp2((top - base) * LOG2E)
        x = tl.load(outs[part] + at, mask=inside & (weight > 0)[:, None], other=0.0).to(tl.float32)
        acc = acc * fade[:, None] + weight[:, None] * x
        total, top = total * fade + weight, higher
    factor = 1.0 / tl.where(total == 0, 1.0, total)
    tl.store(out + at, (acc * factor[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + i, top + tl.log2(total) * LN2, mask=i < rows)
