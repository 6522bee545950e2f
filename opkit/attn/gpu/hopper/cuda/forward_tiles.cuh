// The tiles of the forward: how a block's work and its shared memory are laid out, and the thread that loads.
#pragma once

#include "forward_call.cuh"
#include "masks.cuh"

namespace {

using namespace sm90;

constexpr int GROUP_ROWS = 64;
constexpr int NEAR = 3;                       // steps that a warpgroup may pass over on either side; with more it would wait for what
                                              // the loader has no buffers for until values are freed
constexpr int OWNERS = 4;                     // marks of a block besides those of its tiles
constexpr int MOST_SHARED = 232448 - 2048;    // bytes of a block, but for what is not buffers
constexpr int MEETING = 1, TURN = 5;          // the first of the named barriers that the threads of one warpgroup use, or of two

// A block of queries of a head, and the steps of keys that it needs; `last` is the first one that is taken. No steps: no tile. With
// descales, what logits are times.
struct alignas(16) Tile {
    int batch, head, row, first, last, steps;
    float factor;
};

struct Reach {
    int first, last;
};

// Where there are segments: the steps that each warpgroup needs.
struct SharedOut : Tile {
    Reach own[4];
};

// The first key of a step; and, where there are segments, what is hidden of it: nothing, what is beyond the span of a row, or keys of
// other segments, for which each has to be asked.
enum Hidden { NOTHING, BEYOND, OTHERS };
struct Step {
    int at, hidden;
};

// What the thread that loads knows of a tile where there are segments: the first key of the first step, and that all rows see the keys
// from `from` on and before `to`. If steps are listed `at` is -1, and `from` of them are of keys that all rows see; -1: nothing is seen.
template <typename L>
struct Plan {
    typename L::Published tile;
    int at, from, to;
    Step begin;  // of listed steps the first
};

// How the work of a block is laid out: channels of queries and keys, and of values; warpgroups that multiply, with 64 queries of a tile
// each; keys of a step; buffers for these, and for values; buffers for the queries of a tile; whether warpgroups take turns at the tensor
// cores, all of them in all steps of a tile; and registers of a thread that multiplies, and of one that loads.
template <int D_, int DV_, int GROUPS_, int KEYS_, int STAGES_, int QUERIES_, bool TURNS_, int REGISTERS_, int LOADER_REGISTERS_>
struct Layout {
    static constexpr int D = D_, DV = DV_, GROUPS = GROUPS_, KEYS = KEYS_, STAGES = STAGES_, QUERIES = QUERIES_, TILES = 2;
    static constexpr bool TURNS = TURNS_, LISTED = false;
    using Published = Tile;
    // Whether a thread weighs the first of its two rows before it waits for a product with values; if that is of 256 channels, ptxas
    // finds a better place for the wait.
    static constexpr bool EARLY = DV <= 128;
    static constexpr int REGISTERS = REGISTERS_, LOADER_REGISTERS = LOADER_REGISTERS_;
    static constexpr int ROWS = GROUPS * GROUP_ROWS, THREADS = (GROUPS + 1) * WARPGROUP;
    static constexpr int KEY_BOXES = (D * sizeof(Key) + ROW_BYTES - 1) / ROW_BYTES, VALUE_BOXES = (DV + COLUMNS - 1) / COLUMNS;
    static constexpr int ROWS_BYTES = ROWS * KEY_BOXES * ROW_BYTES, KEYS_BYTES = KEYS * KEY_BOXES * ROW_BYTES;
    static constexpr int VALUES_BYTES = KEYS * VALUE_BOXES * ROW_BYTES;
    static constexpr int BARRIERS = 2 * (QUERIES + TILES + 2 * STAGES);
    static constexpr int LOADED = QUERIES * ROWS_BYTES + STAGES * (KEYS_BYTES + VALUES_BYTES);
    // Boxes of results that the copy engine stores, as many as there is room for. Threads store the others.
    static constexpr int BOX_BYTES = ROWS * ROW_BYTES, ROOM = (MOST_SHARED - LOADED) / BOX_BYTES;
    static constexpr int RESULT_BOXES = ROOM < VALUE_BOXES ? ROOM : VALUE_BOXES;
    static constexpr int BUFFERS = LOADED + RESULT_BOXES * BOX_BYTES;
    static constexpr int BYTES = BUFFERS + TILES * sizeof(Tile) + BARRIERS * 8;
    static constexpr int SHARED = BYTES + 1024;  // boxes begin at multiples of 1024
};

// The same where there are segments, and a list of the blocks of keys that a tile visits; what each step is goes by shared memory.
template <typename L>
struct Listed : L {
    static constexpr bool LISTED = true;
    using Published = SharedOut;
    static constexpr int BYTES = L::BYTES + L::TILES * (sizeof(Published) - sizeof(Tile)) + L::STAGES * 16, SHARED = BYTES + 1024;
};

// For heads of 64. Three warpgroups, since exponentials take most of the time there. Without a band all have the same steps, and go
// through them side by side if they do not take turns.
template <bool TURNS, int D = 64, int DV = 64>
using Narrow = Layout<D, DV, 3, 128, 4, 2, TURNS, 160, 32>;
// For heads of 64 and few keys: more rows and fewer keys at a time, so that less is hidden and fewer rows are beyond the last.
template <int D = 64, int DV = 64>
using Brief = Layout<D, DV, 4, 64, 6, 2, false, 112, 32>;
// And for few queries, or so few that the GPU would not be filled.
template <int D = 64, int DV = 64>
using Low = Layout<D, DV, 2, 128, 4, 2, true, 240, 24>;
// For heads of 128, whose products and exponentials fill the time in turns.
template <bool TURNS, int D = 128, int DV = 128>
using Middle = Layout<D, DV, 2, 128, 2, 2, TURNS, 240, 24>;
// For heads of 192 with values of 128: there is shared memory for queries of one tile.
template <int D = 192, int DV = 128>
using Deep = Layout<D, DV, 2, 128, 2, 1, true, 240, 24>;
// For heads of 256. As many keys as there are registers and shared memory for; where steps are listed a power of two.
template <int KEYS = 80, int D = 256, int DV = 256>
using Wide = Layout<D, DV, 2, KEYS, 2, 1, false, 240, 24>;

// Buffers that one side fills and the other empties, in turn. `full` and `empty` are the addresses of the first barriers.
template <int COUNT, int BYTES>
struct Ring {
    uint32_t buffers, full, empty;
    int index = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ uint32_t buffer() const { return buffers + index * BYTES; }
    __device__ __forceinline__ uint32_t filled() const { return full + index * 8; }
    __device__ __forceinline__ void wait_full() const { wait(full + index * 8, phase); }
    __device__ __forceinline__ void wait_empty() const { wait(empty + index * 8, phase ^ 1); }
    __device__ __forceinline__ void next() {
        index++;
        if (index == COUNT) index = 0, phase ^= 1;
    }
    // A warp, all of whose threads have waited for the buffer, no longer needs it.
    __device__ __forceinline__ void free() {
        if (threadIdx.x % LANES == 0) arrive(empty + index * 8);
        next();
    }
};

template <typename L>
struct Shared {
    Ring<L::QUERIES, L::ROWS_BYTES> rows;
    Ring<L::STAGES, L::KEYS_BYTES> keys;
    Ring<L::STAGES, L::VALUES_BYTES> values;
    Ring<L::TILES, 0> turns;  // of the tiles
    typename L::Published* tiles;
    uint32_t results;
    uint32_t steps;  // what the steps are whose keys are there, 16 bytes each, where they are listed
};

template <typename L>
SM90 Shared<L> shared_of(unsigned char* bytes) {
    const uint32_t rows = shared(bytes), keys = rows + L::QUERIES * L::ROWS_BYTES;
    const uint32_t values = keys + L::STAGES * L::KEYS_BYTES, results = values + L::STAGES * L::VALUES_BYTES;
    const uint32_t tiles = results + L::RESULT_BOXES * L::BOX_BYTES;
    const uint32_t of_rows = tiles + L::TILES * sizeof(typename L::Published), of_keys = of_rows + 2 * L::QUERIES * 8;
    const uint32_t of_values = of_keys + 2 * L::STAGES * 8, of_turns = of_values + 2 * L::STAGES * 8;
    return {{rows, of_rows, of_rows + L::QUERIES * 8},
            {keys, of_keys, of_keys + L::STAGES * 8},
            {values, of_values, of_values + L::STAGES * 8},
            {0, of_turns, of_turns + L::TILES * 8},
            reinterpret_cast<typename L::Published*>(bytes + (tiles - rows)),
            results,
            of_turns + 2 * L::TILES * 8};
}

template <int COUNT, int BYTES>
SM90 void initialize(const Ring<COUNT, BYTES>& ring, int readers) {
    for (int i = 0; i < COUNT; i++) {
        barrier_init(ring.full + i * 8, 1);
        barrier_init(ring.empty + i * 8, readers);
    }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------------

// Where the descales of a head of queries are; what its logits are times, and its results.
SM90 int descale_of(const Problem& problem, int batch, int head) {
    return batch * (problem.heads / problem.group) + head / problem.group;
}
SM90 float factor_of(const Problem& problem, int batch, int head) {
    if (!DESCALED) return problem.factor;
    const int by = descale_of(problem, batch, head);
    return problem.factor * problem.q_by[by] * problem.k_by[by];
}
// A factor of 0 would make no number of what is hidden: so little is as good.
SM90 float not_zero(float factor) { return fabsf(factor) < 1e-30f ? 1e-30f : factor; }
SM90 float values_by(const Problem& problem, int batch, int head) {
    return DESCALED ? problem.v_by[descale_of(problem, batch, head)] : 1.f;
}

// The steps of keys that some rows need; at least one, if only to see nothing.
template <typename L, bool BANDED>
SM90 Reach reach_of(const Problem& problem, int batch, int row, int rows) {
    const int keys = keys_of(problem, batch);
    if (!BANDED) return {0, max(keys - 1, 0) / L::KEYS};
    const int end = min(row + rows, problem.queries) - 1;
    const int last = max(min(end + problem.upper, keys - 1), 0) / L::KEYS;
    return {min(max(row + problem.lower, 0) / L::KEYS, last), last};
}

// What a warpgroup's rows from `row` see of a range: nothing, if it has no rows. x is -1 if it is not in order.
template <bool BANDED>
SM90 int4 seen_from(const Problem& problem, const int4* ranges, int row, int keys) {
    if (row >= problem.queries) return {problem.keys, 0, 0, problem.keys};
    int4 seen = ranges[row / GROUP_ROWS];
    if (LENGTHS) seen.y = min(seen.y, keys), seen.w = min(seen.w, keys);
    if (!BANDED || seen.x < 0) return seen;
    const int last = min(row + GROUP_ROWS, problem.queries) - 1;
    return {max(seen.x, row + problem.lower), min(seen.y, last + problem.upper + 1), max(seen.z, last + problem.lower),
            min(seen.w, row + problem.upper + 1)};
}

// A tile's list of blocks of keys.
template <typename L>
SM90 const int* list_of(const Problem& problem, const Tile& tile) {
    const int blocks = (problem.keys + L::KEYS - 1) / L::KEYS;
    const int* list = problem.lists.blocks + tile.batch * problem.lists.blocks_batch + int64_t(tile.row / L::ROWS) * blocks;
    return PROGRAM ? list + tile.head * problem.mask.blocks_head : list;
}

// The steps of a tile that are listed; one, if only to see nothing. What is read is read at once.
template <typename L>
SM90 Plan<L> plan_of_list(const Problem& problem, Plan<L>& plan) {
    const Lists& lists = problem.lists;
    const int* counts = lists.counts + plan.tile.batch * lists.counts_batch + plan.tile.row / L::ROWS * 2;
    if (PROGRAM) counts += plan.tile.head * problem.mask.counts_head;
    const int* list = list_of<L>(problem, plan.tile);
    const int whole = counts[0], all = counts[1], front = list[0], back = list[(problem.keys - 1) / L::KEYS];
    plan.tile.steps = max(all, 1), plan.tile.last = plan.tile.steps - 1;
    plan.at = -1, plan.from = all > 0 ? whole : -1;
    plan.begin = all == 0 ? Step{0, OTHERS} : whole < all ? Step{back * L::KEYS, OTHERS} : Step{front * L::KEYS, NOTHING};
    for (Reach& own : plan.tile.own) own = {0, plan.tile.last};
    return plan;
}

// Where steps are listed, those come first in which some rows do not see some keys: at the back of the list.
template <typename L>
SM90 Step step_of(const Problem& problem, const Plan<L>& plan, int step) {
    if constexpr (!L::LISTED) return {step * L::KEYS, 0};
    const Tile& tile = plan.tile;
    if (plan.at >= 0) {
        const int at = plan.at + step * L::KEYS;
        return {at, at < plan.from || at + L::KEYS > plan.to ? BEYOND : NOTHING};
    }
    if (plan.from < 0) return {0, OTHERS};
    const int blocks = (problem.keys + L::KEYS - 1) / L::KEYS, n = tile.last - step, parts = tile.steps - plan.from;
    return {list_of<L>(problem, tile)[n < parts ? blocks - 1 - n : n - parts] * L::KEYS, n < parts ? OTHERS : NOTHING};
}

// The steps of a tile where there are segments; one, if only to see nothing.
template <typename L, bool BANDED>
SM90 Plan<L> plan_of_segments(const Problem& problem, int batch, int head, int row) {
    Plan<L> plan{{{batch, head, row, 0, 0, 1}, {}}, problem.keys, 0, problem.keys, {}};
    if (PROGRAM) return plan_of_list(problem, plan);
    const int4* ranges = problem.lists.ranges + batch * problem.lists.ranges_batch;
    const int keys = keys_of(problem, batch);
    int end = 0;
#pragma unroll
    for (int group = 0; group < L::GROUPS; group++) {
        const int4 seen = seen_from<BANDED>(problem, ranges, row + group * GROUP_ROWS, keys);
        if (seen.x < 0) return plan_of_list(problem, plan);
        plan.from = max(plan.from, seen.z), plan.to = min(plan.to, seen.w);
        if (seen.x < seen.y) plan.at = min(plan.at, seen.x), end = max(end, seen.y);
        plan.tile.own[group] = {seen.x, seen.y};
    }
    plan.tile.steps = max((end - plan.at + L::KEYS - 1) / L::KEYS, 1), plan.tile.last = plan.tile.steps - 1;
    constexpr int FURTHEST = L::QUERIES == 1 ? 0 : NEAR;  // with one buffer for queries it would wait for these
#pragma unroll
    for (int group = 0; group < L::GROUPS; group++) {
        const Reach seen = plan.tile.own[group];
        const int first = max(seen.first - plan.at, 0) / L::KEYS, last = max(seen.last - 1 - plan.at, 0) / L::KEYS;
        plan.tile.own[group] = {min(first, FURTHEST), max(last, plan.tile.last - FURTHEST)};
    }
    plan.begin = step_of<L>(problem, plan, plan.tile.last);
    return plan;
}

// Under a mask the last rows of all heads of a section come first: of a causal one they have the most to do.
template <typename L, bool BANDED>
SM90 Plan<L> plan_of(const Problem& problem, int number) {
    if (number >= problem.tiles) return {};
    const int size = problem.section * problem.blocks, first = number / size * problem.section, rest = number % size;
    const int width = min(problem.section, problem.tiles / problem.blocks - first);
    constexpr bool DOWN = BANDED || L::LISTED;
    const int of_all = first + (DOWN ? rest % width : rest / problem.blocks);
    const int row = (DOWN ? problem.blocks - 1 - rest / width : rest % problem.blocks) * L::ROWS;
    const int batch = of_all / problem.heads, head = of_all % problem.heads;
    Plan<L> plan;
    if constexpr (L::LISTED) {
        plan = plan_of_segments<L, BANDED>(problem, batch, head, row);
    } else {
        const Reach reach = reach_of<L, BANDED>(problem, batch, row, L::ROWS);
        plan = {{batch, head, row, reach.first, reach.last, reach.last - reach.first + 1}, 0, 0, 0, {}};
    }
    if (DESCALED) plan.tile.factor = not_zero(factor_of(problem, batch, head));
    return plan;
}

// ---- loading --------------------------------------------------------------------------------------------------------------

template <int ODD_BOXES = 0, int BYTES, int COUNT>
SM90 void fill(Ring<COUNT, BYTES>& ring, const CUtensorMap* map, int batch, int head, int row) {
    ring.wait_empty();
    expect_bytes(ring.filled(), BYTES);
    if (ODD_BOXES == 0) load_boxes(ring.buffer(), map, ring.filled(), row, head, batch);
#pragma unroll
    for (int i = 0; i < ODD_BOXES; i++)
        load_box(ring.buffer() + i * (BYTES / ODD_BOXES), map, ring.filled(), row, 0, head, batch, i * COLUMNS);
    ring.next();
}

template <typename L>
SM90 void load_keys(Shared<L>& shared, const CUtensorMap* k, int batch, int head, const Step& step) {
    if constexpr (L::LISTED) {
        shared.keys.wait_empty();
        store_four(shared.steps + shared.keys.index * 16, {step.at, step.hidden, 0, 0});
    }
    fill<ODD_KEYS ? L::KEY_BOXES : 0>(shared.keys, k, batch, head, step.at);
}

template <typename L>
SM90 void publish(Shared<L>& shared, const typename L::Published& tile) {
    shared.turns.wait_empty();
    shared.tiles[shared.turns.index] = tile;
    arrive(shared.turns.filled());
    shared.turns.next();
}

// Where the values of some keys are; no row: of none.
struct Values {
    int batch, head, row;
};

template <typename L>
SM90 void load_values(Shared<L>& shared, const CUtensorMap* v, const Values& of) {
    if (of.row >= 0) fill<ODD_VALUES ? L::VALUE_BOXES : 0>(shared.values, v, of.batch, of.head, of.row);
}

// Hand out tiles, and load their queries, and keys and values from the last to the first; values a step late, those of a tile's
// last step behind the next tile's first keys, and behind its queries, if these have a buffer of their own. A tile is claimed shortly
// before the one at hand is loaded: what a block has claimed, no other can take, even if that has nothing else to do.
template <typename L, bool BANDED>
SM90 void load(const Problem& problem, Shared<L> shared, const CUtensorMap* q, const CUtensorMap* k, const CUtensorMap* v) {
    constexpr bool LAST = L::QUERIES == 1;
    // Who passes over two steps would wait for these queries with the buffers for these values.
    static_assert(!LAST || (L::GROUPS - 1) * GROUP_ROWS <= L::KEYS);
    Plan<L> plan = plan_of<L, BANDED>(problem, blockIdx.x);
    Values owed = {0, 0, -1};
    while (plan.tile.steps > 0) {
        const auto& tile = plan.tile;
        const int key_head = tile.head / problem.group, claim = min(tile.first + 1, tile.last);
        int following = 0;
        publish(shared, tile);
        Step coming = plan.begin;
#pragma unroll 1
        for (int step = tile.last; step >= tile.first; step--) {
            if (L::LISTED && step == claim) following = atomicAdd(problem.counter, 1) + gridDim.x;  // lists are still to be read then
            const Step next = L::LISTED ? coming : step_of<L>(problem, plan, step);
            // Read while what comes before it is loaded.
            if (L::LISTED && step > tile.first) coming = step_of<L>(problem, plan, step - 1);
            load_keys(shared, k, tile.batch, key_head, next);
            if (LAST) load_values(shared, v, owed);
            if (step == tile.last) fill<ODD_KEYS ? L::KEY_BOXES : 0>(shared.rows, q, tile.batch, tile.head, tile.row);
            if (!LAST) load_values(shared, v, owed);
            owed = {tile.batch, key_head, next.at};
            if (!L::LISTED && step == claim) following = atomicAdd(problem.counter, 1) + gridDim.x;
        }
        plan = plan_of<L, BANDED>(problem, following);
    }
    load_values(shared, v, owed);
    publish(shared, plan.tile);
    // The last block to end leaves the counter as it found it: zeros.
    __threadfence();
    if (atomicAdd(problem.counter + 1, 1) == gridDim.x - 1) problem.counter[0] = problem.counter[1] = 0;
}

}  // namespace
