// The kernels of the backward. Who includes this file names their ELEMENT, and may say that steps are listed, or sums made in order.
// opkit/attn/gpu/hopper/backward_cuda.py chooses among them, and launches.
#include "backward.cuh"

#ifdef STEPS_LISTED
constexpr bool LISTED = true;
#else
constexpr bool LISTED = false;
#endif
#ifdef SUMS_ORDERED
constexpr bool ORDERED = true;
#else
constexpr bool ORDERED = false;
#endif

// By the larger head: threads, shared memory, queries and keys of a step, and boxes next to one another.
#define GRADIENTS(NAME, D, BANDED)                                                                                      \
    SM90_KERNEL(NAME, (THREADS, 1), (gradients<Shape<D, BANDED, LISTED, ORDERED>>), THREADS,                            \
                (Shape<D, BANDED, LISTED, ORDERED>::SHARED), (Shape<D, BANDED, LISTED, ORDERED>::ROWS), KEYS, D / COLUMNS)
#define ROWS_OF(NAME, D) SM90_KERNEL(NAME, (ROW_THREADS), (before<Shape<D, LISTED, LISTED, ORDERED>>), ROW_THREADS, 0)

ROWS_OF(rows_64, 64)
ROWS_OF(rows_128, 128)
GRADIENTS(gradients_64_banded, 64, true)
GRADIENTS(gradients_128_banded, 128, true)
#ifndef STEPS_LISTED
GRADIENTS(gradients_64, 64, false)
GRADIENTS(gradients_128, 128, false)
#endif

SM90_NUMBERS(problem, sizeof(Problem))
