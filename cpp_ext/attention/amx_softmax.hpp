// The online softmax of rows of scores, for products so fast that it decides.
//
// Of 64 scores, four vectors: a product with the scale less the base, what is left of it to the integer below (VREDUCEPS), a
// polynomial, a sum and half a conversion to bf16 each, about 14 instructions. The base is not the largest score so far but one that
// was: it moves when a score is 2^8 above it. So rows of sums are seldom scaled, and maxima are not reduced over lanes (the threshold of
// FlashAttention-4); float32 sums and bf16's exponents have room for 2^8.
#pragma once

#include "../isa/unroll.hpp"
#include "block.hpp"
#include "vectors_avx512.hpp"

namespace opkit::attention {
namespace {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kLowest = -3.402823466e38f;  // the base where nothing was seen: -inf less it is no NaN
constexpr float kRise = 8.0f;

// 2^x, or that times kWeight: the polynomial of least relative error on [0, 1), 7.5e-8, times 2^floor(x). 2^-inf is 0, NaN stays.
template <bool WEIGHT = false>
inline __m512 power_of_two(__m512 x) {
    constexpr int kDown = 0x9;  // to the integer below, exceptions suppressed
    constexpr float c[] = {0.9999999403953552f, 0.6931530833244324f, 0.24015361070632935f, 0.05582631751894951f,
                           0.00898933969438076f, 0.0018775766948238015f};
    const __m512 f = _mm512_reduce_ps(x, kDown);
    constexpr float kTimes = WEIGHT ? kWeight : 1.0f;
    __m512 sum = _mm512_set1_ps(c[5] * kTimes);
    OPKIT_UNROLL
    for (int i = 4; i >= 0; --i) sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(c[i] * kTimes));
    return _mm512_scalef_ps(sum, x);
}

// Exponents of two, less the base. Plain scores are multiplied by a positive factor, and the base is of base two; others are as they
// are defined, and so is their base: a finite score stays finite, though it be of the largest.
template <bool PLAIN>
inline __attribute__((always_inline)) __m512 exponents(__m512 score, __m512 factor, __m512 base) {
    if (PLAIN) return _mm512_fmsub_ps(score, factor, base);
    return _mm512_mul_ps(_mm512_sub_ps(score, base), _mm512_set1_ps(kLog2E));
}

// What is known of a row.
struct RowState {
    float* base;
    float* total;        // a vector: parts of the sum of powers
    float* correction;   // written where the base moves: what sums so far are to be multiplied by
};

template <bool PLAIN>
__attribute__((noinline)) void raise(const RowState& row, float found) {
    const __m512 factor = power_of_two(exponents<PLAIN>(_mm512_set1_ps(*row.base), _mm512_set1_ps(1.0f), _mm512_set1_ps(found)));
    _mm512_storeu_ps(row.total, _mm512_mul_ps(_mm512_loadu_ps(row.total), factor));
    *row.correction = _mm512_cvtss_f32(factor);
    *row.base = found;
}

// Powers of a row of kKeys scores, as pairs of bf16. Returns whether the base has moved.
template <bool PLAIN, bool PARTIAL>
inline __attribute__((always_inline)) bool soften(const float* scores, float factor, uint64_t visible, const RowState& row,
                                                  uint32_t* cells) {
    __m512 scale = _mm512_set1_ps(factor);
    const __m512 hidden = _mm512_set1_ps(-__builtin_inff());
    __m512 score[4];
    OPKIT_UNROLL
    for (int j = 0; j < 4; ++j) {
        score[j] = _mm512_loadu_ps(scores + 16 * j);
        if (PARTIAL) score[j] = Vectors::where(Vectors::bits(visible, j), score[j], hidden);
    }
    const __m512 top = _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]));
    const __m512 above = exponents<PLAIN>(top, scale, _mm512_set1_ps(*row.base));
    const bool moves = _mm512_cmp_ps_mask(above, _mm512_set1_ps(kRise), _CMP_GT_OQ) != 0;
    if (__builtin_expect(moves, 0)) raise<PLAIN>(row, _mm512_reduce_max_ps(top) * (PLAIN ? factor : 1.0f));
    const __m512 base = _mm512_set1_ps(*row.base);
    if (PLAIN && __builtin_expect(__builtin_fabsf(*row.base) > kFar, 0)) {
        OPKIT_UNROLL
        for (int j = 0; j < 4; ++j) score[j] = _mm512_mul_ps(score[j], scale);
        scale = _mm512_set1_ps(1.0f);
    }
    __m512 sum = _mm512_loadu_ps(row.total);
    OPKIT_UNROLL
    for (int j = 0; j < 4; ++j) {
        score[j] = power_of_two<true>(exponents<PLAIN>(score[j], scale, base));
        sum = _mm512_add_ps(sum, score[j]);
    }
    _mm512_storeu_ps(row.total, sum);
    _mm512_storeu_si512(cells, (__m512i)_mm512_cvtne2ps_pbh(score[1], score[0]));
    _mm512_storeu_si512(cells + 16, (__m512i)_mm512_cvtne2ps_pbh(score[3], score[2]));
    return moves;
}

}  // namespace
}  // namespace opkit::attention
