"""Merging attention to parts of the keys: a program for some rows, which reads each part once."""

from __future__ import annotations

import triton
import triton.language as tl

from opkit.attn.gpu.device.programs import LOG2E
from opkit.attn.gpu.portable.device.forward import LN2


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
