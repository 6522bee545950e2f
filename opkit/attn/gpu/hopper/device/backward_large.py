"""Rows whose log-sum-exp is so large that its rounding would show in probabilities: their part of the backward for sm_90.

Of a log-sum-exp as large as L the rounding is up to L / 2^24, and of a huge logit and the logarithm of a sum only the former is
left. The kernels that multiply see such rows with a log-sum-exp of infinity, so that their probabilities are 0. The kernel before
them computes the greatest product and the logarithm of the sum of such a row, apart; the kernel after them adds the row's part of
the gradients. Each head of keys, of all batches, has a flag: 0, or 1 more than the number of programs of the last kernel that are
done with the large rows of its heads of queries. The last of them puts back 0.

Usually there are no such rows, and all of this is a load and a branch. Its tiles are small, so that it takes little shared memory
and few registers, and costs other calls nothing; it need not be fast. Products of queries and keys are made in one way in both
kernels, in tiles of one size, since their last bits count.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.tile import LOG2E, seen, tiles_of_keys, tiles_of_queries
from opkit.attn.gpu.portable.device.backward_rows import is_large
from opkit.attn.gpu.portable.device.forward import started, weights_of

ROWS, KEYS, CHANNELS = tl.constexpr(32), tl.constexpr(32), tl.constexpr(64)  #: of a tile


@triton.jit
def head_of(x, strides, b, h, channels):
    """Return a head of a tensor: its address, the stride of its rows, and how many channels they have."""
    return x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1], strides[2], channels


@triton.jit
def _rows_of(x, at, count, first):
    """``CHANNELS`` channels from ``first`` of the rows ``at`` of a head; zeros for what is not there."""
    column = first + tl.arange(0, CHANNELS)
    inside = (at < count)[:, None] & (column < x[2])[None, :]
    return tl.load(x[0] + at.to(tl.int64)[:, None] * x[1] + column[None, :], mask=inside, other=0.0)


@triton.jit
def _finite_rows_of(x, at, count, first):
    """Return the same with zeros for what is not finite: times the zero of what is hidden it would be NaN."""
    found = _rows_of(x, at, count, first)
    return tl.where(tl.abs(found.to(tl.float32)) < float("inf"), found, 0.0).to(found.dtype)


@triton.jit
def _products(x, i, x_count, y, j, y_count):
    """Return the products of rows ``i`` and ``j`` of two heads: (i, j)."""
    found = tl.zeros([ROWS, KEYS], tl.float32)
    for first in tl.range(0, x[2], CHANNELS, num_stages=1):
        found = tl.dot(_rows_of(x, i, x_count, first), tl.trans(_rows_of(y, j, y_count, first)), found)
    return found


@triton.jit
def large_heads(counter):
    """Return where the numbers of heads of keys are, after those with which the kernel that multiplies counts tiles."""
    return counter + 2


@triton.jit
def is_apart(lse, delta):
    """Return which rows are computed apart: the large ones, but not those whose gradients are NaN anyway."""
    return is_large(lse) & (tl.abs(delta) < float("inf"))


@triton.jit
def _large(numbers, i, queries):
    """:func:`is_apart` of rows of a head."""
    lse = tl.load(numbers[0] + i.to(tl.int64) * numbers[1], mask=i < queries, other=0.0)
    return is_apart(lse, tl.load(numbers[2] + i, mask=i < queries, other=0.0))


@triton.jit
def keys_there(lengths, stride, b, keys):
    """Return how many keys there are for a batch."""
    limit = keys
    if lengths is not None:
        limit = tl.minimum(tl.maximum(tl.load(lengths + b * stride), 0), keys)
    return limit


@triton.jit
def store_exact_sums(
    q, k, numbers, sinks, mask, b, h, first, end, queries, limit, lower, upper, scale, MASK: tl.constexpr
):
    """Of the large ones among rows ``first`` to ``end``, put the greatest product, and the logarithm, base 2, of the sum of
    exponentials of differences from it, to what is apart of the rows' ``numbers``."""
    for at in tl.range(first, end, ROWS, num_stages=1):
        i = at + tl.arange(0, ROWS)
        large = _large(numbers, i, queries)
        if tl.max(large.to(tl.int32), 0) > 0:
            m, l = started(sinks, h, scale, ROWS, True)
            begin, _full, _full_end, stop = tiles_of_keys(
                at, tl.minimum(at + ROWS, queries) - 1, lower, upper, limit, KEYS
            )
            for n in tl.range(begin, stop, num_stages=1):
                j = n * KEYS + tl.arange(0, KEYS)
                m, l, _, _, _ = weights_of(
                    _products(q, i, queries, k, j, limit), m, l, mask[0], mask[1], b, h, i, j, queries, limit, 0, lower, upper,
                    scale, 0.0, MASK, (), True, False, True, False, True,
                )  # fmt: skip
            tl.store(numbers[3] + i, m, mask=large)
            tl.store(numbers[3] + queries + i, tl.log2(l), mask=large)


@triton.jit
def _sums_of(numbers, large, i, queries):
    """Return what :func:`store_exact_sums` stored; for other rows a greatest product of infinity, for probabilities of 0."""
    greatest = tl.load(numbers[3] + i, mask=large, other=float("inf"))
    return greatest, tl.load(numbers[3] + queries + i, mask=large, other=0.0)


@triton.jit
def _slopes(rows, k, v, sums, mask, b, h, i, j, queries, limit, lower, upper, scale, MASK: tl.constexpr):
    """Return the probabilities of large rows, and the gradients of their products of queries and keys before ``scale``."""
    s, products = _products(rows[0], i, queries, k, j, limit), _products(rows[1], i, queries, v, j, limit)
    shown = seen(mask[0], mask[1], b, h, i[:, None], j[None, :], queries, limit, lower, upper, MASK, True)
    shown &= (sums[0] < float("inf"))[:, None]
    p = tl.exp2((s - sums[0][:, None]) * (scale * LOG2E) - sums[1][:, None])
    slopes = p * (products - tl.load(rows[2][2] + i, mask=i < queries, other=0.0)[:, None])
    return tl.where(shown, p, 0.0), tl.where(shown, slopes, 0.0)


@triton.jit
def add_large_rows(
    tensors, strides, delta, apart, flag, mask, b, h, group, block, heads, queries, keys, limit, channels, columns, lower, upper,
    scale, BLOCK: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """What large rows give to the gradients of a block of queries, and of some of the keys that the head's group has.

    The last program of a group to be done puts back 0 into its ``flag``.
    """
    first_of_group = h // group * group
    k, v = (
        head_of(tensors[1], strides[1], b, h // group, channels),
        head_of(tensors[2], strides[2], b, h // group, columns),
    )
    _store_gradients_of_queries(
        _rows_of_head(tensors, strides, delta, apart, b, h, heads, queries, channels, columns), k, v,
        head_of(tensors[5], strides[5], b, h, channels), mask, b, h, block * BLOCK, tl.minimum(block * BLOCK + BLOCK, queries),
        queries, limit, lower, upper, scale, MASK,
    )  # fmt: skip
    of_k, of_v = (
        head_of(tensors[6], strides[6], b, h // group, channels),
        head_of(tensors[7], strides[7], b, h // group, columns),
    )
    program, programs = (h - first_of_group) * tl.num_programs(0) + block, group * tl.num_programs(0)
    for first in tl.range(program * KEYS, keys, programs * KEYS, num_stages=1):
        _add_gradients_of_keys(
            tensors, strides, delta, apart, k, v, of_k, of_v, mask, b, first_of_group, first_of_group + group, heads, first,
            queries, limit, channels, columns, lower, upper, scale, MASK,
        )  # fmt: skip
    if tl.atomic_add(flag, 1) == programs:
        tl.store(flag, 0)


@triton.jit
def _rows_of_head(tensors, strides, delta, apart, b, h, heads, queries, channels, columns):
    """Of a head of queries these, the gradients of their results, and the addresses of their numbers."""
    of_all = (b * heads + h).to(tl.int64) * queries
    lse, stride, _ = head_of(tensors[4], strides[4], b, h, 1)
    q, gradient = head_of(tensors[0], strides[0], b, h, channels), head_of(tensors[3], strides[3], b, h, columns)
    return q, gradient, (lse, stride, delta + of_all, apart + 2 * of_all)


@triton.jit
def _store_gradients_of_queries(
    rows, k, v, of_q, mask, b, h, first, end, queries, limit, lower, upper, scale, MASK: tl.constexpr
):
    """The gradients of the large ones among queries ``first`` to ``end``."""
    for at in tl.range(first, end, ROWS, num_stages=1):
        i = at + tl.arange(0, ROWS)
        large = _large(rows[2], i, queries)
        if tl.max(large.to(tl.int32), 0) > 0:
            sums = _sums_of(rows[2], large, i, queries)
            begin, _full, _full_end, stop = tiles_of_keys(
                at, tl.minimum(at + ROWS, queries) - 1, lower, upper, limit, KEYS
            )
            for c in tl.range(0, of_q[2], CHANNELS, num_stages=1):
                dq = tl.zeros([ROWS, CHANNELS], tl.float32)
                for n in tl.range(begin, stop, num_stages=1):
                    j = n * KEYS + tl.arange(0, KEYS)
                    _, slopes = _slopes(rows, k, v, sums, mask, b, h, i, j, queries, limit, lower, upper, scale, MASK)
                    keys = _finite_rows_of(k, j, limit, c)
                    dq = tl.dot(slopes.to(keys.dtype), keys, dq)
                column = c + tl.arange(0, CHANNELS)
                to = of_q[0] + i.to(tl.int64)[:, None] * of_q[1] + column[None, :]
                inside = large[:, None] & (column < of_q[2])[None, :]
                tl.store(to, (dq * scale).to(of_q[0].dtype.element_ty), mask=inside)


@triton.jit
def _add_gradients_of_keys(
    tensors, strides, delta, apart, k, v, of_k, of_v, mask, b, first_head, last_head, heads, first, queries, limit, channels,
    columns, lower, upper, scale, MASK: tl.constexpr,
):  # fmt: skip
    """Add what large rows of a group's heads give to the gradients of keys from ``first`` on and of their values."""
    j = first + tl.arange(0, KEYS)
    begin, _full, _full_end, stop = tiles_of_queries(
        first, tl.minimum(first + KEYS, limit) - 1, lower, upper, queries, limit, ROWS
    )
    for c in tl.range(0, tl.maximum(channels, columns), CHANNELS, num_stages=1):
        dk, dv = tl.zeros([KEYS, CHANNELS], tl.float32), tl.zeros([KEYS, CHANNELS], tl.float32)
        for h in tl.range(first_head, last_head, num_stages=1):
            rows = _rows_of_head(tensors, strides, delta, apart, b, b * 0 + h, heads, queries, channels, columns)
            for n in tl.range(begin, stop, num_stages=1):
                i = n * ROWS + tl.arange(0, ROWS)
                large = _large(rows[2], i, queries)
                if tl.max(large.to(tl.int32), 0) > 0:
                    p, slopes = _slopes(
                        rows, k, v, _sums_of(rows[2], large, i, queries), mask, b, b * 0 + h, i, j, queries, limit, lower, upper,
                        scale, MASK,
                    )  # fmt: skip
                    upstream = _finite_rows_of(rows[1], i, queries, c)
                    dv = tl.dot(tl.trans(p.to(upstream.dtype)), upstream, dv)
                    queries_of_rows = _finite_rows_of(rows[0], i, queries, c)
                    dk = tl.dot(tl.trans(slopes.to(queries_of_rows.dtype)), queries_of_rows, dk)
        _add_rows(of_k, j, limit, c, dk * scale)
        _add_rows(of_v, j, limit, c, dv)


@triton.jit
def _add_rows(x, at, count, first, value):
    """Add to ``CHANNELS`` channels from ``first`` of the rows ``at`` of a head."""
    column = first + tl.arange(0, CHANNELS)
    inside = (at < count)[:, None] & (column < x[2])[None, :]
    to = x[0] + at.to(tl.int64)[:, None] * x[1] + column[None, :]
    value += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, value.to(x[0].dtype.element_ty), mask=inside)
