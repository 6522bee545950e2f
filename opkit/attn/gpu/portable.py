"""Calls of the portable forward kernel: from the operator's arguments to launches."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import dense_rows, like, rows
from opkit.attn.calls import Call
from opkit.attn.gpu import blocks, common
from opkit.attn.gpu.common import Run
from opkit.attn.gpu.device.forward import attention_forward
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel


@functools.cache
def kernel(constants: tuple[tuple[str, Any], ...]) -> TritonKernel:
    """The forward kernel with its constants settled."""
    return triton_kernel(
        attention_forward,
        grid=lambda queries, programs, ROWS: (blocks.tiles_in(queries, ROWS), programs),
        **dict(constants),
    )


def forward(example: Call) -> Run:
    """The operator's result and log-sum-exp, for calls like ``example``."""
    q, _, v = example[:3]
    new_out = like(rows(q, v.shape[3], example.heads_inside))
    new_lse = like(q.new_empty(q.shape[:3], dtype=torch.float32))
    if 0 in (*q.shape[:3], v.shape[3]):
        return lambda *given: (new_out(), new_lse())
    fits, shape = common.shape_of(example).fits, common.shape_of(common.with_room(example))
    size = common.blocks_of(blocks.FORWARD, common.with_room(example), shape, 1)
    chosen = common.settled(kernel, common.constants_of(example, shape, size), q.dtype)
    numbers = _numbers(example)

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        call = Call(*given) if fits else common.with_room(Call(*given))
        out, lse = new_out(), new_lse()
        chosen()(
            q=dense_rows(call.q), k=dense_rows(call.k), v=dense_rows(call.v), out=out, lse=lse, sinks=call.sinks, seed=call.seed,
            **numbers, **common.of_tensors(call, shape), **common.lists_of(call, shape, size, by_keys=False),
        )  # fmt: skip
        return out, lse

    return run


def _numbers(call: Call) -> dict[str, Any]:
    """The numbers that the kernel takes."""
    (batch, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.v.shape
    return {
        "programs": batch * heads, "heads": heads, "group": heads // max(kv_heads, 1), "queries": queries, "keys": keys,
        "scale": call.scale, "softcap": call.softcap, "threshold": math.ceil(call.dropout_p * 2**32),
        "rescale": common.rescale(call.dropout_p),
    }  # fmt: skip
