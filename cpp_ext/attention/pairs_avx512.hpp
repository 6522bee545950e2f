// Products of bf16 pairs by VDPBF16PS. Probabilities are rounded to bf16 by VCVTNE2PS2BF16, which flushes subnormal ones to zero.
#pragma once

#include "../isa/avx512_pairs.hpp"
#include "products.hpp"
#include "vectors_avx512.hpp"

namespace opkit::attention {
namespace {

struct PairProduct : isa::ProductPairs {
    using V = Vectors;
    static constexpr int kDegree = 4;
    template <int N>
    static void store_weights(uint32_t* cells, const V::Floats (&powers)[N]) {
        OPKIT_UNROLL
        for (int j = 0; j < N; j += 2)
            _mm512_storeu_si512(cells + j * V::kLanes / 2, (__m512i)_mm512_cvtne2ps_pbh(powers[j + 1], powers[j]));
    }
    // Rows of kKeys floats, of an even count, to columns of cells: neighbouring rows are paired where they lie.
    static void transpose_rows(float* rows, int64_t count, int64_t columns, uint32_t* cells, int64_t pitch) {
        auto* words = reinterpret_cast<uint32_t*>(rows);
        for (int64_t i = 0; i < count; i += 2)
            for (int64_t j = 0; j < columns; j += V::kLanes) {
                const float* even = rows + i * kKeys + j;
                _mm512_storeu_si512(words + i / 2 * kKeys + j, paired(V::load(even), V::load(even + kKeys)));
            }
        V::transposed(words, kKeys, count / 2, columns, cells, pitch);
    }
    static __m512i paired(__m512 even, __m512 odd) {
        const auto low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
        const auto high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
        return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
    static float weight(const uint32_t* cells, int64_t key) { return half_of(cells[key / 2], key); }
    static float value(uint32_t word, int64_t key) { return half_of(word, key); }
};

}  // namespace
}  // namespace opkit::attention
