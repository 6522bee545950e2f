// Sums of values, weighted by a tile's probabilities: a block of rows and some vectors of columns stay in registers for all keys.
//
// A product P says how: V, kBytes of a value's row in a block, which gives kParts vectors; kKeys keys in a step;
//   load(rows, offset, right), load(rows, offset, bytes, right)   a step's block of columns
//   Left, left(cell), add(sum, left, right)
//   weigh(exps, weights)  a vector of exps as weights, whose type is Weight
//   order(sums, size)     puts sums, which a block may hold in another order, into that of the columns
#pragma once

#include "decode_scores.hpp"

namespace opkit::attention {
namespace {

template <class Vectors, class T>
struct ValuesFloat {
    using V = Vectors;
    using Left = typename V::Floats;
    using Right = typename V::Floats;
    static constexpr int kBytes = V::kLanes * T::kBytes, kParts = 1, kKeys = 1;
    static void load(const unsigned char* const* rows, int64_t offset, Right* right) {
        right[0] = V::from(T(), rows[0] + offset);
    }
    static void load(const unsigned char* const* rows, int64_t offset, int64_t bytes, Right* right) {
        unsigned char all[kBytes] = {};
        __builtin_memcpy(all, rows[0] + offset, static_cast<size_t>(bytes));
        right[0] = V::from(T(), all);
    }
    static Left left(const float* weight) { return V::broadcast(*weight); }
    static typename V::Floats add(typename V::Floats sum, Left left, Right right) { return V::fma(left, right, sum); }
    static void order(float*, int64_t) {}
    using Weight = float;
    static void weigh(const float* probability, float* weights) { V::store(weights, V::load(probability)); }
};

// The work of one call: `keys` rows, weights of ROWS rows `pitch` apart, sums likewise, and what the sums so far are times.
template <class Weight>
struct Weighing {
    const unsigned char* const* rows;
    const unsigned char* const* next;  // prefetched; or null
    int64_t keys, bytes;
    const Weight* weights;
    int64_t weights_pitch;
    float* sums;
    int64_t sums_pitch;
    const float* decay;
};

template <class P, int ROWS, int COLS, bool PART>
inline __attribute__((always_inline)) void weigh_columns(const Weighing<typename P::Weight>& w, int64_t offset) {
    using V = typename P::V;
    constexpr int kVectors = COLS * P::kParts;
    float* sums = w.sums + offset / P::kBytes * P::kParts * V::kLanes;
    typename V::Floats sum[ROWS][kVectors];
    OPKIT_UNROLL
    for (int r = 0; r < ROWS; ++r)
        OPKIT_UNROLL
        for (int c = 0; c < kVectors; ++c)
            sum[r][c] = V::times(V::load(sums + r * w.sums_pitch + c * V::kLanes), V::broadcast(w.decay[r]));
    for (int64_t k = 0; k < w.keys; k += P::kKeys) {
        if (w.next)
            for (int key = 0; key < P::kKeys; ++key) prefetch(w.next[k + key] + offset, COLS * P::kBytes);
        typename P::Right right[kVectors];
        OPKIT_UNROLL
        for (int c = 0; c < COLS; ++c) {
            if constexpr (PART) P::load(w.rows + k, offset, w.bytes - offset, right + c * P::kParts);
            else P::load(w.rows + k, offset + c * P::kBytes, right + c * P::kParts);
        }
        OPKIT_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            const auto left = P::left(w.weights + r * w.weights_pitch + k);
            OPKIT_UNROLL
            for (int c = 0; c < kVectors; ++c) sum[r][c] = P::add(sum[r][c], left, right[c]);
        }
    }
    OPKIT_UNROLL
    for (int r = 0; r < ROWS; ++r)
        OPKIT_UNROLL
        for (int c = 0; c < kVectors; ++c) V::store(sums + r * w.sums_pitch + c * V::kLanes, sum[r][c]);
}

template <class P, int ROWS>
void weigh(const Weighing<typename P::Weight>& w) {
    constexpr int kFit = P::V::kSums / (ROWS * P::kParts);
    constexpr int kCols = kFit < 1 ? 1 : kFit > 4 ? 4 : kFit;
    int64_t offset = 0;
    for (; offset + kCols * P::kBytes <= w.bytes; offset += kCols * P::kBytes) weigh_columns<P, ROWS, kCols, false>(w, offset);
    for (; offset + P::kBytes <= w.bytes; offset += P::kBytes) weigh_columns<P, ROWS, 1, false>(w, offset);
    if (offset < w.bytes) weigh_columns<P, ROWS, 1, true>(w, offset);
}

}  // namespace
}  // namespace opkit::attention
