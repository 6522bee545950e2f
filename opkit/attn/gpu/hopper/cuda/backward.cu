// The kernels of the backward, for calls of one kind. Who includes this file names their ELEMENT, the LAYOUT, and what else calls ask for:
// opkit/attn/gpu/hopper/backward_kinds.py. opkit/attn/gpu/hopper/backward_cuda.py launches them.
#include "backward.cuh"

// Threads, shared memory, queries and keys of a step, and boxes next to one another.
using Kind = LAYOUT;
SM90_KERNEL(rows, (ROW_THREADS), (before<Kind>), ROW_THREADS, 0)
SM90_KERNEL(gradients, (THREADS, 1), (differentiate<Kind>), THREADS, Kind::SHARED, Kind::ROWS, Kind::KEYS, Kind::BOXES, Kind::ITEM_ROWS)
SM90_KERNEL(after_products, (LARGE_THREADS, 2), (after<Kind>), LARGE_THREADS, 0, LARGE_THREADS / WARPGROUP)

SM90_NUMBERS(problem, sizeof(Problem))
