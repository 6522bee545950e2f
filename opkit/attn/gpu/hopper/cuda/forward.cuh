// Attention for sm_90a in CUDA C++, of elements T.
//
// One thread loads by TMA, and warpgroups multiply, 64 rows of queries each. A block takes tiles, some rows of one head each,
// from a counter until there are no more. The keys of a tile are visited from the last to the first. The product of queries with
// the next keys is begun before the softmax of these keys, together with the product with the values of those before (the method is
// that of FlashAttention-3, Shah et al., 2024, section 3).
#pragma once

#include "forward_rows.cuh"

namespace {

using namespace sm90;

// ---- products -------------------------------------------------------------------------------------------------------------

// Begin the product of a warpgroup's queries, at `q`, with keys. Descriptors are added up where they are used, which the compiler
// does in uniform registers; if they are computed before, each is moved there from a thread's.
template <typename L>
SM90 void multiply_keys(float (&s)[L::KEYS / 2], uint32_t q, uint32_t k) {
    constexpr int PARTS = L::D * sizeof(Key) / 32;
    uint64_t first[] = {along_rows(q), along_rows(k)};
    hold(first);
    products_fence();
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const uint32_t box = i / 4, within = i % 4 * 32;
        const uint64_t rows = further(first[0], box * (L::ROWS * ROW_BYTES) + within);
        Product<Key, L::KEYS>::template ss<0, 0>(s, rows, further(first[1], box * (L::KEYS * ROW_BYTES) + within), i > 0);
    }
    products_commit();
}

// Begin the product of weights with values.
template <typename L>
SM90 void multiply_values(float (&acc)[L::DV / 2], const uint32_t (&p)[L::KEYS / 4], uint32_t v) {
    constexpr int PARTS = L::KEYS / 16;
    uint64_t values[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) values[i] = further(across_rows(v, L::KEYS * ROW_BYTES), i * (16 * ROW_BYTES));
    hold(values);
    products_fence();
#pragma unroll
    for (int i = 0; i < PARTS; i++)
        Product<T, L::DV>::template rs<1>(acc, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], values[i], 1);
    products_commit();
}

// ---- turns at the tensor cores, so that some warpgroups reckon while others' products run ----------------------------------

template <typename L>
SM90 void take_turn(int group) {
    if (L::TURNS) named_sync(TURN + group, 2 * WARPGROUP);
}
template <typename L>
SM90 void pass_turn(int group) {
    if (L::TURNS) named_arrive(TURN + (group + 1) % L::GROUPS, 2 * WARPGROUP);
}

// ---- multiplying ----------------------------------------------------------------------------------------------------------

// What a warpgroup has to do of a tile: its steps, the first one's keys being the last, and how many of others there are before
// and after them.
struct Work {
    Tile tile;
    int step, steps, before, after;
    int keys;  // of the batch

    // What logits are times, once queries are negated where that is below zero.
    __device__ __forceinline__ float factor(const Problem& problem) const { return DESCALED ? fabsf(tile.factor) : problem.factor; }
};

template <typename L, bool BANDED>
SM90 Work work_of(const Problem& problem, Shared<L>& shared, int group) {
    shared.turns.wait_full();
    const Tile tile = shared.tiles[shared.turns.index];
    Reach own;
    if constexpr (L::LISTED) own = shared.tiles[shared.turns.index].own[group];
    __syncwarp();
    shared.turns.free();
    const int keys = keys_of(problem, tile.batch);
    if (L::TURNS) return {tile, tile.last, tile.steps, 0, 0, keys};
    if constexpr (!L::LISTED) own = reach_of<L, BANDED>(problem, tile.batch, tile.row + group * GROUP_ROWS, GROUP_ROWS);
    const int last = max(min(own.last, tile.last), tile.first), first = min(max(own.first, tile.first), last);
    return {tile, last, last - first + 1, tile.last - last, first - tile.first, keys};
}

template <typename R>
SM90 void skip(R& ring, int count) {
    for (; count > 0; count--) {
        ring.wait_full();
        __syncwarp();
        ring.free();
    }
}

// Turn round the signs of a warpgroup's queries, so that logits are times what is above zero, as those are whose greatest is looked for.
template <typename L>
SM90 void negate(uint32_t rows, int group) {
#pragma unroll 1
    for (int i = threadIdx.x % WARPGROUP; i < L::KEY_BOXES * GROUP_ROWS * ROW_BYTES / 16; i += WARPGROUP) {
        const uint32_t at = rows + i / (GROUP_ROWS * 8) * (L::ROWS * ROW_BYTES) + i % (GROUP_ROWS * 8) * 16;
        int4 x = load_four(at);
        x.x ^= 0x80808080, x.y ^= 0x80808080, x.z ^= 0x80808080, x.w ^= 0x80808080;
        store_four(at, x);
    }
    fence_stores();
    named_sync(MEETING + group, WARPGROUP);
}

// Wait for what a tile's first product reads.
template <typename L>
SM90 void first_there(Shared<L>& shared, const Work& work, int group) {
    skip(shared.keys, work.before);
    shared.rows.wait_full();
    if (DESCALED && work.tile.factor < 0) negate<L>(shared.rows.buffer() + group * GROUP_ROWS * ROW_BYTES, group);
    shared.keys.wait_full();
}

// Begin the product of a tile's queries with the next keys.
template <typename L>
SM90 void multiply_next(Shared<L>& shared, float (&s)[L::KEYS / 2], int group) {
    multiply_keys<L>(s, shared.rows.buffer() + group * GROUP_ROWS * ROW_BYTES, shared.keys.buffer());
}

// Whether some of 64 queries from `row` do not see some of the keys from `at`.
template <typename L>
SM90 bool partial(const Problem& problem, int row, int at) {
    return at + L::KEYS - 1 - row > problem.upper || at - row - (GROUP_ROWS - 1) < problem.lower;
}

// The first of a thread's two rows, in a tile.
SM90 int row_of_thread(int group) {
    return group * GROUP_ROWS + threadIdx.x % WARPGROUP / LANES * 16 + threadIdx.x % LANES / 4;
}

// The step whose keys were waited for, where steps are listed. From the first lane, so that the compiler knows that it is the same for
// a warp.
template <typename L>
SM90 Step read_step(const Shared<L>& shared) {
    if constexpr (!L::LISTED) return {};
    const int4 numbers = load_four(shared.steps + shared.keys.index * 16);
    return {__shfl_sync(0xffffffff, numbers.x, 0), __shfl_sync(0xffffffff, numbers.y, 0)};
}

// What a thread's rows see of a step by a mask's program.
template <typename L, bool BANDED>
SM90 Seen seen_in_step(const Problem& problem, const Step& step, const Tile& tile, int group) {
    if constexpr (PROGRAM) {
        const int row = tile.row + row_of_thread(group), column = step.at + int(threadIdx.x) % 4 * 2;
        if (step.hidden != NOTHING) return seen_columns<L::KEYS / 4, BANDED>(problem, {tile.batch, tile.head, row, column});
    }
    return {};
}

// -inf for what a thread's rows do not see of a step: by `seen` under a program, else by segments. Spans are all keys if these are not
// in order.
template <typename L, bool BANDED>
SM90 void hide_step(const Problem& problem, float (&s)[L::KEYS / 2], const Step& step, const Tile& tile, int group, const Seen& seen) {
    if (step.hidden == NOTHING) return;
    if constexpr (PROGRAM) {
        hide(s, 0, seen.of[0]), hide(s, 1, seen.of[1]);
        return;
    }
    hide_beyond(problem, s, tile.batch, tile.row + row_of_thread(group), step.at);
    const int warp = threadIdx.x % WARPGROUP / LANES;
    if (step.hidden == OTHERS) hide_others(problem, s, tile.batch, tile.row + group * GROUP_ROWS + warp * 16, step.at);
}

// What logits of a step become before a mask. `at` is its first key, where steps are not listed.
template <typename L>
SM90 void change_logits(const Problem& problem, float (&s)[L::KEYS / 2], const Step& step, const Tile& tile, int group, int at) {
    if constexpr (SCORED) score(problem, s, tile.batch, tile.head, tile.row + row_of_thread(group), L::LISTED ? step.at : at);
    else cap(problem, s);
}

// What a thread has of a warpgroup's 64 rows: logits of a step, or weights; weights rounded; what is summed up; and of its two rows the
// greatest logits, the sums of weights, and what earlier sums are multiplied by.
template <typename L>
struct Share {
    float s[L::KEYS / 2], acc[L::DV / 2], top[2], total[2], by[2];
    uint32_t p[L::KEYS / 4];
};

// The first product of all tiles.
template <typename L>
SM90 void begin_first(Shared<L>& shared, const Work& work, int group, Share<L>& mine) {
    first_there(shared, work, group);
    take_turn<L>(group);
    multiply_next(shared, mine.s, group);
    pass_turn<L>(group);
    products_wait<0>();
    hold(mine.s);
}

// The softmax of a tile's first step, whose product is there.
template <typename L, bool BANDED>
SM90 void weigh_first(const Problem& problem, Shared<L>& shared, const Work& work, int group, Share<L>& mine) {
    const Step step = read_step(shared);
    shared.keys.free();
    skip(shared.values, work.before);
    if (work.steps == 1) shared.rows.free();
    else shared.keys.wait_full();
    change_logits<L>(problem, mine.s, step, work.tile, group, work.step * L::KEYS);
    if constexpr (L::LISTED) {
        hide_step<L, BANDED>(problem, mine.s, step, work.tile, group, seen_in_step<L, BANDED>(problem, step, work.tile, group));
    } else if (BANDED || (work.step + 1) * L::KEYS > work.keys) {
        mask<BANDED>(problem, mine.s, work.tile.row + row_of_thread(group), work.step * L::KEYS, work.keys);
    }
    const float factor = work.factor(problem);
    // Sums as in other steps: ptxas orders those better for it.
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mine.top[half] = -INFINITY, mine.total[half] = 0;
        scale(mine.s, half, factor, base_of(mine.s, half, factor, mine.top[half], mine.by[half]));
        mine.total[half] = mine.total[half] * mine.by[half] + weigh(mine.s, half);
    }
    round_weights(mine.s, mine.p);
#pragma unroll
    for (int i = 0; i < L::DV / 2; i++) mine.acc[i] = 0;
}

// What of a step's softmax comes before the product with values is waited for: a thread's maxima, and the weights of its first row.
template <typename L>
SM90 void weigh_before(float factor, Share<L>& mine, float (&base)[2], float (&sum)[2]) {
    base[0] = base_of(mine.s, 0, factor, mine.top[0], mine.by[0]);
    if (L::EARLY) {
        scale(mine.s, 0, factor, base[0]);
        sum[0] = weigh(mine.s, 0);
    }
    base[1] = base_of(mine.s, 1, factor, mine.top[1], mine.by[1]);
    if (L::EARLY) scale(mine.s, 1, factor, base[1]);
    hold(mine.s);
}

// And what comes after. The second row's exponentials, which take a unit that nothing else needs, have rounding and rescaling during
// them.
template <typename L>
SM90 void weigh_after(float factor, Share<L>& mine, const float (&base)[2], float (&sum)[2]) {
    if (!L::EARLY) {
        scale(mine.s, 0, factor, base[0]);
        scale(mine.s, 1, factor, base[1]);
        sum[0] = weigh(mine.s, 0);
    }
    sum[1] = weigh(mine.s, 1);
#pragma unroll
    for (int half = 0; half < 2; half++) mine.total[half] = mine.total[half] * mine.by[half] + sum[half];
    round_weights(mine.s, mine.p);
    rescale(mine.acc, mine.by);
}

// Step `i` of a tile: the product with its keys, together with the one with values of the step before; and its softmax during that one.
template <typename L, bool BANDED>
SM90 void take_step(const Problem& problem, Shared<L>& shared, const Work& work, int i, int group, Share<L>& mine) {
    const int at = (work.step - i) * L::KEYS;
    const float factor = work.factor(problem);
    float base[2], sum[2];
    take_turn<L>(group);
    multiply_next(shared, mine.s, group);
    shared.values.wait_full();
    multiply_values<L>(mine.acc, mine.p, shared.values.buffer());
    pass_turn<L>(group);
    const Step step = read_step(shared);
    const Seen seen = seen_in_step<L, BANDED>(problem, step, work.tile, group);  // during the product
    products_wait<1>();
    hold(mine.s);
    shared.keys.free();
    change_logits<L>(problem, mine.s, step, work.tile, group, at);
    if constexpr (L::LISTED) {
        hide_step<L, BANDED>(problem, mine.s, step, work.tile, group, seen);
    } else if (BANDED && partial<L>(problem, work.tile.row + group * GROUP_ROWS, at)) {
        mask<BANDED>(problem, mine.s, work.tile.row + row_of_thread(group), at, work.keys);
    }
    weigh_before(factor, mine, base, sum);
    // Without a branch ptxas moves the wait for the product up to the maxima.
    if (i + 1 < work.steps) shared.keys.wait_full();
    else shared.rows.free();
    products_wait<0>();
    hold(mine.acc);
    hold(mine.p);
    shared.values.free();
    weigh_after(factor, mine, base, sum);
}

// A tile's last product, together with the first one of the next, if there is one; else of what is left in the buffers.
template <typename L, bool BANDED>
SM90 void finish_tile(const Problem& problem, const CUtensorMap* out, Shared<L>& shared, const Work& done, const Work& next, int group,
                      Share<L>& mine) {
    shared.values.wait_full();
    take_turn<L>(group);
    multiply_values<L>(mine.acc, mine.p, shared.values.buffer());
    if (next.tile.steps > 0) first_there(shared, next, group);
    multiply_next(shared, mine.s, group);
    pass_turn<L>(group);
    products_wait<1>();
    hold(mine.acc);
    hold(mine.p);
    shared.values.free();
    skip(shared.values, done.after);
    finish<L, BANDED>(problem, out, shared.results, done.tile, done.factor(problem), group, mine.acc, mine.top, mine.total);
    products_wait<0>();
    hold(mine.s);
}

// The results of 64 rows of each tile. A product is begun, what is there meanwhile is done, and then it is waited for.
template <typename L, bool BANDED>
SM90 void multiply(const Problem& problem, const CUtensorMap* out, Shared<L> shared, int group) {
    Share<L> mine;
    if (group == L::GROUPS - 1) pass_turn<L>(group);  // the first warpgroup may begin
    Work work = work_of<L, BANDED>(problem, shared, group);
    if (work.tile.steps > 0) begin_first(shared, work, group, mine);
    while (work.tile.steps > 0) {
        weigh_first<L, BANDED>(problem, shared, work, group, mine);
#pragma unroll 1
        for (int i = 1; i < work.steps; i++) take_step<L, BANDED>(problem, shared, work, i, group, mine);
        skip(shared.keys, work.after);
        const Work done = work;
        work = work_of<L, BANDED>(problem, shared, group);
        finish_tile<L, BANDED>(problem, out, shared, done, work, group, mine);
    }
    if (group == 0) take_turn<L>(group);  // the last one that was passed on
    recompute_rows<L, BANDED>(problem, group);
}

template <typename L, bool BANDED>
SM90 void attend(const Problem& problem, const Maps& maps) {
    unsigned char* bytes = dynamic_shared();
    Shared<L> shared = shared_of<L>(bytes + (-sm90::shared(bytes) & 1023));
    constexpr int WARPS = L::GROUPS * WARPGROUP / LANES;
    if (threadIdx.x == 0) {
        prefetch_map(&maps.q), prefetch_map(&maps.k), prefetch_map(&maps.v), prefetch_map(&maps.out);
        initialize(shared.rows, WARPS);
        initialize(shared.keys, WARPS);
        initialize(shared.values, WARPS);
        initialize(shared.turns, WARPS);
        barriers_ready();
    }
    __syncthreads();
    launches_before_done();
    next_launch_may_begin();
    // From the first lane, so that the compiler knows that it is the same for a warp.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / LANES, 0), group = warp / (WARPGROUP / LANES);
    if (group == L::GROUPS) {
        fewer_registers<L::LOADER_REGISTERS>();
        if (warp == WARPS && elected()) load<L, BANDED>(problem, shared, &maps.q, &maps.k, &maps.v);
    } else {
        more_registers<L::REGISTERS>();
        multiply<L, BANDED>(problem, &maps.out, shared, group);
    }
}

}  // namespace
