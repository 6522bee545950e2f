"""The part of a mask or a bias that a block of queries and keys needs, with positions that count from the block's begin."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.functions.ranges import truth
from opkit.attn.functions.trace import Traced
from opkit.attn.masks import algebra, lowering
from opkit.attn.masks.algebra import And, CausalOfTorch, Dense, Mask, Not, Or, VarLen
from opkit.attn.masks.biases import ALiBi, RelativePosition
from opkit.attn.masks.diagonals import Causal, PrefixLM, SlidingWindow
from opkit.attn.masks.program_builder import CallSizes
from opkit.attn.masks.sequences import KeyPadding, Segments
from opkit.attn.masks.traced import TracedMask, TracedScore
from opkit.attn.tensor_cache import TensorCache
from opkit.errors import ArgumentError, ShapeError

Part = Mask | bool  # True: every query sees every key; False: none sees any
_STARTS: TensorCache[list[int]] = TensorCache(64)


@dataclasses.dataclass(frozen=True)
class Block:
    """Queries and keys next to each other.

    Attributes:
        queries, keys: their positions in the whole sequence.
        shift: the number of keys of the whole sequence less that of queries.
    """

    queries: range
    keys: range
    shift: int = 0

    @property
    def ranges(self) -> dict[str, range]:
        """The positions by the variables of functions."""
        return {"i": self.queries, "j": self.keys}


def mask_of(mask: Mask | None, block: Block) -> Part:
    """Return what a mask of the whole sequence is for a block.

    Raises:
        ArgumentError: the mask has no such part.
    """
    if mask is None:
        return True
    packed = [part for part in algebra.conjuncts(mask) if isinstance(part, VarLen)] if isinstance(mask, And) else []
    return _part(mask, block, bool(packed))


def tensor_of(tensor: Tensor, block: Block) -> Tensor:
    """Return the part of a tensor that broadcasts to (batch, heads, queries, keys)."""
    return _narrow(_narrow(tensor, -1, block.keys), -2, block.queries)


def bias_of(bias: Any, block: Block) -> list[Any]:
    """Return the biases that are, for a block, a bias of the whole sequence, which ``check_divisible`` has seen."""
    match bias:
        case ALiBi():
            return _alibi(bias, block)
        case RelativePosition():
            rows, columns = (_narrow(x, -2, block.queries) for x in (bias.rel_h, bias.rel_w))
            wide = columns.shape[-1]
            at = range(block.keys.start // wide, block.keys.stop // wide)
            return [RelativePosition(rows[..., at.start : at.stop], columns)]
        case TracedScore():
            return [bias.part(block.ranges)]
        case _:
            return [tensor_of(bias, block)]


def check_whole(mask: Mask | None, added: Sequence[Any], whole: CallSizes) -> None:
    """Raise for a mask or a bias that does not fit the whole sequence: on all processes, of which its parts may fit some."""
    lowering.programs_of(mask, list(added), None, whole, torch.float32, None)


def check_divisible(bias: Any, keys: int) -> None:
    """Raise for a ``RelativePosition`` if ``keys``, those of a part of the sequence, are not whole rows of its grid."""
    if isinstance(bias, RelativePosition) and keys % (wide := bias.rel_w.shape[-1]):
        raise ShapeError(
            f"opkit.attention: RelativePosition with {wide} columns cannot be divided into parts of {keys} keys, which are not "
            'whole rows. Use other sizes, or method="all_to_all".'
        )


def _alibi(bias: ALiBi, block: Block) -> list[Any]:
    """Return what ``-slope * |i + distance - j|`` is: two tensors where its sign is the same for the whole block."""
    distance = block.shift + block.queries.start - block.keys.start  # of the first query and the first key
    queries, keys = len(block.queries), len(block.keys)
    if distance == keys - queries:
        return [bias]
    slopes = bias.slopes.float()[..., None, None]
    i, j = (torch.arange(n, device=slopes.device, dtype=slopes.dtype) for n in (queries, keys))
    i = i[:, None]
    if distance >= keys - 1:  # both summands are distances, too, so that nothing cancels
        return [-slopes * i, -slopes * (distance - j)]
    if distance + queries <= 1:
        return [-slopes * (-distance - i), -slopes * j]
    return [-slopes * (i + distance - j).abs()]


def local_bias(bias: Any, heads: range, batch: range | None = None) -> Any:
    """Return a bias of all positions for some of the heads, and of the batch."""
    match bias:
        case ALiBi():
            return ALiBi(_narrow(_narrow(bias.slopes, -1, heads), -2, batch))
        case RelativePosition():
            return RelativePosition(*(local_tensor(x, heads, batch) for x in (bias.rel_h, bias.rel_w)))
        case TracedScore():
            return bias.part(_beginning_later(heads, batch))
        case _:
            return local_tensor(bias, heads, batch)


def local_mask(mask: Mask, heads: range, batch: range | None = None) -> Mask:
    """Return a mask of all positions for some of the heads, and of the batch."""
    match mask:
        case And() | Or():
            return type(mask)(tuple(local_mask(part, heads, batch) for part in mask.parts))
        case Not():
            return Not(local_mask(mask.part, heads, batch))
        case Dense():
            return Dense(local_tensor(mask.tensor, heads, batch))
        case KeyPadding() | PrefixLM():
            return dataclasses.replace(mask, lengths=_narrow(mask.lengths, -1, batch))
        case Segments():
            keys = None if mask.kv_ids is None else _narrow(mask.kv_ids, -2, batch)
            return Segments(_narrow(mask.q_ids, -2, batch), keys)
        case TracedMask():
            return mask.part(_beginning_later(heads, batch))
        case _:
            return mask


def _beginning_later(heads: range, batch: range | None) -> dict[str, range]:
    """Return the ranges by the variables of functions; without those that begin at 0, from where functions count anyway."""
    given = {"h": heads} if batch is None else {"b": batch, "h": heads}
    return {axis: own for axis, own in given.items() if own.start}


def local_tensor(tensor: Tensor, heads: range, batch: range | None = None) -> Tensor:
    """Return the part for some heads, and of the batch, of a tensor that broadcasts to (batch, heads, queries, keys)."""
    return _narrow(_narrow(tensor, -3, heads), -4, batch)


def _narrow(tensor: Tensor, dim: int, positions: range | None) -> Tensor:
    """Return the elements at positions along a dimension; all if the tensor broadcasts along it."""
    if positions is None or tensor.dim() < -dim or tensor.shape[dim] == 1:
        return tensor
    return tensor.narrow(dim, positions.start, len(positions))


def _part(mask: Mask, block: Block, packed: bool) -> Part:
    match mask:
        case And():
            return _joined(And, [_part(each, block, packed) for each in algebra.conjuncts(mask)], neutral=True)
        case Or():
            return _joined(Or, [_part(each, block, packed) for each in mask.parts], neutral=False)
        case Not():
            part = _part(mask.part, block, packed)
            return not part if isinstance(part, bool) else Not(part)
        case Causal():
            return _band(None, 0, _shift(mask, block, packed), block)
        case CausalOfTorch():
            return _band(None, mask.shift, 0, block)
        case SlidingWindow():
            return _band(mask.left, mask.right, _shift(mask, block, packed), block)
        case PrefixLM() | KeyPadding() if packed:
            raise ArgumentError(
                f"opkit.attention: {type(mask).__name__} together with VarLen cannot be divided among processes; write the "
                "lengths as opkit.masks.Segments."
            )
        case PrefixLM():
            own = [KeyPadding((mask.lengths - block.keys.start).clamp(0, len(block.keys)))]
            return _joined(Or, [*own, _band(None, 0, _shift(mask, block, packed), block)], neutral=False)
        case KeyPadding():
            return KeyPadding((mask.lengths - block.keys.start).clamp(0, len(block.keys)))
        case Segments():
            keys = mask.q_ids if mask.kv_ids is None else mask.kv_ids
            return Segments(_narrow(mask.q_ids, -1, block.queries), _narrow(keys, -1, block.keys))
        case VarLen():
            return _of_packed(mask, block)
        case TracedMask():
            whole = truth(mask.traced, block.ranges) if isinstance(mask.traced, Traced) else None
            return mask.part(block.ranges) if whole is None else whole
        case Dense():
            return Dense(tensor_of(mask.tensor, block))
        case _:
            raise ArgumentError(f"opkit.attention: the mask {mask!r} cannot be divided among processes.")


def _joined(kind: type[And] | type[Or], parts: list[Part], neutral: bool) -> Part:
    if any(part is (not neutral) for part in parts):
        return not neutral
    rest = tuple(part for part in parts if isinstance(part, Mask))
    return kind(rest) if len(rest) > 1 else rest[0] if rest else neutral


def _shift(mask: Any, block: Block, packed: bool) -> int:
    return block.shift if mask.align == "bottom-right" and not packed else 0


def _band(left: int | None, right: int | None, shift: int, block: Block) -> Part:
    """Return the part of the mask ``-left <= key - query - shift <= right``."""
    offset = shift + block.queries.start - block.keys.start
    least, most = 1 - len(block.queries), len(block.keys) - 1  # of key - query in the block
    parts: list[Part] = []
    if right is not None and right + offset < most:
        parts.append(right + offset >= least and CausalOfTorch(right + offset, None))
    if left is not None and offset - left > least:
        parts.append(offset - left <= most and Not(CausalOfTorch(offset - left - 1, None)))
    return _joined(And, parts, neutral=True)


def _of_packed(mask: VarLen, block: Block) -> Part:
    queries, keys = mask.starts
    if keys is not queries and not torch.equal(keys, queries):
        raise ArgumentError(
            "opkit.attention: VarLen with other cu_seqlens_k than cu_seqlens_q cannot be divided among processes."
        )
    starts = _STARTS.get_or_create("starts", [queries], lambda: queries.tolist())
    own = {_sequence(starts, at) for at in (block.queries[0], block.queries[-1])}
    other = {_sequence(starts, at) for at in (block.keys[0], block.keys[-1])}
    if max(own) < min(other) or max(other) < min(own) or min(own) == len(starts) - 1:
        return False
    if own == other and len(own) == 1:
        return True
    return Segments(*_numbers(queries, block))


def _sequence(starts: list[int], at: int) -> int:
    """Return the number of the sequence at a position; after the last one, their number."""
    return sum(start <= at for start in starts[1:])


def _numbers(starts: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return the sequence of each query and key; queries after the last sequence get a number that no key has."""
    found = []
    for positions in (block.queries, block.keys):
        at = torch.arange(positions.start, positions.stop, device=starts.device)
        found.append(torch.searchsorted(starts[1:].contiguous(), at, right=True).to(torch.int32))
    return torch.where(found[0] == starts.shape[0] - 1, -1, found[0]), found[1]
