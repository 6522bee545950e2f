// The tiles of the backward: how a block's work and its shared memory are laid out, and the thread that loads.
#pragma once

#include <type_traits>

#include "tensors.cuh"

namespace {

using namespace sm90;

constexpr int LANES = 32, WARPGROUP = 128, WARPS = 8;  // warps that multiply
constexpr int HALF = 64;                               // keys of a warpgroup; rows and columns of its part of the gradient of queries
constexpr int PART = HALF * HALF;                      // floats
constexpr int KEYS = 2 * HALF;                         // of a block of threads
constexpr int STAGES = 2;                              // blocks of queries that are there at once
constexpr int THREADS = 3 * WARPGROUP, ROW_THREADS = 256;

// A call. Query i sees key j if lower <= j - i <= upper, where there is a band. opkit/attn/gpu/hopper/backward_cuda.py fills it.
struct Problem {
    Rows q, k, v, out, gradient, of_q, of_k, of_v, lse, of_lse;  // of_lse: no data if there is no gradient of the log-sum-exp
    float* delta;  // (batch, heads, queries), dense
    float* sums;   // of a block of rows: -lse / scale, then -delta, four floats each
    float* total;  // of a block of rows: two parts of the gradient of queries, in the order of threads
    int* counter;
    int batch, heads, key_heads, queries, keys, head_size, value_size, lower, upper, banded;
    int section;  // heads of keys whose tiles are interleaved, so that their queries stay in the L2 cache
    int tiles, processors, device;
    float scale;
    float factor;  // of logits, whose exponentials' base is 2
};

// How shared memory is laid out for heads of D channels: D / 64 boxes of keys, values, queries and gradients of results.
template <int D_, bool BANDED_>
struct Shape {
    static constexpr int D = D_, ROWS = 2 * PART / D;  // queries of a step
    static constexpr bool BANDED = BANDED_;
    static constexpr bool AHEAD = D == 64;  // the next logits are begun before a step ends
    static constexpr int BOXES = D / COLUMNS, KEY_BOX = KEYS * ROW_BYTES, ROW_BOX = ROWS * ROW_BYTES;
    static constexpr int KEY_BYTES = BOXES * KEY_BOX, BLOCK_BYTES = BOXES * ROW_BOX, SLOPE_BYTES = 2 * ROW_BOX;
    static constexpr int SUM_FLOATS = 4 * ROWS, SUM_BYTES = SUM_FLOATS * 4, SUM_ROOM = 2 * SUM_BYTES;
    // Offsets. Slopes are gradients of logits.
    static constexpr int K = 0, V = K + KEY_BYTES, Q = V + KEY_BYTES, G = Q + STAGES * BLOCK_BYTES, SLOPES = G + STAGES * BLOCK_BYTES;
    static constexpr int POWERS = SLOPES + STAGES * SLOPE_BYTES, DELTAS = POWERS + STAGES * SUM_ROOM;
    static constexpr int TOLD = DELTAS + STAGES * SUM_ROOM, BARRIERS = TOLD + 2 * 16, BYTES = BARRIERS + 16 * 8;
    static constexpr int SHARED = BYTES + 1024;  // boxes begin at multiples of 1024
};

// Barriers, as offsets from the first; those with two stages are followed by the second's.
constexpr int K_FULL = 0, V_FULL = 8, K_EMPTY = 16, V_EMPTY = 24, Q_FULL = 32, G_FULL = 48, Q_EMPTY = 64, G_EMPTY = 80;
constexpr int SLOPES_FULL = 96, SLOPES_EMPTY = 112;

// ---- tiles ----------------------------------------------------------------------------------------------------------------

// How many blocks of queries of a head a tile has, -1 after the last tile; the first of them; the first key; the head of keys, of
// all batches.
struct Tile {
    int steps, first, at, head;
};

template <class S>
SM90 int blocks_of(const Problem& problem) { return (problem.queries + S::ROWS - 1) / S::ROWS; }

template <class S>
SM90 Tile tile_of(const Problem& problem, int number) {
    const int of_head = (problem.keys + KEYS - 1) / KEYS, size = problem.section * of_head;
    const int first = number / size * problem.section, rest = number % size;
    const int width = min(problem.section, problem.tiles / of_head - first);
    Tile tile{blocks_of<S>(problem), 0, rest / width * KEYS, first + rest % width};
    if (S::BANDED) {
        const int last = min(min(tile.at + KEYS, problem.keys) - 1 - problem.lower, problem.queries - 1);
        tile.first = max(tile.at - problem.upper, 0) / S::ROWS;
        tile.steps = max((max(last, -1) + S::ROWS) / S::ROWS - tile.first, 0);
    }
    return tile;
}

// From the first lane, so that the compiler knows that it is the same for a warp.
SM90 Tile told(uint32_t at) {
    const int4 x = load_four(at);
    return {__shfl_sync(~0u, x.x, 0), __shfl_sync(~0u, x.y, 0), __shfl_sync(~0u, x.z, 0), __shfl_sync(~0u, x.w, 0)};
}

// ---- loading --------------------------------------------------------------------------------------------------------------

// A block of rows of a head, with numbers of these, once the buffer is free.
template <class S>
SM90 void load_block(uint32_t barriers, int full, int empty, int it, uint32_t to, const CUtensorMap* map, int row, int head,
                     int batch, uint32_t numbers, const float* sums) {
    const int slot = it % STAGES;
    const uint32_t barrier = barriers + full + slot * 8;
    wait(barriers + empty + slot * 8, (it / STAGES & 1) ^ 1);
    expect_bytes(barrier, S::BLOCK_BYTES + S::SUM_BYTES);
    load_boxes(to + slot * S::BLOCK_BYTES, map, barrier, row, head, batch);
    load_bytes(numbers + slot * S::SUM_ROOM, sums, S::SUM_BYTES, barrier);
}

// The keys or values of a tile, once those of the one before are not needed.
template <class S>
SM90 void load_keys(uint32_t barriers, int full, int empty, uint32_t parity, uint32_t to, const CUtensorMap* map, const Tile& tile,
                    int head, int batch) {
    wait(barriers + empty, parity);
    expect_bytes(barriers + full, S::KEY_BYTES);
    load_boxes(to, map, barriers + full, tile.at, head, batch);
}

template <class S>
SM90 void load(const Problem& problem, uint32_t base, const CUtensorMap* q, const CUtensorMap* k, const CUtensorMap* v,
               const CUtensorMap* g) {
    const uint32_t barriers = base + S::BARRIERS;
    const int group = problem.heads / problem.key_heads, blocks = blocks_of<S>(problem);
    int number = blockIdx.x, it = 0;
    for (int n = 0;; n++) {
        const uint32_t parity = (n & 1) ^ 1, tell = base + S::TOLD + (n & 1) * 16;
        if (number >= problem.tiles) {
            wait(barriers + K_EMPTY, parity);
            store_four(tell, {-1, 0, 0, 0});
            arrive(barriers + K_FULL);
            return;
        }
        const Tile tile = tile_of<S>(problem, number);
        const int4 telling{tile.steps, tile.first, tile.at, tile.head};
        const int batch = tile.head / problem.key_heads, key_head = tile.head % problem.key_heads;
        for (int head = key_head * group; head < (key_head + 1) * group; head++) {
            const int64_t of_all = int64_t(batch * problem.heads + head) * blocks;
#pragma unroll 1
            for (int block = tile.first; block < tile.first + tile.steps; block++, it++) {
                const bool begins = head == key_head * group && block == tile.first;
                const float* sums = problem.sums + (of_all + block) * (2 * S::SUM_FLOATS);
                load_block<S>(barriers, Q_FULL, Q_EMPTY, it, base + S::Q, q, block * S::ROWS, head, batch, base + S::POWERS, sums);
                if (begins) {
                    wait(barriers + K_EMPTY, parity);
                    store_four(tell, telling);
                    load_keys<S>(barriers, K_FULL, K_EMPTY, parity, base + S::K, k, tile, key_head, batch);
                }
                load_block<S>(barriers, G_FULL, G_EMPTY, it, base + S::G, g, block * S::ROWS, head, batch, base + S::DELTAS,
                              sums + S::SUM_FLOATS);
                if (begins) load_keys<S>(barriers, V_FULL, V_EMPTY, parity, base + S::V, v, tile, key_head, batch);
            }
        }
        if (tile.steps == 0) {
            wait(barriers + K_EMPTY, parity);
            store_four(tell, telling);
            arrive(barriers + K_FULL);
            wait(barriers + V_EMPTY, parity);
            arrive(barriers + V_FULL);
        }
        // Not earlier: a tile that is taken while another one is far from its end would begin late.
        number = atomicAdd(problem.counter, 1) + gridDim.x;
    }
}

}  // namespace
