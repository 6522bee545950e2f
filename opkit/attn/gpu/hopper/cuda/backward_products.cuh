// What the ways to multiply in the backward share: products, weights, and the order of steps.
#pragma once

#include "backward_hidden.cuh"

namespace {

using namespace sm90;

// ---- products -------------------------------------------------------------------------------------------------------------

// Begin a product of 64 keys, or values, with a block of queries, or their gradients, of so many channels; less numbers of these, if
// these are not read by threads.
template <class S, int CHANNELS, bool NUMBERS = true>
SM90 void multiply_rows(float (&s)[S::ROWS / 2], uint32_t left, uint32_t right, int slot, uint32_t numbers) {
    products_fence();
    if constexpr (NUMBERS) broadcast(s, further(numbers_of_columns(numbers, S::SUM_BYTES), slot * S::SUM_ROOM));
    const uint64_t a = along_rows(left), b = further(along_rows(right), slot * S::BLOCK_BYTES);
#pragma unroll
    for (int k = 0; k < (CHANNELS + 15) / 16; k++) {
        const uint64_t x = further(a, k / 4 * S::KEY_BOX + k % 4 * 32), y = further(b, k / 4 * S::ROW_BOX + k % 4 * 32);
        if (!NUMBERS && k == 0) Product<T, S::ROWS>::template first<0, 0>(s, x, y);
        else Product<T, S::ROWS>::template ss<0, 0>(s, x, y, 1);
    }
    products_commit();
}

// Begin to add probabilities, or slopes, times a block of gradients of results, or of queries.
template <class S, int N>
SM90 void gather(float (&sums)[N], const uint32_t (&left)[S::ROWS / 4], uint32_t right, int slot) {
    products_fence();
    const uint64_t b = further(across_rows(right, S::ROW_BOX), slot * S::BLOCK_BYTES);
#pragma unroll
    for (int k = 0; k < S::ROWS / 16; k++)
        Product<T, 2 * N>::template rs<1>(sums, left[4 * k], left[4 * k + 1], left[4 * k + 2], left[4 * k + 3], further(b, k * 16 * ROW_BYTES), 1);
    products_commit();
}

// Begin a part of the gradient of queries, of a step's slopes and keys: of a box of these, or of half of the queries.
template <class S>
SM90 void multiply_slopes(float (&sums)[HALF / 2], uint32_t slopes, int slot, uint32_t keys, int part) {
    products_fence();
    const uint32_t left = slopes + (S::ROWS > HALF ? part * HALF * ROW_BYTES : 0), right = keys + (S::ROWS > HALF ? 0 : part * S::KEY_BOX);
    const uint64_t first_a = further(along_rows(left), slot * S::SLOPE_BYTES), first_b = across_rows(right, S::KEY_BOX);
#pragma unroll
    for (int k = 0; k < S::KEYS / 16; k++) {
        const uint64_t a = further(first_a, k / 4 * S::ROW_BOX + k % 4 * 32), b = further(first_b, k * 16 * ROW_BYTES);
        if (k == 0) Product<T, HALF>::template first<0, 1>(sums, a, b);
        else Product<T, HALF>::template ss<0, 1>(sums, a, b, 1);
    }
    products_commit();
}

// Store a part of the gradient of queries, rounded, `of_all` being the number of its block among all.
template <class S>
SM90 void store_part(const Problem& problem, const float (&dq)[HALF / 2], int part, int thread, int of_all) {
    const float by[] = {problem.scale, problem.scale};
    const int head = of_all / blocks_of<S>(problem), block = of_all % blocks_of<S>(problem);
    const int row = block * S::ROWS + (S::ROWS > HALF ? part * HALF : 0), column = S::ROWS > HALF ? 0 : part * COLUMNS;
    Rows to = problem.of_q;
    to.data = static_cast<T*>(to.data) + column;
    store<T>(to, head / problem.heads, head % problem.heads, row + 16 * (thread / LANES) + thread % LANES / 4, problem.queries,
             problem.head_size - column, dq, by);
}
// Add it to its sum in memory, if it is no whole.
template <class S>
SM90 void add_part(const Problem& problem, const float (&dq)[HALF / 2], int part, int thread, int of_all) {
    if constexpr (S::ALONE) return store_part<S>(problem, dq, part, thread, of_all);
    float* to = problem.total + (int64_t(of_all) * S::PARTS + part) * PART + thread * 4;
#pragma unroll
    for (int j = 0; j < HALF / 8; j++) add_four(to + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
}

template <int N>
SM90 void narrow(const float (&x)[N], uint32_t (&y)[N / 2]) {
#pragma unroll
    for (int j = 0; j < N / 2; j++) y[j] = pack<T>(x[2 * j], x[2 * j + 1]);
    hold(y);
}

// Logits become weights, some of a thread's.
template <int FROM, int TO, int N>
SM90 void weigh(float (&s)[N], float factor) {
#pragma unroll
    for (int j = FROM; j < TO; j++) s[j] = exp2_approx(s[j] * factor);
}

// Gradients of probabilities times these: 0 where a key is hidden, whatever the gradient is there.
template <int N>
SM90 void multiply_weights(float (&dp)[N], const float (&p)[N], bool part) {
#pragma unroll
    for (int j = 0; j < N; j++) dp[j] *= p[j];
    if (!part) return;
#pragma unroll
    for (int j = 0; j < N; j++) dp[j] = p[j] == 0 ? 0 : dp[j];
}

// What is done to logits before their softmax: minus half of what a logit's tanh is less than 1. The factor of exponents is twice the cap
// then, and their offset is the cap.
template <int N>
SM90 void cap(const Problem& problem, float (&s)[N]) {
#pragma unroll
    for (int i = 0; i < (CAPPED ? N : 0); i++) s[i] = -reciprocal_approx(exp2_approx(s[i] * problem.inner) + 1.f);
}
// What the gradient of a logit is times that of a capped one, which this is: 1 less the square of its tanh.
SM90 float slope_of_cap(float capped) { return -4.f * capped * (1.f + capped); }

// A changed logit's weight, and this times what the logit's gradient is times that of what the change makes of it; 0 where a key is hidden,
// whatever that is. It is number `i` of a thread, whose first place is `at`; `power` is the number of its row.
SM90 float2 weigh_changed(const Problem& problem, const Place& at, int i, float logit, float power, bool part) {
    float2 changed{logit, slope_of_cap(logit)};
    if constexpr (SCORED) {
        const int query = min(at.column + i / 4 * 8 + i % 2, problem.queries - 1), key = min(at.row + i / 2 % 2 * 8, problem.keys - 1);
        changed = SCORE(problem, at.batch, at.head, query, key, logit * problem.inner);
    }
    const float weight = part && logit == -INFINITY ? 0.f : exp2_approx(changed.x * problem.factor + power);
    return make_float2(weight, weight == 0 ? 0.f : weight * changed.y);
}
// The first place of a thread, of so many queries from `row` and 64 keys from `at`.
SM90 Place place_of(int batch, int head, int row, int at, int warp, int lane) { return {batch, head, at + 16 * warp + lane / 4, row + 2 * (lane % 4)}; }

// Weights of changed logits, and slopes, which are `dp` times these and times what the change makes of them; 0 where a key is hidden.
// Numbers of rows are in shared memory.
template <int N>
SM90 void weigh_changed(const Problem& problem, const Place& at, const float (&s)[N], const float (&dp)[N], uint32_t powers, bool part,
                        uint32_t (&weights)[N / 2], uint32_t (&slopes)[N / 2]) {
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        const float2 power = load_two(powers + (8 * j + threadIdx.x % 4 * 2) * 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int first = 4 * j + 2 * h;
            const float2 p[] = {weigh_changed(problem, at, first, s[first], power.x, part),
                                weigh_changed(problem, at, first + 1, s[first + 1], power.y, part)};
            float ds[2];
#pragma unroll
            for (int i = 0; i < 2; i++) ds[i] = (part || SCORED) && p[i].x == 0 ? 0 : p[i].y * dp[first + i];
            weights[2 * j + h] = pack<T>(p[0].x, p[1].x), slopes[2 * j + h] = pack<T>(ds[0], ds[1]);
        }
    }
    hold(weights), hold(slopes);
}

// Slopes to shared memory, each four matrices where `to` says for a lane.
template <int N>
SM90 void put(uint32_t to, const uint32_t (&slopes)[N]) {
#pragma unroll
    for (int j = 0; j < N / 4; j++)
        store_across(to + j * 16 * ROW_BYTES, slopes[4 * j], slopes[4 * j + 1], slopes[4 * j + 2], slopes[4 * j + 3]);
}

// What comes next of a tile: a block of queries, and the number of its head's first among all. Where steps are listed each is read when it
// is there.
template <class S>
struct Course {
    Published now{};
    int block = 0, of_head, left;  // left: of a head, where it is asked for

    __device__ __forceinline__ Course(const Problem& problem, const Tile& tile)
        : of_head(tile.head * (problem.heads / problem.key_heads) * blocks_of<S>(problem)), left(tile.steps) {
        if (!S::LISTED) block = visit_of<S>(problem, tile, 0, 0).block;
    }
    // Whether some of the queries do not see some of 64 keys from `at`, or are not there.
    __device__ __forceinline__ bool read(const Problem& problem, uint32_t base, int slot, int at, int keys) {
        if constexpr (S::LISTED) {
            now = read_step(base + S::PUBLISHED_STEPS + slot * 16);
            return now.place != Published::WHOLE;
        }
        now.row = block * S::ROWS;
        return partial<S>(problem, now.row, at, keys);
    }
    // The number of this block among all; and then the next one.
    __device__ __forceinline__ int next(const Problem& problem, const Tile& tile) {
        if constexpr (S::LISTED) return now.of_all;
        const int of_all = of_head + block;
        if constexpr (!S::LISTED && S::ORDERED) {
            block += goes_down<S>(tile) ? -1 : 1;
            if (--left == 0) left = tile.steps, of_head += blocks_of<S>(problem), block = visit_of<S>(problem, tile, 0, 0).block;
        } else if constexpr (!S::LISTED) {
            if (++block == tile.first + tile.steps) block = tile.first, of_head += blocks_of<S>(problem);
        }
        return of_all;
    }
};

}  // namespace
