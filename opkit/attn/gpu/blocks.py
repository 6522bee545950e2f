"""Choose the tiles of the portable kernels: by tables, or, on a GPU without tables, by trying their rows and neighbours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

_SMALLEST, _WHOLE, _LEAST_REST = 16, 512, 64
MAX_TRIED = 16  #: tiles that are tried; each costs seconds of compiling
_TRIED_SIZES, _TRIED_WARPS, _TRIED_STAGES = (
    (16, 128),
    (4, 8),
    (1, 4),
)  # of a tile's rows and keys, and of the compiler's options
_MAX_REGISTERS = 224  # of a thread's 255, for what is summed up
_FORWARD_SOURCES = ("device/tile.py", "portable/device/forward.py")
_BACKWARD_SOURCES = (*_FORWARD_SOURCES, "portable/device/backward_rows.py", "portable/device/backward.py")


class BlockSizes(NamedTuple):
    """Rows of queries and of keys in a tile, and the compiler's options."""

    rows: int
    keys: int
    warps: int
    stages: int


class Rule(NamedTuple):
    """``blocks`` are for heads of at most ``head`` elements of at most ``size`` bytes."""

    head: int
    size: int
    blocks: BlockSizes


FORWARD = (
    Rule(64, 2, BlockSizes(128, 128, 8, 3)),
    Rule(64, 2, BlockSizes(128, 64, 4, 2)),
    Rule(128, 2, BlockSizes(128, 64, 8, 4)),
    Rule(128, 2, BlockSizes(128, 64, 8, 2)),
    Rule(128, 2, BlockSizes(64, 64, 4, 2)),
    Rule(256, 2, BlockSizes(64, 64, 8, 2)),
    Rule(256, 2, BlockSizes(64, 32, 4, 2)),
    Rule(1024, 2, BlockSizes(64, 32, 8, 2)),
    Rule(1024, 2, BlockSizes(32, 16, 4, 1)),
    Rule(64, 4, BlockSizes(64, 64, 4, 2)),
    Rule(128, 4, BlockSizes(64, 32, 4, 2)),
    Rule(256, 4, BlockSizes(32, 32, 4, 2)),
    Rule(1024, 4, BlockSizes(32, 16, 4, 1)),
)
INVARIANT = (
    Rule(64, 2, BlockSizes(64, 64, 4, 3)),
    Rule(128, 2, BlockSizes(64, 64, 4, 2)),
    Rule(256, 2, BlockSizes(64, 32, 4, 2)),
    Rule(1024, 2, BlockSizes(64, 32, 8, 1)),
    Rule(1024, 2, BlockSizes(32, 16, 4, 1)),
    Rule(64, 4, BlockSizes(64, 64, 4, 2)),
    Rule(128, 4, BlockSizes(64, 32, 4, 2)),
    Rule(256, 4, BlockSizes(32, 32, 4, 2)),
    Rule(1024, 4, BlockSizes(32, 16, 4, 1)),
)
"""Of the forward whose results do not depend on the batch: 64 is a multiple of the keys of a tile."""
OF_KEYS = (
    Rule(64, 2, BlockSizes(64, 64, 4, 2)),
    Rule(128, 2, BlockSizes(64, 64, 4, 2)),
    Rule(128, 2, BlockSizes(32, 64, 4, 2)),
    Rule(256, 2, BlockSizes(64, 64, 8, 2)),
    Rule(256, 2, BlockSizes(32, 64, 8, 1)),
    Rule(256, 2, BlockSizes(16, 32, 4, 1)),
    Rule(1024, 2, BlockSizes(16, 32, 8, 1)),
    Rule(64, 4, BlockSizes(32, 32, 4, 1)),
    Rule(128, 4, BlockSizes(32, 32, 4, 1)),
    Rule(256, 4, BlockSizes(16, 32, 4, 1)),
    Rule(1024, 4, BlockSizes(16, 16, 4, 1)),
)
OF_QUERIES = (
    Rule(64, 2, BlockSizes(64, 64, 4, 3)),
    Rule(64, 2, BlockSizes(64, 64, 4, 2)),
    Rule(128, 2, BlockSizes(64, 64, 4, 2)),
    Rule(128, 2, BlockSizes(64, 32, 4, 2)),
    Rule(256, 2, BlockSizes(128, 64, 8, 1)),
    Rule(256, 2, BlockSizes(64, 32, 8, 1)),
    Rule(256, 2, BlockSizes(32, 16, 4, 1)),
    Rule(1024, 2, BlockSizes(32, 16, 8, 1)),
    Rule(64, 4, BlockSizes(32, 32, 4, 1)),
    Rule(128, 4, BlockSizes(32, 32, 4, 1)),
    Rule(256, 4, BlockSizes(32, 16, 4, 1)),
    Rule(1024, 4, BlockSizes(16, 16, 4, 1)),
)
OF_BIAS = (
    Rule(128, 2, BlockSizes(64, 64, 4, 1)),
    Rule(256, 2, BlockSizes(64, 64, 8, 1)),
    Rule(256, 2, BlockSizes(32, 32, 4, 1)),
    Rule(1024, 2, BlockSizes(32, 16, 8, 1)),
    Rule(128, 4, BlockSizes(32, 32, 4, 1)),
    Rule(256, 4, BlockSizes(32, 16, 4, 1)),
    Rule(1024, 4, BlockSizes(16, 16, 4, 1)),
)
"""Forward; the gradients of keys and values, by tiles of keys; that of queries, by tiles of queries; that of a bias."""
FORWARD_OF_FUNCTIONS = (Rule(64, 2, BlockSizes(64, 64, 4, 3)), Rule(128, 2, BlockSizes(128, 64, 8, 2)))
OF_KEYS_OF_FUNCTIONS = (Rule(64, 2, BlockSizes(32, 64, 4, 3)), Rule(128, 2, BlockSizes(32, 64, 4, 2)))
"""What comes before the first two for calls with users' functions, which take registers: the fastest on an H200."""


def choose(
    rules: tuple[Rule, ...], head: int, size: int, queries: int, memory: int, tensors: int, pair: int = 0
) -> BlockSizes:
    """Return the first row that is for such heads and whose tiles have room in ``memory`` bytes of shared memory.

    Args:
        rules: a table from above.
        head: the greater of the head sizes of keys and values.
        size: bytes of an element.
        queries: fewer than a tile has rows make it smaller.
        memory: of a block, in bytes.
        tensors: how many tiles of queries' rows are in memory in addition to those of keys and values.
        pair: bytes that are read for each pair of a query and a key, of masks and biases.

    >>> choose(FORWARD, 128, 2, 4096, 232448, 1)
    BlockSizes(rows=128, keys=64, warps=8, stages=4)
    """
    return fitted(roomy(rules, head, size, memory, tensors, pair)[0], queries)


def roomy(
    rules: tuple[Rule, ...], head: int, size: int, memory: int, tensors: int, pair: int = 0
) -> tuple[BlockSizes, ...]:
    """Of the rows that are for the narrowest heads in which these fit, those that have room; the last, where none has.

    The arguments are those of :func:`choose`.

    >>> roomy(FORWARD, 128, 2, 166912, 1)[1]
    BlockSizes(rows=128, keys=64, warps=8, stages=2)
    """
    fitting = [rule for rule in rules if head <= rule.head and size <= rule.size]
    found = [rule for rule in fitting if bytes_of(rule.blocks, head, size, tensors, pair) <= memory] or fitting[-1:]
    return tuple(rule.blocks for rule in found if (rule.head, rule.size) == (found[0].head, found[0].size))


def fitted(found: BlockSizes, queries: int) -> BlockSizes:
    """Return the same tiles, smaller where there are fewer queries than they have rows."""
    while found.rows > _SMALLEST and found.rows >= 2 * queries:
        found = found._replace(rows=found.rows // 2, warps=max(4, found.warps // 2))
    return found


def invariant(head: int, size: int, memory: int, pair: int = 0) -> BlockSizes:
    """Return the tiles of a forward whose results do not depend on the batch: only what no sum depends on follows from ``pair``.

    The arguments are those of :func:`choose`.

    >>> invariant(64, 2, 232448), invariant(64, 2, 232448, pair=8)
    (BlockSizes(rows=64, keys=64, warps=4, stages=3), BlockSizes(rows=64, keys=64, warps=4, stages=3))
    """
    found = choose(INVARIANT, head, size, _WHOLE, memory, 1)
    while found.stages > 1 and bytes_of(found, head, size, 1, pair) > memory:
        found = found._replace(stages=found.stages - 1)
    return found


def bytes_of(blocks: BlockSizes, head: int, size: int, tensors: int, pair: int) -> int:
    """Return the shared memory that tiles take, computed from what they hold; the arguments are those of :func:`choose`."""
    padded = sum(parts(head)) * size
    pairs = blocks.rows * blocks.keys * pair * (blocks.stages + 1)
    return padded * (tensors * blocks.rows + 2 * blocks.stages * blocks.keys) + pairs


def parts(size: int) -> tuple[int, int]:
    """Return a power of two that holds a head size, and 0; of more than 512 that, and a power of two for the rest.

    Smaller heads are padded rather than read in two parts, of which the second gave wrong results in bfloat16 on Hopper (Triton
    3.6) where it was the narrower one of values.

    >>> parts(128), parts(96), parts(7), parts(576)
    ((128, 0), (128, 0), (16, 0), (512, 64))
    """
    above = 1 << (max(size, _SMALLEST) - 1).bit_length()
    if above <= _WHOLE:
        return above, 0
    return above // 2, max(_LEAST_REST, 1 << (size - above // 2 - 1).bit_length())


def tiles_in(count: int, size: int) -> int:
    """Return how many tiles of a size there are in a count, the last perhaps not whole."""
    return -(-count // size)


@functools.cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; of a CPU, where Triton interprets, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block may have; of a CPU, where Triton interprets, those of an H200."""
    if device.type != "cuda":
        return 232448
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 65536))


class TiledKernel(NamedTuple):
    """A portable kernel whose tiles are searched for.

    Attributes:
        name: of its Triton function.
        rules: its table in :mod:`opkit.attn.gpu.blocks`.
        tensors: how many tiles of queries' rows it keeps, as for :func:`opkit.attn.gpu.blocks.choose`.
        sums: of tiles, and of padded heads of keys and values, how many numbers of float32 it keeps in registers.
        sources: the files, in this folder, of what runs on the GPU.
        functions: rules that come before its table for calls with users' functions.
    """

    name: str
    rules: tuple[Rule, ...]
    tensors: int
    sums: Callable[[BlockSizes, int, int], int]
    sources: tuple[str, ...]
    functions: tuple[Rule, ...] = ()

    @property
    def with_functions(self) -> TiledKernel:
        """The same kernel for calls with users' functions."""
        return self._replace(rules=(*self.functions, *self.rules))


FORWARD_KERNEL = TiledKernel(
    "attention_forward", FORWARD, 1, lambda size, d, e: size.rows * (e + size.keys), _FORWARD_SOURCES,
    FORWARD_OF_FUNCTIONS,
)  # fmt: skip
KEYS_KERNEL = TiledKernel(
    "attention_of_keys", OF_KEYS, 2, lambda size, d, e: size.keys * (d + e + 2 * size.rows), _BACKWARD_SOURCES,
    OF_KEYS_OF_FUNCTIONS,
)  # fmt: skip
QUERIES_KERNEL = TiledKernel(
    "attention_of_queries", OF_QUERIES, 2, lambda size, d, e: size.rows * (d + 2 * size.keys), _BACKWARD_SOURCES
)  # fmt: skip
BIAS_KERNEL = TiledKernel(
    "attention_of_bias", OF_BIAS, 2, lambda size, d, e: 3 * size.rows * size.keys,
    (*_BACKWARD_SOURCES, "portable/device/bias.py"),
)  # fmt: skip


def candidates(kernel: TiledKernel, d: int, e: int, size: int, memory: int, pair: int) -> tuple[BlockSizes, ...]:
    """Return the tiles to try, the table's own choice first, :data:`MAX_TRIED` at most.

    Args:
        kernel: one of those above.
        d: the size of a head of keys.
        e: of values.
        size: bytes of an element.
        memory: of a block, in bytes.
        pair: bytes that are read for each pair of a query and a key.

    >>> candidates(FORWARD_KERNEL, 128, 128, 2, 166912, 0)[:2]
    (BlockSizes(rows=128, keys=64, warps=8, stages=4), BlockSizes(rows=128, keys=64, warps=8, stages=2))
    """
    head = max(d, e)
    rows = roomy(kernel.rules, head, size, memory, kernel.tensors, pair)
    wide = sum(parts(d)), sum(parts(e))

    def fits(each: BlockSizes) -> bool:
        registers = kernel.sums(each, *wide) / (32 * each.warps)
        in_memory = bytes_of(each, head, size, kernel.tensors, pair) <= memory
        return in_memory and registers <= _MAX_REGISTERS and _is_tried(each)

    neighbours = (each for row in rows for each in _neighbours(row) if fits(each))
    return tuple(dict.fromkeys((*rows, *neighbours)))[:MAX_TRIED]


def _neighbours(row: BlockSizes) -> Iterator[BlockSizes]:
    """Yield tiles that differ in one size or option."""
    for name in ("rows", "keys", "warps"):
        for times in (0.5, 2):
            yield row._replace(**{name: int(getattr(row, name) * times)})
    for more in (-1, 1):
        yield row._replace(stages=row.stages + more)


def _is_tried(each: BlockSizes) -> bool:
    sized = all(_TRIED_SIZES[0] <= count <= _TRIED_SIZES[1] for count in (each.rows, each.keys))
    return sized and each.warps in _TRIED_WARPS and _TRIED_STAGES[0] <= each.stages <= _TRIED_STAGES[1]
