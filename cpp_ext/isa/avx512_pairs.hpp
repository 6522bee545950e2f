// The product of bf16 pairs by VDPBF16PS: both k of a pair at once, a's pair broadcast as one word.
#pragma once

#include "avx512_vectors.hpp"
#include "vector_products.hpp"

namespace opkit::isa {
namespace {

struct ProductPairs {
    using V = Vectors;
    using Input = uint16_t;
    using Cell = uint32_t;
    using Right = __m512bh;
    static constexpr int kPerCell = 2;
    static void fill(uint32_t* cells, const uint16_t* a, int64_t k) {
        if (k % 2) cells[k / 2] = 0;
        __builtin_memcpy(cells, a, static_cast<size_t>(k) * 2);
    }
    static Right right(__m512i words) { return (__m512bh)words; }
    static __m512bh left(uint32_t cell) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(cell)); }
    static __m512 add(__m512 sum, __m512bh left, __m512bh right) { return _mm512_dpbf16_ps(sum, left, right); }
};

}  // namespace
}  // namespace opkit::isa
