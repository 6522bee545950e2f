// Dot products of a block of query rows with one vector's worth of keys. Words of 4 bytes of as many keys as there are lanes are
// transposed in registers, so that a lane is a key and no sum is horizontal.
//
// A product P says how: V, Sum, kBytes of a key's row in a block, kPhases cells of the query for each word;
//   load(at), load(at, bytes)      a block, and the last one, of which only so many bytes may be read
//   right<PHASE>(word), add(sum, cell, right), finish(sum)
//   prepare(q, type, d, cells)     writes a query's cells, zeros up to whole blocks; gives the factor of its dot products
#pragma once

#include "block.hpp"
#include "decode_task.hpp"
#include "elements.hpp"

namespace opkit::attention {
namespace {

template <class V, class T>
void widen_query(const unsigned char* q, int64_t d, float* out) {
    int64_t i = 0;
    for (; i + V::kLanes <= d; i += V::kLanes) V::store(out + i, V::from(T(), q + i * T::kBytes));
    for (; i < d; ++i) out[i] = one(T(), q + i * T::kBytes);
}

// A query as float32, and zeros up to `all` elements.
template <class V>
void widen_query(const unsigned char* q, ElementType type, int64_t d, int64_t all, float* out) {
    if (type == kF32) widen_query<V, F32>(q, d, out);
    if (type == kBf16) widen_query<V, Bf16>(q, d, out);
    if (type == kF16) widen_query<V, F16>(q, d, out);
    for (int64_t i = d; i < all; ++i) out[i] = 0.0f;
}

template <class Vectors, class T>
struct KeysFloat {
    using V = Vectors;
    using Sum = typename V::Floats;
    static constexpr int kBytes = V::kLanes * T::kBytes, kPhases = 1;
    static Sum zero() { return V::zero(); }
    static Sum join(Sum a, Sum b) { return V::plus(a, b); }
    static typename V::Words load(const unsigned char* at) { return V::as_words(V::from(T(), at)); }
    static typename V::Words load(const unsigned char* at, int64_t bytes) {
        unsigned char all[kBytes] = {};
        __builtin_memcpy(all, at, static_cast<size_t>(bytes));
        return load(all);
    }
    template <int>
    static Sum right(typename V::Words word) { return V::floats(word); }
    static Sum add(Sum sum, const uint32_t* cell, Sum right) { return V::fma(V::broadcast(isa::float_of(*cell)), right, sum); }
    static typename V::Floats finish(Sum sum) { return sum; }
    static float prepare(const unsigned char* q, ElementType type, int64_t d, uint32_t* cells) {
        widen_query<V>(q, type, d, rounded_up(d, V::kLanes), reinterpret_cast<float*>(cells));
        return 1.0f;
    }
};

// Keys of int8: the query as int16: 32767 at most, and less where a sum of products could exceed 2^31.
template <class Vectors>
struct KeysInt8 {
    using V = Vectors;
    using Sum = typename V::Words;
    static constexpr int kBytes = V::kLanes * 4, kPhases = 2;
    static Sum zero() { return V::no_words(); }
    static Sum join(Sum a, Sum b) { return V::add_words(a, b); }
    static Sum load(const unsigned char* at) { return V::words(at); }
    static Sum load(const unsigned char* at, int64_t bytes) { return V::part(at, bytes); }
    template <int PHASE>
    static Sum right(Sum word) {
        if constexpr (PHASE == 0) return V::even_bytes(word);
        return V::odd_bytes(word);
    }
    static Sum add(Sum sum, const uint32_t* cell, Sum right) {
        return V::add_pairs(sum, static_cast<int32_t>(*cell), right);
    }
    static typename V::Floats finish(Sum sum) { return V::to_floats(sum); }

    // The greatest magnitude; NaN where an element is, or is infinite.
    static float extent(const float* q, int64_t size) {
        auto most = V::zero(), poison = V::zero();
        for (int64_t i = 0; i < size; i += V::kLanes) {
            const auto value = V::load(q + i);
            most = V::greatest(most, V::greatest(value, V::times(value, V::broadcast(-1.0f))));
            poison = V::fma(value, V::zero(), poison);
        }
        return V::greatest_lane(most) + V::sum_of_lanes(poison);
    }
    // Words of dimensions i to i + 3: cells of i and i + 2, of i + 1 and i + 3.
    static float prepare(const unsigned char* q, ElementType type, int64_t d, uint32_t* cells) {
        float values[kLargestHead];
        const int64_t size = rounded_up(d, kBytes), bound = 16777215 / (d < 512 ? 512 : d);
        widen_query<V>(q, type, d, size, values);
        const float limit = static_cast<float>(bound), most = extent(values, size);
        const auto factor = V::broadcast(most > 1e-30f ? limit / most : 0.0f);  // of NaN too: 0, and the step is NaN
        for (int64_t i = 0; i < size; i += V::kLanes) {
            const auto quantised = most > 1e-30f ? V::nearest(V::times(V::load(values + i), factor)) : V::zero();
            V::store(values + i, quantised);
        }
        for (int64_t i = 0; i < size; i += 4, cells += 2) {
            cells[0] = pair(values[i], values[i + 2]);
            cells[1] = pair(values[i + 1], values[i + 3]);
        }
        return most / limit;
    }
    static uint32_t pair(float low, float high) {
        return static_cast<uint32_t>((static_cast<int32_t>(low) & 0xFFFF) | static_cast<int32_t>(high) * 65536);
    }
};

// Few rows have several sums each, so that an addition need not wait for the one before.
template <class P, int ROWS>
struct ScoreBlock {
    using V = typename P::V;
    static constexpr int kSplit = ROWS <= 2 ? 4 : ROWS <= 4 ? 2 : 1;

    template <bool PART>
    static inline __attribute__((always_inline)) void step(typename P::Sum (&sum)[ROWS][kSplit], const unsigned char* const* rows,
                                                           int64_t offset, int64_t bytes, const uint32_t* cells, int64_t pitch) {
        typename V::Words w[V::kLanes];
        OPKIT_UNROLL
        for (int k = 0; k < V::kLanes; ++k) w[k] = PART ? P::load(rows[k] + offset, bytes) : P::load(rows[k] + offset);
        V::transpose(w);
        OPKIT_UNROLL
        for (int i = 0; i < V::kLanes; ++i) {
            add<0>(sum, i % kSplit, w[i], cells + i * P::kPhases, pitch);
            if constexpr (P::kPhases == 2) add<1>(sum, i % kSplit, w[i], cells + i * 2 + 1, pitch);
        }
    }

    template <int PHASE>
    static inline __attribute__((always_inline)) void add(typename P::Sum (&sum)[ROWS][kSplit], int way, typename V::Words word,
                                                          const uint32_t* cell, int64_t pitch) {
        const auto right = P::template right<PHASE>(word);
        OPKIT_UNROLL
        for (int r = 0; r < ROWS; ++r) sum[r][way] = P::add(sum[r][way], cell + r * pitch, right);
    }

    static inline __attribute__((always_inline)) typename P::Sum joined(typename P::Sum (&sum)[kSplit]) {
        if constexpr (kSplit == 4) return P::join(P::join(sum[0], sum[1]), P::join(sum[2], sum[3]));
        if constexpr (kSplit == 2) return P::join(sum[0], sum[1]);
        return sum[0];
    }
};

inline __attribute__((always_inline)) void prefetch(const unsigned char* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// rows: of the keys; next: of keys to be wanted soon, or null; bytes: of a row; scores: ROWS vectors, kTileKeys apart.
template <class P, int ROWS>
void score(const unsigned char* const* rows, const unsigned char* const* next, int64_t bytes, const uint32_t* cells,
           int64_t pitch, float* scores) {
    using V = typename P::V;
    using B = ScoreBlock<P, ROWS>;
    typename P::Sum sum[ROWS][B::kSplit];
    OPKIT_UNROLL
    for (int r = 0; r < ROWS; ++r)
        OPKIT_UNROLL
        for (int way = 0; way < B::kSplit; ++way) sum[r][way] = P::zero();
    int64_t offset = 0;
    for (; offset + P::kBytes <= bytes; offset += P::kBytes, cells += V::kLanes * P::kPhases) {
        if (next)
            for (int k = 0; k < V::kLanes; ++k) prefetch(next[k] + offset, P::kBytes);
        B::template step<false>(sum, rows, offset, P::kBytes, cells, pitch);
    }
    if (offset < bytes) B::template step<true>(sum, rows, offset, bytes - offset, cells, pitch);
    OPKIT_UNROLL
    for (int r = 0; r < ROWS; ++r) V::store(scores + r * kTileKeys, P::finish(B::joined(sum[r])));
}

}  // namespace
}  // namespace opkit::attention
