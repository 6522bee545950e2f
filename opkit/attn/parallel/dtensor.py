"""``opkit.attention`` of ``DTensor``s that are sharded by batch, by heads, or by sequence, or whose keys are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from opkit.attn import api
from opkit.attn.masks.algebra import Dense
from opkit.attn.masks.program_builder import CallSizes
from opkit.attn.merging import merge_attention
from opkit.attn.parallel.api import ContextParallel
from opkit.attn.parallel.blocks import Block, bias_of, check_divisible, check_whole, mask_of
from opkit.attn.parallel.functions import TracedCall
from opkit.attn.parallel.layout import Layout
from opkit.attn.parallel.options import Options
from opkit.errors import ArgumentError, ShapeError

_DIMS = {"bhsd": {0: "batch", 1: "heads", 2: "sequence"}, "bshd": {0: "batch", 1: "sequence", 2: "heads"}}


def attention(
    q: DTensor, k: DTensor, v: DTensor, mask: Any, bias: Any, scale: float | None, softcap: float | None, sinks: Tensor | None,
    dropout_p: float, return_lse: bool, layout: str,
) -> Any:  # fmt: skip
    """Return the result, and with ``return_lse`` the log-sum-exp, sharded as ``q`` is.

    Raises:
        ArgumentError: q, k and v are not sharded alike, or as attention cannot be.
        ShapeError: the heads of keys cannot be divided.
    """
    mesh, dims = q.device_mesh, _DIMS[layout]
    sharded = [_sharded(number, (q, k, v), dims) for number in range(mesh.ndim)]
    if sharded.count("sequence") + sharded.count("keys") > 1:
        raise ArgumentError(f"opkit.attention: {_shown(q, k, v)}: the sequence is sharded along several dimensions.")
    shape, offset = _local_part(q)
    at = {name: range(offset[dim], offset[dim] + shape[dim]) for dim, name in dims.items()}
    heads, batch = at["heads"], at["batch"]
    ways = math.prod([mesh.size(number) for number, name in enumerate(sharded) if name == "heads"])
    of_all = {name: q.shape[dim] for dim, name in dims.items()}
    shared = k.shape[next(dim for dim, name in dims.items() if name == "heads")]
    if of_all["heads"] % ways or shared % ways:
        raise ShapeError(
            f"opkit.attention: {of_all['heads']} heads of queries and {shared} of keys cannot be divided among {ways} processes; "
            f"{_shown(q, k, v)}. Shard the batch or the sequence."
        )
    keys = next(k.shape[dim] for dim, name in dims.items() if name == "sequence")
    whole = CallSizes(of_all["batch"], of_all["heads"], of_all["sequence"], keys, q.device)
    of_parts = [Replicate() if name is None else Partial() for name in sharded]

    def local(captured: DTensor) -> Tensor | None:
        return captured.full_tensor(grad_placements=of_parts) if captured.device_mesh == mesh else None

    call = TracedCall.of(mask, bias, whole, q.dtype, local).part(heads, batch)
    sinks = None if sinks is None else _local_sinks(sinks, heads, sharded)
    of_q = [Partial() if name == "keys" else placement for name, placement in zip(sharded, q.placements, strict=True)]
    own = api.as_bhsd(q.to_local(grad_placements=of_q), k.to_local(), v.to_local(), layout)
    options = Options.drawn(scale, softcap, dropout_p, own[0].device, (heads.start, batch.start))
    if "sequence" in sharded:
        context = ContextParallel(Layout.of(mesh.get_group(sharded.index("sequence")), False), None)
        out, lse = context.attend(*own, call, sinks, options)
    elif "keys" in sharded:
        dim = next(dim for dim, name in dims.items() if name == "sequence")
        begin, group = _local_part(k)[1][dim], mesh.get_group(sharded.index("keys"))
        block = Block(range(q.shape[dim]), range(begin, begin + own[1].shape[2]), k.shape[dim] - q.shape[dim])
        out, lse = _by_keys(*own, call, sinks, options, block, group)
    else:
        out, lse = call.run(options, *own, sinks, (0, 0))
    whole = _joined(api.from_bhsd(out, layout), mesh, q.placements, (*q.shape[:3], v.shape[3]))
    if not return_lse:
        return whole
    order = ("batch", "heads", "sequence")
    placements = [Shard(order.index(name)) if name in order else Replicate() for name in sharded]
    return whole, _joined(lse, mesh, placements, tuple(of_all[name] for name in order))


def _by_keys(
    q: Tensor, k: Tensor, v: Tensor, call: TracedCall, sinks: Tensor | None, options: Options, block: Block, group: Any
) -> tuple[Tensor, Tensor]:
    """Return attention of queries that all processes have to the keys of all, each of which has some, as in decoding."""
    keys = block.shift + len(block.queries)
    check_whole(call.mask, call.biases, CallSizes(q.shape[0], q.shape[1], q.shape[2], keys, q.device))
    for each in call.biases:
        check_divisible(each, -(-keys // dist.get_world_size(group)))
    part = mask_of(call.mask, block) if block.keys else True
    if isinstance(part, bool):
        part = None if part else Dense(torch.zeros(1, 1, dtype=torch.bool, device=q.device))
    own = TracedCall(part, [x for each in call.biases for x in bias_of(each, block)], call.functions)
    of_first = sinks if dist.get_rank(group) == 0 else None
    out, lse = own.run(options, q, k, v, of_first, (0, block.keys.start))
    if sinks is not None and of_first is None:
        lse = lse + sinks[:0].sum().to(lse.dtype)  # zero: the other processes' gradients of sinks are zeros, not None
    return merge_attention([(out, lse)], mesh=group)


def _local_part(x: DTensor) -> tuple[list[int], list[int]]:
    """Return the shape of this process's part, and where it begins."""
    mesh, shape, offset = x.device_mesh, list(x.shape), [0] * x.dim()
    for number, placement in enumerate(x.placements):
        if isinstance(placement, Shard):
            dim = placement.dim
            each = -(-shape[dim] // mesh.size(number))
            begin = min(each * mesh.get_local_rank(number), shape[dim])
            shape[dim], offset[dim] = min(each, shape[dim] - begin), offset[dim] + begin
    return shape, offset


def _joined(local: Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> DTensor:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def _sharded(number: int, tensors: tuple[DTensor, ...], dims: dict[int, str]) -> str | None:
    """Return what is sharded along a dimension of the mesh."""
    if any(not isinstance(x, DTensor) or x.device_mesh != tensors[0].device_mesh for x in tensors):
        raise ArgumentError("opkit.attention: q, k and v must all be DTensors of one mesh, or none of them.")
    first, *others = (x.placements[number] for x in tensors)
    if all(each == first for each in others):
        if first == Replicate():
            return None
        if isinstance(first, Shard) and type(first) is Shard and first.dim in dims:
            return dims[first.dim]
    keys, values = others
    if first == Replicate() and keys == values and type(keys) is Shard and dims.get(keys.dim) == "sequence":
        return "keys"
    raise ArgumentError(
        f"opkit.attention: {_shown(*tensors)}. Along each dimension of the mesh all three must be replicated, or sharded by "
        "batch, heads or sequence alike; or, with replicated q, k and v by sequence. Call redistribute() first."
    )


def _shown(*tensors: Any) -> str:
    return ", ".join(f"{name} is {tuple(x.placements)}" for name, x in zip("qkv", tensors, strict=True))


def _local_sinks(sinks: Tensor, heads: range, sharded: Sequence[str | None]) -> Tensor:
    """Return those of this process's heads; the gradient of what is replicated is a sum over the processes."""
    if not isinstance(sinks, DTensor):
        return sinks[heads.start : heads.stop]
    of_gradient = [
        placement if placement == Shard(0) else Replicate() if name is None else Partial()
        for placement, name in zip(sinks.placements, sharded, strict=True)
    ]
    local = sinks.to_local(grad_placements=of_gradient)
    return local if len(local) == len(heads) else local[heads.start : heads.stop]
