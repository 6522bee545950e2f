"""The choices of lowering that depend on the machine."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LoweringTarget:
    """Choices of lowering.

    Attributes:
        narrow_products: whether the processor multiplies matrices of bfloat16 and float16 itself (AMX, AVX512-BF16). If it
            does not, products of narrow floats are computed in float32, which is several times faster than the emulation
            that torch's libraries fall back on, and rounded once.
        channels_last: whether convolutions of images run on tensors whose channels lie next to each other.
        cache: bytes of the last-level cache, or None if unknown. Larger results are written past it.
    """

    narrow_products: bool = True
    channels_last: bool = False
    cache: int | None = None

    @staticmethod
    def of(features: frozenset[str], cache: int | None = None) -> LoweringTarget:
        """Return the choices for a processor with these features, as Linux names them, and this last-level cache."""
        narrow = bool(features & {"avx512_bf16", "amx_bf16", "bf16", "avx_ne_convert"})
        return LoweringTarget(narrow, channels_last=True, cache=cache)


PLAIN = LoweringTarget()
"""No choices: every operator as torch would run it."""
