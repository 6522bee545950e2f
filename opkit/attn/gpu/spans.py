"""Compute which span of keys each row sees, under segments whose numbers are in order; cached as lists of tiles are."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.gpu import tile_lists
from opkit.attn.gpu.blocks import tiles_in
from opkit.attn.tensor_cache import TensorCache
from opkit.kernels.triton.named import Named
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel

_SPANS = Named("opkit.attn.gpu.device.spans", "spans")
_STEP = 2048  # numbers that a program reads together
_ROWS = 256  # of a program
_MAX_CACHED = 64


class Spans(NamedTuple):
    """Spans and ranges as :func:`opkit.attn.gpu.device.spans.spans` writes them, with the batches that numbers have."""

    rows: Tensor
    tiles: Tensor


_cache: TensorCache[Spans] = TensorCache(_MAX_CACHED)


def spans_of_call(call: Any, own: Tensor, others: Tensor, tile: int, name: Hashable) -> Spans:
    """Return :func:`spans_of` views of the tensors of a call's mask, cached with these; ``name`` identifies the views."""
    return tile_lists.get_or_build(_cache, (name, tile), call, functools.partial(spans_of, own, others, tile))


def spans_of(own: Tensor, others: Tensor, tile: int) -> Spans:
    """Return which of the ``others`` with its own number each row sees, and each tile of rows.

    Args:
        own: a number for each row, int32, (batch or 1, rows).
        others: a number for each of the others, int32, (batch or 1, others); at least one.
        tile: rows of a tile, a power of two.
    """
    batch = max(x.shape[0] for x in (own, others))
    rows, count = own.shape[1], others.shape[1]
    tiles = tiles_in(rows, tile)
    new = functools.partial(torch.empty, dtype=torch.int32, device=own.device)
    result = Spans(new(batch, rows, 2), new(batch, tiles, 4))
    programs = tiles_in(rows, max(_ROWS, tile))
    _kernel(tile, min(_STEP, 1 << (count - 1).bit_length()))(
        own=own.expand(batch, -1), others=others.expand(batch, -1), spans=result.rows, ranges=result.tiles, rows=rows,
        count=count, rounds=count.bit_length(), programs=programs, batch=batch,
    )  # fmt: skip
    return result


@functools.cache
def _kernel(tile: int, some: int) -> TritonKernel:
    return triton_kernel(
        _SPANS,
        grid=lambda programs, batch: (programs, batch),
        num_warps=4,
        TILES=max(1, _ROWS // tile),
        TILE=tile,
        SOME=some,
    )
