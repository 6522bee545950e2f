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
    const float* biases;               // kKeys to a row
    int64_t first;                     // the number of the first in the block
};

template <class P>
struct Scratch {
    using V = typename P::V;
    alignas(64) float scores[V::kGroup * kKeys];
    alignas(64) typename P::Cell cells[V::kGroup * kKeys];
    float correction[V::kGroup];
};

template <class P>
__attribute__((noinline)) void scores(const Block& block, const Group<P>& group, const uint32_t* keys, int64_t count, float* out) {
    using V = typename P::V;
    constexpr int COLS = V::kGroupCols;
    static_assert(kKeys % (COLS * V::kLanes) == 0);
    constexpr int64_t kPerStep = P::kPhases * P::kPerCell;
    for (int64_t j = 0; j < count; j += COLS * V::kLanes) {
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
        in_stretches<P>(group.queries, keys + j, kKeys, (block.head + kPerStep - 1) / kPerStep, part);
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

// Probabilities of one row, up to the factor that is known at the end, from scores that are still to be multiplied by a positive
// factor; what sums so far must be multiplied by.
template <class P, bool PARTIAL>
inline __attribute__((always_inline)) float softened(const float* scores, float factor, uint64_t visible, float* largest,
                                                     float* total, typename P::Cell* cells) {
    using V = typename P::V;
    constexpr int N = kKeys / V::kLanes;
    typename V::Floats score[N];
    OPKIT_UNROLL
    for (int j = 0; j < N; ++j) {
        score[j] = V::load(scores + j * V::kLanes);
        if constexpr (PARTIAL) score[j] = V::where(V::bits(visible, j), score[j], V::broadcast(-__builtin_inff()));
    }
    auto top = score[0];
    OPKIT_UNROLL
    for (int j = 1; j < N; ++j) top = V::greatest(top, score[j]);
    const float before = *largest, found = V::greatest_lane(top) * factor, after = found > before ? found : before;
    const float base = after == -__builtin_inff() ? 0.0f : after;
    auto sum = V::load(total);
    float correction = 1.0f;
    if (after != before) {
        correction = exponential_of<V, 6>(before - base);
        sum = V::times(sum, V::broadcast(correction));
        *largest = after;
    }
    if (__builtin_expect(__builtin_fabsf(base) > kFar, 0)) {
        OPKIT_UNROLL
        for (int j = 0; j < N; ++j) score[j] = V::times(score[j], V::broadcast(factor));
        factor = 1.0f;
    }
    OPKIT_UNROLL
    for (int j = 0; j < N; ++j) {
        auto power = exponential<V, P::kDegree>(V::fused_minus(score[j], V::broadcast(factor), V::broadcast(base)));
        if constexpr (PARTIAL) power = V::where(V::bits(visible, j), power, V::zero());
        sum = V::plus(sum, power);
        score[j] = power;
    }
    P::store_weights(cells, score);
    V::store(total, sum);
    return correction;
}

template <class P, int COLS>
inline __attribute__((always_inline)) void add_columns(const Block& block, const Group<P>& group, const Scratch<P>& scratch,
                                                       const uint32_t* values, int64_t count, int64_t at) {
    using V = typename P::V;
    constexpr int64_t kPerStep = P::kPhases * P::kPerCell;
    typename V::Floats sum[V::kGroup][COLS];
    multiply<P, V::kGroup, COLS>(sum, scratch.cells, kKeys / P::kPerCell, values + at, block.columns, (count + kPerStep - 1) / kPerStep);
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
                                          const uint32_t* values, int64_t count) {
    using V = typename P::V;
    constexpr int COLS = V::kGroupCols;
    int64_t at = 0;
    for (; at + COLS * V::kLanes <= block.columns; at += COLS * V::kLanes) add_columns<P, COLS>(block, group, scratch, values, count, at);
    for (; at < block.columns; at += V::kLanes) add_columns<P, 1>(block, group, scratch, values, count, at);
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
            const uint32_t* words = values + key / P::kKeysPerWord * block.columns;
            for (int64_t c = 0; c < block.columns; ++c) row[c] += weight * P::value(words[c], key);
        }
    }
}

template <class P>
void add_tile(const Block& block, const Group<P>& group, int64_t tile, Scratch<P>& scratch) {
    const uint32_t* keys = block.keys + tile * block.of_keys;
    const uint32_t* values = block.values + tile * (kKeys / P::kKeysPerWord) * block.columns;
    const int64_t left = block.count - tile * kKeys, count = left < kKeys ? left : kKeys;
    scores<P>(block, group, keys, count, scratch.scores);
    const bool adjusted = block.biased || block.apply || block.softcap > 0 || !(block.scale > 0) || block.log_totals;
    if (adjusted) adjust<P>(block, group, scratch.scores);
    if (block.apply) block.apply(block.context, tile, group.first, group.rows, scratch.scores, kKeys);
    const float factor = adjusted ? 1.0f : block.scale;
    for (int64_t i = 0; i < P::V::kGroup; ++i) {
        const float* row = scratch.scores + i * kKeys;
        float* total = group.total + i * P::V::kLanes;
        auto* cells = scratch.cells + i * (kKeys / P::kPerCell);
        scratch.correction[i] =
            group.visible ? softened<P, true>(row, factor, group.visible[i], group.largest + i, total, cells)
                          : softened<P, false>(row, factor, 0, group.largest + i, total, cells);
    }
    if (group.visible && block.unclean[tile])
        add_visible<P>(block, group, scratch, values);
    else
        add_values<P>(block, group, scratch, values, count);
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
        pitch = (block.head + P::kPerCell - 1) / P::kPerCell;
        if (P::kPhases == 2) pitch = rounded_up(pitch, 2);
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
        for (int lane = 0; lane < V::kLanes; ++lane) memory.total[i * V::kLanes + lane] = sunk && lane == 0 ? 1.0f : 0.0f;
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
        const float log_total = total == 0.0f ? 0.0f : __builtin_logf(total);
        block.lse[i] = total == 0.0f ? -__builtin_inff() : block.log_totals ? memory.largest[i] : memory.largest[i] + log_total;
        if (block.log_totals) block.log_totals[i] = log_total;
    }
}

bool none_visible(const uint64_t* visible, int rows) {
    uint64_t any = 0;
    for (int i = 0; i < rows; ++i) any |= visible[i];
    return any == 0;
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
            if (visible && none_visible(visible, V::kGroup)) continue;
            const int64_t rows = block.rows - i < V::kGroup ? block.rows - i : V::kGroup;
            add_tile<P>(block, {memory.queries + i * memory.pitch, memory.pitch, memory.largest + i, memory.total + i * V::kLanes,
                                block.sums + i * block.columns, rows, visible, memory.biases + i * kKeys, i}, tile, scratch);
        }
    }
    end<P>(block, memory);
}

}  // namespace
}  // namespace opkit::attention
