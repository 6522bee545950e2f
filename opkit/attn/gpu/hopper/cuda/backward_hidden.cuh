// What the backward hides, and what is not finite there: it must not reach what does not see it.
#pragma once

#include "backward_tiles.cuh"

namespace {

using namespace sm90;

// Zeros in place of what is not finite: times the zero of what is hidden it would be NaN.
SM90 uint32_t finite(uint32_t both) {
    constexpr uint32_t TOP = std::is_same<T, Half>::value ? 0x7C00u : 0x7F80u;
    if ((both & TOP) == TOP) both &= 0xFFFF0000u;
    if ((both >> 16 & TOP) == TOP) both &= 0x0000FFFFu;
    return both;
}

template <int BYTES>
SM90 void clean(uint32_t at, int lane) {
#pragma unroll 1
    for (int i = lane * 16; i < BYTES; i += LANES * 16) {
        const int4 x = load_four(at + i);
        const int4 y{int(finite(x.x)), int(finite(x.y)), int(finite(x.z)), int(finite(x.w))};
        if (x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w) store_four(at + i, y);
    }
}

// Of a block of queries, if these are hidden from keys of their gradients too, and of a warp's keys.
template <class S>
SM90 void clean_all(uint32_t base, int slot, uint32_t keys, int warp, int lane) {
    clean<S::BLOCK_BYTES>(base + S::Q + slot * S::BLOCK_BYTES, lane);
    if (S::HIDES_ROWS) clean<S::BLOCK_BYTES>(base + S::G + slot * S::BLOCK_BYTES, lane);
#pragma unroll 1
    for (int c = 0; c < S::BOXES; c++) clean<16 * ROW_BYTES>(keys + c * S::KEY_BOX + warp * 16 * ROW_BYTES, lane);
}

// Whether a query or a key is not finite, by its logits; or a value or a gradient, by its products.
template <int N>
SM90 bool not_finite(const float (&s)[N]) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < N; i++) found |= !(fabsf(s[i]) < INFINITY);
    return found;
}

// Whether some of the queries from `row` do not see some of 64 keys from `at`, or are not there; `keys` are those of the batch.
template <class S>
SM90 bool partial(const Problem& problem, int row, int at, int keys) {
    bool found = row + S::ROWS > problem.queries || at + HALF > keys;
    if (S::BANDED) found |= at + (HALF - 1) - row > problem.upper || at - row - (S::ROWS - 1) < problem.lower;
    return found;
}

// -infinity where a query does not see a key: by the band or, if there are segments, by the key's span, the first of which is at `spans`; s
// is (keys from `at`, queries from `row`). Returns whether spans say all.
template <class S, int N>
SM90 bool hide_beyond(const Problem& problem, float (&s)[N], uint32_t spans, int row, int at, int keys, int warp, int lane) {
    bool in_order = true;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int key = at + 16 * warp + lane / 4 + 8 * h, here = row + 2 * (lane % 4);
        int past = problem.queries, from = here;
        if constexpr (S::LISTED) {
            const float2 both = load_two(spans + (16 * warp + lane / 4 + 8 * h) * 8);
            from = __float_as_int(both.x), past = __float_as_int(both.y);
            in_order &= from >= 0;
            from &= 0x7fffffff;
        } else {
            if (S::BANDED) past = min(past, key - problem.lower + 1), from = key - problem.upper;
            if (key >= keys) past = 0;
        }
        past -= here, from -= here;
#pragma unroll
        for (int j = 0; j < N / 4; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int x = 8 * j + i;
                if (x >= past || ((S::BANDED || S::LISTED) && x < from)) s[4 * j + 2 * h + i] = -INFINITY;
            }
    }
    return __all_sync(~0u, in_order);
}

// -infinity where a query and a key are of different segments. A warp asks of all of its 16 keys at once who of the queries see each.
template <class S, int N>
SM90 void hide_others(const Problem& problem, float (&s)[N], int batch, int row, int at, int warp, int lane) {
    const int *of_queries = problem.lists.of_queries + batch * problem.lists.queries_batch, key = at + 16 * warp + lane % 16;
    const int *of_keys = problem.lists.of_keys + batch * problem.lists.keys_batch;
    const int mine = key < problem.keys ? of_keys[key * problem.lists.keys_row] : 0;  // what is not there is hidden elsewhere
#pragma unroll
    for (int from = 0; from < S::ROWS; from += LANES) {
        const int query = row + from + lane, theirs = query < problem.queries ? of_queries[query * problem.lists.queries_row] : 0;
        uint32_t seen[2] = {0, 0};  // by queries, for keys lane / 4 and 8 more
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint32_t by = __ballot_sync(~0u, theirs == __shfl_sync(~0u, mine, i));
            if (lane / 4 == i % 8) seen[i / 8] = by;
        }
#pragma unroll
        for (int i = 0; i < LANES / 2; i++) {  // two queries of eight, for either key
            const int of_32 = i / 4 * 8 + 2 * (lane % 4) + i % 2;
            if (!(seen[i / 2 % 2] >> of_32 & 1)) s[from / 2 + i] = -INFINITY;
        }
    }
}

// -infinity where a query does not see a key of 64 in a step in some buffer: by the band and the `keys` that there are, or by the mask. The
// keys are those from `at`, or of a published tile from its key `first` on: where steps are listed `at` is read anew, if it is needed.
template <class S, int N>
SM90 void hide_unseen(const Problem& problem, float (&s)[N], uint32_t base, int slot, const Published& step, uint32_t published, int first, int at,
                      int keys, int warp, int lane) {
    if constexpr (PROGRAM) {
        constexpr bool COPIED = S::BIT_BYTES != 0;
        Place place{0, 0, first + 16 * warp + lane / 4, step.row + 2 * (lane % 4)};  // in the tile, which is enough for a copy of its bits
        if constexpr (EVALUATED || !COPIED) {
            const Tile tile = read_tile(published);
            place.batch = tile.head / problem.key_heads, place.head = step.head % problem.heads, place.row += tile.at;
        }
        const Seen seen = seen_columns<N / 2, S::BANDED, COPIED>(problem, place, {base + S::BITS + slot * S::BIT_BYTES, step.place});
        hide(s, 0, seen.of[0]), hide(s, 1, seen.of[1]);
    } else {
        const bool all = hide_beyond<S>(problem, s, base + S::SPANS + first * 8, step.row, at, keys, warp, lane);
        if (!S::LISTED || all) return;
        const Tile tile = read_tile(published);
        hide_others<S>(problem, s, tile.head / problem.key_heads, step.row, tile.at + first, warp, lane);
    }
}

}  // namespace
