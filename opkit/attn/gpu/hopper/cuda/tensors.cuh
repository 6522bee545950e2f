// Tensors (batch, heads, rows, channels) in memory, and rows of results that go there from registers.
#pragma once

#include <cmath>

#include "sm90.cuh"

namespace {

using T = sm90::ELEMENT;  // of products and of results: who includes the kernels names it, Half or Bfloat16

constexpr int LANES = 32, WARPGROUP = 128;
constexpr int COLUMNS = 64, ROW_BYTES = 128;  // of a box in shared memory; columns of 16 bits
constexpr float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;

// A tensor's first element and its strides, in elements, by batch, head and row; those of channels are 1.
struct Rows {
    void* data;
    int64_t batch, head, row;
};

template <typename E>
SM90 E* first_of(const Rows& rows, int batch, int head) {
    return static_cast<E*>(rows.data) + batch * rows.batch + head * rows.head;
}

// Segments: query i sees key j only if their numbers are the same. Then tiles have lists of the blocks that they visit, of queries in the
// backward and of keys in the forward: those in which all see all from a list's front on, the others from its back; and the numbers
// of the first and of all. A row's span is what it sees if the numbers of what is visited are in order: from `x` on and before `y`, within
// the band and the lengths; else it is what these leave, and x has its sign bit set. A range is what some of 64 rows see, and from `z` on and before `w` what all see; if they are not in order x is -1.
// Visits are a tile's list from its least block on, where sums are made in order, else null: twice a block, and one more if some there do
// not see all; and how many later tiles visit it too.
struct Lists {
    const int *of_queries, *of_keys;  // (batch, rows), by strides
    const int *blocks, *counts;       // (batch, tiles of a head, blocks) and (.., tiles, 2), dense but for batch
    const int2* spans;                // (batch, rows of the tiles), with room for a multiple of 128 rows
    const int4* ranges;               // (batch, 64 rows of the tiles each)
    const int2* visits;               // (batch, tiles of a head, blocks), as the blocks
    int64_t queries_batch, queries_row, keys_batch, keys_row, blocks_batch, counts_batch, spans_batch, ranges_batch;
};

// Four registers of each thread of a quad: what was register i of thread j becomes register j of thread i.
SM90 void transpose(uint32_t (&w)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
            const uint32_t given = __shfl_xor_sync(0xffffffff, upper ? w[i] : w[i + bit], bit);
            (upper ? w[i] : w[i + bit]) = given;
        }
    }
}

// Two rows of a product that a thread has parts of, `row` and `row + 8`, from a column on, times factors, as elements E; 16 bytes of a row
// at once.
template <typename E, int FIRST = 0, int N>
SM90 void store(const Rows& rows, int batch, int head, int row, int length, int columns, const float (&x)[N], const float (&by)[2]) {
    E* base = first_of<E>(rows, batch, head);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + 8 * half;
        E* of_row = base + i * rows.row;
#pragma unroll
        for (int j = FIRST / 32; j < N / 16; j++) {
            uint32_t w[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int first = 4 * (4 * j + n) + 2 * half;
                w[n] = sm90::pack<E>(x[first] * by[half], x[first + 1] * by[half]);
            }
            transpose(w);
            const int column = (4 * j + threadIdx.x % 4) * 8;
            if (i < length && column < columns) *reinterpret_cast<uint4*>(of_row + column) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

}  // namespace
