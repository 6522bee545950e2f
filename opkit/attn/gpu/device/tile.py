"""What the forward and backward kernels have in common: the parts of a head size, loads of rows, logits, ranges of tiles.

The size ``D`` of a head of keys is read in one part or two, ``D0`` and ``D1``, each a power of two as Triton wants it, and that
of values, ``E``, in one, ``E0``: :func:`opkit.attn.gpu.blocks.parts` says which.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.programs import LOG2E, biased, visible

FP8_SCALE = tl.constexpr(256.0)  #: what :func:`from_fp8` leaves out


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
def logits(
    s, scale, softcap, slots, numbers, b, h, i, j, queries, limit, shift, BIAS: tl.constexpr, CAPPED: tl.constexpr
):
    """From products to logits, before a mask; and the tanh of the cap."""
    s = times(s, scale)
    t = s
    if CAPPED:
        s, t = capped(s, softcap)
    return biased(s, BIAS, slots, numbers, b, h, i, j, queries, limit, shift), t


@triton.jit
def seen(slots, numbers, b, h, i, j, queries, limit, lower, upper, MASK: tl.constexpr, BANDED: tl.constexpr):
    """Which keys of a partly visible tile are seen: inside of the sequences, of the band and of the mask's program."""
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
