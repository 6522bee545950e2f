// AVX-512 (F, BW, DQ, VL): 32 registers of 16 float32.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace opkit::isa {
namespace {

struct Vectors {
    using Floats = __m512;
    using Words = __m512i;
    static constexpr int kLanes = 16;

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats load(const float* at) { return _mm512_loadu_ps(at); }
    static void store(float* at, Floats value) { _mm512_storeu_ps(at, value); }
    static Words words(const void* at) { return _mm512_loadu_si512(at); }
    static Floats floats(Words words) { return _mm512_castsi512_ps(words); }
    static Floats even(Words pairs) { return floats(_mm512_slli_epi32(pairs, 16)); }
    static Floats broadcast(float value) { return _mm512_set1_ps(value); }
    static Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats minus(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }

    static Words extend(const uint16_t* at) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    static void widen(const uint16_t* in, float* out) { store(out, even(extend(in))); }
    static void narrow(const float* in, uint16_t* out) {
        const __m512i bits = words(in);
        const __m512i tie = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_srli_epi32(
            _mm512_add_epi32(bits, _mm512_add_epi32(tie, _mm512_set1_epi32(0x7FFF))), 16);
        const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
        const __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7F800000));
        const __m512i result = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(result));
    }
    static void interleave(const uint16_t* even, const uint16_t* odd, uint16_t* out) {
        _mm512_storeu_si512(out, _mm512_or_si512(extend(even), _mm512_slli_epi32(extend(odd), 16)));
    }
};

}  // namespace
}  // namespace opkit::isa
