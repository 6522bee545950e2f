"""What the kernels in CUDA C++ are told of segments: their numbers, and what each tile visits."""

from __future__ import annotations

import ctypes

from torch import Tensor

from opkit.attn.calls import Call, GradientCall
from opkit.attn.gpu import plans, tile_lists
from opkit.attn.gpu.blocks import Blocks
from opkit.attn.gpu.tile_lists import spans_of_call
from opkit.attn.masks import program

_POINTERS = ("of_queries", "of_keys", "blocks", "counts", "spans", "ranges", "visits")
_STRIDES = (
    "queries_batch", "queries_row", "keys_batch", "keys_row", "blocks_batch", "counts_batch", "spans_batch", "ranges_batch",
)  # fmt: skip

_SPAN_ROWS = 64  # that a range is of


class Lists(ctypes.Structure):
    """Numbers of segments, lists of the blocks that a tile visits, and spans of what rows see, as ``cuda/tensors.cuh`` says."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
    )


def of_segments(shape: plans.Shape) -> bool:
    """Whether a mask says, beside a band, that queries see keys of their own segment alone."""
    return len(shape.mask) == 1 and shape.mask[0][0] == program.SEGMENTS


def lists_of(
    call: Call | GradientCall, rows: int, keys: int, by_keys: bool, in_order: bool = False
) -> tuple[Lists, list[Tensor]]:
    """The lists of tiles of so many queries (``rows``) and ``keys``, kept with the tensors of the mask; and what is read there.

    What is read: numbers of segments, int32, (batch or 1, 1, queries, 1) and (batch or 1, 1, 1, keys), with a stride of 0 where
    a size is 1; of each tile of queries, or ``by_keys`` of keys, the tiles of the other kind that it visits, int32, (batch,
    heads, own, others), and their counts, (batch, heads, own, 2); :class:`~opkit.attn.gpu.tile_lists.Spans` of its rows; and where
    sums are made ``in_order``, what :func:`opkit.attn.gpu.tile_lists.visits_of` gives. These must be held until the
    kernel is launched.
    """
    shape = plans.shape_of(tuple(call.mask), ())
    blocks = Blocks(rows, keys, 0, 0)
    found = tile_lists.lists_of(call, shape, blocks, by_keys)
    slots = plans.slots_of(shape, call.mask_tensors, [], (*call.q.shape[:3], call.k.shape[2]), of_biases=False)
    of_queries, of_keys = (slots[number] for number in shape.mask[0][1:])  # by batch, head, query and key
    strides = (of_queries.stride(0), of_queries.stride(2), of_keys.stride(0), of_keys.stride(3))
    numbers = of_queries[:, 0, :, 0], of_keys[:, 0, 0]
    own, seen = numbers[::-1] if by_keys else numbers
    which = shape.mask, shape.slots, call.q.shape[2], call.k.shape[2], by_keys
    spans = spans_of_call(call, own, seen, _SPAN_ROWS, which)
    read = [of_queries, of_keys, *found, *spans]
    if in_order:
        read.append(tile_lists.visits_of_call(found, call, shape, blocks))
    of_lists = found.tiles.stride(0), found.counts.stride(0)
    of_spans = (x.shape[1] if x.shape[0] > 1 else 0 for x in spans)
    pointers = dict(zip(_POINTERS, (each.data_ptr() for each in read), strict=False))  # null but for those
    return Lists(**pointers, **dict(zip(_STRIDES, (*strides, *of_lists, *of_spans), strict=True))), read
