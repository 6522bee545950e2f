// Attention of few queries for sm_90a in CUDA C++, as decode.cuh is, for more rows of a tile: a warpgroup multiplies them together.
//
// Products have keys or channels as their rows and the rows of the tile as their columns, so that none of them is empty where there are
// fewer than 64. A warp loads keys and values by TMA into a ring of buffers; weights of a step are made while values of the one before
// it are multiplied. So a block ends with a step of 64 keys and with one sum of it, where in decode.cuh there are eight to merge.
#pragma once

#include "decode_ring.cuh"

namespace {

// ---- a step ---------------------------------------------------------------------------------------------------------------

// What a thread has: sums of 64 channels each; and of its columns, rows of the tile, maxima so far and parts of the sums of weights.
template <typename L>
struct Columns {
    static constexpr int COUNT = L::ROWS / 4;
    float acc[L::BOXES][L::ROWS / 2] = {}, top[COUNT], total[COUNT] = {};
};

template <typename L>
SM90 void begin_keys(float (&s)[L::ROWS / 2], uint32_t keys, uint32_t queries) {
    products_fence();
#pragma unroll
    for (int part = 0; part < L::D / 16; part++) {
        const uint64_t a = along_rows(keys + part / 4 * L::BOX_BYTES + part % 4 * 32);
        const uint64_t b = along_rows(queries + part / 4 * (L::ROWS * ROW_BYTES) + part % 4 * 32);
        if (part == 0) Product<T, L::ROWS>::template first<0, 0>(s, a, b);
        else Product<T, L::ROWS>::template ss<0, 0>(s, a, b, 1);
    }
}

template <typename L>
SM90 void begin_values(float (&acc)[L::BOXES][L::ROWS / 2], uint32_t values, uint32_t weights) {
    products_fence();
#pragma unroll
    for (int box = 0; box < L::BOXES; box++)
#pragma unroll
        for (int j = 0; j < L::KEYS / 16; j++) {
            const uint64_t a = across_rows(values + box * L::BOX_BYTES + j * 16 * ROW_BYTES, L::BOX_BYTES);
            Product<T, L::ROWS>::template ss<1, 0>(acc[box], a, along_rows(weights + j * 32), 1);
        }
}

// Whether a key is seen.
SM90 bool seen(const Reach& reach, int key) { return reach.begin <= key && key < reach.end; }

// The key of a thread's first row of a step, of which the second is 8 further.
SM90 int own_key(int key) { return key + threadIdx.x / LANES * 16 + threadIdx.x % LANES / 4; }

template <typename L>
SM90 void hide_keys(float (&s)[L::ROWS / 2], const Reach& reach, int key) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (seen(reach, own_key(key) + 8 * h)) continue;
#pragma unroll
        for (int j = 0; j < L::ROWS / 8; j++) s[4 * j + 2 * h] = s[4 * j + 2 * h + 1] = -INFINITY;
    }
}

// Values of keys that are not seen, of which memory may have anything.
template <typename L>
SM90 void clear_values(uint32_t values, const Reach& reach, int key) {
    const int row = threadIdx.x % L::KEYS;
    if (seen(reach, key + row)) return;
    for (int chunk = threadIdx.x / L::KEYS; chunk < L::D / 8; chunk += WARPGROUP / L::KEYS)
        store_four(values + chunk / 8 * L::BOX_BYTES + row * ROW_BYTES + chunk % 8 * 16, {0, 0, 0, 0});
}

// What the lanes of a warp that have the same columns have together.
template <typename F>
SM90 float of_lanes(float x, F both) {
#pragma unroll
    for (int bit = 4; bit < LANES; bit *= 2) x = both(x, __shfl_xor_sync(~0u, x, bit));
    return x;
}

// Numbers of a warp's columns, which its first lanes have, to shared memory, a row a warp.
template <typename L>
SM90 void tell(float* of_warps, const float (&x)[L::ROWS / 4]) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (lane >= 4) return;
#pragma unroll
    for (int j = 0; j < L::ROWS / 8; j++)
        *reinterpret_cast<float2*>(of_warps + warp * L::ROWS + 8 * j + 2 * lane) = make_float2(x[2 * j], x[2 * j + 1]);
}

// The greatest logits of a thread's columns, of the keys of its warp.
template <typename L>
SM90 void greatest(const float (&s)[L::ROWS / 2], float (&most)[L::ROWS / 4]) {
#pragma unroll
    for (int c = 0; c < L::ROWS / 4; c++) {
        const int at = c / 2 * 4 + c % 2;
        most[c] = of_lanes(fmaxf(s[at], s[at + 2]), [](float a, float b) { return fmaxf(a, b); });
    }
}

// The new maxima, from those of all warps. Gives by what each column of what was summed up is multiplied to fit them.
template <typename L>
SM90 void fit(const float* tops, float factor, Columns<L>& mine, float (&fade)[L::ROWS / 4]) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int j = 0; j < L::ROWS / 8; j++) {
        float2 most = {-INFINITY, -INFINITY};
#pragma unroll
        for (int warp = 0; warp < WARPGROUP / LANES; warp++) {
            const float2 its = *reinterpret_cast<const float2*>(tops + warp * L::ROWS + 8 * j + lane % 4 * 2);
            most = make_float2(fmaxf(most.x, its.x), fmaxf(most.y, its.y));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int c = 2 * j + i;
            const float top = fmaxf(mine.top[c], (i ? most.y : most.x) * factor);
            fade[c] = exp2_approx(mine.top[c] - base_of(top));
            mine.top[c] = top, mine.total[c] *= fade[c];
        }
    }
}

template <typename L>
SM90 void scale(float (&acc)[L::BOXES][L::ROWS / 2], const float (&fade)[L::ROWS / 4]) {
    bool changed = false;
#pragma unroll
    for (float each : fade) changed |= each != 1;
    if (!__any_sync(~0u, changed)) return;
#pragma unroll
    for (auto& of_box : acc)
#pragma unroll
        for (int i = 0; i < L::ROWS / 2; i++) of_box[i] *= fade[i / 4 * 2 + i % 2];
}

// Weights of logits, rounded, to shared memory: a row of 64 keys a row of the tile.
template <typename L>
SM90 void weigh_columns(const float (&s)[L::ROWS / 2], float factor, Columns<L>& mine, uint32_t weights) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    uint32_t p[L::ROWS / 8][2];
#pragma unroll
    for (int j = 0; j < L::ROWS / 8; j++) {
        const float base[] = {base_of(mine.top[2 * j]), base_of(mine.top[2 * j + 1])};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                x[i] = weight(s[4 * j + 2 * h + i], factor, base[i]);
                mine.total[2 * j + i] += x[i];
            }
            p[j][h] = pack<T>(x[0], x[1]);
        }
    }
    const int row = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < L::ROWS / 8; j += 2)
        store_across(weights + (8 * j + row) * ROW_BYTES + ((chunk ^ row % 8) << 4), p[j][0], p[j][1], p[j + 1][0], p[j + 1][1]);
}

// ---- the kernel -----------------------------------------------------------------------------------------------------------

// The steps of a block. Weights of one are made while values of the one before it are multiplied.
template <typename L>
struct Multiplying {
    const Problem& problem;
    const Steps& steps;
    const Gathered<L>& shared;
    Columns<L>& mine;
    float s[L::ROWS / 2], fade[L::ROWS / 4];

    __device__ __forceinline__ int key_of(int number) const { return steps.first + number * L::KEYS; }
    // Whether not all keys of a step are seen.
    __device__ __forceinline__ bool some(int key) const {
        return key + L::KEYS > steps.reach.end || (L::PAGED && key < steps.reach.begin);
    }
    __device__ __forceinline__ void free(int stage, int values) const {
        if (threadIdx.x % LANES == 0) arrive(shared.freed(stage, values));
    }
    __device__ __forceinline__ void begin_logits(const InRing<L>& at) {
        begin_keys<L>(s, shared.buffer(at.stage, 0), shared.queries());
        products_commit();
    }
    __device__ __forceinline__ void begin_sums(int number, const InRing<L>& at) {
        begin_values<L>(mine.acc, shared.buffer(at.stage, 1), shared.weights(number % 2));
        products_commit();
    }
    template <int LATER>
    __device__ __forceinline__ void logits_done(const InRing<L>& at) {
        products_wait<LATER>();
        hold(s);
        free(at.stage, 0);
    }
    __device__ __forceinline__ void sums_done() {
        products_wait<0>();
#pragma unroll
        for (auto& acc : mine.acc) hold(acc);
    }
    // Logits to weights in shared memory.
    __device__ __forceinline__ void weigh(int number) {
        const int key = key_of(number);
        if (some(key)) hide_keys<L>(s, steps.reach, key);
        float most[L::ROWS / 4];
        greatest<L>(s, most);
        tell<L>(shared.tops(), most);
        named_sync(MULTIPLIERS, WARPGROUP);
        fit<L>(shared.tops(), problem.factor, mine, fade);
        weigh_columns<L>(s, problem.factor, mine, shared.weights(number % 2));
    }
    // After that: all may read what was stored, once values that nobody sees are zeros.
    __device__ __forceinline__ void weighed(int number, const InRing<L>& at) {
        if (L::PAGED && some(key_of(number))) {
            wait(shared.filled(at.stage, 1), at.parity);
            clear_values<L>(shared.buffer(at.stage, 1), steps.reach, key_of(number));
        }
        fence_stores();
        named_sync(MULTIPLIERS, WARPGROUP);
    }
    // Not without steps.
    __device__ __forceinline__ void all() {
        InRing<L> before, at;
        wait(shared.filled(at.stage, 0), at.parity);
        begin_logits(at);
        logits_done<0>(at);
        weigh(0);
        weighed(0, at);
        at.next();
#pragma unroll 1
        for (int number = 1; number < steps.count; number++) {
            wait(shared.filled(at.stage, 0), at.parity), wait(shared.filled(before.stage, 1), before.parity);
            begin_logits(at);
            begin_sums(number - 1, before);
            logits_done<1>(at);
            weigh(number);
            sums_done();
            free(before.stage, 1);
            scale<L>(mine.acc, fade);
            weighed(number, at);
            before.next(), at.next();
        }
        wait(shared.filled(before.stage, 1), before.parity);
        begin_sums(steps.count - 1, before);
        sums_done();
    }
};

// ---- the end --------------------------------------------------------------------------------------------------------------

// Maxima and sums of weights to where all find them.
template <typename L>
SM90 void tell_found(const Gathered<L>& shared, Columns<L>& mine) {
#pragma unroll
    for (auto& total : mine.total) total = of_lanes(total, [](float a, float b) { return a + b; });
    tell<L>(shared.totals(), mine.total), tell<L>(shared.tops(), mine.top);
    named_sync(MULTIPLIERS, WARPGROUP);  // and all have read the buffers
}

// Those of a row.
template <typename L>
SM90 float2 found_of(const Gathered<L>& shared, int row) {
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPGROUP / LANES; warp++) total += shared.totals()[warp * L::ROWS + row];
    return make_float2(shared.tops()[row], total);
}

// What a thread has summed up to rows of D floats, of which there are `height`.
template <typename L>
SM90 void store_sums(float* to, int height, const Columns<L>& mine) {
    const int first = threadIdx.x % 4 * 2, channel = threadIdx.x / LANES * 16 + threadIdx.x % LANES / 4;
#pragma unroll
    for (int i = 0; i < L::ROWS / 2; i++) {
        const int row = first + i / 4 * 8 + i % 2;
        if (row >= height) continue;
#pragma unroll
        for (int box = 0; box < L::BOXES; box++) to[row * L::D + box * COLUMNS + channel + i / 2 % 2 * 8] = mine.acc[box][i];
    }
}

// A split's part, for the second kernel.
template <typename L>
SM90 void put_all(const Problem& problem, const Tile& tile, int split, const Gathered<L>& shared, Columns<L>& mine) {
    const int64_t number = number_of(problem, tile, split, 0);
    store_sums(problem.partial + number * L::D, problem.height(), mine);
    tell_found(shared, mine);
    if (threadIdx.x < problem.height()) tops_of(problem, L::D)[number + threadIdx.x] = found_of(shared, threadIdx.x);
}

// Results, where there is one split.
template <typename L>
SM90 void finish_all(const Problem& problem, const Tile& tile, const Gathered<L>& shared, Columns<L>& mine) {
    tell_found(shared, mine);
    store_sums(shared.sums(), L::ROWS, mine);
    named_sync(MULTIPLIERS, WARPGROUP);
    for (int i = threadIdx.x; i < problem.height() * L::D / 4; i += WARPGROUP) {
        const int row = i / (L::D / 4);
        const float2 found = found_of(shared, row);
        finish(problem, tile, row, i % (L::D / 4) * 4, {reinterpret_cast<const float4*>(shared.sums())[i], found.x, found.y});
    }
}

template <typename L>
SM90 void decode_together(const Problem& problem, const Maps& maps) {
    const Tile tile = {int(blockIdx.z), int(blockIdx.x)};
    const Gathered<L> shared(dynamic_shared());
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < L::STAGES; stage++)
            for (int values = 0; values < 2; values++) {
                barrier_init(shared.filled(stage, values), 1);
                barrier_init(shared.freed(stage, values), WARPGROUP / LANES);
            }
        barriers_ready();
    }
    __syncthreads();
    launches_before_done();
    next_launch_may_begin();
    const Steps steps = steps_of<L>(reach_of<L>(problem, tile), problem.splits, blockIdx.y, 0);
    if (__shfl_sync(~0u, threadIdx.x / WARPGROUP, 0) == 1) {
        load_all<L>(problem, &maps.k, &maps.v, tile, steps, shared);
        return;
    }
    load_columns<L>(problem, tile, shared.queries());
    fence_stores();
    named_sync(MULTIPLIERS, WARPGROUP);
    Columns<L> mine;
#pragma unroll
    for (auto& top : mine.top) top = -INFINITY;
    if (steps.count > 0) Multiplying<L>{problem, steps, shared, mine, {}, {}}.all();
    if (problem.splits > 1) put_all(problem, tile, blockIdx.y, shared, mine);
    else finish_all(problem, tile, shared, mine);
}

}  // namespace
