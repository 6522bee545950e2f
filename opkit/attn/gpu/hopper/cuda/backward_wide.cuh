// The backward of heads of 129 to 256 channels: a block of threads has 64 keys of a head.
//
// Sums for 64 keys and 256 channels are 128 registers of each thread of a warpgroup, so that one has room for one of the two. Here the two
// warpgroups divide the products and not the keys: one makes weights and the gradient of values, and passes the weights, in float, to
// the other, which makes the gradients of logits and of keys. Each multiplies half of the channels of the gradient of queries, a box at
// a time, a step late, as for smaller heads, so that neither waits for what the other makes in the same step but the weights.
#pragma once

#include "backward_products.cuh"

namespace {

using namespace sm90;

// What both warpgroups share of a block's work; `me` is 0 for values and 1 for keys.
template <class S>
struct Wide {
    static constexpr int BOXES = (S::DK + COLUMNS - 1) / COLUMNS, FIRST = (BOXES + 1) / 2;  // of keys; of these the first warpgroup's
    static constexpr int MEETING = 2;  // the first of the named barriers of the threads of a warpgroup

    const Problem& problem;
    uint32_t base;
    int me;

    __device__ __forceinline__ uint32_t barrier(int which) const { return base + S::BARRIERS + which; }
    __device__ __forceinline__ int thread() const { return threadIdx.x % WARPGROUP; }
    // A warp, all of whose threads are done, frees a buffer, or says that what it put there is there.
    __device__ __forceinline__ void free(int which) const {
        if (threadIdx.x % LANES == 0) arrive(barrier(which));
    }
    __device__ __forceinline__ uint32_t weights() const { return base + S::WEIGHTS + thread() * 16; }

    // Begin the part of the gradient of queries of a box of keys, of the slopes in some buffer.
    __device__ __forceinline__ void multiply_box(float (&dq)[HALF / 2], int box, int slot) const {
        multiply_slopes<S>(dq, base + S::SLOPES, slot, base + S::K, box);
    }
    __device__ __forceinline__ void wait_slopes(int it) const { wait(barrier(SLOPES_FULL + it % STAGES * 8), it / STAGES & 1); }

    // Zeros in place of what is not finite in a block of rows, by all threads of a warpgroup.
    __device__ __forceinline__ void clean_rows(uint32_t rows) const {
        constexpr int BYTES = S::BLOCK_BYTES / (WARPGROUP / LANES);
        clean<BYTES>(rows + thread() / LANES * BYTES, threadIdx.x % LANES);
        fence_stores();
        named_sync(MEETING + me, WARPGROUP);
    }
    // Whether the gradient of a row's result is not finite, by its delta.
    __device__ __forceinline__ bool odd_rows() const {
        bool odd = false;
#pragma unroll
        for (int row = threadIdx.x % LANES; row < S::ROWS; row += LANES) odd |= !(fabsf(load_one(base + S::DELTAS + row * 16)) < INFINITY);
        return __any_sync(~0u, odd);
    }

    // The last step's gradient of queries, when nothing else is left of a tile.
    __device__ __forceinline__ void add_last(int it, int before) const {
        const int slot = it % STAGES, first = me * FIRST, end = me ? BOXES : FIRST;
        float dq[HALF / 2];
        wait_slopes(it);
#pragma unroll 1
        for (int box = first; box < end; box++) {
            multiply_box(dq, box, slot);
            products_wait<0>();
            hold(dq);
            add_part<S>(problem, dq, box, thread(), before);
        }
        free(SLOPES_EMPTY + slot * 8);
    }
};

// Of changed logits weights, rounded, and in place of the logits weights times what the change makes of slopes; else weights of both kinds.
template <class S>
SM90 void weigh_wide(const Problem& problem, const Place& at, float (&s)[S::ROWS / 2], uint32_t powers, bool part, uint32_t (&weights)[S::ROWS / 4]) {
    if constexpr (CHANGED) {
#pragma unroll
        for (int j = 0; j < S::ROWS / 8; j++) {
            const float2 power = load_two(powers + (8 * j + threadIdx.x % 4 * 2) * 4);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float* x = s + 4 * j + 2 * h;
                const float2 p[] = {weigh_changed(problem, at, 4 * j + 2 * h, x[0], power.x, part),
                                    weigh_changed(problem, at, 4 * j + 2 * h + 1, x[1], power.y, part)};
                weights[2 * j + h] = pack<T>(p[0].x, p[1].x);
                x[0] = p[0].y, x[1] = p[1].y;
            }
        }
        hold(weights);
    } else {
        weigh<0, S::ROWS / 2>(s, problem.factor);
        narrow(s, weights);
    }
}

// The gradient of the values of a tile, and the first boxes of that of queries.
template <class S>
struct Values : Wide<S> {
    using W = Wide<S>;
    float sums[S::OF_V / 2], s[S::ROWS / 2], dq[HALF / 2];

    template <bool FOLLOWS>
    __device__ __forceinline__ void step(const Tile& tile, Course<S>& course, int n, int it, int before, int keys_there) {
        const int slot = it % STAGES, warp = W::thread() / LANES, lane = threadIdx.x % LANES;
        const int batch = tile.head / this->problem.key_heads;
        uint32_t weights[S::ROWS / 4];
        wait(W::barrier(Q_FULL + slot * 8), it / STAGES & 1);
        multiply_rows<S, S::DK, !CHANGED>(s, this->base + S::K, this->base + S::Q, slot, this->base + S::POWERS);
        if constexpr (FOLLOWS) {
            W::wait_slopes(it - 1);
            W::multiply_box(dq, 0, slot ^ 1);
        }
        const bool part = course.read(this->problem, this->base, slot, tile.at, keys_there);
        products_wait<FOLLOWS ? 1 : 0>();
        hold(s);
        bool odd = false;
        if (S::HIDES && part) odd = __any_sync(~0u, not_finite(s));
        cap(this->problem, s);
        if (part)
            hide_unseen<S>(this->problem, s, this->base, slot, course.now, this->base + S::PUBLISHED_TILES + (n & 1) * 16, 0, tile.at, keys_there, warp,
                           lane);
        const int of_batch = S::LISTED ? course.now.head : SCORED ? course.of_head / blocks_of<S>(this->problem) : 0;
        const Place at = place_of(batch, of_batch % this->problem.heads, course.now.row, tile.at, warp, lane);
        weigh_wide<S>(this->problem, at, s, this->base + S::POWERS + slot * S::SUM_ROOM, part, weights);
        // Were read where slopes of the step before are there. But without a branch here ptxas finds too few registers.
        wait(W::barrier(WEIGHTS_EMPTY), (it & 1) ^ 1);
#pragma unroll
        for (int j = 0; j < S::ROWS / 8; j++)
            store_four(W::weights() + j * (WARPGROUP * 16), {__float_as_int(s[4 * j]), __float_as_int(s[4 * j + 1]),
                                                            __float_as_int(s[4 * j + 2]), __float_as_int(s[4 * j + 3])});
        if (S::HIDES) {
            if (lane == 0) store_one(this->base + S::ODD + warp * 4, uint32_t(odd));
            if (odd) {
#pragma unroll 1
                for (int c = 0; c < S::BOXES; c++) clean<16 * ROW_BYTES>(this->base + S::K + c * S::KEY_BOX + warp * 16 * ROW_BYTES, lane);
                fence_stores();
            }
        }
        __syncwarp();
        W::free(WEIGHTS_FULL);
        wait(W::barrier(G_FULL), it & 1);
        if (S::HIDES_ROWS && part && W::odd_rows()) W::clean_rows(this->base + S::G);
        gather<S>(sums, weights, this->base + S::G, 0);
        if constexpr (FOLLOWS) {
            products_wait<1>();
            hold(dq);
            add_part<S>(this->problem, dq, 0, W::thread(), before);
            if constexpr (W::FIRST > 1) {
                W::multiply_box(dq, 1, slot ^ 1);
                products_wait<1>();
            }
        }
        if constexpr (!FOLLOWS || W::FIRST == 1) products_wait<0>();
        hold(weights);
        W::free(G_EMPTY);
        if constexpr (FOLLOWS) {
            products_wait<0>();
            hold(dq);
            W::free(SLOPES_EMPTY + (slot ^ 1) * 8);
            if constexpr (W::FIRST > 1) add_part<S>(this->problem, dq, 1, W::thread(), before);
        }
        hold(sums);
        W::free(Q_EMPTY + slot * 8);
    }
    __device__ __forceinline__ void store_sums(int batch, int head, int key) const {
        const float one[] = {1, 1};
        store<T>(this->problem.of_v, batch, head, key, this->problem.keys, this->problem.value_size, sums, one);
    }
};

// The gradient of the keys of a tile, and the other boxes of that of queries.
template <class S>
struct Keys : Wide<S> {
    using W = Wide<S>;
    float sums[S::OF_K / 2], s[S::ROWS / 2], dq[HALF / 2];

    template <bool FOLLOWS>
    __device__ __forceinline__ void step(const Tile&, Course<S>& course, int n, int it, int before, int) {
        constexpr bool SOME = FOLLOWS && W::BOXES > W::FIRST, MORE = FOLLOWS && W::BOXES > W::FIRST + 1;
        const int slot = it % STAGES, warp = W::thread() / LANES, lane = threadIdx.x % LANES;
        uint32_t slopes[S::ROWS / 4];
        if (!FOLLOWS) wait(W::barrier(V_FULL), n & 1);
        wait(W::barrier(G_FULL), it & 1);
        multiply_rows<S, S::DV>(s, this->base + S::V, this->base + S::G, 0, this->base + S::DELTAS);
        if constexpr (FOLLOWS) W::wait_slopes(it - 1);
        if constexpr (SOME) W::multiply_box(dq, W::FIRST, slot ^ 1);
        wait(W::barrier(Q_FULL + slot * 8), it / STAGES & 1);
        if (S::LISTED) course.read(this->problem, this->base, slot, 0, 0);
        wait(W::barrier(WEIGHTS_FULL), it & 1);
        products_wait<SOME ? 1 : 0>();
        hold(s);
        W::free(G_EMPTY);
        bool odd = false;
#pragma unroll
        for (int j = 0; j < S::ROWS / 8; j++) {
            const int4 four = load_four(W::weights() + j * (WARPGROUP * 16));
            const float p[] = {__int_as_float(four.x), __int_as_float(four.y), __int_as_float(four.z), __int_as_float(four.w)};
#pragma unroll
            for (int i = 0; i < 4; i++) s[4 * j + i] = S::HIDES && p[i] == 0 ? 0 : p[i] * s[4 * j + i];
        }
        if (S::HIDES) {
            const int4 of_warps = load_four(this->base + S::ODD);
            odd = __shfl_sync(~0u, of_warps.x | of_warps.y | of_warps.z | of_warps.w, 0);
        }
        __syncwarp();
        W::free(WEIGHTS_EMPTY);
        narrow(s, slopes);
        wait(W::barrier(SLOPES_EMPTY + slot * 8), (it / STAGES & 1) ^ 1);
        put(this->base + S::SLOPES + slot * S::SLOPE_BYTES + (lane % 8 + lane / 16 * 8) * ROW_BYTES + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4),
            slopes);
        fence_stores();
        __syncwarp();
        W::free(SLOPES_FULL + slot * 8);
        if (S::HIDES && odd) W::clean_rows(this->base + S::Q + slot * S::BLOCK_BYTES);
        gather<S>(sums, slopes, this->base + S::Q, slot);
        if constexpr (SOME) {
            products_wait<1>();
            hold(dq);
            add_part<S>(this->problem, dq, W::FIRST, W::thread(), before);
        }
        if constexpr (MORE) W::multiply_box(dq, W::FIRST + 1, slot ^ 1);
        products_wait<0>();
        hold(slopes);
        if constexpr (MORE) {
            hold(dq);
            add_part<S>(this->problem, dq, W::FIRST + 1, W::thread(), before);
        }
        if constexpr (FOLLOWS) W::free(SLOPES_EMPTY + (slot ^ 1) * 8);
        hold(sums);
        W::free(Q_EMPTY + slot * 8);
    }
    __device__ __forceinline__ void store_sums(int batch, int head, int key) const {
        const float by[] = {this->problem.scale, this->problem.scale};
        store<T>(this->problem.of_k, batch, head, key, this->problem.keys, this->problem.head_size, sums, by);
    }
};

template <class S, class Part>
SM90 void multiply_part(Part mine) {
    const Problem& problem = mine.problem;
    const int group = problem.heads / problem.key_heads;
    int it = 0;  // blocks of queries so far
    for (int n = 0;; n++) {
        wait(mine.barrier(K_FULL), n & 1);
        const Tile tile = read_tile(mine.base + S::PUBLISHED_TILES + (n & 1) * 16);
        if (tile.steps < 0) break;
        const int total = S::LISTED ? tile.steps : tile.steps * group, batch = tile.head / problem.key_heads;
        const int keys_there = keys_of(problem, batch);
#pragma unroll
        for (float& x : mine.sums) x = 0;
        hold(mine.sums);  // else they are set later, when products are under way
        Course<S> course(problem, tile);
        int before = 0;
        const auto step = [&](auto follows) {
            mine.template step<decltype(follows)::value>(tile, course, n, it, before, keys_there);
            before = course.next(problem, tile);
            it++;
        };
        if (total > 0) {
            step(std::false_type());
#pragma unroll 1
            for (int i = 1; i < total; i++) step(std::true_type());
            mine.free(V_EMPTY);
            mine.add_last(it - 1, before);
        } else {
            wait(mine.barrier(V_FULL), n & 1);
            __syncwarp();
            mine.free(V_EMPTY);
        }
        mine.free(K_EMPTY);
        __syncwarp();
        mine.free(SUMMED + (n & 1) * 8);
        mine.store_sums(batch, tile.head % problem.key_heads, tile.at + 16 * (mine.thread() / LANES) + threadIdx.x % LANES / 4);
    }
}

template <class S>
SM90 void multiply_wide(const Problem& problem, uint32_t base, int me) {
    if (me == 0) multiply_part<S>(Values<S>{{problem, base, 0}});
    else multiply_part<S>(Keys<S>{{problem, base, 1}});
}

}  // namespace
