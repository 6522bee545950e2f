// How blocks of decode_together.cuh lie in shared memory, and how they load.
#pragma once

#include "decode_keys.cuh"

namespace {

constexpr int GATHERED = WARPGROUP + LANES;  // threads: a warpgroup that multiplies, and a warp that loads
constexpr int MULTIPLIERS = 1;               // the named barrier of the former

// How a block is laid out: STAGES times KEYS keys and as many values, in boxes of 64 columns next to one another.
template <int D_, bool PAGED_, int ROWS_>
struct Together {
    static constexpr bool PAGED = PAGED_;
    static constexpr int D = D_, ROWS = ROWS_, SHARERS = 1;
    static constexpr int KEYS = 64, BOXES = D / COLUMNS, BOX_BYTES = KEYS * ROW_BYTES, BYTES = BOXES * BOX_BYTES;
    static constexpr int BOX_ROWS = PAGED ? PAGE_ROWS : KEYS, BOXES_AT_ONCE = PAGED ? 1 : BOXES;
    static constexpr int STAGES = 65536 / BYTES + 1;
    static constexpr int BUFFERS = STAGES * 2 * BYTES, QUERIES = ROWS * D * 2, WEIGHTS = ROWS * ROW_BYTES;
    static constexpr int FOUND = 2 * WARPGROUP / LANES * ROWS * sizeof(float);
    static constexpr int BARRIERS = STAGES * 4 * 8;
    static constexpr int SHARED = BUFFERS + QUERIES + 2 * WEIGHTS + FOUND + BARRIERS + 1024;  // boxes begin at multiples of 1024
    static_assert(ROWS * D * int(sizeof(float)) <= BUFFERS, "sums lie where keys and values did");
};

// What a block has of shared memory. Barriers are those of keys, then of values, of all stages: what is filled, and what is free.
template <typename L>
struct Gathered {
    unsigned char* bytes;
    uint32_t first;

    __device__ __forceinline__ explicit Gathered(unsigned char* begin) : bytes(begin + (-shared(begin) & 1023)), first(shared(bytes)) {}
    __device__ __forceinline__ uint32_t buffer(int stage, int values) const { return first + (2 * stage + values) * L::BYTES; }
    __device__ __forceinline__ uint32_t queries() const { return first + L::BUFFERS; }
    // Those of even steps, or of odd ones.
    __device__ __forceinline__ uint32_t weights(int odd) const { return queries() + L::QUERIES + odd * L::WEIGHTS; }
    __device__ __forceinline__ uint32_t filled(int stage, int values) const { return weights(2) + L::FOUND + (2 * stage + values) * 16; }
    __device__ __forceinline__ uint32_t freed(int stage, int values) const { return filled(stage, values) + 8; }
    // Numbers of rows by warps, and the sums of rows once all is multiplied.
    __device__ __forceinline__ float* tops() const { return reinterpret_cast<float*>(bytes + L::BUFFERS + L::QUERIES + 2 * L::WEIGHTS); }
    __device__ __forceinline__ float* totals() const { return tops() + WARPGROUP / LANES * L::ROWS; }
    __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(bytes); }
};

// The buffers of a step, and the parity of their barriers' phase.
template <typename L>
struct InRing {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == L::STAGES) stage = 0, parity ^= 1;
    }
};

// ---- loading --------------------------------------------------------------------------------------------------------------

// Keys from `key` on, or their values; of pages a lane loads a box, if some of it is seen.
template <typename L>
SM90 void load_step(const Problem& problem, const CUtensorMap* map, const Tile& tile, const Reach& reach, int key, uint32_t to,
                    uint32_t filled) {
    const int lane = threadIdx.x % LANES;
    if constexpr (L::PAGED) {
        constexpr int MOST = L::KEYS / L::BOX_ROWS;
        const int boxes = min((reach.end - key + L::BOX_ROWS - 1) / L::BOX_ROWS, MOST), row = lane % MOST * L::BOX_ROWS;
        if (lane == 0) expect_bytes(filled, boxes * L::BOX_ROWS * L::D * 2);
        if (lane >= MOST * L::BOXES || lane % MOST >= boxes) return;
        const Place place = place_of(problem.pages, reach, key + row);
        const int box = lane / MOST;
        load_box(to + box * L::BOX_BYTES + row * ROW_BYTES, map, filled, place.within, box, tile.head, place.page);
    } else if (lane == 0) {
        expect_bytes(filled, L::BYTES);
        load_boxes(to, map, filled, key, tile.head, tile.batch);
    }
}

template <typename L>
SM90 void load_all(const Problem& problem, const CUtensorMap* k, const CUtensorMap* v, const Tile& tile, const Steps& steps,
                   const Gathered<L>& shared) {
    InRing<L> at;
    for (int number = 0; number < steps.count; number++, at.next()) {
#pragma unroll
        for (int values = 0; values < 2; values++) {
            wait(shared.freed(at.stage, values), at.parity ^ 1);
            load_step<L>(problem, values ? v : k, tile, steps.reach, steps.first + number * L::KEYS, shared.buffer(at.stage, values),
                         shared.filled(at.stage, values));
            __syncwarp();
        }
    }
}

// A tile's queries to shared memory as TMA would store them, zeros for the rows that there are none of.
template <typename L>
SM90 void load_columns(const Problem& problem, const Tile& tile, uint32_t to) {
    constexpr int EACH = L::ROWS * L::D / 8 / WARPGROUP;
    int4 x[EACH];  // all are asked for before one is waited for
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int i = threadIdx.x + n * WARPGROUP;
        x[n] = eight_of_query(problem, tile, i / (L::D / 8), i % (L::D / 8) * 8);
    }
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const int i = threadIdx.x + n * WARPGROUP, row = i / (L::D / 8), chunk = i % (L::D / 8);
        store_four(to + chunk / 8 * (L::ROWS * ROW_BYTES) + row * ROW_BYTES + ((chunk ^ row) % 8 << 4), x[n]);
    }
}

}  // namespace
