// What queries see, as bits of columns: what hides logits, and the parts of which a mask's program is put together, of which
// opkit/attn/gpu/hopper/forward_kinds.py writes an expression, MASK_PROGRAM. Who includes this file has a Problem, and says whether its
// logits are BY_KEYS: then rows are keys and columns are queries, else rows are queries and columns are keys.
#pragma once

#include "asked.cuh"

namespace {

using namespace sm90;

// Of a thread's columns 8 * i + j of a row, j < 2, those up to `last`: bits 2 * i + j, of which several are tested at once.
SM90 uint32_t columns_to(int last) {
    const int count = last < 0 ? 0 : min(last / 8 * 2 + min(last % 8 + 1, 2), 32);
    return count < 32 ? (1u << count) - 1 : ~0u;
}

template <int N>
SM90 void hide(float (&s)[N], int half, uint32_t seen) {
    static_assert(N / 2 <= 32);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        float& logit = s[i / 2 * 4 + 2 * half + i % 2];
        logit = seen >> i & 1 ? logit : -INFINITY;
    }
}

// Some columns, COUNT as columns_to counts them from `column` on, or that one, of two rows: `row` and `row + 8`; what is seen of each.
struct Place {
    int batch, head, row, column;
};
struct Seen {
    uint32_t of[2];
    __device__ __forceinline__ Seen operator~() const { return {{~of[0], ~of[1]}}; }
    __device__ __forceinline__ Seen operator&(const Seen& x) const { return {{of[0] & x.of[0], of[1] & x.of[1]}}; }
    __device__ __forceinline__ Seen operator|(const Seen& x) const { return {{of[0] | x.of[0], of[1] | x.of[1]}}; }
};
// Of a tile's bits the place in global memory, and if they have one where a copy is.
struct Copied {
    uint32_t words;
    int place;
};
template <int COUNT>
SM90 int column_of(int i) { return COUNT == 1 ? 0 : i / 2 * 8 + i % 2; }

SM90 int64_t start_of(const Slot& slot, const Place& at) { return at.batch * slot.batch + at.head * slot.head; }
SM90 int64_t by_row(const Slot& slot) { return BY_KEYS ? slot.key : slot.query; }
SM90 int64_t by_column(const Slot& slot) { return BY_KEYS ? slot.query : slot.key; }
SM90 int columns_in(const Problem& problem) { return BY_KEYS ? problem.queries : problem.keys; }
SM90 int row_of(const Problem& problem, const Place& at, int half) {
    return min(at.row + 8 * half, (BY_KEYS ? problem.keys : problem.queries) - 1);
}
SM90 int number_of(const Problem& problem, const Slot& slot, const Place& at, int half) {  // of a row
    return static_cast<const int*>(slot.data)[start_of(slot, at) + row_of(problem, at, half) * by_row(slot)];
}

// How many keys a batch has.
SM90 int keys_of(const Problem& problem, int batch) {
    if (!LENGTHS) return problem.keys;
    return min(max(problem.mask.lengths[batch * problem.mask.lengths_batch], 0), problem.keys);
}

// Whether two neighbours can be read at once, of so many bytes, of all columns.
template <int COUNT>
SM90 bool two_at_once(const Problem& problem, const Slot& slot, const Place& at, const void* row, int bytes) {
    if (COUNT == 1 || by_column(slot) != 1 || reinterpret_cast<uintptr_t>(row) % bytes) return false;
    return at.column + column_of<COUNT>(COUNT - 1) < columns_in(problem);
}

SM90 uint32_t between(int first, int last, int column) { return columns_to(last - column) & ~columns_to(first - 1 - column); }
SM90 Seen in_band(const Place& at, int lower, int upper) {
    const int first = at.row + (BY_KEYS ? -upper : lower), last = at.row + (BY_KEYS ? -lower : upper);
    return {{between(first, last, at.column), between(first + 8, last + 8, at.column)}};
}
SM90 Seen in_band(const Problem& problem, const Place& at, int n) {
    return in_band(at, problem.mask.numbers[n], problem.mask.numbers[n + 1]);
}
template <int COUNT>
SM90 Seen in_band_at(const Problem& problem, const Place& at, int slot, int n) {
    constexpr int64_t FAR = 1 << 30;
    const int lower = problem.mask.numbers[n], upper = problem.mask.numbers[n + 1];
    const auto near = [](int64_t place) { return int(min(max(place, -FAR), FAR)); };
    Seen seen = {};
    if constexpr (BY_KEYS) {
        const Slot& numbers = problem.mask.slots[slot];
        const int* of_queries = static_cast<const int*>(numbers.data) + start_of(numbers, at);
#pragma unroll 8
        for (int i = 0; i < COUNT; i++) {
            const int query = min(at.column + column_of<COUNT>(i), problem.queries - 1);
            const int64_t place = int64_t(query) + of_queries[query * numbers.query];
            const int first = near(place + lower), last = near(place + upper);
            if (first <= at.row && at.row <= last) seen.of[0] |= 1u << i;
            if (first <= at.row + 8 && at.row + 8 <= last) seen.of[1] |= 1u << i;
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t place = int64_t(at.row) + 8 * half + number_of(problem, problem.mask.slots[slot], at, half);
            seen.of[half] = between(near(place + lower), near(place + upper), at.column);
        }
    }
    return seen;
}
// Keys before `length`.
SM90 Seen before(int length, const Place& at) {
    if (BY_KEYS) return {{at.row < length ? ~0u : 0u, at.row + 8 < length ? ~0u : 0u}};
    const uint32_t seen = columns_to(length - 1 - at.column);
    return {{seen, seen}};
}
SM90 Seen before_length(const Problem& problem, const Place& at, int slot) {
    const Slot& lengths = problem.mask.slots[slot];
    return before(static_cast<const int*>(lengths.data)[start_of(lengths, at)], at);
}
template <int COUNT>
SM90 Seen of_segment(const Problem& problem, const Place& at, int of_queries, int of_keys) {
    const Slot& slot = problem.mask.slots[BY_KEYS ? of_queries : of_keys];
    const Slot& own = problem.mask.slots[BY_KEYS ? of_keys : of_queries];
    const int mine[] = {number_of(problem, own, at, 0), number_of(problem, own, at, 1)};
    const int* theirs = static_cast<const int*>(slot.data) + start_of(slot, at);
    Seen seen = {};
    const auto compare = [&](int i, int number) {
        if (number == mine[0]) seen.of[0] |= 1u << i;
        if (number == mine[1]) seen.of[1] |= 1u << i;
    };
    if (two_at_once<COUNT>(problem, slot, at, theirs, sizeof(int2))) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            const int2 two = *reinterpret_cast<const int2*>(theirs + at.column + column_of<COUNT>(i));
            compare(i, two.x), compare(i + 1, two.y);
        }
        return seen;
    }
#pragma unroll 8
    for (int i = 0; i < COUNT; i++) compare(i, theirs[min(at.column + column_of<COUNT>(i), columns_in(problem) - 1) * by_column(slot)]);
    return seen;
}
template <int COUNT>
SM90 Seen where_true(const Problem& problem, const Place& at, int number) {
    const Slot& slot = problem.mask.slots[number];
    Seen seen = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint8_t* bools = static_cast<const uint8_t*>(slot.data) + start_of(slot, at) + row_of(problem, at, half) * by_row(slot);
        if (two_at_once<COUNT>(problem, slot, at, bools, 2)) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 2) {
                const uint32_t two = *reinterpret_cast<const uint16_t*>(bools + at.column + column_of<COUNT>(i));
                seen.of[half] |= ((two | two >> 7) & 3) << i;  // bools are 0 or 1
            }
            continue;
        }
#pragma unroll 8
        for (int i = 0; i < COUNT; i++)
            if (bools[min(at.column + column_of<COUNT>(i), columns_in(problem) - 1) * by_column(slot)]) seen.of[half] |= 1u << i;
    }
    return seen;
}

// The functions of users, of which a mask's program and SCORE may consist.
#ifdef USER_FUNCTIONS
USER_FUNCTIONS
#endif

// Where a function of query and key is true.
template <int COUNT, class Function>
SM90 Seen where_holds(const Problem& problem, const Place& at, const Function& function) {
    Seen seen = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = row_of(problem, at, half);
#pragma unroll 8
        for (int i = 0; i < COUNT; i++) {
            const int column = min(at.column + column_of<COUNT>(i), columns_in(problem) - 1);
            if (BY_KEYS ? function(column, row) : function(row, column)) seen.of[half] |= 1u << i;
        }
    }
    return seen;
}

// Where in `words` the bits of a tile are; or NO_BITS, ALL_FALSE, ALL_TRUE. Tiles are counted by queries, then by keys.
SM90 int place_of_bits(const Problem& problem, int batch, int head, int tile) {
    const Bits& bits = problem.mask.bits;
    return bits.places[batch * bits.batch + head * bits.head + tile];
}

// What a mask says of a tile that has no bits.
template <int COUNT, bool BANDED>
SM90 Seen evaluated(const Problem& problem, const Place& at) {
    Seen seen = before(keys_of(problem, at.batch), at);
    if (BANDED) seen = seen & in_band(at, problem.lower, problem.upper);
    return seen & Seen(MASK_PROGRAM);
}

// Which of some columns two rows see: of queries that are there, all that their mask says. Bits are a row's one after another
// (opkit/attn/gpu/device/tile_lists.py): a thread's columns of 32 are a byte. COPIED: they are in shared memory.
template <int COUNT, bool BANDED, bool COPIED = false>
SM90 Seen seen_columns(const Problem& problem, const Place& at, const Copied& copied = {}) {
    constexpr int ROWS = BY_KEYS ? TILE_KEYS : TILE_QUERIES, WORDS = (BY_KEYS ? TILE_QUERIES : TILE_KEYS) / 32;
    static_assert(COUNT == 1 || COUNT % 16 == 0);
    const int query = BY_KEYS ? at.column : at.row, key = BY_KEYS ? at.row : at.column;
    const int tile = query / TILE_QUERIES * ((problem.keys + TILE_KEYS - 1) / TILE_KEYS) + key / TILE_KEYS;
    const int place = COPIED ? copied.place : place_of_bits(problem, at.batch, at.head, tile);
    if (EVALUATED && place == NO_BITS) return evaluated<COUNT, BANDED>(problem, at);
    if (place < 0) return place == ALL_TRUE ? Seen{{~0u, ~0u}} : Seen{};
    const uint32_t* words = problem.mask.bits.words + (int64_t(place) * ROWS + at.row % ROWS) * WORDS + at.column / 32 % WORDS;
    const int byte = at.column % 8 / 2 * 8;
    if constexpr (COUNT == 1) {
        return {{*words >> (byte + at.column % 32 / 8 * 2 + at.column % 2) & 1, 0}};
    } else {
        struct alignas(COUNT / 2) Row {
            uint32_t words[COUNT / 8];
        };
        Seen seen = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Row row;
            if constexpr (COPIED) {
                static_assert(COUNT == 16 && WORDS == 2);
                const float2 both = load_two(copied.words + (at.row % ROWS + half * 8) * (WORDS * 4));
                row = {{__float_as_uint(both.x), __float_as_uint(both.y)}};
            } else {
                row = *reinterpret_cast<const Row*>(words + half * 8 * WORDS);
            }
#pragma unroll
            for (int i = 0; i < COUNT / 8; i++) seen.of[half] |= (row.words[i] >> byte & 0xff) << (8 * i);
        }
        return seen;
    }
}

}  // namespace
