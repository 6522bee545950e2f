"""Use a ``BlockMask`` of torch's flex_attention as a mask: the mask or function it was made from, or a bool tensor."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor

from opkit.attn.masks import program
from opkit.attn.masks.algebra import Mask, SizedMask, as_mask
from opkit.attn.masks.logit_index import LogitIndex
from opkit.attn.masks.program_builder import PackedSequences, ProgramBuilder
from opkit.errors import ArgumentTypeError


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks(Mask):
    """A ``BlockMask`` of ``torch.nn.attention.flex_attention``: the same queries see the same keys as there.

    Its function is evaluated for every query and key at construction; construct it once, and use it often. Where the blocks are
    those of the function, this is the function from then on, or the mask of :mod:`opkit.masks` that it is; otherwise it takes
    queries * keys bytes for each batch and head of the ``BlockMask``.

    Args:
        block_mask: from ``create_block_mask`` or ``BlockMask.from_kv_blocks``, for the call's numbers of queries and keys.

    Attributes:
        mask: the mask that it equals, or None.
        dense: bool, (batch or 1, heads or 1, queries, keys), or None where ``mask`` is not None.
    """

    block_mask: Any
    mask: Mask | None = dataclasses.field(init=False, repr=False)
    dense: Tensor | None = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.block_mask, "kv_num_blocks"):
            raise ArgumentTypeError(
                f"Blocks takes a BlockMask of torch.nn.attention.flex_attention, got {type(self.block_mask).__name__}. Make one "
                "with create_block_mask, or give a bool tensor to Dense."
            )
        _, mask, tensor = _parts(self.block_mask)
        object.__setattr__(self, "mask", mask)
        object.__setattr__(self, "dense", tensor)

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit the program of ``mask``, or ``DENSE``."""
        if self.mask is not None and (builder.sizes.queries, builder.sizes.keys) == tuple(self.block_mask.seq_lengths):
            self.mask.lower(builder, None)
        else:
            builder.emit(program.DENSE, builder.dense("Blocks", self._tensor(), floating=False))

    def at(self, index: LogitIndex) -> Tensor:
        return index.of_all(self._tensor())

    def _tensor(self) -> Tensor:
        return dense(self.block_mask) if self.dense is None else self.dense


_Parts = tuple[Any, Mask | None, Tensor | None]
_cache: weakref.WeakKeyDictionary[Any, _Parts] = weakref.WeakKeyDictionary()


def _parts(block_mask: Any) -> _Parts:
    """Return the function of a ``BlockMask``, and the mask or the tensor that it equals: cached while the ``BlockMask`` lives."""
    if torch.compiler.is_compiling():
        return block_mask.mask_mod, None, dense(block_mask)
    parts = _cache.get(block_mask)
    if parts is None or parts[0] is not block_mask.mask_mod:
        mask = _original_mask(block_mask)
        parts = _cache[block_mask] = (block_mask.mask_mod, mask, dense(block_mask) if mask is None else None)
    return parts


def _original_mask(block_mask: Any) -> Mask | None:
    """Return the mask that a ``BlockMask`` equals, that of :mod:`opkit.masks` or its function; None if it has other blocks."""
    function, sizes = block_mask.mask_mod, block_mask.seq_lengths
    if isinstance(function, SizedMask) and (function.queries, function.keys) != tuple(sizes):
        return None
    if not _blocks_agree(block_mask):
        return None
    return function.mask if isinstance(function, SizedMask) else as_mask(function)


def _blocks_agree(block_mask: Any) -> bool:
    """Return whether the function hides nothing in the blocks listed as full, and everything in those that are not listed."""
    high, (queries, keys) = block_mask.BLOCK_SIZE[0], block_mask.seq_lengths
    partial, full = listed(block_mask)
    for row in range(partial.shape[-2]):
        seen = _rows(block_mask, row * high, min(queries, row * high + high))
        shown, whole = (_spread(each[..., row : row + 1, :], block_mask)[..., :keys] for each in (partial, full))
        if (whole & ~seen).any() or (seen & ~(shown | whole)).any():
            return False
    return True


def _rows(block_mask: Any, first: int, last: int) -> Tensor:
    """Return the function's own result for some queries, for the batches and heads of the ``BlockMask``."""
    device = block_mask.kv_num_blocks.device
    sizes = (*block_mask.kv_num_blocks.shape[:2], last - first, block_mask.seq_lengths[1])
    axes = [
        torch.arange(size, device=device).reshape([-1 if d == n else 1 for d in range(4)])
        for n, size in enumerate(sizes)
    ]
    index = LogitIndex(axes[0], axes[1], axes[2] + first, axes[3])
    function = block_mask.mask_mod
    # torch 2.11's compiler calls bool() on what is called, which masks refuse
    return function.at(index) if isinstance(function, Mask) else function(*index[:4])


def dense(block_mask: Any) -> Tensor:
    """Return bool, (batch or 1, heads or 1, queries, keys): the full blocks, and the function's result within the others."""
    queries, keys = block_mask.seq_lengths
    evaluated = (
        _rows(block_mask, 0, queries) if isinstance(block_mask.mask_mod, (Mask, SizedMask)) else _evaluated(block_mask)
    )
    partial, full = (_spread(each, block_mask, tall=True)[..., :queries, :keys] for each in listed(block_mask))
    return (partial & evaluated) | full


def _evaluated(block_mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    (queries, keys), (batch, heads) = block_mask.seq_lengths, block_mask.kv_num_blocks.shape[:2]
    return create_mask(block_mask.mask_mod, batch, heads, queries, keys, block_mask.kv_num_blocks.device)


def listed(block_mask: Any) -> tuple[Tensor, Tensor]:
    """Return the blocks that are partly and fully visible: bool, (batch or 1, heads or 1, blocks of queries, blocks of keys)."""
    partial = _listed(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is None:
        return partial, torch.zeros_like(partial)
    return partial, _listed(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)


def _listed(block_mask: Any, counts: Tensor, indices: Tensor) -> Tensor:
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    rank = torch.arange(indices.shape[-1], device=indices.device)
    chosen = torch.where(
        rank < counts.unsqueeze(-1), indices.long(), columns
    )  # padding goes to a column after the last
    found = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return found.scatter(-1, chosen, torch.ones_like(chosen, dtype=torch.bool))[..., :columns]


def _spread(blocks: Tensor, block_mask: Any, tall: bool = False) -> Tensor:
    """Repeat blocks of keys, and those of queries too if ``tall``, for each of their elements."""
    high, wide = block_mask.BLOCK_SIZE
    return (blocks.repeat_interleave(high, -2) if tall else blocks).repeat_interleave(wide, -1)
