// What attention's kernels need of AVX-512 beyond the products of matrices.
#pragma once

#include "../isa/avx512_vectors.hpp"
#include "elements.hpp"

namespace opkit::isa {
namespace {

struct Lanes : Vectors {
    static constexpr int kSums = 16, kMaxRows = 16;

    static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }
    static Floats greatest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats nearest(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats scaled(Floats a, Floats n) { return _mm512_scalef_ps(a, n); }
    static Floats where_below(Floats a, float limit, Floats then, Floats otherwise) {
        return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, _mm512_set1_ps(limit), _CMP_LT_OQ), then);
    }
    static float sum(Floats a) { return _mm512_reduce_add_ps(a); }
    static float maximum(Floats a) { return _mm512_reduce_max_ps(a); }

    static Words part(const unsigned char* at, int64_t bytes) {
        return _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, at);
    }
    static Words bits(Floats a) { return _mm512_castps_si512(a); }
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
};

}  // namespace
}  // namespace opkit::isa
