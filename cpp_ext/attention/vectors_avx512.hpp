// What attention needs of AVX-512 besides isa/avx512_vectors.hpp. A group is 12 x 32: 24 sums, two vectors of b.
#pragma once

#include "../isa/avx512_vectors.hpp"
#include "transpose_avx2.hpp"

namespace opkit::attention {
namespace {

struct Vectors : isa::Vectors, Avx2Transpose {
    static constexpr int kGroup = 12, kGroupCols = 2, kColumnGroup = 8;

    static Floats minus(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static Floats fused_minus(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
    static Floats greatest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats least(Floats a, Floats b) { return _mm512_min_ps(a, b); }
    static Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats scaled(Floats power, Floats n, Floats) { return _mm512_scalef_ps(power, n); }
    static float greatest_lane(Floats x) { return _mm512_reduce_max_ps(x); }
    static __mmask16 bits(uint64_t visible, int vector) { return static_cast<__mmask16>(visible >> (16 * vector)); }
    static Floats where(__mmask16 chosen, Floats yes, Floats no) { return _mm512_mask_blend_ps(chosen, no, yes); }
};

}  // namespace
}  // namespace opkit::attention
