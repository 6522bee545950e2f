// The gradients of attention for sm_90a in CUDA C++: a block of threads has 128 keys of a head, and goes through the queries that
// see them.
//
// Two warpgroups multiply, 64 keys each. Logits and probabilities are (keys, queries), so that probabilities and their gradients
// feed the products for values and keys from registers. The gradients of logits of both meet in shared memory, two steps deep:
// the product for the gradient of queries of a step is begun in the next one, when the other warpgroup's half of it is long
// there, so that neither waits for the other and one reckons while the other's products run. That gradient is added to memory
// from registers. Of the third warpgroup one thread loads, and the other warps help (backward_helpers.cuh). The method is that of
// FlashAttention-2 and -3 (Dao, 2023; Shah et al., 2024).
#pragma once

#include "backward_after.cuh"
#include "backward_helpers.cuh"
#include "backward_ordered.cuh"
#include "backward_wide.cuh"

namespace {

using namespace sm90;

// ---- multiplying ----------------------------------------------------------------------------------------------------------

// A number that the compiler knows.
template <int N>
struct Known {
    __device__ constexpr operator int() const { return N; }
};

// Where a lane's row of four matrices of slopes goes: queries are rows there, keys columns.
template <class S>
SM90 uint32_t slopes_of(uint32_t base, int me, int thread) {
    const int warp = thread % WARPGROUP / LANES, lane = thread % LANES;
    return base + S::SLOPES + me * S::ROW_BOX + (lane % 8 + lane / 16 * 8) * ROW_BYTES + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4);
}

// `me` is the number of the warpgroup: known to the compiler for heads of 128, where there are no registers for what depends on it;
// for heads of 64 both have the same code, of which less is in the way of others'.
template <class S, class Number>
SM90 void multiply(const Problem& problem, uint32_t base, Number me) {
    const uint32_t barriers = base + S::BARRIERS, keys = base + S::K;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / LANES, lane = thread % LANES;
    const int group = problem.heads / problem.key_heads, blocks = blocks_of<S>(problem);
    const uint32_t my_keys = keys + me * HALF * ROW_BYTES, my_values = base + S::V + me * HALF * ROW_BYTES;
    uint32_t my_slopes = slopes_of<S>(base, me, thread);
    const auto free = [&](int barrier) {  // by a warp, all of whose threads are done
        if (lane == 0) arrive(barriers + barrier);
    };
    int it = 0;  // blocks of queries so far
    for (int n = 0;; n++) {
        const uint32_t published = base + S::PUBLISHED_TILES + (n & 1) * 16;
        wait(barriers + K_FULL, n & 1);
        const Tile tile = read_tile(published);
        if (tile.steps < 0) break;
        const int at = tile.at + me * HALF, total = S::LISTED ? tile.steps : tile.steps * group;
        int batch = tile.head / problem.key_heads, key_head = tile.head % problem.key_heads;
        const int keys_there = keys_of(problem, batch);
        float dk[S::OF_K / 2], dv[S::OF_V / 2], s[S::ROWS / 2];
#pragma unroll
        for (float& x : dk) x = 0;
#pragma unroll
        for (float& x : dv) x = 0;
        hold(dk), hold(dv);  // else they are set later, when products are under way
        int block = 0, left = tile.steps;  // the latter of a head, where it is asked for
        if (!S::LISTED) block = visit_of<S>(problem, tile, 0, 0).block;
        int of_head = (batch * problem.heads + key_head * group) * blocks, before = 0;
        const auto begin = [&](int it) {  // a step's logits
            multiply_rows<S, S::DK, !CHANGED>(s, my_keys, base + S::Q, it % STAGES, base + S::POWERS);
        };
        const auto step = [&](auto follows, bool more) {  // whether another step of the tile came before it, or comes
            constexpr bool FOLLOWS = decltype(follows)::value;
            // Of a thread's weights, how many are computed before it waits for the gradients of probabilities. Exponentials take a unit
            // that nothing else needs: some overlap with what comes after, where there are as many as of heads of 64.
            constexpr int FIRST = S::ROWS > HALF ? S::ROWS * 7 / 16 : S::ROWS / 2;
            const int slot = it % STAGES;
            const uint32_t parity = it / STAGES & 1;
            bool odd = false;
            float dp[S::ROWS / 2], dq[HALF / 2];
            uint32_t weights[S::ROWS / 4], slopes[S::ROWS / 4];
            if constexpr (!S::AHEAD) {
                wait(barriers + Q_FULL + slot * 8, parity);
                begin(it);
            }
            Published now{block * S::ROWS};
            if constexpr (S::LISTED) now = read_step(base + S::PUBLISHED_STEPS + slot * 16);
            const bool part = S::LISTED ? now.place != Published::WHOLE : partial<S>(problem, now.row, at, keys_there);
            if (!FOLLOWS) wait(barriers + V_FULL, n & 1);
            wait(barriers + G_FULL + slot * 8, parity);
            multiply_rows<S, S::DV>(dp, my_values, base + S::G, slot, base + S::DELTAS);
            if constexpr (!S::AHEAD) {
                products_wait<1>();
                hold(s);
            }
            if (S::HIDES && part) odd = __any_sync(~0u, not_finite(s));
            cap(problem, s);
            if (part) hide_unseen<S>(problem, s, base, slot, now, published, me * HALF, at, keys_there, warp, lane);
            if (!CHANGED) weigh<0, FIRST>(s, problem.factor);
            hold(s);
            // Has a branch, above which ptxas moves no wait for a product.
            wait(barriers + SLOPES_EMPTY + slot * 8, parity ^ 1);
            if (!CHANGED && S::ROWS == HALF) narrow(s, weights);  // else there are no registers for it yet
            products_wait<0>();
            hold(dp);
            if (S::HIDES_ROWS && part) odd |= __any_sync(~0u, not_finite(dp));
            if constexpr (CHANGED) {
                const int of_batch = S::LISTED ? now.head : SCORED ? of_head / blocks : 0;
                weigh_changed(problem, place_of(batch, of_batch % problem.heads, now.row, at, warp, lane), s, dp, base + S::POWERS + slot * S::SUM_ROOM, part, weights, slopes);
            } else {
                weigh<FIRST, S::ROWS / 2>(s, problem.factor);
                multiply_weights(dp, s, part);
                narrow(dp, slopes);
                if (S::ROWS > HALF) narrow(s, weights);
            }

            if (S::LISTED) my_slopes = slopes_of<S>(base, me, thread_now());  // no register is left for it meanwhile
            put(my_slopes + slot * S::SLOPE_BYTES, slopes);
            if (S::HIDES && odd) clean_all<S>(base, slot, my_keys, warp, lane);
            fence_stores();
            __syncwarp();
            free(SLOPES_FULL + slot * 8);

            gather<S>(dv, weights, base + S::G, slot);
            if constexpr (FOLLOWS) {
                wait(barriers + SLOPES_FULL + (slot ^ 1) * 8, (it - 1) / STAGES & 1);
                multiply_slopes<S>(dq, base + S::SLOPES, slot ^ 1, keys, me);
            }
            gather<S>(dk, slopes, base + S::Q, slot);
            products_wait<1>();
            hold(weights);
            free(G_EMPTY + slot * 8);
            if constexpr (FOLLOWS) hold(dq);
            if constexpr (S::AHEAD) {
                // Behind the last one comes a product of whatever is there, which nobody asks for.
                if (more) wait(barriers + Q_FULL + (slot ^ 1) * 8, (it + 1) / STAGES & 1);
                begin(it + 1);
            }
            if constexpr (FOLLOWS) {
                free(SLOPES_EMPTY + (slot ^ 1) * 8);
                add_part<S>(problem, dq, me, thread, before);
            }
            products_wait<0>();  // of the next logits too: ptxas lets no product go on from one round of a loop to the next
            if constexpr (S::AHEAD) hold(s);
            hold(dk), hold(dv), hold(slopes);
            free(Q_EMPTY + slot * 8);
            before = S::LISTED ? now.of_all : of_head + block;
            if constexpr (!S::LISTED && S::ORDERED) {
                block += goes_down<S>(tile) ? -1 : 1;
                if (--left == 0) left = tile.steps, of_head += blocks, block = visit_of<S>(problem, tile, 0, 0).block;
            } else if constexpr (!S::LISTED) {
                if (++block == tile.first + tile.steps) block = tile.first, of_head += blocks;
            }
            it++;
        };
        if (total > 0) {
            if constexpr (S::AHEAD) {
                wait(barriers + Q_FULL + it % STAGES * 8, it / STAGES & 1);
                begin(it);
                products_wait<0>();
                hold(s);
            }
            step(std::false_type(), total > 1);
#pragma unroll 1
            for (int i = 1; i < total; i++) step(std::true_type(), i + 1 < total);
            const int slot = (it - 1) % STAGES;  // of the last block's gradient of queries
            float dq[HALF / 2];
            free(V_EMPTY);
            wait(barriers + SLOPES_FULL + slot * 8, (it - 1) / STAGES & 1);
            multiply_slopes<S>(dq, base + S::SLOPES, slot, keys, me);
            products_wait<0>();
            hold(dq), hold(s);
            free(SLOPES_EMPTY + slot * 8), free(K_EMPTY);
            add_part<S>(problem, dq, me, thread, before);
        } else {
            wait(barriers + V_FULL, n & 1);
            __syncwarp();
            free(V_EMPTY), free(K_EMPTY);
        }
        __syncwarp();
        free(SUMMED + (n & 1) * 8);
        const float one[] = {1, 1}, scale[] = {problem.scale, problem.scale};
        int key = at + 16 * warp + lane / 4;
        if constexpr (S::LISTED) {  // read anew, so that they take no registers before
            const Tile same = read_tile(published);
            batch = same.head / problem.key_heads, key_head = same.head % problem.key_heads, key = same.at + me * HALF + 16 * warp + lane / 4;
        }
        store<T>(problem.of_v, batch, key_head, key, problem.keys, problem.value_size, dv, one);
        store<T>(problem.of_k, batch, key_head, key, problem.keys, problem.head_size, dk, scale);
    }
}

template <class S>
SM90 void differentiate(const Problem& problem, const Maps& maps) {
    const uint32_t bytes = shared(dynamic_shared()), base = bytes + (-bytes & 1023), barriers = base + S::BARRIERS;
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / LANES, 0);
    if (threadIdx.x == 0) {
        for (const CUtensorMap* map = &maps.q; map <= &maps.part_of_q; map++) prefetch_map(map);
        for (int i = 0; i < BARRIER_BYTES; i += 8) barrier_init(barriers + i, arrivals_at<S>(i));
        barriers_ready();
    }
    for (int i = threadIdx.x * 16; i < (STAGES + S::G_STAGES) * S::SUM_ROOM; i += THREADS * 16) store_four(base + S::POWERS + i, {0, 0, 0, 0});
    fence_stores();
    __syncthreads();
    launches_before_done();
    next_launch_may_begin();
    if (warp < WARPS) {
        more_registers<240>();
        if constexpr (S::WIDE) multiply_wide<S>(problem, base, warp / (WARPS / 2));
        else if constexpr (S::D == HALF) multiply<S>(problem, base, warp / (WARPS / 2));
        else if (warp < WARPS / 2) multiply<S>(problem, base, Known<0>());
        else multiply<S>(problem, base, Known<1>());
    } else {
        fewer_registers<24>();
        if (warp == WARPS && elected()) Loader<S>{problem, maps, base}.load_tiles();
        if (S::ORDERED && warp == THREADS / LANES - 1) {
            if (elected()) pass_turns<S>(problem, base);
        } else if (warp > WARPS) help<S>(problem, base, maps);
    }
}

}  // namespace
