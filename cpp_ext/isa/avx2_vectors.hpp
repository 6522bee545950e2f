// AVX2 with FMA: 16 registers of 8 float32.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace opkit::isa {
namespace {

struct Avx2Vectors {
    using Floats = __m256;
    using Words = __m256i;
    static constexpr int kLanes = 8;

    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats load(const float* at) { return _mm256_loadu_ps(at); }
    static void store(float* at, Floats value) { _mm256_storeu_ps(at, value); }
    static Words words(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
    static Floats floats(Words words) { return _mm256_castsi256_ps(words); }
    static Floats even(Words pairs) { return floats(_mm256_slli_epi32(pairs, 16)); }
    static Floats broadcast(float value) { return _mm256_set1_ps(value); }
    static Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats minus(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }

    static Words extend(const uint16_t* at) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    }
    static void widen(const uint16_t* in, float* out) { store(out, even(extend(in))); }
    static void narrow(const float* in, uint16_t* out) {
        const __m256i bits = words(in), one = _mm256_set1_epi32(1);
        const __m256i tie = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
        const __m256i rounded = _mm256_srli_epi32(
            _mm256_add_epi32(bits, _mm256_add_epi32(tie, _mm256_set1_epi32(0x7FFF))), 16);
        const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
        const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000));
        const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
        const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(halves));
    }
    static void interleave(const uint16_t* even, const uint16_t* odd, uint16_t* out) {
        const __m256i pairs = _mm256_or_si256(extend(even), _mm256_slli_epi32(extend(odd), 16));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), pairs);
    }
};

}  // namespace
}  // namespace opkit::isa
