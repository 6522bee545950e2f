// What attention needs of AVX-512 besides isa/avx512_vectors.hpp. A group is 12 x 32: 24 sums, two vectors of b.
#pragma once

#include "../isa/avx512_vectors.hpp"
#include "vectors_avx2.hpp"

namespace opkit::attention {
namespace {

struct Vectors : isa::Vectors {
    static constexpr int kGroup = 12, kGroupCols = 2, kColumnGroup = 8, kColumnGroupCols = 2;
    static constexpr float kLeastPower = -150.0f;
    static constexpr int kSums = 16, kMaxRows = 16;

    static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static Floats fused_minus(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
    static Floats greatest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }
    static Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats scaled(Floats power, Floats n, Floats) { return _mm512_scalef_ps(power, n); }
    static float greatest_lane(Floats x) { return _mm512_reduce_max_ps(x); }
    static float sum_of_lanes(Floats x) { return _mm512_reduce_add_ps(x); }
    static __mmask16 bits(uint64_t visible, int vector) { return static_cast<__mmask16>(visible >> (16 * vector)); }
    static Floats where(__mmask16 chosen, Floats yes, Floats no) { return _mm512_mask_blend_ps(chosen, no, yes); }

    static Words part(const unsigned char* at, int64_t bytes) {
        return _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, at);
    }
    static Words as_words(Floats a) { return _mm512_castps_si512(a); }
    static Floats from(F32, const void* at) { return _mm512_loadu_ps(at); }
    static Floats from(Bf16, const void* at) { return even(extend(static_cast<const uint16_t*>(at))); }
    static Floats from(F16, const void* at) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(at))); }
    static Words bytes(const void* at) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))); }
    static Floats from(I8, const void* at) { return _mm512_cvtepi32_ps(bytes(at)); }
    static Floats from(F8, const void* at) {
        const Words all = bytes(at), magnitude = _mm512_and_si512(all, _mm512_set1_epi32(0x7F));
        const Floats value = times(floats(_mm512_slli_epi32(magnitude, 20)), _mm512_set1_ps(kF8Scale));
        const __mmask16 nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7F));
        const Words bits = _mm512_mask_mov_epi32(_mm512_castps_si512(value), nan, _mm512_set1_epi32(0x7FC00000));
        return floats(_mm512_or_si512(bits, _mm512_and_si512(all, _mm512_set1_epi32(INT32_MIN))));
    }

    // Words of four int8, as pairs of int16: bytes 0 and 2, bytes 1 and 3.
    static Words even_bytes(Words a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
    static Words odd_bytes(Words a) { return _mm512_srai_epi16(a, 8); }
    static Words no_words() { return _mm512_setzero_si512(); }
    static Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
    static Words add_pairs(Words sum, int32_t pair, Words pairs) {
        return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_set1_epi32(pair), pairs));
    }
    static Floats to_floats(Words a) { return _mm512_cvtepi32_ps(a); }

    // w[i] lane j becomes w[j] lane i.
    static inline __attribute__((always_inline)) void transpose(Words (&w)[16]) {
        Words t[16];
        OPKIT_UNROLL
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_epi32(w[i], w[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(w[i], w[i + 1]);
        }
        OPKIT_UNROLL
        for (int i = 0; i < 16; i += 4) {
            w[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
            w[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            w[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
            w[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
        OPKIT_UNROLL
        for (int i = 0; i < 4; ++i) {
            t[i] = _mm512_shuffle_i32x4(w[i], w[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_i32x4(w[i], w[i + 4], 0xDD);
            t[i + 8] = _mm512_shuffle_i32x4(w[i + 8], w[i + 12], 0x88);
            t[i + 12] = _mm512_shuffle_i32x4(w[i + 8], w[i + 12], 0xDD);
        }
        OPKIT_UNROLL
        for (int i = 0; i < 8; ++i) {
            w[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
            w[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        }
    }
    // By squares of 8 x 8: fewer words are left over, one by one, than of 16 x 16.
    static void transposed(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out, int64_t out_pitch) {
        turn_words<Avx2Vectors>(rows, pitch, keys, words, out, out_pitch);
    }
};

}  // namespace
}  // namespace opkit::attention
