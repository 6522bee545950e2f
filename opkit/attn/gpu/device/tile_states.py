"""What tiles of a tensor of bools have in them, in Triton: a true element, only true elements.

Bytes: each element once. Where rows begin at multiples of 16 bytes, 16 elements are loaded at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

ANY, ALL = tl.constexpr(1), tl.constexpr(2)
_WORD = tl.constexpr(16)
RUN_TIME = ("heads", "rows", "columns", "x_stride_0", "x_stride_1", "x_stride_2")


@triton.jit(do_not_specialize=RUN_TIME)
def tile_states(
    x, x_stride_0, x_stride_1, x_stride_2, x_stride_3, states, heads, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``ANY`` where tile ``program_id(0)`` of ``x`` has a true element, and ``ALL`` where it has no other, or both.

    ``states`` is (batch, heads, tiles of rows, tiles of columns), contiguous, ``x`` (batch, heads, rows, columns).
    ``program_id(1)`` is batch * heads + head. ``STEP`` divides ``ROWS``.
    """
    wide = tl.cdiv(columns, COLUMNS)
    i, j = tl.program_id(0) // wide * ROWS, tl.program_id(0) % wide * COLUMNS
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    x += b.to(tl.int64) * x_stride_0 + h.to(tl.int64) * x_stride_1
    x += i.to(tl.int64) * x_stride_2 + j.to(tl.int64) * x_stride_3
    high, broad = tl.minimum(rows - i, ROWS), tl.minimum(columns - j, COLUMNS)
    even = (x_stride_2 % _WORD == 0) & (x.to(tl.int64) % _WORD == 0) & (broad == COLUMNS)
    if even:
        count = _count(
            tl.multiple_of(x, _WORD), x_stride_2 // _WORD * _WORD, x_stride_3, high, COLUMNS, ROWS, COLUMNS, STEP
        )
    else:
        count = _count(x, x_stride_2, x_stride_3, high, broad, ROWS, COLUMNS, STEP)
    state = tl.where(count > 0, ANY, 0) | tl.where(count == high * broad, ALL, 0)
    tl.store(states + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0), state.to(tl.uint8))


@triton.jit
def _count(x, stride, stride_of_columns, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """How many of the first elements of ``x`` are true: of its first rows the first columns."""
    column = tl.arange(0, COLUMNS)
    count = tl.zeros([STEP, COLUMNS], tl.int32)
    for first in tl.static_range(0, ROWS, STEP):
        row = first + tl.arange(0, STEP)
        at = x + row.to(tl.int64)[:, None] * stride + column[None, :] * stride_of_columns
        count += tl.load(at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0).to(tl.int1).to(tl.int32)
    return tl.sum(tl.sum(count, 1), 0)
