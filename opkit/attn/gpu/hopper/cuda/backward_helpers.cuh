// What goes before the products of the backward and after them, at the same time: warps that neither load nor multiply prepare rows of
// heads that products will come to, and round the gradient of queries of heads that they are done with. Both take as long as memory
// does, of which the products leave most.
//
// They go through items, parts of blocks of rows of all heads. One thread, the mover, brings items to shared memory and results
// from there, both by TMA, and two warps work on them, or one where another passes turns on. Stores of their own to global memory
// would be in the way of those who multiply, whose fences between stores and products wait for them: that took a microsecond for
// 16 KB.
#pragma once

#include "backward_rows.cuh"

namespace {

using namespace sm90;

template <class S>
SM90 int items_of_head(const Problem& problem) { return S::PARTS * blocks_of<S>(problem); }

// The items up to which rows are prepared, and gradients rounded.
template <class S>
SM90 int items_before(const Problem& problem) { return problem.batch * problem.heads * items_of_head<S>(problem); }
template <class S>
SM90 int items_after(const Problem& problem) { return problem.finished * items_of_head<S>(problem); }

// What mover and workers share of an item, `it` being how many there were before.
template <class S>
struct Item {
    uint32_t base;
    int it;

    __device__ __forceinline__ int slot() const { return it % S::ITEM_STAGES; }
    __device__ __forceinline__ uint32_t published() const { return base + S::PUBLISHED_ITEMS + slot() * 16; }
    __device__ __forceinline__ uint32_t room() const { return base + S::ITEMS + slot() * (2 * S::PIECE_BYTES); }
    __device__ __forceinline__ uint32_t rounded() const { return base + S::ROUNDED + slot() * (PART * 2); }
    __device__ __forceinline__ uint32_t sums() const { return base + S::ROW_SUMS + slot() * (S::ITEM_ROWS * 4); }
    __device__ __forceinline__ uint32_t full() const { return base + S::BARRIERS + ITEM_FULL + slot() * 8; }
    __device__ __forceinline__ uint32_t done() const { return base + S::BARRIERS + ITEM_DONE + slot() * 8; }
    __device__ __forceinline__ uint32_t parity() const { return it / S::ITEM_STAGES & 1; }
};

// ---- the mover ------------------------------------------------------------------------------------------------------------

// Rows that are to be prepared: what is multiplied comes, zeros for the sum of gradients go; and the waiting warps are notified.
template <class S>
struct Before {
    const Problem& problem;
    const Maps& maps;

    __device__ __forceinline__ int* counter() const { return problem.counter + 1; }
    __device__ __forceinline__ int first() const { return problem.prepared * items_of_head<S>(problem); }
    __device__ __forceinline__ int items() const { return items_before<S>(problem); }
    __device__ __forceinline__ void load(int item, Item<S> at) const {
        const int of_head = items_of_head<S>(problem), head = item / of_head, row = item % of_head * S::ITEM_ROWS;
        expect_bytes(at.full(), 2 * S::PIECE_BYTES);
        const auto load = [&](uint32_t to, const CUtensorMap* map) {
            load_rows_of<ODD_VALUES, S::BOXES>(to, map, at.full(), row, head % problem.heads, head / problem.heads, S::ROW_BOX / S::PARTS);
        };
        load(at.room(), &maps.piece_of_out), load(at.room() + S::PIECE_BYTES, &maps.piece_of_gradient);
        const uint32_t zeros = at.base + S::POWERS + S::SUM_BYTES;
#pragma unroll 1
        for (int i = 0; i < (S::ALONE ? 0 : PART); i += S::SUM_FLOATS) store_bytes(problem.total + int64_t(item) * PART + i, zeros, S::SUM_BYTES);
        stores_commit();
    }
    __device__ __forceinline__ void begin_to_store(int, Item<S>) const {}
    template <int LATER>
    __device__ __forceinline__ void end(int item) const {  // of an item after which so many were loaded
        stores_done<LATER>();
        add_count(ready(problem, item / items_of_head<S>(problem)), 1);
    }
};

// Parts of the gradient of queries that are to be rounded, when all has been added to them.
template <class S>
struct After {
    const Problem& problem;
    const Maps& maps;

    __device__ __forceinline__ int* counter() const { return problem.counter + 2; }
    __device__ __forceinline__ int first() const { return 0; }
    __device__ __forceinline__ int items() const { return items_after<S>(problem); }
    __device__ __forceinline__ void load(int item, Item<S> at) const {
        const int key_head = item / items_of_head<S>(problem) / (problem.heads / problem.key_heads);
        wait_count(summed(problem, key_head), tiles_of_head<S>(problem));
        expect_bytes(at.full(), PART * 4);
        load_bytes(at.room(), problem.total + int64_t(item) * PART, PART * 4, at.full());
    }
    __device__ __forceinline__ void begin_to_store(int item, Item<S> at) const {
        const int of_head = items_of_head<S>(problem), head = item / of_head, block = item % of_head / S::PARTS, part = item % S::PARTS;
        const int row = block * S::ROWS + (S::ROWS > HALF ? part * HALF : 0), box = S::ROWS > HALF ? 0 : part;
        store_box(&maps.part_of_q, at.rounded(), row, ODD_KEYS ? 0 : box, head % problem.heads, head / problem.heads, ODD_KEYS ? box * COLUMNS : 0);
        stores_commit();
        stores_read();
    }
    template <int>
    __device__ __forceinline__ void end(int) const {}
};

// Go through the items that all blocks of threads count together, as many at once as there are places.
template <class S, class Job>
SM90 void move(const Problem& problem, uint32_t base, const Job job, int& it) {
    constexpr int AT_ONCE = S::ITEM_STAGES;
    const int items = job.items(), begun = it;
    int claimed = job.first() + atomicAdd(job.counter(), 1);
    for (bool more = true; more; it++) {
        const Item<S> place{base, it};
        int before = -1;  // what was in this place
        if (it >= AT_ONCE) wait(place.done(), place.parity() ^ 1);
        if (it >= begun + AT_ONCE) job.begin_to_store(before = load_four(place.published()).x, place);
        store_four(place.published(), {claimed, 0, 0, 0});
        more = claimed < items;
        if (more) {
            job.load(claimed, place);
            claimed = job.first() + atomicAdd(job.counter(), 1);
        } else {
            arrive(place.full());
        }
        if (before < 0) continue;
        if (more) job.template end<AT_ONCE>(before);
        else job.template end<AT_ONCE - 1>(before);
    }
    const Item<S> last{base, it - AT_ONCE};
    if (AT_ONCE == 1 || last.it < begun) return;
    wait(last.done(), last.parity());
    const int item = load_four(last.published()).x;
    job.begin_to_store(item, last);
    job.template end<0>(item);
}

// ---- the workers ----------------------------------------------------------------------------------------------------------

// A part of a block of rows as the kernel before has it.
template <class S>
SM90 void prepare(const Problem& problem, int item, Item<S> at) {
    constexpr int COUNT = S::ITEM_ROWS, OF_ROW = 8, MEETING = 1;  // rows; threads that a row has; a named barrier
    constexpr int EACH = (COUNT + S::WORKERS - 1) / S::WORKERS;
    const int thread = threadIdx.x - FIRST_WORKER, of_head = items_of_head<S>(problem), column = thread % OF_ROW;
    Numbers numbers[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int row = i * S::WORKERS + thread;
        if (row < COUNT) numbers[i] = numbers_of(problem, item / of_head, item % of_head * COUNT + row);
    }
#pragma unroll 1
    for (int row = thread / OF_ROW; row < COUNT; row += S::WORKERS / OF_ROW) {
        const uint32_t chunk = at.room() + row * ROW_BYTES + ((column ^ row % 8) << 4);
        float sum = 0;
#pragma unroll
        for (int box = 0; box < S::BOXES; box++) {
            const uint32_t in_box = chunk + box * (S::ROW_BOX / S::PARTS);
            sum += dot(load_four(in_box), load_four(in_box + S::PIECE_BYTES));
        }
#pragma unroll
        for (int bit = OF_ROW / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
        if (column == 0) store_one(at.sums() + row * 4, sum);
    }
    named_sync(MEETING, S::WORKERS);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int row = i * S::WORKERS + thread;
        if (row < COUNT) publish_row<S>(problem, item / of_head, item % of_head * COUNT + row, numbers[i], load_one(at.sums() + row * 4));
    }
}

// A part of the gradient of a block of queries, times the scale, rounded, in rows of 64 channels. A warp takes 16 rows and 8 channels
// at once.
template <class S>
SM90 void round_part(const Problem& problem, Item<S> at) {
    const int lane = threadIdx.x % LANES, quad = lane / 4;
    const uint32_t from = at.room() + lane * 16, to = at.rounded() + quad * ROW_BYTES + lane % 4 * 4;
#pragma unroll 4
    for (int piece = (threadIdx.x - FIRST_WORKER) / LANES; piece < 32; piece += S::WORKERS / LANES) {
        const int eight = piece / 4, warp = piece % 4;
        const int4 x = load_four(from + (eight * WARPGROUP + warp * LANES) * 16);
        const uint32_t row = to + warp * 16 * ROW_BYTES + ((eight ^ quad) << 4);
        store_one(row, pack<T>(__int_as_float(x.x) * problem.scale, __int_as_float(x.y) * problem.scale));
        store_one(row + 8 * ROW_BYTES, pack<T>(__int_as_float(x.z) * problem.scale, __int_as_float(x.w) * problem.scale));
    }
    fence_stores();
}

template <class S, class Work>
SM90 void work_on(int items, uint32_t base, int& it, Work work) {
    for (bool more = true; more; it++) {
        const Item<S> place{base, it};
        wait(place.full(), place.parity());
        const int item = load_four(place.published()).x;
        more = item < items;
        if (more) work(item, place);
        __syncwarp();
        if (threadIdx.x % LANES == 0) arrive(place.done());
    }
}

// What the helpers do: rows that products will come to, then those that they are done with.
template <class S>
SM90 void help(const Problem& problem, uint32_t base, const Maps& maps) {
    int it = 0;
    if (threadIdx.x < FIRST_WORKER) {
        if (!elected()) return;
        move<S>(problem, base, Before<S>{problem, maps}, it);
        move<S>(problem, base, After<S>{problem, maps}, it);
        stores_done<0>();
    } else {
        work_on<S>(items_before<S>(problem), base, it, [&](int item, Item<S> at) { prepare<S>(problem, item, at); });
        work_on<S>(items_after<S>(problem), base, it, [&](int, Item<S> at) { round_part<S>(problem, at); });
    }
}

}  // namespace
