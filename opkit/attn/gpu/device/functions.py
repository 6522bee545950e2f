"""Triton functions that the text of users' functions calls (:mod:`opkit.attn.gpu.functions`)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def within(at, size):
    """Return a coordinate as int32: a negative one counts from the end, and none is out of range."""
    at = tl.where(at < 0, at + size, at)
    return tl.minimum(tl.maximum(at, 0), size - 1).to(tl.int32)


@triton.jit
def of_pairs(pointers, size):
    """Return elements for each pair of a query and a key; there are some, as ``size`` says.

    Loads under a condition are not pipelined: several tiles of these would not fit in shared memory.
    """
    if pointers.dtype.element_ty == tl.int1:
        pointers = pointers.to(
            tl.pointer_type(tl.int8), bitcast=True
        )  # Triton 3.6 compiles no bools that leave a branch
    found = tl.zeros(pointers.shape, pointers.dtype.element_ty)
    if size > 0:
        found = tl.load(pointers)
    return found


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, exact to 2e-7."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, 0.0 - t, t)
