// The kernel of the forward, for calls of one kind. Who includes this file names their ELEMENT, of which FLOAT8 queries, keys and
// values are, if they are, the LAYOUT, and what else calls ask for: opkit/attn/gpu/hopper/forward_kinds.py.
#include "forward.cuh"
#include "forward_values.cuh"

// Threads, shared memory, queries and keys of a step, and boxes next to one another of keys and of values.
using Kind = LAYOUT;
SM90_KERNEL(attention, (Kind::THREADS, 1), (attend<Kind, OF_BAND>), Kind::THREADS, Kind::SHARED, Kind::ROWS, Kind::KEYS,
            Kind::KEY_BOXES, Kind::VALUE_BOXES)

#ifdef FLOAT8
SM90_KERNEL(widen_values, (WIDENERS), widen<Key>, WIDENERS, 0, PIECE, AT_ONCE)
#endif

SM90_NUMBERS(problem, sizeof(Problem))
