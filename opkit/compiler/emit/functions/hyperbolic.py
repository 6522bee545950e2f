"""sinh, cosh, tanh and their inverses.

tanh and sinh of small arguments are x + x**3 p(x**2), p minimax; tanh of others is 1 - 2 / (exp(2 |x|) + 1), and sinh and
cosh are e -+ 1 / (4 e) with e = exp(|x|) / 2. The inverses are logarithms of sums, whose rounding errors are kept.

In f32, sinh above 1 and cosh are sums of cosh(r) and sinh(r), as x = n ln 2 + r, by minimax polynomials to 2**-33; atanh is
x + x**3 p(x**2) to 2**-29 below 1/2, and log1p(2 x / (1 - x)) / 2 above.
"""

from __future__ import annotations

from opkit.compiler.emit.functions.exponential import Q32
from opkit.compiler.emit.functions.templates import estrin, fill, through_f64

_NEAR_F32 = "-0x1.55554cp-2 0x1.110d3ep-3 -0x1.b92c0ep-5 0x1.5958bep-6 -0x1.9bc4dp-8"
_ODD_F32 = "0x1.555556p-3 0x1.110fc2p-7 0x1.a2d6bp-13"
_EVEN_F32 = "0x1p-1 0x1.5554e2p-5 0x1.6d54cep-10"
_SINH_NEAR_F32 = "0x1.555556p-3 0x1.1110ep-7 0x1.a022bcp-13 0x1.756c1ep-19"
_ATANH_NEAR_F32 = "0x1.555538p-2 0x1.99aa48p-3 0x1.2301bp-3 0x1.e91e2cp-4 0x1.7edea8p-5 0x1.779586p-3"

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

# With a = n ln 2 + r, sinh and cosh of a are 2**(n-1) ((1 -+ w) cosh(r) + (1 +- w) sinh(r)) where w = 2**-2n. even is
# cosh(r) - 1; the scale is a quarter of what it should be, for it is not infinite then.
_PARTS = """
OPK_INLINE float opk_hyperbolic_f32(float a, float *odd, float *even, float *w) {
    const float y = a > 90.0f ? 90.0f : a;
    const float shifted = opk_fma_f32(y, 0x1.715476p+0f, 0x1.8p+23f), n = shifted - 0x1.8p+23f;
    const float r = opk_fma_f32(n, -0x1.7f7d1cp-20f, opk_fma_f32(n, -0x1.62e4p-1f, y)), s = r * r, s2 = s * s;
    const int whole = (int)(opk_bits_f32(shifted) - 0x4b400000u);
    *odd = opk_fma_f32(r * s, $odd, r);
    *even = s * $even;
    *w = opk_power_f32(-2 * (whole > 40 ? 40 : whole));
    return opk_power_f32(whole - 3);
}
"""

_SINH_F32 = """
OPK_INLINE float opk_sinh_f32(float x) {
    float odd, even, w;
    const float a = __builtin_fabsf(x), scale = opk_hyperbolic_f32(a, &odd, &even, &w), t = 1.0f - w;
    const float far = opk_fma_f32(t, even, opk_fma_f32(1.0f + w, odd, t)) * scale * 4.0f;
    const float s = x * x, s2 = s * s;
    return __builtin_copysignf(a < 1.0f ? opk_fma_f32(a * s, $near, a) : far, x);
}
"""

_COSH_F32 = """
OPK_INLINE float opk_cosh_f32(float x) {
    float odd, even, w;
    const float scale = opk_hyperbolic_f32(__builtin_fabsf(x), &odd, &even, &w), t = 1.0f + w;
    return (t + opk_fma_f32(t, even, (1.0f - w) * odd)) * scale * 4.0f;
}
"""

_ATANH_F32 = """
OPK_INLINE float opk_atanh_f32(float x) {
    const float a = __builtin_fabsf(x), s = x * x, s2 = s * s, s4 = s2 * s2;
    const float near = opk_fma_f32(a * s, $near, a), far = 0.5f * opk_log1p_f32((a + a) / (1.0f - a));
    return __builtin_copysignf(a < 0.5f ? near : far, x);
}
"""

_NEAR_F64 = (
    "-0x1.5555555555555p-2 0x1.111111111110ep-3 -0x1.ba1ba1ba1b4fcp-5 0x1.664f4882a33b6p-6 -0x1.226e3558049d7p-7 "
    "0x1.d6d3cf1c700d3p-9 -0x1.7da339fb3b79p-10 0x1.35556226d0faap-11 -0x1.f53c673d5cae9p-13 0x1.945fbbd6d0cafp-14 "
    "-0x1.3d2d107a7f85p-15 0x1.b57c7828cf46cp-17 -0x1.7ea5b3d01848cp-19"
)

_TANH_F64 = """
OPK_INLINE double opk_tanh_f64(double x) {
    const double a = __builtin_fabs(x), s = x * x, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    const double near = opk_fma_f64(a * s, $near, a);
    const double far = 1.0 - 2.0 / (opk_exp_f64(a + a) + 1.0);
    return __builtin_copysign(a < 0.55 ? near : far, x);
}
"""

_SINH = (
    "0x1.5555555555555p-3 0x1.1111111111111p-7 0x1.a01a01a019fbep-13 0x1.71de3a5574245p-19 0x1.ae645673e92e1p-26 "
    "0x1.61246b19205dbp-33 0x1.ae755afdefcfap-41 0x1.9a7e446b1099ap-49"
)

_SINH_F64 = """
OPK_INLINE double opk_sinh_f64(double x) {
    const double a = __builtin_fabs(x), s = x * x, s2 = s * s, s4 = s2 * s2;
    const double near = opk_fma_f64(a * s, $near, a);
    const double half = opk_exp_times_f64(a, -1);
    return __builtin_copysign(a < 1.0 ? near : half - 0.25 / half, x);
}
"""

_COSH_F64 = """
OPK_INLINE double opk_cosh_f64(double x) {
    const double half = opk_exp_times_f64(__builtin_fabs(x), -1);
    return half + 0.25 / half;
}
"""

# sqrt(square + rest + one) as a sum, where square + rest is x**2
_ROOT = """
OPK_INLINE double opk_root_f64(double x, double one, double *low) {
    const double square = x * x, t = square + one;
    const double rest = opk_sum_error(square, one, t) + opk_product_error(x, x, square);
    const double root = __builtin_sqrt(t), again = root * root;
    const double left = ((t - again) - opk_product_error(root, root, again)) + rest;
    *low = root == 0.0 ? 0.0 : left / (root + root);
    return root;
}
"""

_ASINH_F64 = """
OPK_INLINE double opk_asinh_f64(double x) {
    const double a = __builtin_fabs(x);
    double low;
    const double b = a > 0x1p+30 ? 1.0 : a, root = opk_root_f64(b, 1.0, &low), sum = root + b;
    const double high = a > 0x1p+30 ? a : sum, rest = a > 0x1p+30 ? 0.0 : ((root - sum) + b) + low;
    const double finite = opk_log_sum_f64(high, rest, a > 0x1p+30 ? 1.0 : 0.0);
    return __builtin_copysign((a > 0x1p-30) & (a < __builtin_inf()) ? finite : a, x);
}
"""

_ACOSH_F64 = """
OPK_INLINE double opk_acosh_f64(double x) {
    double low;
    const double b = x > 0x1p+30 ? 1.0 : x, root = opk_root_f64(b, -1.0, &low), sum = root + b;
    const double high = x > 0x1p+30 ? x : sum, rest = x > 0x1p+30 ? 0.0 : ((b - sum) + root) + low;
    const double finite = opk_log_sum_f64(high, rest, x > 0x1p+30 ? 1.0 : 0.0);
    const double known = x < __builtin_inf() ? finite : x;
    return x < 1.0 ? __builtin_nan("") : known;
}
"""

# With q = 2a / (1 - a), atanh(a) is log(1 + q) / 2; what q was rounded by is found from its product with 1 - a.
_ATANH_F64 = """
OPK_INLINE double opk_atanh_f64(double x) {
    const double a = __builtin_fabs(x), d = 1.0 - a, d_rest = (1.0 - d) - a;
    const double q = (a + a) / d, p = q * d;
    const double q_rest = (((a + a) - p) - opk_fma_f64(q, d_rest, opk_product_error(q, d, p))) / d;
    const double sum = 1.0 + q, rest = opk_sum_error(1.0, q, sum) + q_rest;
    const double inside = a > 0x1p-30 ? 0.5 * opk_log_sum_f64(sum, rest, 0.0) : a;
    const double outside = a > 1.0 ? __builtin_nan("") : a == 1.0 ? __builtin_inf() : a;
    return __builtin_copysign(a < 1.0 ? inside : outside, x);
}
"""

TEXT = {
    "tanh_f32": fill(_TANH_F32, "f32", near=estrin("f32", "s", _NEAR_F32), q=estrin("f32", "r", Q32)),
    "tanh_f64": fill(_TANH_F64, "f64", near=estrin("f64", "s", _NEAR_F64)),
    "sinh_f64": fill(_SINH_F64, "f64", near=estrin("f64", "s", _SINH)),
    "cosh_f64": fill(_COSH_F64, "f64"),
    "root_f64": fill(_ROOT, "f64"),
    "asinh_f64": fill(_ASINH_F64, "f64"),
    "acosh_f64": fill(_ACOSH_F64, "f64"),
    "atanh_f64": fill(_ATANH_F64, "f64"),
    "hyperbolic_f32": fill(_PARTS, "f32", odd=estrin("f32", "s", _ODD_F32), even=estrin("f32", "s", _EVEN_F32)),
    "sinh_f32": fill(_SINH_F32, "f32", near=estrin("f32", "s", _SINH_NEAR_F32)),
    "cosh_f32": fill(_COSH_F32, "f32"),
    "atanh_f32": fill(_ATANH_F32, "f32", near=estrin("f32", "s", _ATANH_NEAR_F32)),
    **through_f64("asinh", "acosh"),
}
