"""Loads and stores of rows for :mod:`opkit.attn.gpu.decode.device.decode`, and values that are not finite."""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.tile import from_fp8


@triton.jit
def queries_of(
    at, valid, FIRST: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, COMPUTE: tl.constexpr, NEGATIVE: tl.constexpr
):
    """Elements from ``FIRST`` on of a tile's queries; ``NEGATIVE``: with the other sign."""
    column = FIRST + tl.arange(0, WIDE)
    x = tl.load(at[:, None] + column[None, :], mask=valid[:, None] & (column < D)[None, :], other=0.0)
    x = x.to(COMPUTE)
    return -x if NEGATIVE else x


@triton.jit
def banded(distance, lower, upper):
    return (distance >= lower) & (distance <= upper)


@triton.jit
def elements_of(
    x, at, inside, FIRST: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr, FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Elements from ``FIRST`` on of rows of keys or values; zeros where nothing is to be read."""
    column = FIRST + tl.arange(0, WIDE)
    pointers = x + at[:, None] + column[None, :]
    if FIRST + WIDE > SIZE:
        mask = (column < SIZE)[None, :]
        if MASKED:
            mask &= inside[:, None]
        found = tl.load(pointers, mask=mask, other=0)
    elif MASKED:
        found = tl.load(pointers, mask=inside[:, None], other=0)
    else:
        found = tl.load(pointers)
    if FP8:
        return from_fp8(found).to(COMPUTE)
    return found.to(COMPUTE)


@triton.jit
def scales_of(x, at, inside, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return tl.load(x + at).to(tl.float32)


@triton.jit
def finite(x, SOME: tl.constexpr):
    """``x`` with zeros for what is not finite: times a zero that would be NaN for the rows that do not see it, if ``SOME``."""
    if SOME:
        x = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)
    return x


@triton.jit
def met(acc, shown, v):
    """``acc`` with NaN where a row sees what :func:`finite` left out: without a loop, so that those around are pipelined."""
    odd = ~(tl.abs(v.to(tl.float32)) < float("inf"))
    if tl.max(odd.to(tl.int32)) > 0:
        acc = tl.where(tl.dot(shown.to(tl.float16), odd.to(tl.float16)) > 0, float("nan"), acc)
    return acc


@triton.jit
def odd_ones(
    acc, p, v, at_v, j, inside, position, lower, upper, FIRST: tl.constexpr, WIDE: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """``acc`` with what :func:`finite` left out, for the rows that see it, a key at a time."""
    column = FIRST + tl.arange(0, WIDE)
    for n in range(BLOCK):
        here = (tl.arange(0, BLOCK) == n) & inside
        key, at = tl.sum(tl.where(here, j, 0), 0), tl.sum(tl.where(here, at_v, 0), 0)
        there = tl.sum(here.to(tl.int32), 0) > 0
        value = tl.load(v + at + column, mask=(column < DV) & there, other=0)
        value = (from_fp8(value) if FP8 else value).to(tl.float32)
        weight = tl.sum(tl.where(here[None, :], p.to(tl.float32), 0.0), 1)
        seen = banded(key - position, lower, upper)
        wrong = (tl.abs(value) < float("inf")) == 0
        acc += tl.where(seen[:, None] & wrong[None, :], weight[:, None] * value[None, :], 0.0)
    return acc


@triton.jit
def store(at, x, valid, FIRST: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr):
    column = FIRST + tl.arange(0, WIDE)
    tl.store(at[:, None] + column[None, :], x.to(at.dtype.element_ty), mask=valid[:, None] & (column < SIZE)[None, :])
