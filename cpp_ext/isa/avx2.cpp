// AVX2 with FMA: 16 registers of 8 float32. A tile is 6 x 16: 12 sums, two vectors of b, one broadcast of a.
#if defined(__x86_64__)
#include <immintrin.h>
#include <stddef.h>

#include "../attention/backward.hpp"
#include "../attention/forward.hpp"
#include "../attention/products.hpp"
#include "../attention/vectors_avx2.hpp"
#include "../attention/decode.hpp"
#include "table.hpp"
#include "vector_gemm.hpp"

namespace opkit::isa {
namespace {

struct Vectors {
    using Floats = __m256;
    using Words = __m256i;
    using Mask = __m256i;
    static constexpr int kLanes = 8, kRows = 6, kPairRows = 6, kCols = 2;

    static Mask mask(int64_t lanes) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats load(const float* at) { return _mm256_loadu_ps(at); }
    static Floats load(const float* at, Mask mask) { return _mm256_maskload_ps(at, mask); }
    static void store(float* at, Floats value) { _mm256_storeu_ps(at, value); }
    static void store(float* at, Floats value, Mask mask) { _mm256_maskstore_ps(at, mask, value); }
    static Words words(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
    static Words words(const void* at, Mask mask) { return _mm256_maskload_epi32(static_cast<const int*>(at), mask); }
    static Floats floats(Words words) { return _mm256_castsi256_ps(words); }
    static Floats even(Words pairs) { return floats(_mm256_slli_epi32(pairs, 16)); }
    static Floats odd(Words pairs) { return floats(_mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000))); }
    static Floats broadcast(float value) { return _mm256_set1_ps(value); }
    static Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
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

#include "../attention/lanes_avx2.hpp"

namespace opkit::isa {
namespace {

constexpr Table make_table() {
    Table table{"avx2", {"avx2", "fma"}};
    table.bf16_to_f32 = widen<Vectors>;
    table.f32_to_bf16 = narrow<Vectors>;
    table.pack_b_bf16 = pack_pairs<Vectors>;
    table.gemm_block_bf16 = gemm_pairs<ProductBf16<Vectors>>;
    table.gemm_block_f32 = gemm_f32<Vectors>;
    using Attention = attention::Avx2Vectors<Vectors>;
    table.transpose_words = attention::transpose_words_avx2;
    table.attention_f32 = attention::attend<attention::FloatProduct<Attention>>;
    table.attention_cells_f32 = attention::fill_cells<attention::FloatProduct<Attention>>;
    table.attention_backward_f32 = attention::retreat<attention::FloatProduct<Attention>>;
    table.attention_bf16 = attention::attend<attention::WidenedProduct<Attention>>;
    table.attention_cells_bf16 = attention::fill_cells<attention::WidenedProduct<Attention>>;
    table.attention_backward_bf16 = attention::retreat<attention::WidenedProduct<Attention>>;
    table.attend_decode = attend_decode<Lanes>;
    return table;
}

}  // namespace

extern const Table avx2;
constexpr Table avx2 = make_table();

}  // namespace opkit::isa
#endif
