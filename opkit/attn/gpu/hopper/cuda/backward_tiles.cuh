// The tiles of the backward: how a block's work and its shared memory are laid out, and the thread that loads.
#pragma once

#include "backward_call.cuh"
#include "masks.cuh"

namespace {

using namespace sm90;

constexpr int WARPS = 8;                               // warps that multiply
constexpr int HALF = 64;                               // keys of a warpgroup; rows and columns of its part of the gradient of queries
constexpr int PART = HALF * HALF;                      // floats
constexpr int STAGES = 2;                              // blocks of queries that are there at once
constexpr int THREADS = 3 * WARPGROUP, ROW_THREADS = 256;
constexpr int FIRST_WORKER = THREADS - 2 * LANES;  // threads from there on do what goes before products, and after

// Barriers, as offsets from the first; those from Q_FULL to ITEM_FULL and from Q_EMPTY to PASSED have two stages. At the first ones one
// thread arrives, from K_EMPTY on a thread of each warp that multiplies, at ITEM_DONE one of each that works on items. PASSED and SUMMED are
// for sums that are made in order (backward_ordered.cuh), the last two for heads of 256.
constexpr int K_FULL = 0, V_FULL = 8, Q_FULL = 16, G_FULL = 32, ITEM_FULL = 48;
constexpr int K_EMPTY = 64, V_EMPTY = 72, Q_EMPTY = 80, G_EMPTY = 96, SLOPES_FULL = 112, SLOPES_EMPTY = 128, SUMMED = 144;
constexpr int ITEM_DONE = 160, PASSED = 176, WEIGHTS_FULL = 192, WEIGHTS_EMPTY = 200, BARRIER_BYTES = 208;

// Whether some queries do not see some keys that are there; and whether what such queries' gradients hold must not reach these keys.
constexpr bool hides(bool banded, bool listed) { return banded || listed || LENGTHS; }
constexpr bool hides_rows(bool listed) { return listed || LENGTHS; }

// How shared memory is laid out for heads of up to D channels: D / 64 boxes of keys, values, queries and gradients of results. Products
// take DK channels of keys and DV of values. LISTED: there are segments or a mask's program, and a list of the blocks that a tile visits.
// ORDERED: the gradient of queries is summed up in one order. ALONE: heads have one tile, whose gradient of queries is no sum. Of heads of
// 256 warpgroups divide products, not keys (backward_wide.cuh).
template <int D_, int DK_, int DV_, bool BANDED_, bool LISTED_, bool ORDERED_, bool ALONE_>
struct Shape {
    static constexpr int D = D_, DK = DK_, DV = DV_;
    static constexpr bool BANDED = BANDED_, LISTED = LISTED_, ORDERED = ORDERED_, ALONE = ALONE_, WIDE = D > 2 * HALF;
    static constexpr int ROWS = WIDE ? HALF : 2 * PART / D, KEYS = WIDE ? HALF : 2 * HALF;  // queries of a step, and keys
    static constexpr int SUM_STEP = WIDE ? 64 : 32, OF_K = (DK + SUM_STEP - 1) / SUM_STEP * SUM_STEP;  // channels of sums
    static constexpr int OF_V = (DV + SUM_STEP - 1) / SUM_STEP * SUM_STEP;
    static constexpr int PARTS = ROWS * D / PART, ITEM_ROWS = ROWS / PARTS;  // of the gradient of a block of queries; rows of an item of helpers
    static constexpr bool HIDES = hides(BANDED, LISTED), HIDES_ROWS = hides_rows(LISTED);
    static constexpr int WORKERS = (ORDERED ? 1 : 2) * LANES;  // threads that work on items; a warp less where one passes turns on
    static constexpr bool AHEAD = D == 64;  // the next logits are begun before a step ends
    static constexpr int G_STAGES = WIDE ? 1 : STAGES, ITEM_STAGES = WIDE ? 1 : STAGES;
    static constexpr int BOXES = D / COLUMNS, KEY_BOX = KEYS * ROW_BYTES, ROW_BOX = ROWS * ROW_BYTES;
    static constexpr int KEY_BYTES = BOXES * KEY_BOX, BLOCK_BYTES = BOXES * ROW_BOX, SLOPE_BYTES = KEYS / HALF * ROW_BOX;
    static constexpr int PIECE_BYTES = BLOCK_BYTES / PARTS;
    static constexpr int SUM_FLOATS = 4 * ROWS, SUM_BYTES = SUM_FLOATS * 4, SUM_ROOM = 2 * SUM_BYTES;
    // Offsets. Slopes are gradients of logits.
    static constexpr int K = 0, V = K + KEY_BYTES, Q = V + KEY_BYTES, G = Q + STAGES * BLOCK_BYTES, SLOPES = G + G_STAGES * BLOCK_BYTES;
    static constexpr int WEIGHTS = SLOPES + STAGES * SLOPE_BYTES;  // that one warpgroup passes to the other
    static constexpr int ITEMS = WEIGHTS + (WIDE ? PART * 4 : 0);  // what helpers work on, for a part of a block each
    static constexpr int ROUNDED = ITEMS + ITEM_STAGES * 2 * PIECE_BYTES;  // parts of the gradient of queries that helpers store
    static constexpr int POWERS = ROUNDED + ITEM_STAGES * PART * 2, DELTAS = POWERS + STAGES * SUM_ROOM;
    static constexpr int ROW_SUMS = DELTAS + G_STAGES * SUM_ROOM, PUBLISHED_TILES = ROW_SUMS + ITEM_STAGES * ITEM_ROWS * 4;
    static constexpr int PUBLISHED_ITEMS = PUBLISHED_TILES + 2 * 16;
    static constexpr int PUBLISHED_STEPS = PUBLISHED_ITEMS + ITEM_STAGES * 16;  // of listed steps, as Published says
    static constexpr int ODD = PUBLISHED_STEPS + (LISTED ? STAGES * 16 : 0);  // of weights that are passed, by warps whether they are odd
    // What is copied of a mask, as loads by threads that multiply come behind the sums that they send to memory: spans of keys, or bits of a
    // block of queries, for which there is no room with heads of 64.
    static constexpr int SPANS = ODD + (WIDE ? 16 : 0), SPAN_BYTES = LISTED && !PROGRAM ? KEYS * 8 : 0;
    static constexpr int BITS = SPANS + SPAN_BYTES, BIT_BYTES = PROGRAM && D > HALF ? KEYS * ROWS / 8 : 0;
    static constexpr int BARRIERS = BITS + STAGES * BIT_BYTES, BYTES = BARRIERS + BARRIER_BYTES;
    static constexpr int SHARED = BYTES + 1024;  // boxes begin at multiples of 1024
};

// How many threads arrive at a barrier before it lets others go on.
template <class S>
SM90 int arrivals_at(int barrier) {
    if (barrier >= WEIGHTS_FULL) return WARPS / 2;
    if (barrier < K_EMPTY || barrier >= PASSED) return 1;
    if (barrier >= ITEM_DONE) return S::WORKERS / LANES;
    const bool of_slopes = barrier / 16 == SLOPES_FULL / 16;
    // Who passes turns on reads what a tile is; who loads gives them. Of heads of 256 one warpgroup has slopes.
    return (S::WIDE && of_slopes ? WARPS / 2 : WARPS) + (S::ORDERED && (barrier == K_EMPTY || of_slopes) ? 1 : 0);
}

// Counts behind those of Problem::counter: of each head of queries how many items helpers have prepared, of each
// head of keys how many tiles have added all that they have to the gradient of queries; where that is summed up in order, of each block of
// rows how many tiles have added to it.
constexpr int COUNTERS = 3;
SM90 int counts_of_heads(const Problem& problem) { return COUNTERS + problem.batch * (problem.heads + problem.key_heads); }
SM90 int* ready(const Problem& problem, int head) { return problem.counter + COUNTERS + head; }
SM90 int* summed(const Problem& problem, int key_head) { return problem.counter + COUNTERS + problem.batch * problem.heads + key_head; }

// ---- tiles ----------------------------------------------------------------------------------------------------------------

// How many blocks of queries of a head a tile has, where they are listed of all heads that share its keys, -1 after the last tile; the
// first of them, its complement if they are visited from the last one on; the first key; the head of keys, of all batches.
struct Tile {
    int steps, first, at, head;
};

// From the last block to the first: some tiles where sums are made in order.
template <class S>
SM90 bool goes_down(const Tile& tile) { return S::ORDERED && (!S::BANDED || tile.first < 0); }

template <class S>
SM90 int blocks_of(const Problem& problem) { return (problem.queries + S::ROWS - 1) / S::ROWS; }

template <class S>
SM90 int counts_of(const Problem& problem) {
    return counts_of_heads(problem) + (S::ORDERED ? problem.batch * problem.heads * blocks_of<S>(problem) : 0);
}
template <class S>
SM90 int* added(const Problem& problem, int head, int block) {
    return problem.counter + counts_of_heads(problem) + head * blocks_of<S>(problem) + block;
}

template <class S>
SM90 int tiles_of_head(const Problem& problem) { return (problem.keys + S::KEYS - 1) / S::KEYS; }

// The counts of a tile's list for a head of queries, of all batches: of the blocks that see all of its keys, and of all. And where the
// list is.
template <class S>
SM90 const int* counts_of_list(const Problem& problem, const Tile& tile, int head) {
    const int* counts = problem.lists.counts + head / problem.heads * problem.lists.counts_batch + tile.at / S::KEYS * 2;
    return PROGRAM ? counts + head % problem.heads * problem.mask.counts_head : counts;
}
template <class S>
SM90 int64_t place_of_list(const Problem& problem, const Tile& tile, int head) {
    const int64_t place = head / problem.heads * problem.lists.blocks_batch + int64_t(tile.at / S::KEYS) * blocks_of<S>(problem);
    return PROGRAM ? place + head % problem.heads * problem.mask.blocks_head : place;
}

// A block of queries that a tile visits, and whether by a list some of those do not see some keys.
struct Visit {
    int block;
    bool part;
};

// A listed step as who multiplies reads it: the first row of its block; WHOLE, or if some of the block do not see some keys the place of bits
// that are copied, or NO_BITS; the head of queries, and the block's number among all, of all batches.
struct Published {
    static constexpr int WHOLE = -4;
    int row, place, head, of_all;
};
SM90 Published read_step(uint32_t at) {
    const int4 x = load_four(at);
    return {__shfl_sync(~0u, x.x, 0), __shfl_sync(~0u, x.y, 0), __shfl_sync(~0u, x.z, 0), __shfl_sync(~0u, x.w, 0)};
}

// Where sums are made in order twice a step's block, and one more if it is such a part; and the tile's turn there.
template <class S>
SM90 int2 listed_visit(const Problem& problem, const Tile& tile, int head, int step) {
    return problem.lists.visits[place_of_list<S>(problem, tile, head) + step];
}

// A step of a tile, of a head of queries, of whose list so many steps are parts. In lists parts come first, from the back; where sums are made in order steps are in order
// too, since the parts of several tiles are often of one block, at which all would meet.
template <class S>
SM90 Visit visit_of(const Problem& problem, const Tile& tile, int head, int step, int parts = 0) {
    if constexpr (!S::LISTED) {
        return {goes_down<S>(tile) ? (S::BANDED ? ~tile.first : 0) + tile.steps - 1 - step : tile.first + step, false};
    } else if constexpr (S::ORDERED) {
        const int mark = listed_visit<S>(problem, tile, head, step).x;
        return {mark >> 1, (mark & 1) != 0};
    } else {
        const int place = step < parts ? blocks_of<S>(problem) - 1 - step : step - parts;
        return {problem.lists.blocks[place_of_list<S>(problem, tile, head) + place], step < parts};
    }
}

// How many steps a tile has of a head of queries.
template <class S>
SM90 int steps_of(const Problem& problem, const Tile& tile, int head) {
    return S::LISTED ? counts_of_list<S>(problem, tile, head)[1] : tile.steps;
}

// The steps of a tile that has some, one after another: of each head of queries that shares its keys.
template <class S>
struct Walk {
    int head, step, steps, parts;

    __device__ __forceinline__ Walk(const Problem& problem, const Tile& tile) : head(tile.head * (problem.heads / problem.key_heads)) {
        begin(problem, tile);
        if (S::LISTED) pass_over(problem, tile);
    }
    __device__ __forceinline__ void begin(const Problem& problem, const Tile& tile) {
        step = 0, steps = tile.steps, parts = 0;
        if constexpr (S::LISTED) {
            const int* counts = counts_of_list<S>(problem, tile, head);
            steps = counts[1], parts = steps - counts[0];
        }
    }
    __device__ __forceinline__ void pass_over(const Problem& problem, const Tile& tile) {
        while (step == steps) head++, begin(problem, tile);
    }
    __device__ __forceinline__ void next(const Problem& problem, const Tile& tile) {
        step++;
        if (S::LISTED) pass_over(problem, tile);
        else if (step == steps) head++, step = 0;
    }
    __device__ __forceinline__ Visit visit(const Problem& problem, const Tile& tile) const {
        return visit_of<S>(problem, tile, head, step, parts);
    }
};

template <class S>
SM90 Tile tile_of(const Problem& problem, int number) {
    const int of_head = tiles_of_head<S>(problem), size = problem.section * of_head;
    const int first = number / size * problem.section, rest = number % size;
    const int width = min(problem.section, problem.tiles / of_head - first);
    const bool down = S::ORDERED && !S::LISTED && (!S::BANDED || number >= problem.turned);
    const int place = S::ORDERED && !down ? of_head - 1 - rest / width : rest / width;
    Tile tile{blocks_of<S>(problem), 0, place * S::KEYS, first + rest % width};
    const int keys = keys_of(problem, tile.head / problem.key_heads);
    if (S::LISTED) {
        const int group = problem.heads / problem.key_heads, alike = PROGRAM && problem.mask.counts_head ? 1 : group;
        tile.steps = 0;
        for (int head = 0; head < group; head += alike) tile.steps += alike * steps_of<S>(problem, tile, tile.head * group + head);
    } else if (LENGTHS && tile.at >= keys) {
        tile.steps = 0;
    } else if (S::BANDED) {
        const int last = min(min(tile.at + S::KEYS, keys) - 1 - problem.lower, problem.queries - 1);
        tile.first = max(tile.at - problem.upper, 0) / S::ROWS;
        tile.steps = max((max(last, -1) + S::ROWS) / S::ROWS - tile.first, 0);
        if (down) tile.first = ~tile.first;
    }
    return tile;
}

// How many tiles add to the block of rows of a tile's step before this tile: those of later keys that see it, or of earlier ones.
template <class S>
SM90 int turn_of(const Problem& problem, const Tile& tile, int head, int step, int block) {
    if (S::LISTED) return listed_visit<S>(problem, tile, head, step).y;
    const int last = (keys_of(problem, tile.head / problem.key_heads) - 1) / S::KEYS, place = tile.at / S::KEYS;
    if (goes_down<S>(tile)) return place - (S::BANDED ? max(block * S::ROWS + problem.lower, 0) / S::KEYS : 0);
    return (S::BANDED ? min(((block + 1) * S::ROWS - 1 + problem.upper) / S::KEYS, last) : last) - place;
}

// From the first lane, so that the compiler knows that it is the same for a warp.
SM90 Tile read_tile(uint32_t at) {
    const int4 x = load_four(at);
    return {__shfl_sync(~0u, x.x, 0), __shfl_sync(~0u, x.y, 0), __shfl_sync(~0u, x.z, 0), __shfl_sync(~0u, x.w, 0)};
}

// ---- loading --------------------------------------------------------------------------------------------------------------

// What products read of a block of rows, behind one another: -lse / scale, or of capped logits another number, and -delta.
template <class S>
SM90 float* sums_of(const Problem& problem, int head, int block) {
    return problem.sums + int64_t(head * blocks_of<S>(problem) + block) * (2 * S::SUM_FLOATS);
}

// The one thread that loads. Heads are those of all batches. Few variables outlive a step, since its registers are few.
template <class S>
struct Loader {
    const Problem& problem;
    const Maps& maps;
    uint32_t base;
    int it = 0;  // blocks so far

    __device__ __forceinline__ uint32_t barrier(int which) const { return base + S::BARRIERS + which; }
    __device__ __forceinline__ uint32_t place_of(int n) const { return base + S::PUBLISHED_TILES + (n & 1) * 16; }

    // A block of rows of a head, with numbers of these, to one of COUNT buffers.
    template <bool ODD, int COUNT>
    __device__ __forceinline__ void load_block(int full, int to, const CUtensorMap* map, int head, int block, int numbers,
                                               const float* sums, int more = 0) const {
        const int slot = it % COUNT;
        expect_bytes(barrier(full + slot * 8), S::BLOCK_BYTES + S::SUM_BYTES + more);
        load_rows_of<ODD, S::BOXES>(base + to + slot * S::BLOCK_BYTES, map, barrier(full + slot * 8), block * S::ROWS, head % problem.heads,
                                    head / problem.heads, S::ROW_BOX);
        load_bytes(base + numbers + slot * S::SUM_ROOM, sums, S::SUM_BYTES, barrier(full + slot * 8));
    }
    template <int COUNT = STAGES>
    __device__ __forceinline__ void wait_empty(int empty) const { wait(barrier(empty + it % COUNT * 8), (it / COUNT & 1) ^ 1); }
    // `at` is the tile's first key.
    __device__ __forceinline__ void load_rows(int head, const Visit& visit, int at) const {
        int place = visit.part ? NO_BITS : Published::WHOLE;
        const int tile = visit.block * tiles_of_head<S>(problem) + at / S::KEYS, of_all = head * blocks_of<S>(problem) + visit.block;
        if (S::BIT_BYTES && visit.part) place = place_of_bits(problem, head / problem.heads, head % problem.heads, tile);
        wait_empty(Q_EMPTY);
        if (S::LISTED) store_four(base + S::PUBLISHED_STEPS + it % STAGES * 16, {visit.block * S::ROWS, place, head, of_all});
        load_block<ODD_KEYS, STAGES>(Q_FULL, S::Q, &maps.q, head, visit.block, S::POWERS, sums_of<S>(problem, head, visit.block),
                                     place < 0 ? 0 : S::BIT_BYTES);
        if (S::BIT_BYTES && place >= 0)
            load_bytes(base + S::BITS + it % STAGES * S::BIT_BYTES, problem.mask.bits.words + int64_t(place) * (S::BIT_BYTES / 4), S::BIT_BYTES,
                       barrier(Q_FULL + it % STAGES * 8));
    }
    __device__ __forceinline__ void load_gradients(int head, int block) const {
        wait_empty<S::G_STAGES>(G_EMPTY);
        load_block<ODD_VALUES, S::G_STAGES>(G_FULL, S::G, &maps.gradient, head, block, S::DELTAS, sums_of<S>(problem, head, block) + S::SUM_FLOATS);
    }
    template <bool ODD>
    __device__ __forceinline__ void load_keys(int full, int to, const CUtensorMap* map, const Tile& tile, int more = 0) const {
        expect_bytes(barrier(full), S::KEY_BYTES + more);
        load_rows_of<ODD, S::BOXES>(base + to, map, barrier(full), tile.at, tile.head % problem.key_heads, tile.head / problem.key_heads, S::KEY_BOX);
    }

    // Once nobody multiplies with the keys of the tile before, tile n.
    __device__ __forceinline__ void tell(int n, const Tile& tile) const {
        wait(barrier(K_EMPTY), (n & 1) ^ 1);
        store_four(place_of(n), {tile.steps, tile.first, tile.at, tile.head});
    }
    // That tile n has added all that it has to the gradient of queries; when the next one is under way.
    __device__ __forceinline__ void tell_summed(int n) const {
        if (n < 0) return;
        wait(barrier(SUMMED + (n & 1) * 8), n >> 1 & 1);
        add_count(summed(problem, load_four(place_of(n)).w), 1);
    }
    // Until helpers have prepared the rows of a head.
    __device__ __forceinline__ void wait_ready(int head) const {
        if (head >= problem.prepared) wait_count(ready(problem, head), S::PARTS * blocks_of<S>(problem));
    }

    // Where sums are made in order: let the products for the gradient of queries of a tile's step be made, of that before number `it`,
    // when the tile's turn to add them has come. Nobody multiplies any more then in the step before.
    __device__ __forceinline__ void give_turn(const Tile& tile, int head, int step) const {
        wait_empty(PASSED);
        const int block = visit_of<S>(problem, tile, head, step).block;
        wait_count(added<S>(problem, head, block), turn_of<S>(problem, tile, head, step, block));
        arrive(barrier(SLOPES_FULL + (it - 1) % STAGES * 8));
    }

    // Tile n, which no query sees.
    __device__ __forceinline__ void pass_over(int n, const Tile& tile) const {
        tell(n, tile);
        arrive(barrier(K_FULL));
        wait(barrier(V_EMPTY), (n & 1) ^ 1);
        arrive(barrier(V_FULL));
        tell_summed(n - 1);
    }
    // Tile n, as who multiplies reads it: so it takes no registers.
    __device__ __forceinline__ Tile published(int n) const {
        const int4 x = load_four(place_of(n));
        return {x.x, x.y, x.z, x.w};
    }
    __device__ __forceinline__ void load_tile(int n, const Tile& tile) {
        Walk<S> walk(problem, tile);
        Visit visit = walk.visit(problem, tile);
        wait_ready(walk.head);
        load_rows(walk.head, visit, tile.at);
        tell(n, tile);
        load_keys<ODD_KEYS>(K_FULL, S::K, &maps.k, tile, S::SPAN_BYTES);
        if (S::SPAN_BYTES)
            load_bytes(base + S::SPANS, problem.lists.spans + tile.head / problem.key_heads * problem.lists.spans_batch + tile.at, S::SPAN_BYTES,
                       barrier(K_FULL));
        load_gradients(walk.head, visit.block);
        wait(barrier(V_EMPTY), (n & 1) ^ 1);
        load_keys<ODD_VALUES>(V_FULL, S::V, &maps.v, tile);
        tell_summed(n - 1);
        int left = S::LISTED ? tile.steps : tile.steps * (problem.heads / problem.key_heads);
        for (;;) {
            it++;
            if (--left == 0) break;
            const Tile same = published(n);
            const int head = walk.head, step = walk.step;
            walk.next(problem, same);
            if (walk.head != head) wait_ready(walk.head);
            visit = walk.visit(problem, same);
            load_rows(walk.head, visit, same.at);
            load_gradients(walk.head, visit.block);
            if constexpr (S::ORDERED) give_turn(same, head, step);
        }
        if constexpr (S::ORDERED) {
            wait_empty(Q_EMPTY);
            give_turn(published(n), walk.head, walk.step);
        }
    }
    __device__ __forceinline__ void load_tiles() {
        // Not first the tile of one's own number: a block of threads that has not begun, for want of a multiprocessor, has nothing
        // that others wait for. And one tile at a time: one that is taken far from the end of another would begin late.
        int n = 0;
        for (int number; (number = atomicAdd(problem.counter, 1)) < problem.tiles; n++) {
            const Tile tile = tile_of<S>(problem, number);
            if (tile.steps == 0) pass_over(n, tile);
            else load_tile(n, tile);
        }
        tell(n, {-1, 0, 0, 0});
        arrive(barrier(K_FULL));
        tell_summed(n - 1);
    }
};

}  // namespace
