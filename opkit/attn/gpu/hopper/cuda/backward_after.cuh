// The kernel that comes last. It rounds the gradient of queries of heads that helpers have left to it. And it adds the part of rows with
// huge logits to the gradients, which products leave out: by warps, of logits that are exact to the rounding of products. As a rule there
// are no such rows; it need not be fast.
//
// Warps go through items in order: some rows each, whose sums of exponentials and gradients they compute, and then some keys each, to
// whose gradients they add what all such rows that see them give. Only an item that another warp has begun is waited for.
#pragma once

#include "backward_helpers.cuh"
#include "backward_products.cuh"

namespace {

using namespace sm90;

constexpr int LARGE_THREADS = 256, LARGE_ITEM = 8;  // keys of an item; of rows as many as a warp has lanes
// Numbers at Problem::large, zeros before a call and after it: whether there are such rows, items that were begun, items of rows that
// are done, warps that have ended, blocks that have rounded, and how many such rows each head of keys has, of all batches.
enum { THERE, BEGUN, ROWS_DONE, ENDED, ROUNDED, OF_HEADS };

template <int N>
SM90 void read_channels(float (&x)[N], const Rows& rows, int batch, int head, int i, int size) {
    const T* at = first_of<const T>(rows, batch, head) + i * rows.row;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int column = n * LANES + threadIdx.x % LANES;
        x[n] = column < size ? float(at[column]) : 0.f;
    }
}
template <int N>
SM90 float dot_of_warp(const float (&x)[N], const float (&y)[N]) {  // in one order, as its last bits count
    float sum = 0;
#pragma unroll
    for (int n = 0; n < N; n++) sum = fmaf(x[n], y[n], sum);
#pragma unroll
    for (int bit = LANES / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    return sum;
}

// Whether a query sees a key of those that the band and lengths leave.
template <class S>
SM90 bool sees(const Problem& problem, int batch, int head, int i, int j) {
    if constexpr (PROGRAM) return seen_columns<1, S::BANDED>(problem, {batch, head, j, i}).of[0] & 1;
    if constexpr (!S::LISTED) return true;
    const Lists& lists = problem.lists;
    return lists.of_queries[batch * lists.queries_batch + i * lists.queries_row] ==
           lists.of_keys[batch * lists.keys_batch + j * lists.keys_row];
}

// What users' functions make of a product, and what the gradient of the product is times that of the logit.
SM90 float2 logit_of(const Problem& problem, int batch, int head, int i, int j, float product) {
    if constexpr (SCORED) return SCORE(problem, batch, head, i, j, product * problem.inner);
    return make_float2(product, 1.f);
}

// A row of a head of queries, whose logits with keys are compared with the greatest of them.
template <int N>
struct LargeRow {
    float q[N], gradient[N], delta, top, total;  // total: the logarithm, base 2, of the sum of exponentials
    int of_all;  // among the rows of all heads

    __device__ __forceinline__ LargeRow(const Problem& problem, int batch, int head, int i) {
        read_channels(q, problem.q, batch, head, i, problem.head_size);
        read_channels(gradient, problem.gradient, batch, head, i, problem.value_size);
        of_all = (batch * problem.heads + head) * problem.queries + i;
        delta = problem.delta[of_all];
    }
    __device__ __forceinline__ void read_sums(const Problem& problem) {
        volatile const float* exact = problem.exact + 2 * int64_t(of_all);
        top = exact[0], total = exact[1];
    }
    // The probability of a key with a logit, and the gradient of its product.
    __device__ __forceinline__ float2 weigh(const Problem& problem, float2 logit, const float (&v)[N]) const {
        const float p = exp2_approx((logit.x - top) * problem.factor - total);
        return make_float2(p, p == 0 ? 0.f : p * logit.y * (dot_of_warp(gradient, v) - delta));
    }
};

// The sum of a row, and its gradient.
template <class S>
SM90 void finish_row(const Problem& problem, int batch, int head, int i) {
    constexpr int N = S::D / LANES;
    const int key_head = head / (problem.heads / problem.key_heads);
    const int first = S::BANDED ? max(i + problem.lower, 0) : 0, keys = keys_of(problem, batch);
    const int last = S::BANDED ? min(i + problem.upper, keys - 1) : keys - 1;
    LargeRow<N> row(problem, batch, head, i);
    float k[N], v[N], of_q[N] = {}, top = -INFINITY, sum = 0;
    const auto logit = [&](int j) {
        read_channels(k, problem.k, batch, key_head, j, problem.head_size);
        return logit_of(problem, batch, head, i, j, dot_of_warp(row.q, k));
    };
    for (int j = first; j <= last; j++)
        if (sees<S>(problem, batch, head, i, j)) top = fmaxf(top, logit(j).x);
    const float sink = problem.sinks ? problem.sinks[head] * LOG2E / problem.factor : -INFINITY;  // as logits are
    top = fmaxf(top, sink);
    if (problem.sinks) sum = exp2_approx((sink - top) * problem.factor);
    for (int j = first; j <= last; j++)
        if (sees<S>(problem, batch, head, i, j)) sum += exp2_approx((logit(j).x - top) * problem.factor);
    row.top = top, row.total = log2f(sum);
    for (int j = first; j <= last; j++) {
        if (!sees<S>(problem, batch, head, i, j)) continue;
        const float2 of_key = logit(j);
        read_channels(v, problem.v, batch, key_head, j, problem.value_size);
        const float slope = row.weigh(problem, of_key, v).y;
#pragma unroll
        for (int n = 0; n < N; n++) of_q[n] += slope * k[n];
    }
    T* to = first_of<T>(problem.of_q, batch, head) + i * problem.of_q.row;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int column = n * LANES + threadIdx.x % LANES;
        if (column < problem.head_size) to[column] = T(of_q[n] * problem.scale);
    }
    if (threadIdx.x % LANES != 0) return;
    volatile float* exact = problem.exact + 2 * int64_t(row.of_all);
    exact[0] = row.top, exact[1] = row.total;
    atomicAdd(problem.large + OF_HEADS + batch * problem.key_heads + key_head, 1);
}

// Which of 32 rows have huge logits, as bits.
SM90 uint32_t large_rows(const Problem& problem, int batch, int head, int from) {
    const int i = from + threadIdx.x % LANES, of_head = batch * problem.heads + head;
    bool large = false;
    if (i < problem.queries)
        large = is_large(numbers_of(problem, of_head, i).power, problem.delta[int64_t(of_head) * problem.queries + i]);
    return __ballot_sync(~0u, large);
}

template <int N>
SM90 void add_channels(const Rows& rows, int batch, int head, int i, int size, const float (&x)[N], float by) {
    T* at = first_of<T>(rows, batch, head) + i * rows.row;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int column = n * LANES + threadIdx.x % LANES;
        if (column < size) at[column] = T(float(at[column]) + x[n] * by);
    }
}

// What such rows give to the gradients of a key and its value.
template <class S>
SM90 void finish_key(const Problem& problem, int batch, int key_head, int j) {
    constexpr int N = S::D / LANES;
    const int group = problem.heads / problem.key_heads;
    const int first = S::BANDED ? max(j - problem.upper, 0) : 0;
    const int last = S::BANDED ? min(j - problem.lower, problem.queries - 1) : problem.queries - 1;
    float k[N], v[N], of_k[N] = {}, of_v[N] = {};
    read_channels(k, problem.k, batch, key_head, j, problem.head_size);
    read_channels(v, problem.v, batch, key_head, j, problem.value_size);
    for (int head = key_head * group; head < (key_head + 1) * group; head++) {
        for (int from = first / LANES * LANES; from <= last; from += LANES) {
            const uint32_t large = large_rows(problem, batch, head, from);
            for (int i = max(first, from); i <= min(last, from + LANES - 1); i++) {
                if (!(large >> (i - from) & 1) || !sees<S>(problem, batch, head, i, j)) continue;
                LargeRow<N> row(problem, batch, head, i);
                row.read_sums(problem);
                const float2 found = row.weigh(problem, logit_of(problem, batch, head, i, j, dot_of_warp(row.q, k)), v);
#pragma unroll
                for (int n = 0; n < N; n++) of_v[n] += found.x * row.gradient[n], of_k[n] += found.y * row.q[n];
            }
        }
    }
    add_channels(problem.of_k, batch, key_head, j, problem.head_size, of_k, problem.scale);
    add_channels(problem.of_v, batch, key_head, j, problem.value_size, of_v, 1.f);
}

// A warpgroup rounds one part of a block at a time.
template <class S>
SM90 void round_sums(const Problem& problem) {
    constexpr int AT_ONCE = LARGE_THREADS / WARPGROUP;
    const int thread = threadIdx.x % WARPGROUP, items = items_before<S>(problem);
    for (int item = items_after<S>(problem) + blockIdx.x * AT_ONCE + threadIdx.x / WARPGROUP; item < items; item += gridDim.x * AT_ONCE) {
        const float4* from = reinterpret_cast<const float4*>(problem.total + int64_t(item) * PART) + thread;
        float x[HALF / 2];
#pragma unroll
        for (int j = 0; j < HALF / 8; j++) {
            const float4 four = from[j * WARPGROUP];
            x[4 * j] = four.x, x[4 * j + 1] = four.y, x[4 * j + 2] = four.z, x[4 * j + 3] = four.w;
        }
        store_part<S>(problem, x, item % S::PARTS, thread, item / S::PARTS);
    }
}

template <class S>
SM90 void add_large_rows(const Problem& problem) {
    if (!problem.large || problem.large[THERE] == 0) return;
    __syncthreads();
    if (threadIdx.x == 0) add_count(problem.large + ROUNDED, 1);
    wait_count(problem.large + ROUNDED, gridDim.x);
    __threadfence();
    const int of_rows = (problem.queries + LANES - 1) / LANES, of_keys = (problem.keys + LARGE_ITEM - 1) / LARGE_ITEM;
    const int items_of_rows = problem.batch * problem.heads * of_rows;
    const int64_t items = items_of_rows + int64_t(problem.batch) * problem.key_heads * of_keys;
    const int lane = threadIdx.x % LANES, warps = gridDim.x * (LARGE_THREADS / LANES);
    for (;;) {
        const int item = __shfl_sync(~0u, lane == 0 ? atomicAdd(problem.large + BEGUN, 1) : 0, 0);
        if (item >= items) break;
        if (item < items_of_rows) {
            const int of_head = item / of_rows, from = item % of_rows * LANES, batch = of_head / problem.heads, head = of_head % problem.heads;
            uint32_t large = large_rows(problem, batch, head, from);
            for (int i = from; large != 0; i++, large >>= 1)
                if (large & 1) finish_row<S>(problem, batch, head, i);
            __syncwarp();
            if (lane == 0) add_count(problem.large + ROWS_DONE, 1);
            continue;
        }
        wait_count(problem.large + ROWS_DONE, items_of_rows);
        __threadfence();
        const int of_head = (item - items_of_rows) / of_keys, from = (item - items_of_rows) % of_keys * LARGE_ITEM;
        const int batch = of_head / problem.key_heads, key_head = of_head % problem.key_heads;
        if (static_cast<volatile int*>(problem.large)[OF_HEADS + of_head] == 0) continue;
        for (int j = from; j < min(from + LARGE_ITEM, keys_of(problem, batch)); j++) finish_key<S>(problem, batch, key_head, j);
    }
    int ended = 0;
    if (lane == 0) ended = atomicAdd(problem.large + ENDED, 1);
    if (__shfl_sync(~0u, ended, 0) < warps - 1) return;
    for (int i = lane; i < OF_HEADS + problem.batch * problem.key_heads; i += LANES) problem.large[i] = 0;
}

template <class S>
SM90 void after(const Problem& problem, const Maps&) {
    launches_before_done();
    next_launch_may_begin();
    if (!S::ALONE) round_sums<S>(problem);
    add_large_rows<S>(problem);
}

}  // namespace
