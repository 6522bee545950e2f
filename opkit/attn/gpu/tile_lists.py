"""Build the lists of a call's live tiles and the span of keys of each row on the GPU; cache them with the mask's tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from opkit.attn.gpu import functions, plans
from opkit.attn.gpu.blocks import BlockSizes, tiles_in
from opkit.attn.gpu.plans import MaskShape
from opkit.attn.masks import program
from opkit.attn.tensor_cache import TensorCache, cacheable, stream_of
from opkit.kernels.triton.named import Named
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel

T = TypeVar("T")
_LISTS = Named("opkit.attn.gpu.device.tile_lists", "tile_lists")
_TURNS = "opkit.attn.gpu.device.tile_lists"
_STATES = Named("opkit.attn.gpu.device.tile_lists", "tile_states")
_MASK_STATES = Named("opkit.attn.gpu.device.tile_lists", "mask_states")
_STEP = 32  # tiles, or rows of a tile, that a program reads together
_MAX_CACHED = 64  # lists, and as many orders
_BITS = 32 << 20  # bytes that a mask's bits take at most, unless its own bools take so many times as many:
_BOOLS = 4
MAX_UNLISTED = 4  #: tiles; up to so many are checked in the kernel itself
_order_cache: TensorCache[Tensor] = TensorCache(_MAX_CACHED)
_SPANS = Named("opkit.attn.gpu.device.spans", "spans")
_ELEMENTS = 2048  # of a tile that a program evaluates together
_SPANS_STEP = 2048  # numbers that a program reads together
_SPANS_ROWS = 256  # of a program
_SPANS_ROOM = 128  # there is room for a multiple of so many rows: tiles are copied whole


class TileLists(NamedTuple):
    """Tiles and counts as :func:`opkit.attn.gpu.device.tile_lists.tile_lists` writes them, with the call's batch and heads."""

    tiles: Tensor
    counts: Tensor


_lists_cache: TensorCache[TileLists] = TensorCache(_MAX_CACHED)


class MaskBits(NamedTuple):
    """States of a mask's tiles, and what is visible in those that are visible in part, as bits.

    :func:`opkit.attn.gpu.device.tile_lists.mask_states` writes them. Without words ``places`` and ``words`` are None.
    """

    states: Tensor
    places: Tensor | None
    words: Tensor | None


def worth_it(shape: MaskShape, blocks: BlockSizes, queries: int, keys: int) -> bool:
    """Return whether lists are built: the mask has more than bands and lengths, and there are enough tiles to skip some."""
    return bool(shape.mask) and tiles_in(queries, blocks.rows) * tiles_in(keys, blocks.keys) > MAX_UNLISTED


def lists_of(call: Any, shape: MaskShape, blocks: BlockSizes, by_keys: bool, bits: MaskBits | None = None) -> TileLists:
    """Return the lists of a call: for each tile of queries the tiles of keys, or ``by_keys`` the other way round.

    ``bits`` are :func:`bits_of` the call, of which the lists are made then.
    """
    masks, sizes = list(call.mask_tensors), _sizes(call)

    def build() -> TileLists:
        found = bits
        if found is None and any(word[0] == program.FUNCTION for word in shape.mask):
            found = bits_of(call, shape, blocks)
        return _build(shape, masks, blocks, sizes, by_keys, call.q.device, found)

    return get_or_build(_lists_cache, (shape, blocks[:2], sizes, by_keys, bits is None), call, build)


def bits_fit(call: Any, shape: MaskShape, blocks: BlockSizes) -> bool:
    """Return whether there is room for bits of all tiles of a call's mask, of which ``shape`` is the shape."""
    slots = plans.slots_of(shape, call.mask_tensors, [], _sizes(call), of_biases=False)
    bools = sum(slots[word[1]].numel() for word in shape.mask if word[0] == program.DENSE)
    batch, heads = _depends(shape, slots, call.mask_tensors, _sizes(call))
    rows, keys = (tiles_in(size, tile) * tile for size, tile in zip(_sizes(call)[2:], blocks[:2], strict=True))
    return batch * heads * rows * keys // 8 <= max(_BITS, bools // _BOOLS)


def turns_of_call(lists: TileLists, call: Any, shape: MaskShape, blocks: BlockSizes) -> Tensor:
    """Return :func:`turns_of` a call's ``lists`` by keys among those by queries."""
    return _ordered(turns_of, lists, call, shape, blocks)


def visits_of_call(
    lists: TileLists, call: Any, shape: MaskShape, blocks: BlockSizes, bits: MaskBits | None = None
) -> Tensor:
    """Return :func:`visits_of` a call's ``lists`` by keys among those by queries; all are made of ``bits`` if there are some."""
    return _ordered(visits_of, lists, call, shape, blocks, bits)


def _ordered(
    compute: Callable[[TileLists, TileLists], Tensor], lists: TileLists, call: Any, shape: MaskShape, blocks: BlockSizes,
    bits: MaskBits | None = None,
) -> Tensor:  # fmt: skip
    def build() -> Tensor:
        return compute(lists, lists_of(call, shape, blocks, by_keys=False, bits=bits))

    return get_or_build(_order_cache, (compute, shape, blocks[:2], _sizes(call), bits is None), call, build)


def _sizes(call: Any) -> tuple[int, int, int, int]:
    return (*call.q.shape[:3], call.k.shape[2])


def get_or_build(cache: TensorCache[T], name: Hashable, call: Any, build: Callable[[], T]) -> T:
    """Return what is cached for the tensors of a call's mask, or build it; while a graph is captured, always build."""
    masks, device = call.mask_tensors, call.q.device
    stream = stream_of(device)
    if stream is None or not all(map(cacheable, masks)):
        return build()
    return cache.get_or_create((name, device), masks, build, stream)


def turns_of(lists: TileLists, others: TileLists) -> Tensor:
    """Return the turn of each tile in a list, at which ordered accumulation adds it.

    It is the number of greater tiles in its list among ``others``, the lists the other way round. The result has the shape and
    the strides of ``lists.tiles``.
    """
    turns = torch.empty_like(_own(lists.tiles))
    _launch("tile_turns", lists, others, turns=turns)
    return turns.expand(lists.tiles.shape)


def visits_of(lists: TileLists, others: TileLists) -> Tensor:
    """Return the tiles of each list from the least to the greatest, with their turns.

    The result is int32, (batch, heads, own, others, 2): twice a tile, plus one if it is partly visible; and its turn, as
    :func:`turns_of` returns it. Elements after the last tile of a list are undefined. Batches and heads that share their lists
    share these.
    """
    tiles = _own(lists.tiles)
    visits = tiles.new_empty((*tiles.shape, 2))
    _launch("tile_visits", lists, others, visits=visits)
    return visits.expand(*lists.tiles.shape, 2)


def _launch(name: str, lists: TileLists, others: TileLists, **results: Tensor) -> None:
    tiles, counts, theirs, their_counts = (_own(x) for x in (*lists, *others))
    own, count = tiles.shape[2:]
    _turns_kernel(name)(
        tiles=tiles, counts=counts, theirs=theirs, their_counts=their_counts, own=own, others=count,
        programs=tiles.shape[0] * tiles.shape[1], **results,
    )  # fmt: skip


def _own(x: Tensor) -> Tensor:
    """Return the lists without the batches and heads that share others'."""
    return x[: 1 if x.stride(0) == 0 else None, : 1 if x.stride(1) == 0 else None]


@functools.cache
def _turns_kernel(name: str) -> TritonKernel:
    return triton_kernel(Named(_TURNS, name), grid=lambda own, programs: (own, programs), SOME=_STEP, num_warps=4)


@functools.cache
def _kernel(constants: tuple[tuple[str, Any], ...]) -> TritonKernel:
    return triton_kernel(_LISTS, grid=lambda own, programs: (own, programs), num_warps=4, **dict(constants))


def _build(
    shape: MaskShape,
    masks: Sequence[Tensor],
    blocks: BlockSizes,
    sizes: Sequence[int],
    by_keys: bool,
    device: torch.device,
    found: MaskBits | None,
) -> TileLists:
    if found is None:
        slots = plans.slots_of(shape, masks, [], sizes, of_biases=False)
        batch, heads = _depends(shape, slots, masks, sizes)
        for slot in {word[1] for word in shape.mask if word[0] == program.DENSE}:
            slots[slot] = states_of(slots[slot], blocks)
    else:  # the states say all
        shape, slots = plans.shape_of((program.DENSE, 0), ()), [found.states]
        batch, heads = _depends(shape, slots, [], sizes)
    counted = tiles_in(sizes[2], blocks.rows), tiles_in(sizes[3], blocks.keys)
    own, others = counted[::-1] if by_keys else counted
    tiles = torch.empty((batch, heads, own, others), dtype=torch.int32, device=device)
    counts = torch.empty((batch, heads, own, 2), dtype=torch.int32, device=device)
    constants = {
        "MASK": shape.mask, "BANDED": shape.banded, "BY_KEYS": by_keys, "ROWS": blocks.rows, "KEYS": blocks.keys,
        "SOME": min(_STEP, 1 << (others - 1).bit_length()),
    }  # fmt: skip
    tensors = dict(zip(plans.TENSORS, plans.tensors_of(shape, masks, slots, sizes[0]), strict=True))
    _kernel(tuple(constants.items()))(
        tiles=tiles, counts=counts, own=own, programs=batch * heads, heads=heads, queries=sizes[2], keys=sizes[3],
        **tensors, **plans.numbers_of(shape),
    )  # fmt: skip
    return TileLists(tiles.expand(*sizes[:2], -1, -1), counts.expand(*sizes[:2], -1, -1))


def bits_of(
    call: Any, shape: MaskShape, blocks: BlockSizes, by_keys: bool | None = None, every: bool = False
) -> MaskBits:
    """Return what a call's mask says: :func:`states_of` its tiles, and bits of those that are visible in part. It is not cached.

    The strides of states and places are 0 for batches and heads if the mask does not depend on these. There are no bits if
    ``by_keys`` is None; else a row of bits is that of a query, or ``by_keys`` of a key. There are bits of ``every`` tile that is
    visible in part, or of as many as ``_BITS`` says.
    """
    sizes, masks, device = _sizes(call), list(call.mask_tensors), call.q.device
    slots = plans.slots_of(shape, masks, [], sizes, of_biases=False)
    dims = _depends(shape, slots, masks, sizes)
    tiles = tiles_in(sizes[2], blocks.rows), tiles_in(sizes[3], blocks.keys)
    states = torch.empty((*dims, *tiles), dtype=torch.uint8, device=device)
    numbers = blocks.rows * blocks.keys // 32
    room = states.numel() if every else min(states.numel(), _BITS // (4 * numbers))
    places = words = count = None
    if by_keys is not None:
        places, count = torch.empty_like(states, dtype=torch.int32), torch.zeros(1, dtype=torch.int32, device=device)
        words = torch.empty((room, numbers), dtype=torch.int32, device=device)
    said = functions.words_of(shape.mask, shape.functions, program.FUNCTION, masks)
    of_tiles, found = _words_of_tiles(shape, slots, blocks)
    tensors = dict(zip(plans.TENSORS, plans.tensors_of(shape, masks, [*slots, *found], dims[0]), strict=True))
    captured = dict(zip(functions.TENSORS, functions.tensors_of(shape.functions, masks, None), strict=True))
    _mask_states_kernel(blocks[:2], said, of_tiles, shape.banded, by_keys)(
        states=states, places=places, words=words, count_of_words=count, room=room, tiles=tiles[0] * tiles[1],
        programs=dims[0] * dims[1], heads=dims[1], queries=sizes[2], keys=sizes[3], **tensors, **captured,
        **plans.numbers_of(shape), **functions.numbers_of(shape.functions, masks, None),
    )  # fmt: skip
    strides = [stride if size > 1 else 0 for stride, size in zip(states.stride(), dims, strict=False)]
    states, places = (
        None if x is None else x.as_strided(x.shape, (*strides, *x.stride()[2:])) for x in (states, places)
    )
    return MaskBits(states, places, words)


def _words_of_tiles(shape: MaskShape, slots: Sequence[Tensor], blocks: BlockSizes) -> tuple[plans.Words, list[Tensor]]:
    """Return a mask's program for whole tiles, and the states of its bools, for slots after ``slots``, while there are some."""
    words: list[tuple[int, ...]] = []
    states: list[Tensor] = []
    for word in shape.mask:
        if word[0] == program.DENSE and len(slots) + len(states) < plans.SLOTS:
            words.append((program.DENSE, len(slots) + len(states)))
            states.append(states_of(slots[word[1]], blocks))
        else:
            words.append((program.FUNCTION,) if word[0] in (program.DENSE, program.FUNCTION) else word)
    return tuple(words), states


@functools.cache
def _mask_states_kernel(
    tile: tuple[int, int], said: Any, of_tiles: plans.Words, banded: bool, by_keys: bool | None
) -> TritonKernel:
    rows, keys = tile
    step = min(rows, max(32 if by_keys else 1, _ELEMENTS // keys))
    return triton_kernel(
        _MASK_STATES,
        grid=lambda tiles, programs: (tiles, programs),
        num_warps=4, MASK=said, OF_TILES=of_tiles, BANDED=banded, ROWS=rows, KEYS=keys, STEP=step, BY_KEYS=bool(by_keys),
    )  # fmt: skip


def _depends(
    shape: MaskShape, slots: Sequence[Tensor | None], masks: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[int, int]:
    """Return on how many batches and heads a mask depends: 1 if on none."""
    read = {name for each in shape.functions if each.whose == "mask" for name in each.variables}
    read |= {name for dim, name in enumerate("bh") for x in slots if x is not None and x.stride(dim)}
    if any(masks[n].shape[0] > 1 for n in shape.lengths):
        read.add("b")
    return (sizes[0] if "b" in read else 1), (sizes[1] if "h" in read else 1)


def states_of(x: Tensor, blocks: BlockSizes) -> Tensor:
    """Return for each tile of bools whether any (1) and all (2) are true: uint8, (batch, heads, tiles of rows, of columns).

    ``x`` is (batch, heads, rows, columns), with stride 0 for a dimension that it does not depend on; so is the result.
    """
    if x.stride(2) == 1 != x.stride(3):
        return states_of(x.mT, BlockSizes(blocks.keys, blocks.rows, 0, 0)).mT
    batch, heads, rows, columns = x.shape
    tiles = tiles_in(rows, blocks.rows), tiles_in(columns, blocks.keys)
    states = torch.empty((batch, heads, *tiles), dtype=torch.uint8, device=x.device)
    _states_kernel(blocks[:2])(
        x=x, states=states, tiles=tiles[0] * tiles[1], programs=batch * heads, heads=heads, rows=rows, columns=columns
    )
    strides = (stride if its else 0 for stride, its in zip(states.stride(), x.stride(), strict=True))
    return states.as_strided(states.shape, tuple(strides))


@functools.cache
def _states_kernel(tile: tuple[int, int]) -> TritonKernel:
    rows, columns = tile
    return triton_kernel(
        _STATES,
        grid=lambda tiles, programs: (tiles, programs),
        num_warps=4,
        ROWS=rows,
        COLUMNS=columns,
        STEP=min(_STEP, rows),
    )


class Spans(NamedTuple):
    """Spans and ranges as :func:`opkit.attn.gpu.device.spans.spans` writes them, with the batches that numbers have."""

    rows: Tensor
    tiles: Tensor


_spans_cache: TensorCache[Spans] = TensorCache(_MAX_CACHED)


class Within(NamedTuple):
    """What a row sees of others with its own number at most.

    Attributes:
        lower: others from so many places further on,
        upper: and up to so many places further.
        lengths: how many of the others are there, or of the rows if ``of_rows``; int32, (batch or 1,).
    """

    lower: int = -plans.FAR
    upper: int = plans.FAR
    lengths: Tensor | None = None
    of_rows: bool = False


def spans_of_call(call: Any, own: Tensor, others: Tensor, tile: int, within: Within, name: Hashable) -> Spans:
    """Return :func:`spans_of` views of the tensors of a call's mask, cached with these; ``name`` identifies all but ``tile``."""
    return get_or_build(_spans_cache, (name, tile), call, functools.partial(spans_of, own, others, tile, within))


def spans_of(own: Tensor, others: Tensor, tile: int, within: Within) -> Spans:
    """Return which of the ``others`` with its own number each row sees, and, with no regard to ``within``, each tile of rows.

    Args:
        own: a number for each row, int32, (batch or 1, rows).
        others: a number for each of the others, int32, (batch or 1, others); at least one.
        tile: rows of a tile, a power of two.
        within: what of these.
    """
    lengths = within.lengths
    batch = max(x.shape[0] for x in (own, others, lengths) if x is not None)
    rows, count = own.shape[1], others.shape[1]
    tiles = tiles_in(rows, tile)
    new = functools.partial(torch.empty, dtype=torch.int32, device=own.device)
    room = tiles_in(rows, _SPANS_ROOM) * _SPANS_ROOM
    result = Spans(new(batch, room, 2)[:, :rows], new(batch, tiles, 4))
    programs = tiles_in(rows, max(_SPANS_ROWS, tile))
    _spans_kernel(tile, min(_SPANS_STEP, 1 << (count - 1).bit_length()), within.of_rows)(
        own=own.expand(batch, -1), others=others.expand(batch, -1), spans=result.rows, ranges=result.tiles, rows=rows,
        room=room, count=count, rounds=count.bit_length(), programs=programs, batch=batch, lower=within.lower,
        upper=within.upper, lengths=None if lengths is None else lengths.expand(batch),
    )  # fmt: skip
    return result


@functools.cache
def _spans_kernel(tile: int, some: int, of_rows: bool) -> TritonKernel:
    return triton_kernel(
        _SPANS,
        grid=lambda programs, batch: (programs, batch),
        num_warps=4,
        TILES=max(1, _SPANS_ROWS // tile),
        TILE=tile,
        SOME=some,
        OF_ROWS=of_rows,
    )
