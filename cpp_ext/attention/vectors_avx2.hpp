// What attention needs of AVX2 besides isa/avx2_vectors.hpp. A group is 6 x 16: 12 sums, two vectors of b.
#pragma once

#include "../isa/avx2_vectors.hpp"
#include "elements.hpp"
#include "transpose.hpp"

namespace opkit::attention {
namespace {

struct Avx2Vectors : isa::Avx2Vectors {
    static constexpr int kGroup = 6, kGroupCols = 2, kColumnGroup = 4, kColumnGroupCols = 3;
    static constexpr int kSums = 8, kMaxRows = 8;
    static constexpr float kLeastPower = -88.02969f;  // 2^-127, whose bits are those of 0

    static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    static Floats fused_minus(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
    static Floats greatest(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    static Floats least(Floats a, Floats b) { return _mm256_min_ps(a, b); }
    static Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats scaled(Floats power, Floats n, Floats) {
        const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
        return _mm256_mul_ps(power, _mm256_castsi256_ps(exponent));
    }
    static float greatest_lane(Floats x) {
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }
    static float sum_of_lanes(Floats a) {
        float all[8];
        store(all, a);
        return ((all[0] + all[4]) + (all[1] + all[5])) + ((all[2] + all[6]) + (all[3] + all[7]));
    }
    static __m256 bits(uint64_t visible, int vector) {
        const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i all = _mm256_set1_epi32(static_cast<int>(visible >> (8 * vector) & 0xFF));
        return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, each), each));
    }
    static Floats where(__m256 chosen, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, chosen); }

    static Words part(const unsigned char* at, int64_t bytes) {
        unsigned char all[32] = {};
        __builtin_memcpy(all, at, static_cast<size_t>(bytes));
        return words(all);
    }
    static Words as_words(Floats a) { return _mm256_castps_si256(a); }
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
    static void transposed(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out, int64_t out_pitch) {
        turn_words<Avx2Vectors>(rows, pitch, keys, words, out, out_pitch);
    }
};

}  // namespace
}  // namespace opkit::attention
