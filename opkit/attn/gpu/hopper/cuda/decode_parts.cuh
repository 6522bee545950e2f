// A decoding call, what splits of its keys give, and the kernel that merges them.
#pragma once

#include "tensors.cuh"

namespace {

using namespace sm90;

constexpr int WARPS = 8, THREADS = WARPS * LANES;
constexpr int AT_ONCE = 4;  // splits that a thread which merges reads at once

// Whole numbers of 32 or 64 bits, of which the nearest that `most` allows counts.
struct Numbers {
    const void* data;
    int wide;

    __device__ __forceinline__ int at(int64_t i, int most) const {
        const int64_t x = wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int*>(data)[i];
        return int(min(max(x, int64_t(0)), int64_t(most)));
    }
};

// Keys in pages: of sequence b, of lengths[b] keys, page n is table[b * row + n]. It has the queries from starts[b] to starts[b + 1],
// which are its last positions; one at position i sees key j if lower <= j - i <= upper.
struct Pages {
    Numbers table, lengths, starts;
    int64_t row;
    int sequences, count, size, keys, lower, upper;  // `count` pages of `size` keys; `keys` that a table has room for
};

// A call; every query of a tile sees the same keys. opkit/attn/gpu/hopper/decode_cuda.py and decode_pages_cuda.py fill it; with pages
// each query is a batch of its own.
struct Problem {
    Rows q, k, v, out;
    float* lse;          // (batch, heads, queries), dense
    const float* sinks;  // of heads, or null
    float* partial;      // (tiles, splits, rows, D), and maxima and sums, (tiles, splits, rows, 2); unused with one split
    int batch, heads, key_heads, group, queries, head_size;
    int first, seen;  // keys that are seen, without pages: the first of them, and how many
    int splits, device;
    float factor;  // of logits, whose exponentials' base is 2
    Pages pages;

    __device__ __forceinline__ int height() const { return group * queries; }  // rows of a tile
};

// How TMA finds keys and values.
struct Maps {
    CUtensorMap k, v;
};

// A head of keys, and a row of its tile: the queries come one after the other, each with all its heads.
struct Tile {
    int batch, head;
};
struct Row {
    int batch, head, query;
};

SM90 Row row_of(const Problem& problem, const Tile& tile, int row) {
    return {tile.batch, tile.head * problem.group + row % problem.group, row / problem.group};
}

// ---- parts of a result ----------------------------------------------------------------------------------------------------

// Four columns of a row, of some of its keys: their sum, times exp2(-top), the greatest logit, and the sum of the weights.
struct alignas(16) Part {
    float4 x;
    float top, total;
};

// What is taken from logits before their exponentials are: their maximum, or 0 where there is nothing to see.
SM90 float base_of(float top) { return top == -INFINITY ? 0 : top; }

// The product is rounded, as the greatest was: fused with the difference, the power of what is rounded away overflows where it is large.
SM90 float weight(float logit, float factor, float base) { return exp2_approx(__fmul_rn(logit, factor) - base); }

// The same of all their keys; in order.
template <int N>
SM90 Part merged(const Part (&parts)[N]) {
    Part all = {{0, 0, 0, 0}, -INFINITY, 0};
#pragma unroll
    for (const Part& part : parts) all.top = fmaxf(all.top, part.top);
#pragma unroll
    for (const Part& part : parts) {
        const float by = exp2_approx(part.top - base_of(all.top));
        all.x.x += part.x.x * by, all.x.y += part.x.y * by, all.x.z += part.x.z * by, all.x.w += part.x.w * by;
        all.total += part.total * by;
    }
    return all;
}

// A row's results and its log-sum-exp, with its sink.
SM90 void finish(const Problem& problem, const Tile& tile, int row, int column, const Part& found) {
    const Row of = row_of(problem, tile, row);
    float top = found.top, total = found.total, by = 1;
    if (problem.sinks) {
        const float sink = problem.sinks[of.head] * LOG2E, base = base_of(fmaxf(top, sink));
        by = exp2_approx(top - base);
        total = total * by + exp2_approx(sink - base), top = fmaxf(top, sink);
    }
    by = total == 0 ? 0 : by / total;
    T* to = first_of<T>(problem.out, of.batch, of.head) + of.query * problem.out.row + column;
    *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(found.x.x * by, found.x.y * by), pack<T>(found.x.z * by, found.x.w * by));
    if (column == 0)
        problem.lse[(int64_t(of.batch) * problem.heads + of.head) * problem.queries + of.query] =
            total == 0 ? -INFINITY : (top + log2f(total)) * LN2;
}

// ---- parts in memory ------------------------------------------------------------------------------------------------------

SM90 int64_t number_of(const Problem& problem, const Tile& tile, int split, int row) {
    return ((int64_t(tile.batch) * problem.key_heads + tile.head) * problem.splits + split) * problem.height() + row;
}

SM90 float2* tops_of(const Problem& problem, int d) {
    const int64_t tiles = int64_t(problem.batch) * problem.key_heads;
    return reinterpret_cast<float2*>(problem.partial + tiles * problem.splits * problem.height() * d);
}

SM90 void put(const Problem& problem, int d, const Tile& tile, int split, int row, int column, const Part& part) {
    const int64_t number = number_of(problem, tile, split, row);
    *reinterpret_cast<float4*>(problem.partial + number * d + column) = part.x;
    if (column == 0) tops_of(problem, d)[number] = make_float2(part.top, part.total);
}

// Of a split that there is none of, nothing; without a branch, so that what is read at once is asked for at once.
SM90 Part part_of(const Problem& problem, int d, const Tile& tile, int split, int row, int column) {
    const int64_t number = number_of(problem, tile, min(split, problem.splits - 1), row);
    const float2 found = tops_of(problem, d)[number];
    const float4 x = *reinterpret_cast<const float4*>(problem.partial + number * d + column);
    return {x, split < problem.splits ? found.x : -INFINITY, found.y};
}

// How GROUPS groups of threads merge; one of them reads every GROUPS-th split, a thread four columns.
template <int D, int GROUPS_>
struct Merging {
    static constexpr int GROUPS = GROUPS_, EACH = D / 4, THREADS = GROUPS * EACH, SHARED = THREADS * sizeof(Part);
};

// A block merges the splits of a row.
template <int D, int GROUPS>
SM90 void merge(const Problem& problem, const Maps&) {
    constexpr int EACH = Merging<D, GROUPS>::EACH;
    const Tile tile = {int(blockIdx.z), int(blockIdx.y)};
    const int row = blockIdx.x;
    const int group = threadIdx.x / EACH, column = threadIdx.x % EACH * 4;
    Part* of_groups = reinterpret_cast<Part*>(dynamic_shared());
    Part parts[AT_ONCE + 1];  // the last is what was merged before
    parts[AT_ONCE] = {{0, 0, 0, 0}, -INFINITY, 0};
    launches_before_done();
    next_launch_may_begin();
    for (int first = group; first < problem.splits; first += GROUPS * AT_ONCE) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) parts[i] = part_of(problem, D, tile, first + i * GROUPS, row, column);
        parts[AT_ONCE] = merged(parts);
    }
    of_groups[threadIdx.x] = parts[AT_ONCE];
    __syncthreads();
    if (group > 0) return;
    Part all[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) all[i] = of_groups[i * EACH + threadIdx.x];
    finish(problem, tile, row, column, merged(all));
}

}  // namespace
