"""What goes before and after the backward for sm_90, row by row: sums of rows, and the gradient of queries from its sum.

The gradient of queries is summed up in float32 in memory of its own, whole blocks of queries one after another, each of them
two parts of 64 x 64 in the order of :func:`opkit.attn.gpu.hopper.device.backward_work.in_order`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.tile import LOG2E
from opkit.attn.gpu.hopper.device.backward_large import (
    add_large_rows,
    head_of,
    is_apart,
    keys_there,
    large_heads,
    store_exact_sums,
)
from opkit.attn.gpu.portable.device.backward_rows import delta_of

OF_CALL = (
    *("heads", "key_heads", "queries", "keys", "channels", "columns", "lower", "upper", "scale", "lengths_stride_0"),
    *(f"n{i}" for i in range(8)),
    *(f"t{i}_stride_{k}" for i in range(6) for k in range(4)),
)
"""Numbers whose values are not compiled in."""
PART = tl.constexpr(64)  #: rows and columns of a part


@triton.jit(do_not_specialize=OF_CALL)
def hopper_backward_begin(
    out, gradient, of_lse, lse, delta, sums, total, turns, q, k, sinks, apart, counter, lengths, out_stride_0, out_stride_1,
    out_stride_2, gradient_stride_0, gradient_stride_1, gradient_stride_2, of_lse_stride_0, of_lse_stride_1, of_lse_stride_2,
    lse_stride_0, lse_stride_1, lse_stride_2, q_stride_0, q_stride_1, q_stride_2, k_stride_0, k_stride_1, k_stride_2,
    lengths_stride_0,
    t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3, t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3,
    t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3, t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3,
    t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3, t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3,
    n0, n1, n2, n3, n4, n5, n6, n7, heads, key_heads, queries, keys, channels, lower, upper, scale,
    E: tl.constexpr, E0: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, APART: tl.constexpr,
    GROUPED: tl.constexpr, LISTED: tl.constexpr = False,
):  # fmt: skip
    """Of a block of rows delta, what the other kernel reads of them, and zeros for the sum of their gradients.

    That is the log-sum-exp times log2(e), infinite for rows that see nothing or are not there, so that their
    probabilities are 0; then delta. ``delta`` and what follows is contiguous. Where the other kernel has lists, it puts zeros
    in place of what is not finite in queries and gradients of which some keys are hidden: then the log-sum-exp of rows that see
    something is NaN if it or delta is not finite, so that their probabilities are.

    Where logits may be large, rows whose log-sum-exp is are kept APART (:mod:`opkit.attn.gpu.hopper.device.backward_large`).
    """
    slots = (
        (t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3), (t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3),
        (t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3), (t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3),
        (t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3), (t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3),
    )  # fmt: skip
    numbers = (n0, n1, n2, n3, n4, n5, n6, n7)
    of_head, at = _last_first()
    b, h = of_head // heads, of_head % heads
    i = at * ROWS + tl.arange(0, ROWS)
    within = tl.arange(0, ROWS)
    if GROUPED:
        within = grouped(within)
    of_delta = delta + (b * heads + h).to(tl.int64) * queries
    lse += b.to(tl.int64) * lse_stride_0 + h.to(tl.int64) * lse_stride_1
    sum_of_row = tl.load(lse + i * lse_stride_2, mask=i < queries, other=float("-inf"))
    found = delta_of(
        out, gradient, of_lse, b, h, i, out_stride_0, out_stride_1, out_stride_2, gradient_stride_0, gradient_stride_1,
        gradient_stride_2, of_lse_stride_0, of_lse_stride_1, of_lse_stride_2, queries, E, E0,
    )  # fmt: skip
    tl.store(of_delta + i, found, mask=i < queries)
    power = sum_of_row * LOG2E
    if LISTED:
        lost = (power != float("-inf")) & ((power == float("inf")) | ((tl.abs(found) < float("inf")) == 0))
        power = tl.where(lost, float("nan"), power)
    if APART:
        power = tl.where(is_apart(sum_of_row, found), float("inf"), power)
    block = of_head.to(tl.int64) * tl.num_programs(0) + at
    tl.store(sums + block * (2 * ROWS) + within, tl.where(power == float("-inf"), float("inf"), power))
    tl.store(sums + block * (2 * ROWS) + ROWS + within, found)
    tl.store(total + block * (ROWS * D) + tl.arange(0, ROWS * D), tl.zeros([ROWS * D], tl.float32))
    if turns is not None:
        tl.store(turns + block, 0)
    large = is_apart(sum_of_row, found)
    if APART:  # noqa: SIM102 - the one is compiled, the other a branch
        if tl.max(large.to(tl.int32), 0) > 0:
            group = heads // key_heads
            tl.store(large_heads(counter) + b * key_heads + h // group, 1)
            tl.debug_barrier()  # delta is read again, by other threads
            store_exact_sums(
                head_of(q, (q_stride_0, q_stride_1, q_stride_2), b, h, channels),
                head_of(k, (k_stride_0, k_stride_1, k_stride_2), b, h // group, channels),
                (lse, lse_stride_2, of_delta, apart + of_head.to(tl.int64) * (2 * queries)), sinks, (slots, numbers), b, h,
                at * ROWS, tl.minimum(at * ROWS + ROWS, queries), queries, keys_there(lengths, lengths_stride_0, b, keys), lower,
                upper, scale, MASK,
            )  # fmt: skip


@triton.jit
def _last_first():
    """Return the head of a program, and its block, from the last to the first.

    The other kernel begins with the first heads and ends with the last: what was written last is then still in the L2 cache.
    """
    return tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def grouped(row):
    """Return where the number of a row lies among those of its block: a thread finds four of those that it needs together."""
    return row // 16 * 16 + row % 8 // 2 * 4 + row // 8 % 2 * 2 + row % 2


@triton.jit
def in_rows(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Return the numbers of a block of rows, as they lie in its sum, as (ROWS, D).

    There they lie by part, eight columns, 16 rows, row of the first 8 of these, two columns of the eight, whether the row is 8
    further, and column of the two.
    """
    x = x.reshape(ROWS * D // (PART * PART), 8, 4, 8, 4, 2, 2)
    if ROWS > PART:
        return x.permute(0, 2, 5, 3, 1, 4, 6).reshape(ROWS, D)
    return x.permute(2, 5, 3, 0, 1, 4, 6).reshape(ROWS, D)


@triton.jit(do_not_specialize=OF_CALL)
def hopper_backward_end(
    total, of_q, q, k, v, gradient, lse, delta, apart, counter, of_k, of_v, lengths, of_q_stride_0, of_q_stride_1, of_q_stride_2,
    q_stride_0, q_stride_1, q_stride_2, k_stride_0, k_stride_1, k_stride_2, v_stride_0, v_stride_1, v_stride_2,
    gradient_stride_0, gradient_stride_1, gradient_stride_2, lse_stride_0, lse_stride_1, lse_stride_2,
    of_k_stride_0, of_k_stride_1, of_k_stride_2, of_v_stride_0, of_v_stride_1, of_v_stride_2, lengths_stride_0,
    t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3, t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3,
    t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3, t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3,
    t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3, t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3,
    n0, n1, n2, n3, n4, n5, n6, n7, heads, key_heads, queries, keys, columns, lower, upper, scale,
    E: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries: what was summed up for it, times ``scale``, rounded.

    If rows of the head, or of another that shares its keys, are kept APART, their part of all gradients.
    """
    slots = (
        (t0, t0_stride_0, t0_stride_1, t0_stride_2, t0_stride_3), (t1, t1_stride_0, t1_stride_1, t1_stride_2, t1_stride_3),
        (t2, t2_stride_0, t2_stride_1, t2_stride_2, t2_stride_3), (t3, t3_stride_0, t3_stride_1, t3_stride_2, t3_stride_3),
        (t4, t4_stride_0, t4_stride_1, t4_stride_2, t4_stride_3), (t5, t5_stride_0, t5_stride_1, t5_stride_2, t5_stride_3),
    )  # fmt: skip
    numbers = (n0, n1, n2, n3, n4, n5, n6, n7)
    of_head, first = _last_first()
    b, h = of_head // heads, of_head % heads
    group = heads // key_heads
    flag = large_heads(counter) + b * key_heads + h // group
    state = 0
    if APART:
        state = tl.load(flag)
    block = of_head.to(tl.int64) * tl.num_programs(0) + first
    found = in_rows(tl.load(total + block * (ROWS * D) + tl.arange(0, ROWS * D)) * scale, ROWS, D)
    i = first * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    at = of_q + b.to(tl.int64) * of_q_stride_0 + h.to(tl.int64) * of_q_stride_1
    inside = (i < queries)[:, None] & (column < E)[None, :]
    tl.store(at + i[:, None] * of_q_stride_2 + column[None, :], found.to(of_q.dtype.element_ty), mask=inside)
    if APART:  # noqa: SIM102 - the one is compiled, the other a branch
        if state != 0:
            tl.debug_barrier()  # these gradients are stored again, by other threads
            strides = (
                (q_stride_0, q_stride_1, q_stride_2), (k_stride_0, k_stride_1, k_stride_2), (v_stride_0, v_stride_1, v_stride_2),
                (gradient_stride_0, gradient_stride_1, gradient_stride_2), (lse_stride_0, lse_stride_1, lse_stride_2),
                (of_q_stride_0, of_q_stride_1, of_q_stride_2), (of_k_stride_0, of_k_stride_1, of_k_stride_2),
                (of_v_stride_0, of_v_stride_1, of_v_stride_2),
            )  # fmt: skip
            add_large_rows(
                (q, k, v, gradient, lse, of_q, of_k, of_v), strides, delta, apart, flag, (slots, numbers), b, h, group, first,
                heads, queries, keys, keys_there(lengths, lengths_stride_0, b, keys), E, columns, lower, upper, scale, ROWS, MASK,
            )  # fmt: skip
