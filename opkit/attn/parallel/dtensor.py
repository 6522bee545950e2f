"""``opkit.attention`` of ``DTensor``s that are sharded by batch, by heads, or by sequence."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from opkit.attn import api
from opkit.attn.compat import torch_private
from opkit.attn.masks import biases
from opkit.attn.masks.algebra import as_mask
from opkit.attn.parallel.api import ContextParallel
from opkit.attn.parallel.blocks import local_mask, local_tensor
from opkit.attn.parallel.layout import Layout
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
    if sharded.count("sequence") > 1:
        raise ArgumentError(f"opkit.attention: {_shown(q, k, v)}: the sequence is sharded along several dimensions.")
    shape, offset = torch_private.local_part(q)
    at = {name: range(offset[dim], offset[dim] + shape[dim]) for dim, name in dims.items()}
    heads, batch = at["heads"], at["batch"]
    ways = math.prod(mesh.size(number) for number, name in enumerate(sharded) if name == "heads")
    of_all = {name: q.shape[dim] for dim, name in dims.items()}
    shared = k.shape[next(dim for dim, name in dims.items() if name == "heads")]
    if of_all["heads"] % ways or shared % ways:
        raise ShapeError(
            f"opkit.attention: {of_all['heads']} heads of queries and {shared} of keys cannot be divided among {ways} processes; "
            f"{_shown(q, k, v)}. Shard the batch or the sequence."
        )
    mask = None if mask is None else local_mask(as_mask(mask), heads, batch)
    bias = [x if isinstance(x, biases.Bias) else local_tensor(x, heads, batch) for x in api.listed(bias)] or None
    sinks = None if sinks is None else _local_sinks(sinks, heads, sharded)
    parts = [x.to_local() for x in (q, k, v)]
    if "sequence" in sharded:
        context = _context(mesh.get_group(sharded.index("sequence")))
        own = api.as_bhsd(parts[0], parts[1], parts[2], layout)
        out, lse = context.attention(*own, mask, bias, scale, softcap, sinks, dropout_p)
        out = api.from_bhsd(out, layout)
    else:
        out, lse = api.attention(
            *parts, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p, return_lse=True,
            layout=layout,
        )  # fmt: skip
    whole = _joined(out, mesh, q.placements, (*q.shape[:3], v.shape[3]))
    if not return_lse:
        return whole
    order = ("batch", "heads", "sequence")
    placements = [Replicate() if name is None else Shard(order.index(name)) for name in sharded]
    return whole, _joined(lse, mesh, placements, tuple(of_all[name] for name in order))


@functools.lru_cache(16)
def _context(group: Any) -> ContextParallel:
    return ContextParallel(Layout(group, False), None)


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
    raise ArgumentError(
        f"opkit.attention: {_shown(*tensors)}. Along each dimension of the mesh all three must be replicated, or sharded by "
        "batch, heads or sequence alike. Call redistribute() first."
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
