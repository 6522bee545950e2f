"""What a unit of this package is compiled with, beside what every native kernel is."""

from __future__ import annotations

# Signed integers wrap around, as ATen's do. "omp simd" alone of OpenMP: the sharing among threads is done by hand, on the
# OpenMP that torch has loaded.
FLAGS = (
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fopenmp-simd",
    "-ffp-contract=fast",
    "-fno-semantic-interposition",
    "-mprefer-vector-width=512",
)
