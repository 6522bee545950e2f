// Attention of few queries for sm_90a in CUDA C++, of elements T.
//
// A tile is all rows of a head of keys, a row being one query of one of the heads that share it. Its keys are divided among blocks,
// its *splits*, and those of a split among warps, which go on by themselves: each loads by TMA, into a buffer of its own, the keys and
// values that it reads next, so that no warp waits for another before the end. A second kernel merges the splits, in their order
// (Dao et al., "Flash-Decoding for long-context inference", 2023). Softmax is online and in base 2.
#pragma once

#include "decode_keys.cuh"

namespace {

// What a block has of shared memory, and a warp of it.
template <typename L>
struct Shared {
    float* sums;    // (warps, rows, D), each warp's in its own buffers, once it has read them
    float2* found;  // (rows, warps): maxima and sums
    uint32_t queries, keys, values, filled;
};

template <typename L>
SM90 Shared<L> shared_of(unsigned char* bytes, int warp) {
    const uint32_t first = shared(bytes), keys = first + warp * 2 * L::BYTES;
    const uint32_t queries = first + L::BUFFERS, barriers = queries + L::QUERIES + L::FOUND;
    auto* found = reinterpret_cast<float2*>(bytes + L::BUFFERS + L::QUERIES);
    return {reinterpret_cast<float*>(bytes), found, queries, keys, keys + L::BYTES, barriers + warp * 2 * 8};
}

// Where a row's number of a column lies in `sums`, so that what a warp stores at once lies in different banks.
template <typename L>
SM90 int sum_at(int warp, int row, int column) {
    return warp * (2 * L::BYTES / 4) + row * L::D + (column ^ (row % 8 * 8));
}

// ---- queries --------------------------------------------------------------------------------------------------------------

// A tile's queries to shared memory, zeros for the rows that there are none of.
template <typename L>
SM90 void load_queries(const Problem& problem, const Tile& tile, uint32_t to) {
    for (int i = threadIdx.x; i < L::ROWS * L::D / 8; i += THREADS) {
        const int row = i / (L::D / 8), column = i % (L::D / 8) * 8;
        store_four(to + row * L::QUERY_BYTES + column * 2, eight_of_query(problem, tile, row, column));
    }
}

// The queries of a block as a warp multiplies them: one set stays in registers, of more each is read again in each step.
template <typename L>
struct Queries {
    static constexpr bool KEPT = L::SETS == 1;
    uint32_t at, kept[KEPT ? L::PARTS : 1][4];

    __device__ __forceinline__ explicit Queries(uint32_t queries) {
        const int lane = threadIdx.x % LANES;
        at = queries + lane % 16 * L::QUERY_BYTES + lane / 16 * 16;
        if constexpr (KEPT) {
#pragma unroll
            for (int part = 0; part < L::PARTS; part++) load_matrices<false>(kept[part], at + part * 32);
        }
    }
    // Some channels of each set.
    __device__ __forceinline__ void read(uint32_t (&q)[L::SETS][4], int part) const {
#pragma unroll
        for (int set = 0; set < L::SETS; set++) {
            if constexpr (KEPT) {
#pragma unroll
                for (int i = 0; i < 4; i++) q[set][i] = kept[part][i];
            } else {
                load_matrices<false>(q[set], at + set * 16 * L::QUERY_BYTES + part * 32);
            }
        }
    }
};

// ---- a step of a warp -----------------------------------------------------------------------------------------------------

// What a thread has of a step: of each set of rows logits, weights and what is summed up.
template <typename L>
struct Share {
    float s[L::SETS][L::KEYS / 8][4], acc[L::SETS][L::D / 8][4];
    uint32_t p[L::SETS][L::KEYS / 16][4];
};

// Where a lane's row of 16 bytes of a buffer's 16 rows from `row` lies: of the matrices that one load brings, two are next to one
// another, and two below one another, in this order for keys and the other one for values.
template <typename L, bool OF_VALUES>
SM90 uint32_t matrices_at(uint32_t buffer, int row, int part) {
    const int lane = threadIdx.x % LANES, right = OF_VALUES ? lane / 16 : lane / 8 % 2, below = OF_VALUES ? lane / 8 % 2 : lane / 16;
    const int within = row % L::BOX_ROWS + below * 8 + lane % 8, chunk = part % 4 * 2 + right;
    const uint32_t box = buffer + row / L::BOX_ROWS * L::BOX_BYTES + part / 4 * (L::BOX_ROWS * ROW_BYTES);
    return box + within * ROW_BYTES + ((chunk ^ lane % 8) << 4);
}

template <typename L>
SM90 void multiply_keys(Share<L>& mine, const Queries<L>& queries, uint32_t keys) {
#pragma unroll
    for (auto& s : mine.s)
#pragma unroll
        for (auto& each : s) each[0] = each[1] = each[2] = each[3] = 0;
#pragma unroll
    for (int part = 0; part < L::PARTS; part++) {
        uint32_t q[L::SETS][4];
        queries.read(q, part);
#pragma unroll
        for (int j = 0; j < L::KEYS / 16; j++) {
            uint32_t k[4];
            load_matrices<false>(k, matrices_at<L, false>(keys, 16 * j, part));
#pragma unroll
            for (int set = 0; set < L::SETS; set++) {
                multiply_add<T>(mine.s[set][2 * j], q[set], k[0], k[1]);
                multiply_add<T>(mine.s[set][2 * j + 1], q[set], k[2], k[3]);
            }
        }
    }
}

// Bits of two elements, those of `key` and the next: of each, all where it is seen.
SM90 uint32_t seen_bits(const Reach& reach, int key) {
    const auto seen = [&](int at) { return reach.begin <= at && at < reach.end; };
    return (seen(key) ? 0xFFFFu : 0) | (seen(key + 1) ? 0xFFFF0000u : 0);
}

// Add values times their weights. SOME: of the keys from `key` on not all are seen, and what memory has for others may be anything.
template <typename L, bool SOME>
SM90 void multiply_values(Share<L>& mine, uint32_t values, const Reach& reach, int key) {
#pragma unroll
    for (int j = 0; j < L::KEYS / 16; j++) {
        uint32_t bits[2];
        if constexpr (SOME) {
            const int first = key + 16 * j + threadIdx.x % 4 * 2;
            bits[0] = seen_bits(reach, first), bits[1] = seen_bits(reach, first + 8);
        }
#pragma unroll
        for (int part = 0; part < L::PARTS; part++) {
            uint32_t v[4];
            load_matrices<true>(v, matrices_at<L, true>(values, 16 * j, part));
            if constexpr (SOME) v[0] &= bits[0], v[1] &= bits[1], v[2] &= bits[0], v[3] &= bits[1];
#pragma unroll
            for (int set = 0; set < L::SETS; set++) {
                multiply_add<T>(mine.acc[set][2 * part], mine.p[set][j], v[0], v[1]);
                multiply_add<T>(mine.acc[set][2 * part + 1], mine.p[set][j], v[2], v[3]);
            }
        }
    }
}

// Hide the keys that are not seen.
template <typename L>
SM90 void hide(float (&s)[L::KEYS / 8][4], const Reach& reach, int key) {
#pragma unroll
    for (int j = 0; j < L::KEYS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = key + 8 * j + threadIdx.x % 4 * 2 + i % 2;
            if (at < reach.begin || at >= reach.end) s[j][i] = -INFINITY;
        }
}

// Of two rows, for h 0 and 1: their maxima so far, and this thread's part of their sums.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
};

// Weights of logits, rounded, and what was summed up made to fit the new maxima.
template <typename L>
SM90 void weigh(float (&s)[L::KEYS / 8][4], float factor, Softmax& of, uint32_t (&p)[L::KEYS / 16][4], float (&acc)[L::D / 8][4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = -INFINITY, sum = 0;
#pragma unroll
        for (const auto& each : s) most = fmaxf(most, fmaxf(each[2 * h], each[2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float top = fmaxf(of.top[h], most * factor), base = base_of(top), fade = exp2_approx(of.top[h] - base);
#pragma unroll
        for (int j = 0; j < L::KEYS / 8; j++) {
            const float a = weight(s[j][2 * h], factor, base), b = weight(s[j][2 * h + 1], factor, base);
            sum += a + b;
            p[j / 2][j % 2 * 2 + h] = pack<T>(a, b);
        }
        of.top[h] = top, of.total[h] = of.total[h] * fade + sum;
        if (!__any_sync(~0u, fade != 1)) continue;
#pragma unroll
        for (auto& each : acc) each[2 * h] *= fade, each[2 * h + 1] *= fade;
    }
}

// What a warp has found of a set of rows to shared memory.
template <typename L>
SM90 void hand_over(const Shared<L>& shared, int warp, int set, int height, const float (&acc)[L::D / 8][4], const Softmax& of) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = 16 * set + lane / 4 + 8 * h;
        float total = of.total[h];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (row >= height) continue;
        if (lane % 4 == 0) shared.found[row * WARPS + warp] = make_float2(of.top[h], total);
#pragma unroll
        for (int j = 0; j < L::D / 8; j++) {
            float* to = shared.sums + sum_at<L>(warp, row, 8 * j + lane % 4 * 2);
            *reinterpret_cast<float2*>(to) = make_float2(acc[j][2 * h], acc[j][2 * h + 1]);
        }
    }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------------

// What warps have found, as one, for the second kernel; or as results, where there is one split.
template <typename L>
SM90 void merge_warps(const Problem& problem, const Shared<L>& shared, const Tile& tile, int split) {
    for (int i = threadIdx.x; i < problem.height() * L::D / 4; i += THREADS) {
        const int row = i / (L::D / 4), column = i % (L::D / 4) * 4;
        Part of[WARPS];
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const float2 found = shared.found[row * WARPS + warp];
            of[warp] = {*reinterpret_cast<const float4*>(shared.sums + sum_at<L>(warp, row, column)), found.x, found.y};
        }
        const Part all = merged(of);
        if (problem.splits == 1) finish(problem, tile, row, column, all);
        else put(problem, L::D, tile, split, row, column, all);
    }
}

template <typename L>
SM90 void decode(const Problem& problem, const Maps& maps) {
    const Tile tile = {int(blockIdx.z), int(blockIdx.x)};
    const int split = blockIdx.y;
    const int warp = __shfl_sync(~0u, threadIdx.x / LANES, 0), lane = threadIdx.x % LANES;
    unsigned char* bytes = dynamic_shared();
    const Shared<L> shared = shared_of<L>(bytes + (-sm90::shared(bytes) & 1023), warp);
    if (lane == 0) {
        barrier_init(shared.filled, 1), barrier_init(shared.filled + 8, 1);
        barriers_ready();
    }
    __syncwarp();
    launches_before_done();
    const Steps steps = steps_of<L>(reach_of<L>(problem, tile), problem.splits, split, warp);
    const Reach& reach = steps.reach;
    const auto key_of = [&](int number) { return steps.first + number * (L::SHARERS * L::KEYS); };
    const auto load_keys = [&](int number) {
        if (number < steps.count) load<L>(problem, &maps.k, tile, reach, key_of(number), shared.keys, shared.filled);
    };
    const auto load_values = [&](int number) {
        if (number < steps.count) load<L>(problem, &maps.v, tile, reach, key_of(number), shared.values, shared.filled + 8);
    };
    load_keys(0), load_values(0);
    next_launch_may_begin();
    load_queries<L>(problem, tile, shared.queries);
    __syncthreads();
    const Queries<L> queries(shared.queries);
    Share<L> mine{};
    Softmax softmax[L::SETS];
#pragma unroll 1
    for (int number = 0; number < steps.count; number++) {
        wait(shared.filled, number % 2);
        multiply_keys<L>(mine, queries, shared.keys);
        __syncwarp();
        load_keys(number + 1);
        const int key = key_of(number);
        const bool some = key + L::KEYS > reach.end || (L::PAGED && key < reach.begin);
#pragma unroll
        for (int set = 0; set < L::SETS; set++) {
            if (some) hide<L>(mine.s[set], reach, key);
            weigh<L>(mine.s[set], problem.factor, softmax[set], mine.p[set], mine.acc[set]);
        }
        wait(shared.filled + 8, number % 2);
        if (L::PAGED && some) multiply_values<L, true>(mine, shared.values, reach, key);
        else multiply_values<L, false>(mine, shared.values, reach, key);
        __syncwarp();
        load_values(number + 1);
    }
#pragma unroll
    for (int set = 0; set < L::SETS; set++) hand_over(shared, warp, set, problem.height(), mine.acc[set], softmax[set]);
    __syncthreads();
    merge_warps(problem, shared, tile, split);
}

}  // namespace
