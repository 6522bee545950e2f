// What attention's kernels need of AVX2 beyond the products of matrices. Included where Vectors is defined, by isa/avx2.cpp.
#pragma once

#include "elements.hpp"

namespace opkit::isa {
namespace {

struct Lanes : Vectors {
    static constexpr int kSums = 8, kMaxRows = 8;

    static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    static Floats least(Floats a, Floats b) { return _mm256_min_ps(a, b); }
    static Floats greatest(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    static Floats nearest(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats power_of_two(Words n) {
        return floats(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
    static Floats scaled(Floats a, Floats n) {  // in two steps, as a factor alone may be out of range
        const Words whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
        return times(times(a, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
    }
    static Floats where_below(Floats a, float limit, Floats then, Floats otherwise) {
        return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, _mm256_set1_ps(limit), _CMP_LT_OQ));
    }
    static float sum(Floats a) {
        float all[8];
        store(all, a);
        return ((all[0] + all[4]) + (all[1] + all[5])) + ((all[2] + all[6]) + (all[3] + all[7]));
    }
    static float maximum(Floats a) {
        float all[8];
        store(all, a);
        for (int i = 1; i < 8; ++i) all[0] = all[i] > all[0] ? all[i] : all[0];
        return all[0];
    }

    static Words part(const unsigned char* at, int64_t bytes) {
        unsigned char all[32] = {};
        __builtin_memcpy(all, at, static_cast<size_t>(bytes));
        return words(all);
    }
    static Words bits(Floats a) { return _mm256_castps_si256(a); }
    static Floats from(F32, const void* at) { return load(static_cast<const float*>(at)); }
    static Floats from(Bf16, const void* at) { return even(extend(static_cast<const uint16_t*>(at))); }
    static Words select(Words mask, Words then, Words otherwise) { return _mm256_blendv_epi8(otherwise, then, mask); }
    static Words all(int value) { return _mm256_set1_epi32(value); }
    static Floats from(F16, const void* at) {
        const Words bits = extend(static_cast<const uint16_t*>(at)), magnitude = _mm256_and_si256(bits, all(0x7FFF));
        const Words shifted = _mm256_slli_epi32(magnitude, 13), large = _mm256_cmpgt_epi32(magnitude, all(0x7BFF));
        const Words value = _mm256_castps_si256(times(floats(shifted), _mm256_set1_ps(kF16Scale)));
        const Words sign = _mm256_slli_epi32(_mm256_and_si256(bits, all(0x8000)), 16);
        return floats(_mm256_or_si256(select(large, _mm256_or_si256(shifted, all(0x7F800000)), value), sign));
    }
    static Words bytes(const void* at) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(at))); }
    static Floats from(I8, const void* at) { return _mm256_cvtepi32_ps(bytes(at)); }
    static Floats from(F8, const void* at) {
        const Words both = bytes(at), magnitude = _mm256_and_si256(both, all(0x7F));
        const Words value = _mm256_castps_si256(times(floats(_mm256_slli_epi32(magnitude, 20)), _mm256_set1_ps(kF8Scale)));
        const Words bits = select(_mm256_cmpeq_epi32(magnitude, all(0x7F)), all(0x7FC00000), value);
        return floats(_mm256_or_si256(bits, _mm256_and_si256(both, all(INT32_MIN))));
    }

    static Words even_bytes(Words a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
    static Words odd_bytes(Words a) { return _mm256_srai_epi16(a, 8); }
    static Words no_words() { return _mm256_setzero_si256(); }
    static Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
    static Words add_pairs(Words sum, int32_t pair, Words pairs) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(all(pair), pairs));
    }
    static Floats to_floats(Words a) { return _mm256_cvtepi32_ps(a); }

    static inline __attribute__((always_inline)) void transpose(Words (&w)[8]) {
        Words t[8];
        OPKIT_UNROLL
        for (int i = 0; i < 8; i += 2) {
            t[i] = _mm256_unpacklo_epi32(w[i], w[i + 1]);
            t[i + 1] = _mm256_unpackhi_epi32(w[i], w[i + 1]);
        }
        OPKIT_UNROLL
        for (int i = 0; i < 8; i += 4) {
            w[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
            w[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
            w[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
            w[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
        OPKIT_UNROLL
        for (int i = 0; i < 4; ++i) {
            t[i] = _mm256_permute2x128_si256(w[i], w[i + 4], 0x20);
            t[i + 4] = _mm256_permute2x128_si256(w[i], w[i + 4], 0x31);
        }
        OPKIT_UNROLL
        for (int i = 0; i < 8; ++i) w[i] = t[i];
    }
};

}  // namespace
}  // namespace opkit::isa
