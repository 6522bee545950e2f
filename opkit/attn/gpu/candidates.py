"""Choose the tiles to try on a GPU without a table: the table rows that fit there, and their neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from opkit.attn.gpu import blocks
from opkit.attn.gpu.blocks import Blocks, Rule

MAX_TRIED = 16  #: tiles that are tried; each costs seconds of compiling
_SIZES, _WARPS, _STAGES = (16, 128), (4, 8), (1, 4)  # of a tile's rows and keys, and of the compiler's options
_REGISTERS = 224  # of a thread's 255, for what is summed up


class Kernel(NamedTuple):
    """A portable kernel whose tiles are searched for.

    Attributes:
        name: of its Triton function.
        rules: its table in :mod:`opkit.attn.gpu.blocks`.
        tensors: how many tiles of queries' rows it keeps, as for :func:`opkit.attn.gpu.blocks.choose`.
        sums: of tiles, and of padded heads of keys and values, how many numbers of float32 it keeps in registers.
        sources: the files, in this folder, of what runs on the GPU.
    """

    name: str
    rules: tuple[Rule, ...]
    tensors: int
    sums: Callable[[Blocks, int, int], int]
    sources: tuple[str, ...]


_SHARED = ("device/programs.py", "device/tile.py", "portable/device/forward.py")
_BACKWARD = (*_SHARED, "portable/device/backward_rows.py", "portable/device/backward.py")

FORWARD = Kernel(
    "attention_forward", blocks.FORWARD, 1, lambda size, d, e: size.rows * (e + size.keys), _SHARED
)  # fmt: skip
OF_KEYS = Kernel(
    "attention_of_keys", blocks.OF_KEYS, 2, lambda size, d, e: size.keys * (d + e + 2 * size.rows), _BACKWARD
)  # fmt: skip
OF_QUERIES = Kernel(
    "attention_of_queries", blocks.OF_QUERIES, 2, lambda size, d, e: size.rows * (d + 2 * size.keys), _BACKWARD
)  # fmt: skip
OF_BIAS = Kernel(
    "attention_of_bias", blocks.OF_BIAS, 2, lambda size, d, e: 3 * size.rows * size.keys,
    (*_BACKWARD, "portable/device/bias.py"),
)  # fmt: skip


def candidates(kernel: Kernel, d: int, e: int, size: int, memory: int, pair: int) -> tuple[Blocks, ...]:
    """Return the tiles to try, the table's own choice first, :data:`MAX_TRIED` at most.

    Args:
        kernel: one of those above.
        d: the size of a head of keys.
        e: of values.
        size: bytes of an element.
        memory: of a block, in bytes.
        pair: bytes that are read for each pair of a query and a key.

    >>> candidates(FORWARD, 128, 128, 2, 166912, 0)[:2]
    (Blocks(rows=128, keys=64, warps=8, stages=4), Blocks(rows=128, keys=64, warps=8, stages=2))
    """
    head = max(d, e)
    rows = blocks.roomy(kernel.rules, head, size, memory, kernel.tensors, pair)
    wide = sum(blocks.parts(d)), sum(blocks.parts(e))

    def fits(each: Blocks) -> bool:
        registers = kernel.sums(each, *wide) / (32 * each.warps)
        in_memory = blocks.bytes_of(each, head, size, kernel.tensors, pair) <= memory
        return in_memory and registers <= _REGISTERS and _within(each)

    neighbours = (each for row in rows for each in _neighbours(row) if fits(each))
    return tuple(dict.fromkeys((*rows, *neighbours)))[:MAX_TRIED]


def _neighbours(row: Blocks) -> Iterator[Blocks]:
    """Yield tiles that differ in one size or option."""
    for name in ("rows", "keys", "warps"):
        for times in (0.5, 2):
            yield row._replace(**{name: int(getattr(row, name) * times)})
    for more in (-1, 1):
        yield row._replace(stages=row.stages + more)


def _within(each: Blocks) -> bool:
    sized = all(_SIZES[0] <= count <= _SIZES[1] for count in (each.rows, each.keys))
    return sized and each.warps in _WARPS and _STAGES[0] <= each.stages <= _STAGES[1]
