// Attention backward, for any ISA with vectors: some query rows against one tile of keys.
//
// With P = exp(scale Q K^T - lse) (or less the largest logit, then less the logarithm of a sum), dP = dO V^T and dS = P (dP - delta), what is added is dQ += dS K, dK += dS^T Q, dV += P^T dO
// (Dao et al., FlashAttention, 2022). That are five products of rows x 64 x head multiply-adds; P and dS are transposed once, in the
// first caches, so that the last two products read them by rows as the others do. Sums stay in float32, and are added to in an order
// that the shape decides. What limits it is the rate of multiply-adds; for each of them there are 1/80 (head 64) exponentials.
#pragma once

#include "multiply.hpp"
#include "powers.hpp"

namespace opkit::attention {
namespace {

template <class P, int R, int COLS, bool ADD>
inline __attribute__((always_inline)) void stretch_columns(const typename P::Cell* a, int64_t a_pitch, const uint32_t* b,
                                                           int64_t b_pitch, int64_t steps, float* c, int64_t c_pitch) {
    using V = typename P::V;
    typename V::Floats sum[R][COLS];
    multiply<P, R, COLS>(sum, a, a_pitch, b, b_pitch, steps);
    OPKIT_UNROLL
    for (int i = 0; i < R; ++i)
        OPKIT_UNROLL
        for (int j = 0; j < COLS; ++j) {
            float* at = c + i * c_pitch + j * V::kLanes;
            V::store(at, ADD ? V::plus(V::load(at), sum[i][j]) : sum[i][j]);
        }
}

template <class P, int R, int COLS, bool ADD>
inline __attribute__((always_inline)) void product_columns(const typename P::Cell* a, int64_t a_pitch, const uint32_t* b,
                                                           int64_t b_pitch, int64_t steps, float* c, int64_t c_pitch, int64_t at,
                                                           int64_t blocks, const Span* spans) {
    for (int64_t n = 0; n < blocks; ++n, a += R * a_pitch, c += R * c_pitch) {
        const Span span = spans[n];
        if constexpr (ADD) {
            const int64_t first = span.first / P::kPerCell, last = cells_of<P>(span.last);
            if (first < last)
                stretch_columns<P, R, COLS, true>(a + first, a_pitch, b + first * b_pitch + at, b_pitch, last - first, c + at, c_pitch);
        } else if (at < span.last && at + COLS * P::V::kLanes > span.first) {
            in_stretches<P>(a, b + at, b_pitch, steps, [&](const typename P::Cell* cells, const uint32_t* words, int64_t count, auto first) {
                stretch_columns<P, R, COLS, !first.value>(cells, a_pitch, words, b_pitch, count, c + at, c_pitch);
            });
        }
    }
}

// c[R][columns] = a[R][steps] b[steps][columns] for blocks of R rows, where a column lies in the block's span; or, adding, of rows or
// keys of a tile, += for those steps. Some columns of b stay in the first cache for all blocks.
template <class P, int R, int COLS, bool ADD>
__attribute__((noinline)) void product(const typename P::Cell* a, int64_t a_pitch, const uint32_t* b, int64_t b_pitch, int64_t steps,
                                       float* c, int64_t c_pitch, int64_t columns, int64_t blocks, const Span* spans) {
    constexpr int64_t kWide = COLS * P::V::kLanes;
    int64_t at = 0;
    // The last four vectors are two and two: a product of one has too few sums in flight.
    for (; at + kWide <= columns && (COLS != 3 || columns - at != 4 * P::V::kLanes); at += kWide)
        product_columns<P, R, COLS, ADD>(a, a_pitch, b, b_pitch, steps, c, c_pitch, at, blocks, spans);
    for (; at + 2 * P::V::kLanes <= columns; at += 2 * P::V::kLanes)
        product_columns<P, R, 2, ADD>(a, a_pitch, b, b_pitch, steps, c, c_pitch, at, blocks, spans);
    for (; at < columns; at += P::V::kLanes)
        product_columns<P, R, 1, ADD>(a, a_pitch, b, b_pitch, steps, c, c_pitch, at, blocks, spans);
}

// Scores of a row to probabilities, and gradients of probabilities to those of scores (without the scale).
template <class P>
inline __attribute__((always_inline)) void differentiate(const BackwardTile& tile, int64_t row, Span span, float* scores, float* gradients) {
    using V = typename P::V;
    const float lse = tile.lse[row];
    const auto scale = V::broadcast(tile.scale), base = V::broadcast(lse), delta = V::broadcast(tile.delta[row]);
    const bool plain = !(tile.softcap > 0) && !tile.biases && !tile.log_totals;
    const auto log_total = V::broadcast(tile.log_totals ? tile.log_totals[row] : 0.0f);
    const uint64_t visible = lse == -__builtin_inff() ? 0 : tile.visible ? tile.visible[row] : ~uint64_t{0};
    for (int64_t j = 0; j < kKeys / V::kLanes; ++j) {
        float *at = scores + j * V::kLanes, *slope = gradients + j * V::kLanes;
        if (j * V::kLanes < span.first || j * V::kLanes >= span.last) {
            V::store(at, V::zero());
            V::store(slope, V::zero());
            continue;
        }
        auto score = V::times(V::load(at), scale), inner = V::broadcast(1.0f);
        if (tile.softcap > 0) {
            const auto capped = hyperbolic_tangent<V>(V::times(score, V::broadcast(1.0f / tile.softcap)));
            inner = V::minus(inner, V::times(capped, capped));
            score = V::times(capped, V::broadcast(tile.softcap));
        }
        if (tile.biases) score = V::plus(score, V::load(tile.biases + row * kKeys + j * V::kLanes));
        const auto seen = V::bits(visible, static_cast<int>(j));
        auto above = plain ? V::fused_minus(V::load(at), scale, base) : V::minus(score, base);
        if (tile.log_totals) above = V::minus(above, log_total);
        const auto power = V::where(seen, exponential<V, P::kDegree>(above), V::zero());
        const auto found = V::times(V::times(power, V::minus(V::load(slope), delta)), inner);
        V::store(at, power);
        V::store(slope, V::where(seen, found, V::zero()));
    }
}

// The same for some rows whose scores users' functions change, or whose gradients are read by `tile.differentiate`.
template <class P>
__attribute__((noinline)) void differentiate_functions(const BackwardTile& tile, int64_t first, int64_t rows, float* scores,
                                                       float* gradients) {
    using V = typename P::V;
    float* before = static_cast<float*>(tile.memory) + 3 * kBackwardRows * kKeys;
    float* inner = before + kMostRows * kKeys;
    uint64_t seen[kMostRows];
    const bool capped = tile.softcap > 0;
    const auto scale = V::broadcast(tile.scale), cap = V::broadcast(tile.softcap), one = V::broadcast(1.0f);
    const auto inverse = V::broadcast(capped ? 1.0f / tile.softcap : 0.0f);
    for (int64_t at = 0; at < rows * kKeys; at += V::kLanes) {
        auto score = V::times(V::load(scores + at), scale);
        if (capped) {
            const auto tangent = hyperbolic_tangent<V>(V::times(score, inverse));
            V::store(inner + at, V::minus(one, V::times(tangent, tangent)));
            score = V::times(tangent, cap);
        }
        if (tile.biases) score = V::plus(score, V::load(tile.biases + first * kKeys + at));
        V::store(before + at, score);
        V::store(scores + at, score);
    }
    tile.apply(tile.context, 0, first, rows, scores, kKeys);
    for (int64_t i = 0; i < rows; ++i) {
        const float lse = tile.lse[first + i];
        const auto base = V::broadcast(lse), delta = V::broadcast(tile.delta[first + i]);
        const auto log_total = V::broadcast(tile.log_totals ? tile.log_totals[first + i] : 0.0f);
        seen[i] = lse == -__builtin_inff() ? 0 : tile.visible ? tile.visible[first + i] : ~uint64_t{0};
        for (int j = 0; j < kKeys / V::kLanes; ++j) {
            float *at = scores + i * kKeys + j * V::kLanes, *slope = gradients + i * kKeys + j * V::kLanes;
            const auto visible = V::bits(seen[i], j);
            auto above = V::minus(V::load(at), base);
            if (tile.log_totals) above = V::minus(above, log_total);
            const auto power = V::where(visible, exponential<V, P::kDegree>(above), V::zero());
            V::store(at, power);
            V::store(slope, V::where(visible, V::times(power, V::minus(V::load(slope), delta)), V::zero()));
        }
    }
    tile.differentiate(tile.context, first, rows, before, gradients, seen);
    for (int64_t i = 0; i < rows; ++i)
        for (int j = 0; j < kKeys / V::kLanes; ++j) {
            float* slope = gradients + i * kKeys + j * V::kLanes;
            auto found = V::load(slope);
            if (capped) found = V::times(found, V::load(inner + i * kKeys + j * V::kLanes));
            V::store(slope, V::where(V::bits(seen[i], j), found, V::zero()));
        }
}

// Scores of a group of `group` rows to probabilities, and gradients of probabilities to those of scores; zeros beyond the last row
// and outside of a span of whole vectors.
template <class P>
void differentiate_rows(const BackwardTile& tile, int64_t first, int64_t group, Span span, float* scores, float* gradients) {
    const int64_t left = tile.rows - first, rows = left < group ? left : group;
    if (tile.differentiate)
        differentiate_functions<P>(tile, first, rows, scores, gradients);
    else
        for (int64_t i = 0; i < rows; ++i) differentiate<P>(tile, first + i, span, scores + i * kKeys, gradients + i * kKeys);
    if (rows == group) return;
    __builtin_memset(scores + rows * kKeys, 0, static_cast<size_t>(4 * (group - rows) * kKeys));
    __builtin_memset(gradients + rows * kKeys, 0, static_cast<size_t>(4 * (group - rows) * kKeys));
}

template <class P>
void keep_row(const float* row, typename P::Cell* cells) {
    using V = typename P::V;
    typename V::Floats all[kKeys / V::kLanes];
    for (int j = 0; j < kKeys / V::kLanes; ++j) all[j] = V::load(row + j * V::kLanes);
    P::store_weights(cells, all);
}

// c[kKeys][columns] += rows^T words, of what `rows` rows of kKeys hold, which is lost. `spans`: of keys, for each group of rows.
template <class P>
void add_turned(float* rows, int64_t count, const Span* spans, typename P::Cell* cells, const uint32_t* words, float* sums,
                int64_t columns) {
    using V = typename P::V;
    constexpr int R = V::kColumnGroup;
    const int64_t even = rounded_up(count, 2), pitch = even / P::kPerCell, groups = (count + V::kGroup - 1) / V::kGroup;
    int64_t seen = 0;
    for (int64_t n = 0; n < groups; ++n) seen = spans[n].last > seen ? spans[n].last : seen;
    P::transpose_rows(rows, even, seen, cells, pitch);
    Span turned[kKeys / R];  // of rows, for each block of keys
    for (int64_t key = 0; key < kKeys; key += R) {
        const auto hidden = [&](int64_t group) { return spans[group].last <= key || spans[group].first >= key + R; };
        int64_t first = 0, last = groups;
        while (first < last && hidden(first)) ++first;
        while (first < last && hidden(last - 1)) --last;
        turned[key / R] = {first * V::kGroup, last == groups ? even : last * V::kGroup, false};
        if (first == last) turned[key / R] = {0, 0, false};
    }
    product<P, R, V::kColumnGroupCols, true>(cells, pitch, words, columns, 0, sums, columns, columns, kKeys / R, turned);
}

template <class P>
void attend_backward(const BackwardTile& tile) {
    using V = typename P::V;
    using Cell = typename P::Cell;
    constexpr int R = V::kGroup;
    constexpr int64_t kWide = V::kGroupCols * V::kLanes, kChunk = 24 / R;  // groups, whose scores stay in the first cache
    static_assert(R % 2 == 0 && kBackwardRows % R == 0);
    auto* scores = static_cast<float*>(tile.memory);
    float* slopes = scores + kBackwardRows * kKeys;
    Cell* cells = reinterpret_cast<Cell*>(slopes + kBackwardRows * kKeys);
    const int64_t pitch = cells_of<P>(tile.head), value_pitch = cells_of<P>(tile.value), groups = (tile.rows + R - 1) / R;
    Span spans[kBackwardRows / R];
    if (tile.visible && !tile.differentiate)  // users' functions see whole tiles
        for (int64_t n = 0; n < groups; ++n)
            spans[n] = span_of(tile.visible + n * R, tile.rows - n * R < R ? tile.rows - n * R : R).widened(kWide);
    for (int64_t n = 0; n < groups; n += kChunk) {
        const int64_t row = n * R, count = groups - n < kChunk ? groups - n : kChunk;
        float *score = scores + row * kKeys, *slope = slopes + row * kKeys;
        product<P, R, V::kGroupCols, false>(static_cast<const Cell*>(tile.queries) + row * pitch, pitch, tile.keys, kKeys, pitch, score,
                                            kKeys, kKeys, count, spans + n);
        product<P, R, V::kGroupCols, false>(static_cast<const Cell*>(tile.gradients) + row * value_pitch, value_pitch, tile.values, kKeys,
                                            value_pitch, slope, kKeys, kKeys, count, spans + n);
        for (int64_t i = 0; i < count; ++i)
            differentiate_rows<P>(tile, row + i * R, R, spans[n + i], score + i * R * kKeys, slope + i * R * kKeys);
        for (int64_t i = 0; i < count * R; ++i) keep_row<P>(slope + i * kKeys, cells + (row + i) * (kKeys / P::kPerCell));
    }
    if (!tile.query_sums) return;
    product<P, R, V::kGroupCols, true>(cells, kKeys / P::kPerCell, tile.key_words, tile.columns, 0, tile.query_sums, tile.columns,
                                       tile.columns, groups, spans);
    add_turned<P>(scores, tile.rows, spans, cells, tile.gradient_words, tile.value_sums, tile.value_columns);
    add_turned<P>(slopes, tile.rows, spans, cells, tile.query_words, tile.key_sums, tile.columns);
}

}  // namespace
}  // namespace opkit::attention
