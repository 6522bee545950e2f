"""What the backward kernels read of rows and make of logits, and the kernel that prepares the former.

Where a log-sum-exp is so large that its rounding would be seen in the probabilities (of a huge logit and the logarithm of a sum
it is the former), the row's greatest logit and the logarithm of its sum are computed again, apart, by the kernel of the gradient
of queries, which runs first. Where logits are FOLDED (:mod:`opkit.attn.gpu.portable.device.forward`), such rows have no
probabilities in the loops that are fast, and are gone over once more. ``apart`` has of each head the greatest logits of its rows,
the logarithms, and a number that is not 0 if there are such rows; where logits are not FOLDED, of all rows what probabilities
are computed from.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.tile import LOG2E, columns_of, logits, rows_of
from opkit.attn.gpu.portable.device.forward import started, weights_of

LARGE = tl.constexpr(4096.0)  #: a log-sum-exp that is no larger is exact to 2^-13


@triton.jit
def delta_of(
    out, gradient, of_lse, b, h, i, out_stride_0, out_stride_1, out_stride_2, gradient_stride_0, gradient_stride_1,
    gradient_stride_2, of_lse_stride_0, of_lse_stride_1, of_lse_stride_2, queries, E: tl.constexpr, E0: tl.constexpr,
):  # fmt: skip
    """Of rows ``i`` of a head the sum of result * gradient, less the gradient of its log-sum-exp."""
    out += b.to(tl.int64) * out_stride_0 + h.to(tl.int64) * out_stride_1
    gradient += b.to(tl.int64) * gradient_stride_0 + h.to(tl.int64) * gradient_stride_1
    x = rows_of(out, out_stride_2, i, queries, 0, E0, E, True).to(tl.float32)
    y = rows_of(gradient, gradient_stride_2, i, queries, 0, E0, E, True).to(tl.float32)
    found = tl.sum(x * y, 1)
    if of_lse is not None:
        of_lse += b.to(tl.int64) * of_lse_stride_0 + h.to(tl.int64) * of_lse_stride_1
        found -= tl.load(of_lse + i * of_lse_stride_2, mask=i < queries, other=0.0)
    return found


@triton.jit(do_not_specialize=("heads", "queries", "lse_stride_0", "lse_stride_1"))
def attention_delta(
    out, gradient, of_lse, delta, apart, out_stride_0, out_stride_1, out_stride_2, gradient_stride_0, gradient_stride_1,
    gradient_stride_2, of_lse_stride_0, of_lse_stride_1, of_lse_stride_2, heads, queries,
    E: tl.constexpr, E0: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """:func:`delta_of` each row, and 0 for each head in ``apart``; ``delta`` is contiguous."""
    if tl.program_id(0) == 0:
        tl.store(apart_of(apart, tl.program_id(1), queries) + 2 * queries, 0.0)
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    found = delta_of(
        out, gradient, of_lse, b, h, i, out_stride_0, out_stride_1, out_stride_2, gradient_stride_0, gradient_stride_1,
        gradient_stride_2, of_lse_stride_0, of_lse_stride_1, of_lse_stride_2, queries, E, E0,
    )  # fmt: skip
    tl.store(delta + (b * heads + h).to(tl.int64) * queries + i, found, mask=i < queries)


@triton.jit
def loaded(x, i, queries, other, BOUNDED: tl.constexpr):
    """Numbers of rows."""
    if BOUNDED:
        return tl.load(x + i, mask=i < queries, other=other)
    return tl.load(x + i)


@triton.jit
def apart_of(apart, head, queries):
    """Return where a head's numbers are."""
    return apart + head.to(tl.int64) * (2 * queries + 1)


@triton.jit
def is_large(lse):
    """Return which rows are computed again; those that see nothing, or what is not finite, are not."""
    return (tl.abs(lse) > LARGE) & (tl.abs(lse) < float("inf"))


@triton.jit
def folded_bases(lse):
    """Return what is subtracted from ``FOLDED`` logits: infinity for fully masked and large rows, so that probabilities are 0."""
    return tl.where(tl.abs(lse) > LARGE, float("inf"), lse * LOG2E)


@triton.jit
def bases_of(base):
    """Return what is subtracted from other logits."""
    return tl.where(base == float("-inf"), float("inf"), base)


@triton.jit
def exact_sums(
    lse, q0, q1, k, k_row, sinks, slots, numbers, b, h, i, start, stop, queries, limit, shift, lower, upper, scale, softcap,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr, BANDED: tl.constexpr,
    CAPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of rows the log-sum-exp and 0, or, where it is large, the greatest logit and the logarithm, base 2, of the sum.

    ``start`` to ``stop`` are the tiles of keys that any of the rows may see.
    """
    base, rest = lse, tl.zeros_like(lse)
    large = is_large(lse)
    if tl.max(large.to(tl.int32), 0) > 0:
        m, l = started(sinks, h, scale, ROWS, False)
        for n in tl.range(start, stop, num_stages=1):
            j = n * KEYS + tl.arange(0, KEYS)
            s = tl.dot(q0, columns_of(k, k_row, j, limit, 0, D0, D, True), input_precision=PRECISION)
            if D1 > 0:
                s = tl.dot(q1, columns_of(k, k_row, j, limit, D0, D1, D, True), s, input_precision=PRECISION)
            m, l, _, _, _ = weights_of(
                s, m, l, slots, numbers, b, h, i, j, queries, limit, shift, lower, upper, scale, softcap, MASK, BIAS, BANDED,
                CAPPED, False, False, True,
            )  # fmt: skip
        base, rest = tl.where(large, m, base), tl.where(large, tl.log2(l), rest)
    return base, rest


@triton.jit
def slopes_of_logits(
    s, products, base, rest, delta, drawn, slots, numbers, b, h, i, j, queries, limit, shift, scale, softcap, rescale,
    BIAS: tl.constexpr, CAPPED: tl.constexpr, FOLDED: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """Return the probabilities by which values are weighed, the gradients of the logits, and the tanh of the cap; no mask yet.

    ``s`` are products of queries and keys, ``products`` those of gradients and values; ``i``, ``j``, ``base``, ``rest`` and
    ``delta`` broadcast to them; ``drawn`` says which probabilities dropout keeps.
    """
    t = s
    if FOLDED:
        p = tl.exp2(s * (scale * LOG2E) - base)
    else:
        s, t = logits(s, scale, softcap, slots, numbers, b, h, i, j, queries, limit, shift, BIAS, CAPPED)
        p = tl.exp2((s - base) * LOG2E - rest)
    weights = p
    if DROPPED:
        products = tl.where(drawn, products * rescale, 0.0)
        weights = tl.where(drawn, p * rescale, 0.0)
    return weights, p * (products - delta), t
