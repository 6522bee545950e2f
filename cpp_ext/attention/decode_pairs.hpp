// Products of bf16 by VDPBF16PS, which takes pairs: two dimensions of a key; the values of two keys, whose weights are rounded
// to bf16. Sums of exps are of those before rounding, so that the log-sum-exp is as exact as without pairs.
#pragma once

#include "decode.hpp"
#include "vectors_avx512.hpp"

namespace opkit::attention {
namespace {

inline __m512bh pair_of(const void* at) {
    int32_t pair;
    __builtin_memcpy(&pair, at, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}

struct KeysPairs {
    using V = Vectors;
    using Sum = __m512;
    static constexpr int kBytes = 64, kPhases = 1;
    static Sum zero() { return V::zero(); }
    static Sum join(Sum a, Sum b) { return V::plus(a, b); }
    static __m512i load(const unsigned char* at) { return V::words(at); }
    static __m512i load(const unsigned char* at, int64_t bytes) { return V::part(at, bytes); }
    template <int>
    static __m512bh right(__m512i word) { return (__m512bh)word; }
    static Sum add(Sum sum, const uint32_t* cell, __m512bh right) { return _mm512_dpbf16_ps(sum, right, pair_of(cell)); }
    static __m512 finish(Sum sum) { return sum; }
    static float prepare(const unsigned char* q, ElementType, int64_t d, uint32_t* cells) {
        __builtin_memset(cells, 0, static_cast<size_t>(rounded_up(d, 32) * 2));
        __builtin_memcpy(cells, q, static_cast<size_t>(d * 2));
        return 1.0f;
    }
};

// Every processor with VDPBF16PS has VPDPWSSD too.
struct VectorsOfPairs : Vectors {
    static Words add_pairs(Words sum, int32_t pair, Words pairs) {
        return _mm512_dpwssd_epi32(sum, pairs, _mm512_set1_epi32(pair));
    }
};

struct ValuesPairs {
    using V = Vectors;
    using Left = __m512bh;
    using Right = __m512bh;
    using Weight = uint16_t;
    static constexpr int kBytes = 64, kParts = 2, kKeys = 2;
    static void interleaved(__m512i even, __m512i odd, Right* right) {
        right[0] = (__m512bh)_mm512_unpacklo_epi16(even, odd);
        right[1] = (__m512bh)_mm512_unpackhi_epi16(even, odd);
    }
    static void load(const unsigned char* const* rows, int64_t offset, Right* right) {
        interleaved(V::words(rows[0] + offset), V::words(rows[1] + offset), right);
    }
    static void load(const unsigned char* const* rows, int64_t offset, int64_t bytes, Right* right) {
        interleaved(V::part(rows[0] + offset, bytes), V::part(rows[1] + offset, bytes), right);
    }
    static Left left(const uint16_t* weights) { return pair_of(weights); }
    static __m512 add(__m512 sum, Left left, Right right) { return _mm512_dpbf16_ps(sum, right, left); }
    static void weigh(const float* probability, uint16_t* weights) { V::narrow(probability, weights); }
    // Interleaving leaves columns 0 to 3, 8 to 11, ... in the first vector of a block, the others in the second.
    static void order(float* sums, int64_t size) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        for (int64_t i = 0; i < size; i += 32) {
            const __m512 low = V::load(sums + i), high = V::load(sums + i + 16);
            V::store(sums + i, _mm512_permutex2var_ps(low, first, high));
            V::store(sums + i + 16, _mm512_permutex2var_ps(low, second, high));
        }
    }
};

inline void attend_decode_pairs(const DecodeTask* task) {
    if (task->q_type == kBf16 && task->kv_type == kBf16)
        attend_part<KeysPairs, ValuesPairs>(*task);
    else
        attend_decode<VectorsOfPairs>(task);
}

}  // namespace
}  // namespace opkit::attention
