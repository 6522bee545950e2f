"""How calls of the decoding kernel are divided into tiles, splits and blocks: rules over sizes and the GPU alone.

Time goes to reading keys and values, so what matters is that as many bytes are on their way as the memory can deliver, from
the first moment to the last: as many programs as the GPU holds at once, no second wave of them, and blocks of keys large
enough that few are needed in flight.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

MOST_SPLITS = 128
_LEAST = 16  # of the sizes that a matrix product takes
_IN_FLIGHT = 32768  # bytes of a block of keys and values; twice as many where a program has a multiprocessor to itself
_MANY_KEYS = 4096  # changes for fewer are searched for apart
_SCRATCH = 1024  # bytes of shared memory in addition to blocks and queries
_OF_PROGRAMS = 32768  # the same where rows see different keys
_BUFFERS = {(False, False): 2, (True, False): 2, (False, True): 3, (True, True): 4}
"""DecodeBlocks in shared memory: whether a program has a multiprocessor to itself, and whether tiles have more than 32 rows."""


class Device(NamedTuple):
    """What of a GPU decides how a call is divided.

    Attributes:
        processors: multiprocessors.
        shared: bytes of shared memory that a program may have; a multiprocessor has a little more.
        overlaps: whether a kernel may start before the one that it depends on has ended.
        precision: of products of float32.
        interprets: whether it is none, and Triton's interpreter runs in its place.
    """

    processors: int
    shared: int
    overlaps: bool
    precision: str
    interprets: bool = False


class DecodeBlocks(NamedTuple):
    """How a call is divided; the parameters of :mod:`opkit.attn.gpu.decode.device.decode` with these names."""

    rows: int
    block: int
    stages: int
    warps: int
    splits: int


class Change(NamedTuple):
    """How a division differs from what the rules say: a block's keys and warps times so many, and stages more."""

    block: float = 1
    stages: int = 0
    warps: float = 1


AS_RULED = Change()
CHANGES = (
    AS_RULED, Change(block=0.5), Change(block=2), Change(stages=-1), Change(stages=1), Change(warps=0.5), Change(warps=2),
    Change(block=2, warps=2), Change(block=0.5, stages=1),
)  # fmt: skip
"""What is tried on a GPU that the rules were not made on."""
_MOST_WARPS = 8


@functools.cache
def device_of(index: int) -> Device:
    """Return the GPU of this number; a small one where Triton interprets, and one of 132 processors where there is none."""
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    if interprets or index < 0 or not torch.cuda.is_available():
        return Device(4 if interprets else 132, 232448, False, "ieee", interprets)
    about = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    shared = int(getattr(about, "shared_memory_per_block_optin", 0) or 65536)
    return Device(about.multi_processor_count, shared, not hip and about.major >= 9, "ieee" if hip else "tf32x3")


class DecodeShape(NamedTuple):
    """A call, as it matters for its division.

    Attributes:
        height: rows of a head of keys: queries times the query heads that share it.
        heads: of keys, in all sequences.
        keys: of a sequence.
        d: the size of a head of keys.
        dv: the size of a head of values.
        item: bytes of an element in products.
        stored: bytes of an element in memory.
        paged: whether keys lie in pages.
        shared: whether values are read as a part of the keys.
        mixed: whether a tile of 64 rows may have queries that see different keys.
        programs: whether there are programs of masks and biases, which take registers and shared memory.
    """

    height: int
    heads: int
    keys: int
    d: int
    dv: int
    item: int
    stored: int
    paged: bool = False
    shared: bool = False
    mixed: bool = False
    programs: bool = False


def blocks_of(shape: DecodeShape, gpu: Device, change: Change = AS_RULED) -> DecodeBlocks:
    """Return how to divide a call; with a change of the rules, as far as there is room for it.

    >>> h200 = Device(132, 232448, True, "tf32x3")
    >>> blocks_of(DecodeShape(4, 8, 8192, 128, 128, 2, 2), h200)
    DecodeBlocks(rows=16, block=64, stages=3, warps=2, splits=32)
    >>> blocks_of(DecodeShape(128, 128, 8192, 128, 128, 2, 2), h200)
    DecodeBlocks(rows=128, block=128, stages=3, warps=8, splits=1)
    """
    size = max(shape.d, shape.dv)
    tall = _rows(shape.height, _most_rows(shape, size))
    tiles = shape.heads * -(-shape.height // tall)
    plain = gpu.overlaps and not shape.paged and not shape.mixed and shape.item == 2 and 64 < size <= 128
    lone = plain and 2 * tiles <= gpu.processors
    lifted = lone and tall == 32  # the products of Hopper's warpgroups have 64 rows
    tall = 64 if lifted else tall
    huge = tall > 32 and size > 256
    alone = tall == 128 or huge or lifted or 3 * gpu.processors <= 4 * tiles <= 4 * gpu.processors
    scratch = _SCRATCH + shape.programs * _OF_PROGRAMS
    free = gpu.shared // (1 if alone else 2) - scratch - tall * shape.d * shape.item
    elements = max(shape.d if shape.shared else shape.d + shape.dv, 1)
    narrow = shape.stored < shape.item  # what is converted goes through registers
    double = alone and tall != 64 and not narrow
    block = _block(free // 2 if huge else _IN_FLIGHT * (1 + double), elements * shape.item)
    if change.block != 1:
        block = max(_LEAST, min(int(block * change.block), _block(free, elements * shape.item)))
    buffers = _BUFFERS[alone, tall > 32] * (2 if narrow and tall <= 32 else 1) + change.stages
    stages = max(1, min(buffers, free // (block * elements * shape.stored)))
    stages += tall <= 32  # products of small tiles leave the tensor cores' operands in registers
    crowded = tall == 128 or size > 256 or (size > 128 and (tall == 64 or shape.item > 2))
    crowded |= shape.programs and tall == 64
    splits = splits_of(tiles, gpu.processors * (1 if alone else 2), -(-shape.keys // block))
    warps = 8 if crowded else 2 if lone and tall == 16 else 4
    warps = max(1, min(int(warps * change.warps), _MOST_WARPS))
    return DecodeBlocks(tall, block, 2 * stages - 1 if shape.paged else stages, warps, splits)


def _most_rows(shape: DecodeShape, size: int) -> int:
    """Return the rows of a tile for which there are registers."""
    if size > 256 and (shape.mixed or not shape.shared):
        return 32
    if shape.item > 2:
        return 64 if size <= 128 else 16
    if shape.programs:
        return 64 if size <= 128 else 32
    return 128 if size <= 128 else 64


def _rows(height: int, most: int) -> int:
    """Rows of a tile, a power of two: all of them up to ``most``, so that keys are read once; else 64, so that two overlap."""
    return max(_LEAST, power(height)) if height <= most else min(most, 64)


def _block(room: int, read: int) -> int:
    """Keys of a block, a power of two: as many as ``room`` has bytes for, up to 128."""
    return max(_LEAST, min(128, power(room // read + 1) // 2))


def class_of(shape: DecodeShape, blocks: DecodeBlocks) -> dict[str, int]:
    """Return what decides which change is the fastest for a call: a tile's rows, heads, bytes, pages, whether keys are many."""
    sizes = {"d": sum(parts(shape.d)), "e": sum(parts(shape.dv)), "stored": shape.stored, "rows": blocks.rows}
    flags = {"paged": shape.paged, "shared": shape.shared, "mixed": shape.mixed, "long": shape.keys > _MANY_KEYS}
    return {**sizes, **{name: int(flag) for name, flag in flags.items()}}


def splits_of(tiles: int, room: int, blocks: int) -> int:
    """Splits of a tile, so that programs fill the ``room`` there is; at least two blocks each, for what merging costs."""
    most = max(1, min(blocks // 2, MOST_SPLITS))
    wanted = _filling(tiles, room)
    share = -(-blocks // max(1, min(wanted, most)))
    return max(1, -(-blocks // max(share, 1)))


def _filling(tiles: int, room: int) -> int:
    """One wave of programs if that fills seven tenths of the room, else the fewest splits whose last wave is nearly full."""
    one = max(1, room // max(tiles, 1))
    if tiles == 0 or (tiles <= room and 10 * tiles * one >= 7 * room):
        return one
    for splits in range(one, 9):
        waves = -(-tiles * splits // room)
        if 10 * tiles * splits >= 9 * waves * room:
            return splits
    return one


def power(size: int) -> int:
    """Return the least power of two that is no less."""
    return 1 << max(size - 1, 0).bit_length()


def parts(size: int) -> tuple[int, int]:
    """Return the two parts in which a head size is read; the second may be 0.

    >>> parts(96), parts(576), parts(7)
    ((64, 32), (512, 64), (16, 0))
    """
    first = max(_LEAST, 1 << (max(size, 1).bit_length() - 1))
    return first, max(_LEAST, power(size - first)) if size > first else 0
