// The kernels that decode. Who includes this file names their ELEMENT. opkit/attn/gpu/hopper/decode_cuda.py chooses among them, and
// launches.
#include "decode.cuh"
#include "decode_together.cuh"

// By the channels of heads, and how many rows a tile has at most: threads, shared memory, keys of a box and boxes next to one another.
#define DECODE(NAME, PAGED, D, SETS)                                                                \
    SM90_KERNEL(NAME, (THREADS, 1), (decode<Layout<D, PAGED, SETS>>), THREADS,                      \
                (Layout<D, PAGED, SETS>::SHARED), (Layout<D, PAGED, SETS>::BOX_ROWS), (Layout<D, PAGED, SETS>::BOXES_AT_ONCE))
#define TOGETHER(NAME, PAGED, D, ROWS)                                                              \
    SM90_KERNEL(NAME, (GATHERED, 1), (decode_together<Together<D, PAGED, ROWS>>), GATHERED,         \
                (Together<D, PAGED, ROWS>::SHARED), (Together<D, PAGED, ROWS>::BOX_ROWS), (Together<D, PAGED, ROWS>::BOXES_AT_ONCE))
#define MERGE(NAME, D, GROUPS)                                                                      \
    SM90_KERNEL(NAME, (Merging<D, GROUPS>::THREADS), (merge<D, GROUPS>), (Merging<D, GROUPS>::THREADS), (Merging<D, GROUPS>::SHARED))

#define DECODES(ENDING, PAGED)                           \
    DECODE(decode_64_16##ENDING, PAGED, 64, 1)           \
    DECODE(decode_64_32##ENDING, PAGED, 64, 2)           \
    DECODE(decode_128_16##ENDING, PAGED, 128, 1)         \
    DECODE(decode_128_32##ENDING, PAGED, 128, 2)         \
    DECODE(decode_256_16##ENDING, PAGED, 256, 1)         \
    TOGETHER(together_64_64##ENDING, PAGED, 64, 64)      \
    TOGETHER(together_128_32##ENDING, PAGED, 128, 32)    \
    TOGETHER(together_128_64##ENDING, PAGED, 128, 64)    \
    TOGETHER(together_256_16##ENDING, PAGED, 256, 16)    \
    TOGETHER(together_256_32##ENDING, PAGED, 256, 32)

DECODES(, false)
DECODES(_paged, true)
// Of up to 8 AT_ONCE splits, and of more.
MERGE(merge_64_few, 64, 8)
MERGE(merge_64, 64, 16)
MERGE(merge_128_few, 128, 8)
MERGE(merge_128, 128, 16)
MERGE(merge_256_few, 256, 8)
MERGE(merge_256, 256, 16)

SM90_NUMBERS(problem, sizeof(Problem))
