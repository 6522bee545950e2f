"""Writing keys and values to pages: one program for each head of each token."""

from __future__ import annotations

import triton
import triton.language as tl

_ROUNDS = tl.constexpr(
    12582912.0
)  # 1.5 * 2**23: added and subtracted, it rounds to the nearest integer, halves to even


@triton.jit(do_not_specialize=("batch", "kv_heads", "pages", "width", "table_b"))
def append(
    k, v, k_pages, v_pages, table, lengths, starts, k_scale, v_scale, k_t, k_h, v_t, v_h, kp_b, kp_t, kp_h,
    vp_b, vp_t, vp_h, table_b, ks_b, ks_t, ks_h, vs_b, vs_t, vs_h, batch, kv_heads, pages, width,
    D: tl.constexpr, DV: tl.constexpr, D_WIDE: tl.constexpr, DV_WIDE: tl.constexpr, PAGE: tl.constexpr,
    BATCH: tl.constexpr, LARGEST: tl.constexpr, FP8: tl.constexpr, INT8: tl.constexpr, K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
):  # fmt: skip
    """One head of one token: ``starts[b]`` is the first token of sequence ``b``, which has ``lengths[b]`` before."""
    token, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    each = tl.arange(0, BATCH)
    first = tl.load(starts + each, mask=each < batch, other=2**30).to(tl.int32)
    length = tl.load(lengths + each, mask=each < batch, other=0).to(tl.int32)
    b = tl.maximum(tl.sum((first <= token).to(tl.int32), 0) - 1, 0)
    position = token + tl.sum(tl.where(each == b, length - first, 0), 0)
    known = (position >= 0) & (position < width * PAGE)
    page = tl.load(table + b * table_b + position // PAGE, mask=known, other=-1).to(tl.int32)
    known &= (page >= 0) & (page < pages)
    place = position % PAGE
    at = k + token * k_t + head * k_h
    to = k_pages + page * kp_b + place * kp_t + head * kp_h
    scale = k_scale
    if K_SCALED:
        scale = k_scale + page * ks_b + place * ks_t + head * ks_h
    _write(at, to, scale, known, D, D_WIDE, LARGEST, FP8, INT8, K_SCALED)
    at = v + token * v_t + head * v_h
    to = v_pages + page * vp_b + place * vp_t + head * vp_h
    scale = v_scale
    if V_SCALED:
        scale = v_scale + page * vs_b + place * vs_t + head * vs_h
    _write(at, to, scale, known, DV, DV_WIDE, LARGEST, FP8, INT8, V_SCALED)


@triton.jit
def _write(
    at, to, scale, known, D: tl.constexpr, WIDE: tl.constexpr, LARGEST: tl.constexpr, FP8: tl.constexpr,
    INT8: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDE)
    x = tl.load(at + column, mask=column < D, other=0.0).to(tl.float32)
    if SCALED:
        step = tl.div_rn(tl.max(tl.abs(x), 0), tl.full((), LARGEST, tl.float32))
        tl.store(scale, step.to(scale.dtype.element_ty), mask=known)
        x = tl.div_rn(x, tl.where(step > 0, step, 1.0))
    if INT8:
        x = tl.minimum(tl.maximum((x + _ROUNDS) - _ROUNDS, -127.0), 127.0).to(tl.int8)
    elif FP8:
        x = _to_fp8(x)
    tl.store(to + column, x.to(to.dtype.element_ty), mask=(column < D) & known)


@triton.jit
def _to_fp8(x):
    """Return the bytes of float8_e4m3fn, rounded to the nearest, halves to even; what is too large becomes the largest."""
    bits = x.to(tl.uint32, bitcast=True)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20).to(tl.int32) - ((127 - 7) << 3)
    small = ((tl.abs(x) * 512.0 + _ROUNDS) - _ROUNDS).to(tl.int32)  # below 2**-6 steps are of 2**-9
    code = tl.where(magnitude < (127 - 6) << 23, small, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (sign | code.to(tl.uint32)).to(tl.uint8)
