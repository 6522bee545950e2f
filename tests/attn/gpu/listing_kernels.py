"""Tiles of bools, spans of segments and visits of tiles, as operators for the process in which they run on the CPU."""

import os
import types

import torch
from cuda_on_cpu import visits_in_torch
from torch import Tensor

import opkit
from opkit.attn.gpu import plans, tile_lists
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.tile_lists import Spans, TileLists, Within, spans_of, states_of, visits_of
from opkit.attn.masks.program import Grid, visible


@opkit.custom_op("listing_tests::states", mutates_args=(), inline=False)
def states(x: Tensor, shape: list[int], stride: list[int], rows: int, columns: int) -> Tensor:
    """Of each tile of ``x`` as it is seen with a shape and strides, (batch, heads, tiles, tiles): 1 some true, 2 all, 3 both."""
    blocks = x.as_strided(shape, stride)
    padded = [-(-n // tile) * tile for n, tile in zip(shape[2:], (rows, columns), strict=True)]
    edge = (0, padded[1] - shape[3], 0, padded[0] - shape[2])
    some, every = (torch.nn.functional.pad(blocks, edge, value=value) for value in (False, True))
    tiles = (*shape[:2], padded[0] // rows, rows, padded[1] // columns, columns)
    some, every = some.reshape(tiles).any(3).any(4), every.reshape(tiles).all(3).all(4)
    return some.to(torch.uint8) + 2 * every.to(torch.uint8)


def states_by_kernel(x: Tensor, shape: list[int], stride: list[int], rows: int, columns: int) -> Tensor:
    """The kernel's."""
    return states_of(x.as_strided(shape, stride), BlockSizes(rows, columns, 0, 0)).contiguous()


@opkit.custom_op("listing_tests::bits", mutates_args=(), inline=False)
def bits(
    mask: list[int], tensors: list[Tensor], sizes: list[int], rows: int, keys: int, by_keys: bool, room: int
) -> Tensor:
    """Which keys each query sees; 2 in tiles of which bits are not written."""
    batch, heads, queries, columns = sizes
    grid = Grid(queries, columns, tensors[0].device, batch, heads)
    return visible(mask, tensors, grid).to(torch.uint8).expand(sizes).contiguous()


def masked_call(tensors, sizes):
    """What is read of a call for the bits of its mask."""
    q, k = (torch.empty(*sizes[:2], size, 0, device=tensors[0].device) for size in sizes[2:])
    return types.SimpleNamespace(q=q, k=k, mask_tensors=tensors)


def bits_by_kernel(mask, tensors, sizes, rows, keys, by_keys, room):
    """The kernel's, from its words."""
    tile_lists._BITS = room * rows * keys // 8
    blocks = BlockSizes(rows, keys, 0, 0)
    _, places, words = tile_lists.bits_of(masked_call(tensors, sizes), plans.shape_of(tuple(mask), ()), blocks, by_keys)
    place = torch.arange(32, device=words.device)
    bit = words[..., None] >> (place % 8 // 2 * 8 + place // 8 * 2 + place % 2) & 1
    tiles = bit.reshape(-1, keys, rows).mT if by_keys else bit.reshape(-1, rows, keys)
    kept = tiles.to(torch.uint8)[places.clamp(min=0).long()]  # (batch, heads, tiles, tiles, rows, keys)
    others = torch.where(places == -1, 2, torch.where(places == -3, 1, 0)).to(torch.uint8)
    found = torch.where(places[..., None, None] >= 0, kept, others[..., None, None])
    whole = found.transpose(3, 4).flatten(4).flatten(2, 3)
    return whole[..., : sizes[2], : sizes[3]].expand(sizes).contiguous()


def spans_in_torch(own, others, tile, within):
    """What :func:`opkit.attn.gpu.tile_lists.spans_of` finds."""
    lengths = torch.tensor([2**31 - 1]) if within.lengths is None else within.lengths
    batch, count = max(own.shape[0], others.shape[0], lengths.shape[0]), others.shape[1]
    own, others = own.expand(batch, -1), others.expand(batch, -1)
    rows, tiles = [], []
    place = torch.arange(own.shape[1])
    for mine, theirs, length in zip(own, others, lengths.expand(batch), strict=True):
        falls = (theirs.diff() < 0).sum()
        in_order = falls == 0 or (falls == 1 and theirs[-1] < theirs[0])
        same = mine[:, None] == theirs
        first = torch.where(same.any(1), same.int().argmax(1), 0)
        spans = torch.stack([first, first + same.sum(1)], 1)
        least, most = (spans if in_order else torch.tensor([0, count]).expand(len(mine), 2)).unbind(1)
        least, most = least.maximum(place + within.lower), most.minimum(place + within.upper + 1)
        most = torch.where(place < length, most, 0) if within.of_rows else most.minimum(length)
        clipped = torch.stack([least, most], 1) * (least < most)[:, None]
        rows.append(clipped if in_order else clipped - torch.tensor([2**31, 0]))
        for part, numbers in zip(spans.split(tile), mine.split(tile), strict=True):
            some = part[part[:, 0] < part[:, 1]]
            if not in_order or (numbers.diff() < 0).sum() > 1:
                tiles.append([-1, 0, 2**31 - 1, 0])
            elif len(some) < len(part):
                tiles.append(
                    [int(some[:, 0].min()), int(some[:, 1].max()), 2**31 - 1, 0] if len(some) else [0, 0, 2**31 - 1, 0]
                )
            else:
                tiles.append([int(x) for x in (some[:, 0].min(), some[:, 1].max(), some[:, 0].max(), some[:, 1].min())])
    padded = torch.nn.functional.pad(torch.stack(rows).int(), (0, 0, 0, -own.shape[1] % 128))
    return Spans(padded[:, : own.shape[1]], torch.tensor(tiles, dtype=torch.int32).reshape(batch, -1, 4))


@opkit.custom_op("listing_tests::spans", mutates_args=(), inline=False)
def spans(
    own: Tensor, others: Tensor, tile: int, lower: int, upper: int, lengths: Tensor | None, of_rows: bool
) -> tuple[Tensor, Tensor]:
    """Which others each row sees, (batch, rows, 2), and each tile of rows, (batch, tiles, 4)."""
    rows, tiles = spans_in_torch(own, others, tile, Within(lower, upper, lengths, of_rows))
    return rows.contiguous(), tiles


def spans_by_kernel(
    own: Tensor, others: Tensor, tile: int, lower: int, upper: int, lengths: Tensor | None, of_rows: bool
) -> tuple[Tensor, Tensor]:
    """The kernel's."""
    rows, tiles = spans_of(own, others, tile, Within(lower, upper, lengths, of_rows))
    return rows.contiguous(), tiles


@opkit.custom_op("listing_tests::visits", mutates_args=(), inline=False)
def visits(tiles: Tensor, counts: Tensor, theirs: Tensor, their_counts: Tensor) -> Tensor:
    """The tiles of each list in order with their turns, (batch, heads, own, others, 2), and -1 behind them."""
    return visits_in_torch(TileLists(tiles, counts)).contiguous()


def visits_by_kernel(tiles: Tensor, counts: Tensor, theirs: Tensor, their_counts: Tensor) -> Tensor:
    """The kernel's."""
    found = visits_of(TileLists(tiles, counts), TileLists(theirs, their_counts))
    return found.where((torch.arange(found.shape[3], device=found.device) < counts[..., 1:])[..., None], -1)


if os.environ.get("TRITON_INTERPRET") == "1":
    bits.register_kernel("cpu", bits_by_kernel, name="interpreted")
    states.register_kernel("cpu", states_by_kernel, name="interpreted")
    spans.register_kernel("cpu", spans_by_kernel, name="interpreted")
    visits.register_kernel("cpu", visits_by_kernel, name="interpreted")
