"""What a unit of this package is compiled with, beside what every native kernel is."""

from __future__ import annotations

from opkit.kernels.cc import isa

# Signed integers wrap around, as ATen's do. "omp simd" alone of OpenMP: the sharing among threads is done by hand, on the
# OpenMP that torch has loaded. Of gcc's levels, the vectoriser is what loop nests that were planned already need: sixteen
# kernels took gcc 12 0.5 s so, and 0.95 s at "-O3"; a tanh in float32 was slower without "-fexpensive-optimizations".
_FLAGS = (
    "-O1",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fexpensive-optimizations",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fopenmp-simd",
    "-ffp-contract=off",
    "-fno-semantic-interposition",
)
_MACHINES = {"x86_64": ("-mprefer-vector-width=512",)}


def flags() -> tuple[str, ...]:
    """The flags of ``opkit.kernels.cc.compilation.Request``."""
    return (*_FLAGS, *_MACHINES.get(isa.machine(), ()))
