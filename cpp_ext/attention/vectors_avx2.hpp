// What attention needs of AVX2 besides the vectors of isa/avx2.cpp. A group is 6 x 16: 12 sums, two vectors of b.
#pragma once

#include <immintrin.h>

#include "transpose_avx2.hpp"

namespace opkit::attention {
namespace {

template <class Base>
struct Avx2Vectors : Base, Avx2Transpose {
    using Floats = __m256;
    static constexpr int kGroup = 6, kGroupCols = 2, kColumnGroup = 4;

    static Floats minus(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    static Floats fused_minus(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
    static Floats greatest(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    static Floats least(Floats a, Floats b) { return _mm256_min_ps(a, b); }
    static Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats scaled(Floats power, Floats n, Floats x) {
        const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
        const Floats result = _mm256_mul_ps(power, _mm256_castsi256_ps(exponent));
        return _mm256_and_ps(result, _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ));
    }
    static float greatest_lane(Floats x) {
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }
    static __m256 bits(uint64_t visible, int vector) {
        const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i all = _mm256_set1_epi32(static_cast<int>(visible >> (8 * vector) & 0xFF));
        return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, each), each));
    }
    static Floats where(__m256 chosen, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, chosen); }
};

}  // namespace
}  // namespace opkit::attention
