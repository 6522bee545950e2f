"""Tiles of bools, as an operator for the interpreter's process: there it runs on the CPU."""

import os

import torch
from torch import Tensor

import opkit
from opkit.attn.gpu.blocks import Blocks
from opkit.attn.gpu.tile_states import states_of


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
    return states_of(x.as_strided(shape, stride), Blocks(rows, columns, 0, 0)).contiguous()


if os.environ.get("TRITON_INTERPRET") == "1":
    states.register_kernel("cpu", states_by_kernel, name="interpreted")
