"""What a unit of this package is compiled with, beside what every native kernel is."""

from __future__ import annotations

from opkit.kernels import isa

# Signed integers wrap around, as ATen's do. "omp simd" alone of OpenMP: the sharing among threads is done by hand, on the
# OpenMP that torch has loaded. What "-O2" and "-O3" add beyond the vectoriser doubles gcc's time and gains nothing in loop
# nests that were planned already; only register allocation wants what "-fexpensive-optimizations" does.
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
    "-ffp-contract=fast",
    "-fno-semantic-interposition",
)
_MACHINES = {"x86_64": ("-mprefer-vector-width=512",)}


def flags() -> tuple[str, ...]:
    """The flags of ``opkit.kernels.compilation.Request``."""
    return (*_FLAGS, *_MACHINES.get(isa.machine(), ()))
