// Attention forward, for any ISA with vectors.
//
// A block of query rows goes over the tiles of keys that it sees, R rows at a time: S = Q K^T of R x 64 in registers, the online
// softmax of these rows (scores stay in the first cache), O = O * correction + P V. So a tile of K and V is read from the second
// cache once for R rows, and memory sees neither S nor P (Dao et al., FlashAttention, 2022; FlashAttention-2, 2023).
//
// Per row and tile: 64 * (head + columns) multiply-adds, 2 FLOPs each; 64 * (head + columns) / R words of K and V from the second
// cache; about 15 instructions for each vector of 64 scores: a head of 64 in bf16 (VDPBF16PS) spends a quarter of its time on
// the softmax, a head of 128 in float32 a sixteenth. What limits it is the rate of multiply-adds.
#pragma once

#include "multiply.hpp"
#include "powers.hpp"

namespace opkit::attention {
namespace {

// Rows that are computed together, and what is known of them so far.
template <class P>
struct Group {
    using V = typename P::V;
    static constexpr int R = V::kGroup;
    const typename P::Cell* queries;   // R rows, `pitch` cells apart
    int64_t pitch;
    float* largest;                    // R: of the scores
    float* total;                      // R vectors: parts of the sums of exponentials
    float* sums;                       // up to R rows of `columns`
    int64_t rows;                      // that there are
    const uint64_t* visible;           // null: everything
    Span span;                         // of the keys that one of them sees
    const float* biases;               // kKeys to a row
    int64_t first;                     // the number of the first in the block
};

template <class P>
struct Scratch {
    using V = typename P::V;
    alignas(64) float scores[V::kGroup * kKeys];
    alignas(64) typename P::Cell cells[V::kGroup * kKeys];
    alignas(64) float correction[rounded_up(V::kGroup, V::kLanes)];  // what sums so far must be multiplied by
};

template <class P>
__attribute__((noinline)) void scores(const Block& block, const Group<P>& group, const uint32_t* keys, float* out) {
    using V = typename P::V;
    constexpr int COLS = V::kGroupCols;
    static_assert(kKeys % (COLS * V::kLanes) == 0);
    const Span span = group.span.widened(COLS * V::kLanes);
    for (int64_t j = span.first; j < span.last; j += COLS * V::kLanes) {
        const auto part = [&](const typename P::Cell* queries, const uint32_t* words, int64_t steps, auto first) {
            typename V::Floats sum[V::kGroup][COLS];
            multiply<P, V::kGroup, COLS>(sum, queries, group.pitch, words, kKeys, steps);
            OPKIT_UNROLL
            for (int i = 0; i < V::kGroup; ++i)
                OPKIT_UNROLL
                for (int c = 0; c < COLS; ++c) {
                    float* at = out + i * kKeys + j + c * V::kLanes;
                    V::store(at, first.value ? sum[i][c] : V::plus(V::load(at), sum[i][c]));
                }
        };
        in_stretches<P>(group.queries, keys + j, kKeys, cells_of<P>(block.head), part);
    }
}

// Scores as they are defined.
template <class P>
__attribute__((noinline)) void adjust(const Block& block, const Group<P>& group, float* scores) {
    using V = typename P::V;
    const auto scale = V::broadcast(block.scale), cap = V::broadcast(block.softcap);
    const auto inverse = V::broadcast(block.softcap > 0 ? 1.0f / block.softcap : 0.0f);
    for (int64_t at = 0; at < V::kGroup * kKeys; at += V::kLanes) {
        auto score = V::times(V::load(scores + at), scale);
        if (block.softcap > 0) score = V::times(hyperbolic_tangent<V>(V::times(score, inverse)), cap);
        if (block.biased) score = V::plus(score, V::load(group.biases + at));
        V::store(scores + at, score);
    }
}

// Probabilities of N vectors of keys from `first` on, up to the factors that are known at the end, from scores that are still to
// be multiplied by a positive factor. Corrections are computed for all rows at once.
template <class P, bool PARTIAL, int N>
__attribute__((noinline)) void soften(const Group<P>& group, int64_t first, float factor, Scratch<P>& scratch) {
    using V = typename P::V;
    constexpr int kPadded = rounded_up(V::kGroup, V::kLanes);
    const auto load = [&](int i, int j) {
        const auto score = V::load(scratch.scores + i * kKeys + first + j * V::kLanes);
        if constexpr (PARTIAL) return V::where(V::bits(group.visible[i] >> first, j), score, V::broadcast(-__builtin_inff()));
        return score;
    };
    alignas(64) float largest[kPadded] = {}, base[kPadded] = {};
    __builtin_memcpy(largest, group.largest, 4 * V::kGroup);
    for (int i = 0; i < V::kGroup; ++i) {
        auto top = load(i, 0);
        OPKIT_UNROLL
        for (int j = 1; j < N; ++j) top = V::greatest(top, load(i, j));
        base[i] = V::greatest_lane(top) * factor;
    }
    const auto finite = [](auto x) { return V::least(V::broadcast(__FLT_MAX__), V::greatest(V::broadcast(-__FLT_MAX__), x)); };
    for (int i = 0; i < V::kGroup; i += V::kLanes) {
        const auto before = V::load(largest + i), after = V::greatest(V::load(base + i), before);
        V::store(largest + i, after);
        V::store(base + i, finite(after));
        V::store(scratch.correction + i, exponential<V, 6>(V::minus(finite(before), finite(after))));
    }
    __builtin_memcpy(group.largest, largest, 4 * V::kGroup);
    for (int i = 0; i < V::kGroup; ++i) {
        const bool far = __builtin_fabsf(base[i]) > kFar;
        auto sum = V::times(V::load(group.total + i * V::kLanes), V::broadcast(scratch.correction[i]));
        typename V::Floats powers[N];
        OPKIT_UNROLL
        for (int j = 0; j < N; ++j) {
            auto score = load(i, j), multiple = V::broadcast(factor);
            if (__builtin_expect(far, 0)) {
                score = V::times(score, multiple);
                multiple = V::broadcast(1.0f);
            }
            auto power = exponential<V, P::kDegree, true>(V::fused_minus(score, multiple, V::broadcast(base[i])));
            if constexpr (PARTIAL) power = V::where(V::bits(group.visible[i] >> first, j), power, V::zero());
            sum = V::plus(sum, power);
            powers[j] = power;
        }
        P::store_weights(scratch.cells + (i * kKeys + first) / P::kPerCell, powers);
        V::store(group.total + i * V::kLanes, sum);
    }
}

template <class P, int COLS>
inline __attribute__((always_inline)) void add_columns(const Block& block, const Group<P>& group, const Scratch<P>& scratch,
                                                       const uint32_t* values, int64_t at) {
    using V = typename P::V;
    typename V::Floats sum[V::kGroup][COLS];
    const int64_t first = group.span.first / P::kPerCell, last = cells_of<P>(group.span.last);
    multiply<P, V::kGroup, COLS>(sum, scratch.cells + first, kKeys / P::kPerCell, values + first * block.columns + at, block.columns,
                                 last - first);
    OPKIT_UNROLL
    for (int i = 0; i < V::kGroup; ++i) {
        if (i == group.rows) break;
        const auto factor = V::broadcast(scratch.correction[i]);
        float* row = group.sums + i * block.columns + at;
        OPKIT_UNROLL
        for (int c = 0; c < COLS; ++c) V::store(row + c * V::kLanes, V::fma(V::load(row + c * V::kLanes), factor, sum[i][c]));
    }
}

template <class P>
__attribute__((noinline)) void add_values(const Block& block, const Group<P>& group, const Scratch<P>& scratch,
                                          const uint32_t* values) {
    using V = typename P::V;
    constexpr int COLS = V::kGroupCols;
    int64_t at = 0;
    for (; at + COLS * V::kLanes <= block.columns; at += COLS * V::kLanes) add_columns<P, COLS>(block, group, scratch, values, at);
    for (; at < block.columns; at += V::kLanes) add_columns<P, 1>(block, group, scratch, values, at);
}

// Where values that are no numbers are hidden from some rows: key after key, of each row those that it sees. It is slow, and rare.
template <class P>
__attribute__((noinline)) void add_visible(const Block& block, const Group<P>& group, const Scratch<P>& scratch,
                                           const uint32_t* values) {
    for (int64_t i = 0; i < group.rows; ++i) {
        float* row = group.sums + i * block.columns;
        for (int64_t c = 0; c < block.columns; ++c) row[c] *= scratch.correction[i];
        for (int64_t key = 0; key < kKeys; ++key) {
            if (!(group.visible[i] >> key & 1)) continue;
            const float weight = P::weight(scratch.cells + i * (kKeys / P::kPerCell), key);
            const uint32_t* words = values + key / P::kPerCell * block.columns;
            for (int64_t c = 0; c < block.columns; ++c) row[c] += weight * P::value(words[c], key);
        }
    }
}

template <class P>
void add_tile(const Block& block, const Group<P>& group, int64_t tile, Scratch<P>& scratch) {
    const uint32_t* keys = block.keys + tile * block.of_keys;
    const uint32_t* values = block.values + tile * (kKeys / P::kPerCell) * block.columns;
    scores<P>(block, group, keys, scratch.scores);
    const bool adjusted = block.biased || block.apply || block.softcap > 0 || !(block.scale > 0) || block.log_totals;
    if (adjusted) adjust<P>(block, group, scratch.scores);
    if (block.apply) block.apply(block.context, tile, group.first, group.rows, scratch.scores, kKeys);
    const float factor = adjusted ? 1.0f : block.scale;
    constexpr int N = kKeys / P::V::kLanes;
    const bool upper = group.span.first >= kKeys / 2;
    if (!group.visible)
        soften<P, false, N>(group, 0, factor, scratch);
    else if (upper || group.span.last <= kKeys / 2)
        soften<P, true, N / 2>(group, upper ? kKeys / 2 : 0, factor, scratch);
    else
        soften<P, true, N>(group, 0, factor, scratch);
    if (group.visible && block.unclean[tile])
        add_visible<P>(block, group, scratch, values);
    else
        add_values<P>(block, group, scratch, values);
}

// The memory of a block, cut up.
template <class P>
struct Memory {
    typename P::Cell* queries;
    float *largest, *total, *biases;
    uint64_t* visible;
    int64_t pitch, groups;
    explicit Memory(const Block& block) {
        using V = typename P::V;
        groups = (block.rows + V::kGroup - 1) / V::kGroup;
        const int64_t rows = groups * V::kGroup;
        pitch = cells_of<P>(block.head);
        total = static_cast<float*>(block.memory);
        visible = reinterpret_cast<uint64_t*>(total + rows * V::kLanes);
        largest = reinterpret_cast<float*>(visible + rounded_up(rows, 8));
        queries = reinterpret_cast<typename P::Cell*>(largest + rounded_up(rows, 16));
        biases = reinterpret_cast<float*>(queries + rounded_up(rows * pitch, 16));  // last: there is room for them only if there are any
    }
};

template <class P>
void begin(const Block& block, const Memory<P>& memory) {
    using V = typename P::V;
    const auto* rows = static_cast<const typename P::Input*>(block.queries);
    for (int64_t i = 0; i < memory.groups * V::kGroup; ++i) {
        typename P::Cell* cells = memory.queries + i * memory.pitch;
        if (i < block.rows)
            P::fill(cells, rows + i * block.query_pitch, block.head);
        else
            __builtin_memset(cells, 0, static_cast<size_t>(memory.pitch) * sizeof *cells);
        const bool sunk = block.sink > -__builtin_inff();
        memory.largest[i] = sunk ? block.sink : -__builtin_inff();
        for (int lane = 0; lane < V::kLanes; ++lane) memory.total[i * V::kLanes + lane] = sunk && lane == 0 ? kWeight : 0.0f;
        memory.visible[i] = 0;
    }
    __builtin_memset(block.sums, 0, static_cast<size_t>(block.rows * block.columns) * 4);
    if (block.biased) __builtin_memset(memory.biases, 0, static_cast<size_t>(memory.groups * V::kGroup * kKeys) * 4);
}

template <class P>
void end(const Block& block, const Memory<P>& memory) {
    using V = typename P::V;
    for (int64_t i = 0; i < block.rows; ++i) {
        float total = 0.0f;
        for (int lane = 0; lane < V::kLanes; ++lane) total += memory.total[i * V::kLanes + lane];
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        float* row = block.sums + i * block.columns;
        for (int64_t c = 0; c < block.columns; c += V::kLanes) V::store(row + c, V::times(V::load(row + c), V::broadcast(inverse)));
        const float log_total = total == 0.0f ? 0.0f : __builtin_logf(total / kWeight);
        block.lse[i] = total == 0.0f ? -__builtin_inff() : block.log_totals ? memory.largest[i] : memory.largest[i] + log_total;
        if (block.log_totals) block.log_totals[i] = log_total;
    }
}

template <class P>
void attend(const Block& block) {
    using V = typename P::V;
    const Memory<P> memory(block);
    Scratch<P> scratch;
    begin<P>(block, memory);
    for (int64_t tile = block.first; tile < block.last; ++tile) {
        const State state = block.prepare(block.context, tile, memory.visible, memory.biases);
        if (state == kHidden) continue;
        for (int64_t g = 0, i = 0; g < memory.groups; ++g, i += V::kGroup) {
            const uint64_t* visible = state == kPartial ? memory.visible + i : nullptr;
            const int64_t rows = block.rows - i < V::kGroup ? block.rows - i : V::kGroup;
            const Span span = visible ? span_of(visible, rows) : Span();
            if (span.empty()) continue;
            add_tile<P>(block, {memory.queries + i * memory.pitch, memory.pitch, memory.largest + i, memory.total + i * V::kLanes,
                                block.sums + i * block.columns, rows, span.whole ? nullptr : visible, span, memory.biases + i * kKeys, i}, tile, scratch);
        }
    }
    end<P>(block, memory);
}

}  // namespace
}  // namespace opkit::attention
