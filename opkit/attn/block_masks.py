"""What a ``BlockMask`` of torch's flex_attention lets queries see, as a bool tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def dense(block_mask: Any) -> Tensor:
    """Bool, (batch or 1, heads or 1, queries, keys): the blocks that are full, and the function within the others."""
    queries, keys = block_mask.seq_lengths
    shape = block_mask.kv_num_blocks.shape[:2]
    partial = _spread(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)
    chosen = partial[..., :queries, :keys] & _evaluated(block_mask, shape, queries, keys)
    if block_mask.full_kv_num_blocks is None:
        return chosen
    full = _spread(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return chosen | full[..., :queries, :keys]


def _spread(block_mask: Any, counts: Tensor, indices: Tensor) -> Tensor:
    """The blocks that are listed, each element by element."""
    high, wide = block_mask.BLOCK_SIZE
    columns = -(-block_mask.seq_lengths[1] // wide)
    rank = torch.arange(indices.shape[-1], device=indices.device)
    chosen = torch.where(rank < counts.unsqueeze(-1), indices.long(), columns)  # a column after the last takes the rest
    listed = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    blocks = listed.scatter(-1, chosen, torch.ones_like(chosen, dtype=torch.bool))[..., :columns]
    return blocks.repeat_interleave(high, -2).repeat_interleave(wide, -1)


def _evaluated(block_mask: Any, shape: Any, queries: int, keys: int) -> Tensor:
    """The function of (batch, head, query, key), over all of them; it may hold what ``torch.vmap`` allows."""
    device = block_mask.kv_num_blocks.device
    axes = [torch.arange(size, device=device) for size in (*shape, queries, keys)]
    function = block_mask.mask_mod
    for dim in (3, 2, 1, 0):
        function = torch.vmap(function, tuple(0 if i == dim else None for i in range(4)))
    return function(*axes)
