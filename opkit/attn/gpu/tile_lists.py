"""The lists of live tiles of a call, built on the GPU and kept while the tensors of its mask stay what they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from opkit.attn.gpu import plans
from opkit.attn.gpu.blocks import Blocks, tiles_in
from opkit.attn.gpu.plans import Shape
from opkit.attn.gpu.tile_states import states_of
from opkit.attn.masks import program
from opkit.attn.tensor_cache import TensorCache, cacheable, stream_of
from opkit.kernels.triton.named import Named
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel

T = TypeVar("T")
_LISTS = Named("opkit.attn.gpu.device.tile_lists", "tile_lists")
_TURNS = "opkit.attn.gpu.device.tile_turns"
_SOME = 32  # tiles that a program looks at together
_MOST = 64  # lists that are kept, and as many turns
FEW = 4  #: tiles; of fewer keys or queries each tile is asked in the kernel itself


class Lists(NamedTuple):
    """Tiles and counts as :func:`opkit.attn.gpu.device.tile_lists.tile_lists` writes them, with the call's batch and heads."""

    tiles: Tensor
    counts: Tensor


_kept: TensorCache[Lists] = TensorCache(_MOST)
_kept_turns: TensorCache[Tensor] = TensorCache(_MOST)


def worth_it(shape: Shape, blocks: Blocks, queries: int, keys: int) -> bool:
    """Whether lists are built: the mask says more than bands and lengths, and there are tiles enough to leave some out."""
    return bool(shape.mask) and tiles_in(queries, blocks.rows) * tiles_in(keys, blocks.keys) > FEW


def lists_of(call: Any, shape: Shape, blocks: Blocks, by_keys: bool) -> Lists:
    """The lists of a call: of each tile of queries the tiles of keys, or ``by_keys`` the other way round."""
    masks, sizes = list(call.mask_tensors), _sizes(call)
    build = functools.partial(_built, shape, masks, blocks, sizes, by_keys, call.q.device)
    return get_or_create(_kept, (shape, blocks[:2], sizes, by_keys), call, build)


def turns_of_call(lists: Lists, call: Any, shape: Shape, blocks: Blocks) -> Tensor:
    """The :func:`turns_of` a call's ``lists`` by keys among those by queries."""
    return _turned(turns_of, lists, call, shape, blocks)


def visits_of_call(lists: Lists, call: Any, shape: Shape, blocks: Blocks) -> Tensor:
    """The :func:`visits_of` a call's ``lists`` by keys among those by queries."""
    return _turned(visits_of, lists, call, shape, blocks)


def _turned(count: Callable[[Lists, Lists], Tensor], lists: Lists, call: Any, shape: Shape, blocks: Blocks) -> Tensor:
    def build() -> Tensor:
        return count(lists, lists_of(call, shape, blocks, by_keys=False))

    return get_or_create(_kept_turns, (count, shape, blocks[:2], _sizes(call)), call, build)


def _sizes(call: Any) -> tuple[int, int, int, int]:
    return (*call.q.shape[:3], call.k.shape[2])


def get_or_create(kept: TensorCache[T], what: Hashable, call: Any, build: Callable[[], T]) -> T:
    """What is kept for the tensors of a call's mask, else what is built now: always where a graph is captured."""
    masks, device = call.mask_tensors, call.q.device
    stream = stream_of(device)
    if stream is None or not all(map(cacheable, masks)):
        return build()
    return kept.get_or_create((what, device), masks, build, stream)


def turns_of(lists: Lists, others: Lists) -> Tensor:
    """Of each tile in a list how many greater ones are in its list among ``others``, the lists the other way round.

    The result is as ``lists.tiles``, with its strides.
    """
    turns = torch.empty_like(_own(lists.tiles))
    _launch("tile_turns", lists, others, turns=turns)
    return turns.expand(lists.tiles.shape)


def visits_of(lists: Lists, others: Lists) -> Tensor:
    """The tiles of each list from the least to the greatest, with their turns.

    The result is int32, (batch, heads, own, others, 2): twice a tile, and one more if it is partly visible; and its turn, as
    :func:`turns_of` has it. What is behind the last tile of a list is any number. Batches and heads that share their lists share
    these.
    """
    tiles = _own(lists.tiles)
    visits = tiles.new_empty((*tiles.shape, 2))
    _launch("tile_visits", lists, others, visits=visits)
    return visits.expand(*lists.tiles.shape, 2)


def _launch(name: str, lists: Lists, others: Lists, **results: Tensor) -> None:
    tiles, counts, theirs, their_counts = (_own(x) for x in (*lists, *others))
    own, count = tiles.shape[2:]
    _turns_kernel(name)(
        tiles=tiles, counts=counts, theirs=theirs, their_counts=their_counts, own=own, others=count,
        programs=tiles.shape[0] * tiles.shape[1], **results,
    )  # fmt: skip


def _own(x: Tensor) -> Tensor:
    """Lists of batches and heads that have lists of their own."""
    return x[: 1 if x.stride(0) == 0 else None, : 1 if x.stride(1) == 0 else None]


@functools.cache
def _turns_kernel(name: str) -> TritonKernel:
    return triton_kernel(Named(_TURNS, name), grid=lambda own, programs: (own, programs), SOME=_SOME, num_warps=4)


@functools.cache
def _kernel(constants: tuple[tuple[str, Any], ...]) -> TritonKernel:
    return triton_kernel(_LISTS, grid=lambda own, programs: (own, programs), num_warps=4, **dict(constants))


def _built(
    shape: Shape, masks: Sequence[Tensor], blocks: Blocks, sizes: Sequence[int], by_keys: bool, device: torch.device
) -> Lists:
    slots = plans.slots_of(shape, masks, [], sizes, of_biases=False)
    for slot in {word[1] for word in shape.mask if word[0] == program.DENSE}:
        slots[slot] = states_of(slots[slot], blocks)
    batch, heads = _depends(slots, [masks[n] for n in shape.lengths], sizes)
    counted = tiles_in(sizes[2], blocks.rows), tiles_in(sizes[3], blocks.keys)
    own, others = counted[::-1] if by_keys else counted
    tiles = torch.empty((batch, heads, own, others), dtype=torch.int32, device=device)
    counts = torch.empty((batch, heads, own, 2), dtype=torch.int32, device=device)
    constants = {
        "MASK": shape.mask, "BANDED": shape.banded, "BY_KEYS": by_keys, "ROWS": blocks.rows, "KEYS": blocks.keys,
        "SOME": min(_SOME, 1 << (others - 1).bit_length()),
    }  # fmt: skip
    tensors = dict(zip(plans.TENSORS, plans.tensors_of(shape, masks, slots, sizes[0]), strict=True))
    _kernel(tuple(constants.items()))(
        tiles=tiles, counts=counts, own=own, programs=batch * heads, heads=heads, queries=sizes[2], keys=sizes[3],
        **tensors, **plans.numbers_of(shape),
    )  # fmt: skip
    return Lists(tiles.expand(*sizes[:2], -1, -1), counts.expand(*sizes[:2], -1, -1))


def _depends(slots: Sequence[Tensor | None], lengths: Sequence[Tensor], sizes: Sequence[int]) -> tuple[int, int]:
    """How many batches and heads have lists of their own."""
    batches = any(x is not None and x.stride(0) for x in slots) or any(x.shape[0] > 1 for x in lengths)
    heads = any(x is not None and x.stride(1) for x in slots)
    return (sizes[0] if batches else 1), (sizes[1] if heads else 1)
