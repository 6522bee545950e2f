"""The choices of lowering that depend on the machine."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """The sizes of kernels whose programs compute tiles of rows and columns at once; those that name no unit are elements.

    The numbers follow torch's Inductor (``torch/_inductor/runtime/triton_heuristics.py``).

    Attributes:
        processors: the multiprocessors. A kernel has at least two programs for each if it can, a reduction in parts four.
        points: a tile of a pointwise kernel, or of several short rows.
        row: the longest row that is one tile.
        reread_row: a row so long that the next pass along it finds nothing of it in the caches: passes are kernels of their own
            if the rows are not many more than the programs.
        step: a step along a longer row; twice as many if the program goes along it several times.
        wide: the largest tile whose rows, not columns, lie next to each other.
        adjacent_rows: the rows next to each other that a program reduces at once.
        long_column: adjacent rows that are longer may be cut into parts.
        min_column_part: the least elements of each row in such a part.
    """

    processors: int = 132
    points: int = 1 << 10
    row: int = 1 << 14
    reread_row: int = 1 << 17
    step: int = 1 << 11
    wide: int = 1 << 13
    adjacent_rows: int = 64
    long_column: int = 1 << 10
    min_column_part: int = 64

    @property
    def programs(self) -> int:
        """The programs of a kernel that keep the device busy."""
        return 2 * self.processors


@dataclasses.dataclass(frozen=True)
class LoweringTarget:
    """Choices of lowering.

    Attributes:
        device: the kind of device that runs the kernels.
        narrow_products: whether the device multiplies matrices of bfloat16 and float16 itself (AMX, AVX512-BF16, GPUs). If it
            does not, products of narrow floats are computed in float32, which is several times faster than the emulation
            that torch's libraries fall back on, and rounded once.
        channels_last: whether convolutions of images run on tensors whose channels lie next to each other.
        cache: bytes of the last-level cache, or None if unknown. Larger results are written past it.
        wide_sums: whether sums of float32 accumulate in float64.
        few_rows: the most rows that are too few to divide among threads; steps that need a reduction of such rows, if they are
            long, are in another kernel, so that the reduction can be cut into parts.
        long_row: the elements of a reduction that is worth several threads.
        min_part: the least elements of a part of a reduction.
        max_parts: the most parts of one.
        max_recomputed_cost: the largest cost (``rewrites.cost``) of an element that is recomputed rather than read.
        recompute_pairs: whether a step computes what it alone reads of another kernel also from two buffers as large: less is
            moved, but both stay in memory until then, such as all products of a sum of products.
        product_alignment: sizes of large products of narrow floats are padded to multiples of so many elements. Libraries have
            fast kernels only for such sizes.
        deterministic: whether only algorithms may run whose results never vary.
        tf32: whether convolutions of float32 round their operands to TF32.
        own_products: whether products of float32 are opkit's own (``run/driver.py``), and faster than MKL's.
        mkl_convolutions: whether they are, and torch computes convolutions of few images with windows of one element by MKL's.
        tiles: the sizes of tiles, if kernels compute tiles, so that no loop over columns is needed.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    narrow_products: bool = True
    channels_last: bool = False
    cache: int | None = None
    wide_sums: bool = True
    few_rows: int = 4
    long_row: int = 1 << 14
    min_part: int = 1 << 12
    max_parts: int = 64
    max_recomputed_cost: int = 6
    recompute_pairs: bool = False
    product_alignment: int = 1
    deterministic: bool = False
    tf32: bool = True
    own_products: bool = False
    mkl_convolutions: bool = False
    tiles: TileSizes | None = None

    @staticmethod
    def of(features: frozenset[str], cache: int | None = None) -> LoweringTarget:
        """Return the choices for a processor with these features, as Linux names them, and this last-level cache."""
        narrow = bool(features & {"avx512_bf16", "amx_bf16", "bf16", "avx_ne_convert"})
        return LoweringTarget(narrow_products=narrow, channels_last=True, cache=cache)


PLAIN = LoweringTarget()
"""No choices: every operator as torch would run it."""

GPU = LoweringTarget(
    "cuda", channels_last=True, wide_sums=False, few_rows=64, min_part=1 << 11, max_parts=1 << 10, max_recomputed_cost=48,
    recompute_pairs=True, product_alignment=8, tiles=TileSizes(),
)  # fmt: skip
"""GPUs; the number of multiprocessors is that of an H100 or H200."""
