// Which keys a block and its warps read, and how they load them.
#pragma once

#include "decode_parts.cuh"

namespace {

constexpr int PAGE_ROWS = 16;  // keys that are loaded at once of a page, which has a multiple of them

// How a block is laid out, for heads of D and up to SETS sets of 16 rows of a tile: a warp's buffers have KEYS keys and as many values,
// 8 KB each, which come in boxes of BOX_ROWS of them.
template <int D_, bool PAGED_, int SETS_>
struct Layout {
    static constexpr bool PAGED = PAGED_;
    static constexpr int SETS = SETS_, ROWS = 16 * SETS, SHARERS = WARPS;
    static constexpr int D = D_, PARTS = D / 16, BOXES = D / COLUMNS;  // BOXES of 64 columns next to one another are one of rows
    static constexpr int KEYS = 4096 / D, BYTES = KEYS * D * 2;
    static constexpr int BOX_ROWS = PAGED ? PAGE_ROWS : KEYS, BOXES_AT_ONCE = BOXES, BOX_BYTES = BOX_ROWS * D * 2;
    static constexpr int QUERY_BYTES = D * 2 + 16;  // of a row of queries: 8 of them lie in different banks
    static constexpr int BUFFERS = WARPS * 2 * BYTES, QUERIES = ROWS * QUERY_BYTES, FOUND = WARPS * ROWS * sizeof(float2);
    static constexpr int SHARED = BUFFERS + QUERIES + FOUND + WARPS * 2 * 8 + 1024;  // boxes begin at multiples of 1024
};

// ---- which keys -----------------------------------------------------------------------------------------------------------

// The keys that a tile sees, from `begin` to before `end`, of which the first step's are from `base` on; with pages, those of a row
// of the table.
struct Reach {
    int base, begin, end;
    int64_t row;
};

// Those where there are none.
SM90 Reach nothing() { return {0, 0, 0, 0}; }

// Those of a query, whose sequence each warp finds: a lane looks at every LANES-th.
template <typename L>
SM90 Reach reach_in_pages(const Pages& pages, int queries, int query) {
    for (int first = 0; first < pages.sequences; first += LANES) {
        const int sequence = first + threadIdx.x % LANES, read = min(sequence, pages.sequences - 1);
        const int start = pages.starts.at(read, queries), after = pages.starts.at(read + 1, queries);
        const int length = pages.lengths.at(read, pages.keys);
        const bool mine = sequence < pages.sequences && start <= query && query < after;
        const uint32_t found = __ballot_sync(~0u, mine);
        if (found == 0) continue;
        const int lane = __ffs(found) - 1, position = __shfl_sync(~0u, length - after + query, lane);
        const int begin = max(position + pages.lower, 0), end = min(position + pages.upper + 1, __shfl_sync(~0u, length, lane));
        if (begin >= end) return nothing();
        return {begin / L::KEYS * L::KEYS, begin, end, (first + lane) * pages.row};
    }
    return nothing();
}

template <typename L>
SM90 Reach reach_of(const Problem& problem, const Tile& tile) {
    if constexpr (L::PAGED) return reach_in_pages<L>(problem.pages, problem.batch, tile.batch);
    else return {problem.first, problem.first, problem.first + problem.seen, 0};
}

// The steps of one of SHARERS that share a split, KEYS keys each: the first's first key, and how many there are, each SHARERS steps
// after the one before.
struct Steps {
    Reach reach;
    int first, count;
};

template <typename L>
SM90 Steps steps_of(const Reach& reach, unsigned splits, int split, int sharer) {
    const unsigned all = (reach.end - reach.base + L::KEYS - 1) / L::KEYS;
    const int each = all / splits, more = all % splits, first = split * each + min(split, more) + sharer;
    return {reach, reach.base + first * L::KEYS, (each + (split < more) - sharer + L::SHARERS - 1) / L::SHARERS};
}

// ---- loading --------------------------------------------------------------------------------------------------------------

// A key's page, and its place in it.
struct Place {
    int page, within;
};

SM90 Place place_of(const Pages& pages, const Reach& reach, int key) {
    const int number = key / pages.size;
    return {pages.table.at(reach.row + number, pages.count - 1), key - number * pages.size};
}

// Eight channels of a row of a tile's queries from `column` on, zeros where there is no such row.
SM90 int4 eight_of_query(const Problem& problem, const Tile& tile, int row, int column) {
    if (row >= problem.height()) return {0, 0, 0, 0};
    const Row of = row_of(problem, tile, row);
    return *reinterpret_cast<const int4*>(first_of<const T>(problem.q, of.batch, of.head) + of.query * problem.q.row + column);
}

// The keys from `key` on, or their values, to a warp's buffer; of pages a lane loads a box, if some of it is seen.
template <typename L>
SM90 void load(const Problem& problem, const CUtensorMap* map, const Tile& tile, const Reach& reach, int key, uint32_t to,
               uint32_t filled) {
    const int lane = threadIdx.x % LANES;
    if constexpr (L::PAGED) {
        const int boxes = min((reach.end - key + L::BOX_ROWS - 1) / L::BOX_ROWS, L::KEYS / L::BOX_ROWS);
        if (lane >= boxes) return;
        if (lane == 0) expect_bytes(filled, boxes * L::BOX_BYTES);
        const Place place = place_of(problem.pages, reach, key + lane * L::BOX_ROWS);
        load_boxes(to + lane * L::BOX_BYTES, map, filled, place.within, tile.head, place.page);
    } else if (lane == 0) {
        expect_bytes(filled, L::BYTES);
        load_boxes(to, map, filled, key, tile.head, tile.batch);
    }
}

}  // namespace
