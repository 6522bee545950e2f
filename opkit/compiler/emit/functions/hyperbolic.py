"""sinh, cosh, tanh and their inverses.

tanh: with exp(2 |x|) - 1 = 2**n e + (2**n - 1) as in expm1, tanh |x| is that over that plus 2: no cancellation anywhere.
Where n is at least 2 it is 1 less 2 over that plus 2, whose rounding errors are small beside 1.
"""

from __future__ import annotations

from opkit.compiler.emit.functions.exponential import Q32, Q64
from opkit.compiler.emit.functions.templates import estrin, fill

_NEAR_F32 = "-0x1.55554cp-2 0x1.110d3ep-3 -0x1.b92c0ep-5 0x1.5958bep-6 -0x1.9bc4dp-8"

_TANH_F32 = """
OPK_INLINE float opk_tanh_f32(float x) {
    const float a = __builtin_fabsf(x), s = x * x, s2 = s * s, s4 = s2 * s2;
    const float near = opk_fma_f32(a * s, $near, a);
    const float shifted = opk_fma_f32(a, 0x1.715476p+1f, 0x1.8p+23f);
    const float n = shifted - 0x1.8p+23f;
    const float r = opk_fma_f32(n, -0x1.62e43p-1f, a + a), r2 = r * r, r4 = r2 * r2;
    const float e = opk_fma_f32(r2, $q, r);
    const float scale = opk_from_bits_f32((opk_bits_f32(shifted) << 23) + 0x3f800000u);
    const float far = 1.0f - 2.0f / opk_fma_f32(scale, e, scale + 1.0f);
    const float below = a > 9.1f ? 1.0f : far;
    return __builtin_copysignf(a < 0.55f ? near : below, x);
}
"""

_TANH_F64 = """
OPK_INLINE double opk_tanh_f64(double x) {
    const double a = __builtin_fabs(x);
    const double y = a > 22.0 ? 22.0 : a;
    const double shifted = opk_fma_f64(y, 0x1.71547652b82fep+1, 0x1.8p+52);
    const double n = shifted - 0x1.8p+52;
    const double r = opk_fma_f64(n, -0x1.a39ef35793c76p-33, opk_fma_f64(n, -0x1.62e42feep-1, 2.0 * y));
    const double r2 = r * r, r4 = r2 * r2, r8 = r4 * r4;
    const double e = opk_fma_f64(r2, $q, r);
    const double scale = opk_from_bits_f64((opk_bits_f64(shifted) << 52) + 0x3ff0000000000000ull);
    const int large = n >= 2.0;
    const double quotient = (large ? 2.0 : opk_fma_f64(scale, e, scale - 1.0)) / opk_fma_f64(scale, e, scale + 1.0);
    return __builtin_copysign(large ? 1.0 - quotient : quotient, x);
}
"""

TEXT = {
    "tanh_f32": fill(_TANH_F32, "f32", near=estrin("f32", "s", _NEAR_F32), q=estrin("f32", "r", Q32)),
    "tanh_f64": fill(_TANH_F64, "f64", q=estrin("f64", "r", Q64)),
}
