"""The choices of lowering that depend on the machine."""

from __future__ import annotations

import dataclasses
from typing import Literal


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
        programs: the programs that a device needs to be busy, of kernels of tiles.
        product_alignment: sizes of large products of narrow floats are padded to multiples of so many elements. Libraries have
            fast kernels only for such sizes.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    narrow_products: bool = True
    channels_last: bool = False
    cache: int | None = None
    wide_sums: bool = True
    few_rows: int = 4
    programs: int = 1
    product_alignment: int = 1

    @staticmethod
    def of(features: frozenset[str], cache: int | None = None) -> LoweringTarget:
        """Return the choices for a processor with these features, as Linux names them, and this last-level cache."""
        narrow = bool(features & {"avx512_bf16", "amx_bf16", "bf16", "avx_ne_convert"})
        return LoweringTarget(narrow_products=narrow, channels_last=True, cache=cache)

    @property
    def tiles(self) -> bool:
        """Whether kernels compute tiles of rows and columns at once, so that no loop over columns is needed."""
        return self.device != "cpu"


PLAIN = LoweringTarget()
"""No choices: every operator as torch would run it."""

GPU = LoweringTarget("cuda", channels_last=True, wide_sums=False, few_rows=64, programs=528, product_alignment=8)
