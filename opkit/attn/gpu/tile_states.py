"""What tiles of a mask's bools have in them, found on the GPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from opkit.attn.gpu.blocks import Blocks, tiles_in
from opkit.kernels.triton.named import Named
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel

_STATES = Named("opkit.attn.gpu.device.tile_states", "tile_states")
_STEP = 32  # rows that a program looks at together


def states_of(x: Tensor, blocks: Blocks) -> Tensor:
    """Of each tile of bools whether some, 1, and whether all, 2, are true: uint8, (batch, heads, tiles of rows, of columns).

    ``x`` is (batch, heads, rows, columns), with the stride 0 for a dimension that it does not depend on, and so is the result.
    """
    if x.stride(2) == 1 != x.stride(3):
        return states_of(x.mT, Blocks(blocks.keys, blocks.rows, 0, 0)).mT
    batch, heads, rows, columns = x.shape
    tiles = tiles_in(rows, blocks.rows), tiles_in(columns, blocks.keys)
    states = torch.empty((batch, heads, *tiles), dtype=torch.uint8, device=x.device)
    _kernel(blocks[:2])(
        x=x, states=states, tiles=tiles[0] * tiles[1], programs=batch * heads, heads=heads, rows=rows, columns=columns
    )
    strides = (stride if its else 0 for stride, its in zip(states.stride(), x.stride(), strict=True))
    return states.as_strided(states.shape, tuple(strides))


@functools.cache
def _kernel(tile: tuple[int, int]) -> TritonKernel:
    rows, columns = tile
    return triton_kernel(
        _STATES,
        grid=lambda tiles, programs: (tiles, programs),
        num_warps=4,
        ROWS=rows,
        COLUMNS=columns,
        STEP=min(_STEP, rows),
    )
