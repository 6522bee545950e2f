// Products of bf16 pairs by VDPBF16PS. Probabilities are rounded to bf16 by VCVTNE2PS2BF16, which flushes subnormal ones to zero.
#pragma once

#include "../isa/avx512_pairs.hpp"
#include "products.hpp"
#include "vectors_avx512.hpp"

namespace opkit::attention {
namespace {

struct PairProduct : isa::ProductPairs {
    using V = Vectors;
    static constexpr int kDegree = 4, kKeysPerWord = 2;
    template <int N>
    static void keep(uint32_t* cells, const V::Floats (&powers)[N]) {
        OPKIT_UNROLL
        for (int j = 0; j < N; j += 2)
            _mm512_storeu_si512(cells + j * V::kLanes / 2, (__m512i)_mm512_cvtne2ps_pbh(powers[j + 1], powers[j]));
    }
    static float kept(const uint32_t* cells, int64_t key) { return half_of(cells[key / 2], key); }
    static float value(uint32_t word, int64_t key) { return half_of(word, key); }
};

}  // namespace
}  // namespace opkit::attention
