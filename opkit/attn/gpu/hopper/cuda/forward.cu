// The kernels of the forward. Who includes this file names their ELEMENT, and may say that steps are listed, or of which FLOAT8
// queries, keys and values are. opkit/attn/gpu/hopper/forward_cuda.py chooses among them, and launches.
#include "forward.cuh"
#include "forward_values.cuh"

// By the channels of heads: threads, shared memory, queries and keys of a step, and boxes next to one another of keys and of values.
#define ATTENTION(NAME, L, BANDED)                                                      \
    SM90_KERNEL(NAME, (L::THREADS, 1), (attention<L, BANDED>), L::THREADS, L::SHARED,   \
                L::ROWS, L::KEYS, L::KEY_BOXES, L::VALUE_BOXES)

#ifdef STEPS_LISTED
ATTENTION(attention_64_brief_banded, Listed<Brief>, true)
ATTENTION(attention_128_banded, Listed<Middle>, true)
#else
ATTENTION(attention_64, Narrow<true>, false)
ATTENTION(attention_64_banded, Narrow<false>, true)
ATTENTION(attention_64_brief, Brief, false)
ATTENTION(attention_64_brief_banded, Brief, true)
ATTENTION(attention_128, Middle, false)
ATTENTION(attention_128_banded, Middle, true)
ATTENTION(attention_256, Wide, false)
ATTENTION(attention_256_banded, Wide, true)
#endif

#ifdef FLOAT8
SM90_KERNEL(widen_values, (WIDENERS), widen<Key>, WIDENERS, 0, PIECE, AT_ONCE)
#endif

SM90_NUMBERS(problem, sizeof(Problem))
