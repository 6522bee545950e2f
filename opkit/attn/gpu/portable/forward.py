"""Calls of the portable forward kernel: from the operator's arguments to launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import dense_rows, overwritten, rows
from opkit.attn.calls import Call
from opkit.attn.gpu import arguments, blocks, candidates, plans, search
from opkit.attn.gpu.arguments import Run
from opkit.kernels.triton.named import Named
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel

_DESCALES = ("q_by", "k_by", "v_by")
_TENSORS = ("q", "k", "v", *_DESCALES, "out", "lse", "sinks", "seed", *plans.TENSORS)
_RESULTS = slice(6, 8)  # of these, out and lse
_FORWARD = Named("opkit.attn.gpu.portable.device.forward", "attention_forward")


@functools.cache
def kernel(constants: arguments.Constants) -> TritonKernel:
    """The forward kernel with its constants settled."""
    return triton_kernel(
        _FORWARD,
        grid=lambda queries, programs, ROWS: (blocks.tiles_in(queries, ROWS), programs),
        **dict(constants),
    )


def forward(example: Call, ordered: bool = False, fp8: str = "") -> Run:
    """The operator's result and log-sum-exp, for calls like ``example``; descales may follow the arguments of a call.

    With ``ordered`` what a query gives does not depend, to the last bit, on what is computed beside it. ``fp8`` is as
    :func:`opkit.attn.gpu.device.tile.widened` has it; results are in bfloat16 then.
    """
    q, _, v = example[:3]
    of_result = torch.empty_like(q, dtype=torch.bfloat16) if fp8 else q
    new_out = overwritten(rows(of_result, v.shape[3], example.out_is_bshd))
    new_lse = overwritten(q.new_empty(q.shape[:3], dtype=torch.float32))
    if 0 in (*q.shape[:3], v.shape[3]):
        return lambda *given: (new_out(), new_lse())
    roomy = arguments.fit_to_slots(example)
    fits, shape = roomy is example, arguments.shape_of(roomy)
    tiles = arguments.invariant_tiles_of(roomy, shape) if ordered else tiles_of(roomy)
    numbers, constants = {**_numbers(example), **plans.numbers_of(shape)}, (("ORDERED", ordered), ("FP8", fp8))
    launch = arguments.Tiled(kernel, tiles, shape, q.dtype, _TENSORS, numbers, written=_RESULTS, constants=constants)

    def run(*given: Any, by: Sequence[Tensor | None] = (None, None, None)) -> tuple[Tensor, Tensor]:
        call = Call(*given) if fits else arguments.fit_to_slots(Call(*given))
        out, lse = new_out(), new_lse()
        read = dense_rows(call.q), dense_rows(call.k), dense_rows(call.v)
        launch(call, *read, *by, out, lse, call.sinks, call.seed, *arguments.tensors_of(call, shape))
        return out, lse

    return run


def tiles_of(call: Call) -> search.Tiles[Any, Any]:
    """The tiles of calls like this one, whose mask and bias have room in the kernel."""
    return arguments.tiles_of(candidates.FORWARD, call, arguments.shape_of(call))


def _numbers(call: Call) -> dict[str, Any]:
    """The numbers that the kernel takes."""
    (batch, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.v.shape
    return {
        "programs": batch * heads, "heads": heads, "group": heads // max(kv_heads, 1), "queries": queries, "keys": keys,
        "scale": call.scale, "softcap": call.softcap, "threshold": math.ceil(call.dropout_p * 2**32),
        "rescale": arguments.rescale(call.dropout_p),
    }  # fmt: skip
