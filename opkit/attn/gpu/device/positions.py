"""Relative positions as channels: a Triton kernel that appends them to queries, or to keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "length"])
def with_positions(
    x, x_stride_0, x_stride_1, x_stride_2, x_stride_3, rel_h, rel_h_stride_0, rel_h_stride_1, rel_h_stride_2, rel_h_stride_3,
    rel_w, rel_w_stride_0, rel_w_stride_1, rel_w_stride_2, rel_w_stride_3, out, heads, length, one,
    HEAD: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Rows ``program_id(0) * ROWS`` and on of batch and head ``program_id(1)``, in ``out`` of ``CHANNELS`` channels.

    After the ``HEAD`` channels of ``x`` come those of ``rel_h`` and ``rel_w``, with the least finite number for minus infinity.
    ``KEYS``: ``one`` at the key's row and at its column, and zeros at the others. ``SOME`` is a power of two, of at least
    ``CHANNELS``.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, SOME)[None, :]
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    inside = (row < length)[:, None]
    at = row.to(tl.int64)[:, None]
    own = x + b.to(tl.int64) * x_stride_0 + h.to(tl.int64) * x_stride_1 + at * x_stride_2 + channel * x_stride_3
    found = tl.load(own, mask=inside & (channel < HEAD), other=0.0)
    by_row, by_column = channel - HEAD, channel - (HEAD + HIGH)
    of_row, of_column = (by_row >= 0) & (by_row < HIGH), (by_column >= 0) & (by_column < WIDE)
    if KEYS:
        place = row[:, None]
        here = (of_row & (by_row == place // WIDE)) | (of_column & (by_column == place % WIDE))
        found = tl.where(here, one, found.to(tl.float32))
    else:
        rows = rel_h + b.to(tl.int64) * rel_h_stride_0 + h.to(tl.int64) * rel_h_stride_1 + at * rel_h_stride_2
        columns = rel_w + b.to(tl.int64) * rel_w_stride_0 + h.to(tl.int64) * rel_w_stride_1 + at * rel_w_stride_2
        found = tl.where(of_row, tl.load(rows + by_row * rel_h_stride_3, mask=inside & of_row, other=0.0), found)
        found = tl.where(
            of_column, tl.load(columns + by_column * rel_w_stride_3, mask=inside & of_column, other=0.0), found
        )
        least: tl.constexpr = -65504.0 if out.dtype.element_ty == tl.float16 else -3.3895313892515355e38
        found = found.to(tl.float32)
        found = tl.where((found == float("-inf")) & (channel >= HEAD), least, found)
    to = out + (tl.program_id(1).to(tl.int64) * length + at) * CHANNELS + channel
    tl.store(to, found.to(out.dtype.element_ty), mask=inside & (channel < CHANNELS))
