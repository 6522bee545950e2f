"""Calls of the portable backward kernels: from the operator's arguments to launches."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import dense_rows, overwritten, rows
from opkit.attn.calls import GradientCall
from opkit.attn.gpu import arguments, blocks, candidates, plans
from opkit.attn.gpu.arguments import Run
from opkit.kernels.triton.named import Named
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launch import PreparedLaunch

_Four = tuple[Tensor, Tensor, Tensor, Tensor]
_ROWS = ("out", "gradient", "of_lse", "delta", "apart")
_TENSORS = ("q", "k", "v", "gradient", "lse", "apart", "delta", "seed", *plans.TENSORS)
_ELEMENTS = 4096  # of a tile of results
_DELTA = Named("opkit.attn.gpu.portable.device.backward_rows", "attention_delta")
_OF_KEYS, _OF_QUERIES = (
    Named("opkit.attn.gpu.portable.device.backward", name) for name in ("attention_of_keys", "attention_of_queries")
)


@functools.cache
def delta_kernel(columns: int) -> TritonKernel:
    """The kernel of delta for values of so many columns."""
    wide, _ = blocks.parts(columns)
    return triton_kernel(
        _DELTA,
        grid=lambda queries, programs, ROWS: (blocks.tiles_in(queries, ROWS), programs),
        E=columns, E0=wide, ROWS=max(16, _ELEMENTS // wide),
    )  # fmt: skip


@functools.cache
def keys_kernel(constants: arguments.Constants) -> TritonKernel:
    """The kernel of the gradients of keys and values with its constants settled."""
    return triton_kernel(
        _OF_KEYS, grid=lambda keys, programs, KEYS: (blocks.tiles_in(keys, KEYS), programs), **dict(constants)
    )


@functools.cache
def queries_kernel(constants: arguments.Constants) -> TritonKernel:
    """The kernel of the gradient of queries with its constants settled."""
    return triton_kernel(
        _OF_QUERIES,
        grid=lambda queries, programs, ROWS: (blocks.tiles_in(queries, ROWS), programs),
        **dict(constants),
    )


def backward(example: GradientCall) -> Run:
    """The gradients of q, k and v, and delta, for calls like ``example``."""
    q, k, v = example[2:5]
    new = [overwritten(rows(each, each.shape[3], example.out_is_bshd)) for each in (q, k, v)]
    new.append(overwritten(q.new_empty(q.shape[:3], dtype=torch.float32)))
    if 0 in (q.numel(), k.numel(), v.numel()):
        return lambda *given: tuple([make().zero_() for make in new])
    roomy = arguments.fit_to_slots(example)
    fits, launch = roomy is example, _launch(roomy)

    def run(*given: Any) -> _Four:
        call = GradientCall(*given) if fits else arguments.fit_to_slots(GradientCall(*given))
        call = call._replace(
            **{name: dense_rows(getattr(call, name)) for name in ("gradient", "q", "k", "v", "out")},
            lse=call.lse.contiguous(),
        )
        of_q, of_k, of_v, delta = (make() for make in new)
        launch(call, of_q, of_k, of_v, delta)
        return of_q, of_k, of_v, delta

    return run


def _launch(example: GradientCall) -> Run:
    """A function of a call and its results, which launches the three kernels."""
    (batch, heads, queries, _), (_, kv_heads, _, columns) = example.q.shape, example.v.shape
    shape, dtype = arguments.shape_of(example), example.q.dtype
    numbers = {**_numbers(example), **plans.numbers_of(shape)}
    sums = {"heads": heads, "queries": queries, "programs": batch * heads}
    of_rows = PreparedLaunch(delta_kernel(columns), _ROWS, sums)
    tiles = arguments.tiles_of(candidates.OF_KEYS, example, shape)
    theirs = {**numbers, "kv_heads": kv_heads, "programs": batch * kv_heads}
    of_keys = arguments.Tiled(
        keys_kernel, tiles, shape, dtype, ("of_k", "of_v", *_TENSORS), theirs, written=slice(2), by_keys=True
    )
    tiles = arguments.tiles_of(candidates.OF_QUERIES, example, shape)
    theirs = {**numbers, "heads": heads, "programs": batch * heads}
    of_queries = arguments.Tiled(
        queries_kernel, tiles, shape, dtype, ("of_q", "sinks", *_TENSORS), theirs, written=slice(1)
    )
    new = overwritten(example.q.new_empty((batch * heads, 2 * example.q.shape[2] + 1), dtype=torch.float32))

    def launch(call: GradientCall, of_q: Tensor, of_k: Tensor, of_v: Tensor, delta: Tensor) -> None:
        apart = new()
        of_rows(call.out, call.gradient, call.of_lse, delta, apart)
        rows, sums = (call.q, call.k, call.v, call.gradient), (call.lse, apart, delta)
        read = (*rows, *sums, call.seed, *arguments.tensors_of(call, shape))
        of_queries(call, of_q, call.sinks, *read)
        of_keys(call, of_k, of_v, *read)

    return launch


def _numbers(call: GradientCall) -> dict[str, Any]:
    """The numbers that both kernels take."""
    heads, kv_heads = call.q.shape[1], call.v.shape[1]
    return {
        "group": heads // kv_heads, "queries": call.q.shape[2], "keys": call.v.shape[2], "scale": call.scale,
        "softcap": call.softcap, "threshold": math.ceil(call.dropout_p * 2**32), "rescale": arguments.rescale(call.dropout_p),
    }  # fmt: skip
