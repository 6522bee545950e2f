"""A ``BlockMask`` of torch's flex_attention as a mask: by the mask of the algebra of which it was made, or as a bool tensor."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opkit.attn.masks import program
from opkit.attn.masks.algebra import Mask, SizedMask
from opkit.attn.place import Place
from opkit.errors import ArgumentTypeError

if TYPE_CHECKING:
    from opkit.attn.masks.lowering import Documents, Lowering


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks(Mask):
    """A ``BlockMask`` of ``torch.nn.attention.flex_attention``: the same queries see the same keys as there.

    Its function is evaluated for every query and key when this is made; make it once, and use it often. Where the function is a
    mask of :mod:`opkit.masks` and the blocks are its own, it is that mask from then on; otherwise it takes queries * keys bytes
    for each batch and head that it has.

    Args:
        block_mask: what ``create_block_mask`` or ``BlockMask.from_kv_blocks`` gave, for as many queries and keys.

    Attributes:
        mask: the mask of the algebra that it is, or None.
        dense: bool, (batch or 1, heads or 1, queries, keys), or None where ``mask`` says it.
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

    def lower(self, to: Lowering, documents: Documents | None) -> None:
        """The mask's, or ``DENSE``."""
        if self.mask is not None and (to.sizes.queries, to.sizes.keys) == tuple(self.block_mask.seq_lengths):
            self.mask.lower(to, None)
        else:
            to.emit(program.DENSE, to.dense("Blocks", self._tensor(), floating=False))

    def at(self, place: Place) -> Tensor:
        return place.of_all(self._tensor())

    def _tensor(self) -> Tensor:
        return dense(self.block_mask) if self.dense is None else self.dense


_Parts = tuple[Any, Mask | None, Tensor | None]
_known: weakref.WeakKeyDictionary[Any, _Parts] = weakref.WeakKeyDictionary()


def _parts(block_mask: Any) -> _Parts:
    """The function of a ``BlockMask``, and it as a mask or a tensor: found once for each as long as it lives."""
    if torch.compiler.is_compiling():
        return block_mask.mask_mod, None, dense(block_mask)
    found = _known.get(block_mask)
    if found is None or found[0] is not block_mask.mask_mod:
        mask = algebraic(block_mask)
        found = _known[block_mask] = (block_mask.mask_mod, mask, dense(block_mask) if mask is None else None)
    return found


def algebraic(block_mask: Any) -> Mask | None:
    """The mask of the algebra that a ``BlockMask`` is exactly, or None."""
    function, sizes = block_mask.mask_mod, block_mask.seq_lengths
    if not _is_algebra(function):
        return None
    if isinstance(function, SizedMask) and (function.queries, function.keys) != tuple(sizes):
        return None
    return (function.mask if isinstance(function, SizedMask) else function) if _agree(block_mask) else None


def _is_algebra(function: Any) -> bool:
    return isinstance(function, (Mask, SizedMask))


def _agree(block_mask: Any) -> bool:
    """Whether the function hides nothing in the blocks listed as full, and all of those that are not listed."""
    high, (queries, keys) = block_mask.BLOCK_SIZE[0], block_mask.seq_lengths
    partial, full = listed(block_mask)
    for row in range(partial.shape[-2]):
        seen = _rows(block_mask, row * high, min(queries, row * high + high))
        shown, whole = (_spread(each[..., row : row + 1, :], block_mask)[..., :keys] for each in (partial, full))
        if (whole & ~seen).any() or (seen & ~(shown | whole)).any():
            return False
    return True


def _rows(block_mask: Any, first: int, last: int) -> Tensor:
    """The function's own result for some queries, of the batches and heads that the ``BlockMask`` has."""
    device = block_mask.kv_num_blocks.device
    sizes = (*block_mask.kv_num_blocks.shape[:2], last - first, block_mask.seq_lengths[1])
    axes = [
        torch.arange(size, device=device).reshape([-1 if d == n else 1 for d in range(4)])
        for n, size in enumerate(sizes)
    ]
    place = Place(axes[0], axes[1], axes[2] + first, axes[3])
    function = block_mask.mask_mod
    # torch 2.11's compiler asks of what is called whether it is true, which no mask answers
    return function.at(place) if isinstance(function, Mask) else function(*place[:4])


def dense(block_mask: Any) -> Tensor:
    """Bool, (batch or 1, heads or 1, queries, keys): the blocks that are full, and the function within the others."""
    queries, keys = block_mask.seq_lengths
    evaluated = _rows(block_mask, 0, queries) if _is_algebra(block_mask.mask_mod) else _evaluated(block_mask)
    partial, full = (_spread(each, block_mask, tall=True)[..., :queries, :keys] for each in listed(block_mask))
    return (partial & evaluated) | full


def _evaluated(block_mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    (queries, keys), (batch, heads) = block_mask.seq_lengths, block_mask.kv_num_blocks.shape[:2]
    return create_mask(block_mask.mask_mod, batch, heads, queries, keys, block_mask.kv_num_blocks.device)


def listed(block_mask: Any) -> tuple[Tensor, Tensor]:
    """The blocks that are partly and wholly seen: bool, (batch or 1, heads or 1, blocks of queries, blocks of keys)."""
    partial = _listed(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is None:
        return partial, torch.zeros_like(partial)
    return partial, _listed(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)


def _listed(block_mask: Any, counts: Tensor, indices: Tensor) -> Tensor:
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    rank = torch.arange(indices.shape[-1], device=indices.device)
    chosen = torch.where(rank < counts.unsqueeze(-1), indices.long(), columns)  # a column after the last takes the rest
    found = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return found.scatter(-1, chosen, torch.ones_like(chosen, dtype=torch.bool))[..., :columns]


def _spread(blocks: Tensor, block_mask: Any, tall: bool = False) -> Tensor:
    """Blocks of keys, and of queries where they are ``tall``, element by element."""
    high, wide = block_mask.BLOCK_SIZE
    return (blocks.repeat_interleave(high, -2) if tall else blocks).repeat_interleave(wide, -1)
