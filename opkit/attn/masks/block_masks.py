"""Use a ``BlockMask`` of torch's flex_attention as a mask: the mask or function it was made from, or that and its blocks."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit.attn.masks.algebra import Mask, MaskFunction, SizedMask, as_mask
from opkit.attn.masks.logit_index import LogitIndex
from opkit.attn.masks.program_builder import CallSizes, PackedSequences, ProgramBuilder
from opkit.errors import ArgumentTypeError, ShapeError
from opkit.op import torch_private as private


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks(Mask):
    """A ``BlockMask`` of ``torch.nn.attention.flex_attention``: the same queries see the same keys as there.

    Its function is evaluated for every query and key at construction, in eager mode; construct it once, and use it often. Where
    the blocks are those of the function, this is the function from then on, or the mask of :mod:`opkit.masks` that it is.
    Otherwise, and in compiled code, it is the function together with a table of blocks.

    Args:
        block_mask: from ``create_block_mask`` or ``BlockMask.from_kv_blocks``, for the call's numbers of queries and keys.

    Attributes:
        mask: the mask that it equals.

    Raises:
        ArgumentTypeError: ``block_mask`` is no ``BlockMask``.
        ShapeError: at a call with other numbers of queries or keys.

    >>> import opkit, torch
    >>> from opkit.masks import Blocks
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> q = torch.ones(1, 2, 256, 8)
    >>> block_mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, 256, 256, device="cpu")
    >>> opkit.attention(q, q, q, mask=Blocks(block_mask)).shape
    torch.Size([1, 2, 256, 8])
    """

    block_mask: Any
    mask: Mask = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.block_mask, "kv_num_blocks"):
            raise ArgumentTypeError(
                f"Blocks takes a BlockMask of torch.nn.attention.flex_attention, got {type(self.block_mask).__name__}. Make one "
                "with create_block_mask, or give a bool tensor to Dense."
            )
        object.__setattr__(self, "mask", _mask(self.block_mask))

    def lower(self, builder: ProgramBuilder, packed: PackedSequences | None) -> None:
        """Emit the program of ``mask``."""
        self.check(builder.sizes)
        self.mask.lower(builder, None)

    def check(self, call: CallSizes) -> None:
        """Raise for a call with other numbers of queries or keys."""
        sizes, known = (call.queries, call.keys), tuple(self.block_mask.seq_lengths)
        if not all(private.or_true(own == given) for own, given in zip(known, sizes, strict=True)):
            raise ShapeError(
                f"opkit.attention: Blocks: the BlockMask is for (queries, keys) = {known}; there are {sizes}. Make one for these."
            )

    def at(self, index: LogitIndex) -> Tensor:
        return _of_blocks(self.block_mask)(index.b, index.h, index.i, index.j)


_cache: weakref.WeakKeyDictionary[Any, tuple[Any, Mask]] = weakref.WeakKeyDictionary()


def _mask(block_mask: Any) -> Mask:
    """Return the mask that a ``BlockMask`` equals; it is cached while the ``BlockMask`` lives."""
    if torch.compiler.is_compiling():
        return MaskFunction(_of_blocks(block_mask))
    function, mask = _cache.get(block_mask, (None, None))
    if mask is None or function is not block_mask.mask_mod:
        mask = _original_mask(block_mask)
        mask = MaskFunction(_of_blocks(block_mask)) if mask is None else mask
        _cache[block_mask] = (block_mask.mask_mod, mask)
    return mask


def _of_blocks(block_mask: Any) -> Callable[..., Tensor]:
    """Return a function that says what a ``BlockMask`` does: full blocks, and its own function in partial ones."""
    function, (high, wide), (partial, full) = block_mask.mask_mod, block_mask.BLOCK_SIZE, listed(block_mask)
    of_batches, of_heads = (int(size > 1) for size in partial.shape[:2])

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        block = (b * of_batches, h * of_heads, q_idx // high, kv_idx // wide)
        return full[block] | (partial[block] & function(b, h, q_idx, kv_idx))

    return mask


def _original_mask(block_mask: Any) -> Mask | None:
    """Return the mask of a ``BlockMask`` whose blocks are those of its function; None if it has others."""
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
    return block_mask.mask_mod(*index[:4])


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


def _spread(blocks: Tensor, block_mask: Any) -> Tensor:
    """Repeat blocks of keys for each of their elements."""
    return blocks.repeat_interleave(block_mask.BLOCK_SIZE[1], -1)
