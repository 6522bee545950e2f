"""sinh, cosh, tanh and their inverses; asin, acos, atan and atan2.

tanh and sinh of small arguments are x + x**3 p(x**2), p minimax. tanh of others is 1 - 2 / (exp(2 |x|) + 1), and sinh and cosh
are e -+ 1 / (4 e) with e = exp(|x|) / 2. The inverses are logarithms of sums, computed with the rounding errors of the sums.

In f32, sinh above 1 and cosh are sums of cosh(r) and sinh(r), as x = n ln 2 + r, by minimax polynomials to 2**-33. atanh is x +
x**3 p(x**2) to 2**-29 below 1/2, and log1p(2 x / (1 - x)) / 2 above.

atan: the angle of a point in the first quadrant, rotated by 0, pi/4 or pi/2 so that its tangent t has |t| <= tan(pi/8), is t +
t**3 p(t**2); in f32, t is the lesser of x and 1 / x. asin: x + x**3 p(x**2) up to 1/2, and pi/2 - 2 asin(sqrt((1 - x) / 2))
above. p is minimax, in f32 to 2**-28.5 of atan and to 2**-27.6 of asin.
"""

from __future__ import annotations

from opkit.compiler.emit.c.functions.exponential import Q32
from opkit.compiler.emit.c.functions.floats import estrin, fill, through_f64

_TANH_NEAR_F32 = "-0x1.55554cp-2 0x1.110d3ep-3 -0x1.b92c0ep-5 0x1.5958bep-6 -0x1.9bc4dp-8"
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
# cosh(r) - 1. The scale is a quarter of the full one, so that it is not infinite.
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

_TANH_NEAR_F64 = (
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

_SINH_NEAR_F64 = (
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

# With q = 2a / (1 - a), atanh(a) is log(1 + q) / 2; the rounding error of q comes from its product with 1 - a.
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

_HYPERBOLIC_TEXT = {
    "tanh_f32": fill(_TANH_F32, "f32", near=estrin("f32", "s", _TANH_NEAR_F32), q=estrin("f32", "r", Q32)),
    "tanh_f64": fill(_TANH_F64, "f64", near=estrin("f64", "s", _TANH_NEAR_F64)),
    "sinh_f64": fill(_SINH_F64, "f64", near=estrin("f64", "s", _SINH_NEAR_F64)),
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

_ATAN = (
    "-0x1.5555555555543p-2 0x1.999999999632ep-3 -0x1.24924922e5e6ep-3 0x1.c71c70f9240ffp-4 -0x1.745cfac188b68p-4 "
    "0x1.3b11376548d51p-4 -0x1.10ecf14271aafp-4 0x1.df1f9dfb30676p-5 -0x1.9d16b4365d386p-5 0x1.3876245c01bdep-5 "
    "-0x1.26b2a51a48f84p-6"
)
_ASIN = (
    "0x1.55555555553e8p-3 0x1.3333333367068p-4 0x1.6db6db464babfp-5 0x1.f1c72b3433c36p-6 0x1.6e8a091830a17p-6 "
    "0x1.1c6acf903285dp-6 0x1.c71080fa3a7c9p-7 0x1.8e5474ac8cafdp-7 0x1.af3307f01aeacp-8 0x1.3dd526c732cf5p-6 "
    "-0x1.06c06e74c7fd9p-6 0x1.04731d276534p-5"
)
_ATAN32 = (
    "-0x1.55553ep-2 0x1.9991e4p-3 -0x1.242086p-3 0x1.c08c4cp-4 -0x1.580904p-4 0x1.da2942p-5 -0x1.fd7b0ap-6 "
    "0x1.641f72p-7 -0x1.d34bbcp-10"
)
_ASIN32 = "0x1.5555c8p-3 0x1.330204p-4 0x1.747bb8p-5 0x1.8c3e4ep-6 0x1.595c66p-5"

# The angle of the point (b, a), or of (-b, a) if left; a and b are not negative.
_ANGLE = """
OPK_INLINE double opk_angle_f64(double a, double b, int left) {
    const int low = a <= 0x1.a827999fcef32p-2 * b, high = a > 0x1.3504f333f9de6p+1 * b;
    const double up = low ? a : high ? -b : a - b, down = low ? b : high ? a : a + b;
    const double ratio = down == 0.0 ? 0.0 : up / down, t = left ? -ratio : ratio;
    const double edge = left ? 0x1.921fb54442d18p+1 : 0.0, edge_rest = left ? 0x1.1a62633145c07p-53 : 0.0;
    const double mid = left ? 0x1.2d97c7f3321d2p+1 : 0x1.921fb54442d18p-1;
    const double mid_rest = left ? 0x1.a79394c9e8a0ap-54 : 0x1.1a62633145c07p-55;
    const double turn = low ? edge : high ? 0x1.921fb54442d18p+0 : mid;
    const double rest = low ? edge_rest : high ? 0x1.1a62633145c07p-54 : mid_rest;
    const double s = t * t, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    return turn + (opk_fma_f64(t * s, $p, rest) + t);
}
"""

_ATAN_F64 = """
OPK_INLINE double opk_atan_f64(double x) {
    return __builtin_copysign(opk_angle_f64(__builtin_fabs(x), 1.0, 0), x);
}
"""

# Scaling prevents overflow in sums and makes quotients of subnormal numbers exact; two infinities count as equal.
_ATAN2_F64 = """
OPK_INLINE double opk_atan2_f64(double y, double x) {
    const double a = __builtin_fabs(y), b = __builtin_fabs(x);
    const double most = a > b ? a : b, up = most < 0x1p-900 ? 0x1p+200 : 1.0, scale = most > 0x1p+1000 ? 0x1p-100 : up;
    const double above = b == __builtin_inf() ? 0.0 : scale, across = a == __builtin_inf() ? 0.0 : scale;
    const double p = a == __builtin_inf() ? 1.0 : a * above, q = b == __builtin_inf() ? 1.0 : b * across;
    const double angle = opk_angle_f64(p, q, __builtin_copysign(1.0, x) < 0.0);
    return __builtin_copysign(angle, y);
}
"""

_ASIN_F64 = """
OPK_INLINE double opk_asin_f64(double x) {
    const double a = __builtin_fabs(x);
    const double s = a > 0.5 ? opk_fma_f64(-0.5, a, 0.5) : a * a, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    const double root = a > 0.5 ? __builtin_sqrt(s) : a;
    const double rest = root * s * $p;
    const double far =
        opk_fma_f64(-2.0, root, 0x1.921fb54442d18p+0) + opk_fma_f64(-2.0, rest, 0x1.1a62633145c07p-54);
    return __builtin_copysign(a > 0.5 ? far : a + rest, x);
}
"""

_ACOS_F64 = """
OPK_INLINE double opk_acos_f64(double x) {
    const double a = __builtin_fabs(x);
    const double s = a > 0.5 ? opk_fma_f64(-0.5, a, 0.5) : a * a, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    const double root = a > 0.5 ? __builtin_sqrt(s) : x;
    const double rest = root * s * $p;
    const double near = 0x1.921fb54442d18p+0 - (root - (0x1.1a62633145c07p-54 - rest));
    const double low = opk_fma_f64(-2.0, rest, 0x1.1a62633145c07p-53);
    const double left = 0x1.921fb54442d18p+1 - opk_fma_f64(2.0, root, -low);
    const double far = x < 0.0 ? left : 2.0 * (root + rest);
    return a > 0.5 ? far : near;
}
"""

# Up to pi / 4, the arctangent of the lesser number divided by the greater; above, pi / 2 minus it. No scaling is needed: a
# quotient that underflows is the result before rounding.
_ANGLE_F32 = """
OPK_INLINE float opk_angle_f32(float a, float b, int left) {
    const int high = a > b;
    const float up = high ? b : a, down = high ? a : b;
    const float same = a == 0.0f ? 0.0f : 1.0f, t = up == down ? same : up / down;
    const float s = t * t, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4, rest = t * s * $p;
    const float turn = high ? 0x1.921fb6p+0f : left ? 0x1.921fb6p+1f : 0.0f;
    const float turn_rest = high ? -0x1.777a5cp-25f : left ? -0x1.777a5cp-24f : 0.0f;
    const unsigned sign = (unsigned)(high != left) << 31;
    const float u = opk_from_bits_f32(opk_bits_f32(t) ^ sign), u_rest = opk_from_bits_f32(opk_bits_f32(rest) ^ sign);
    return (turn + u) + (turn_rest + u_rest);
}
"""

_ATAN_F32 = """
OPK_INLINE float opk_atan_f32(float x) {
    const float a = __builtin_fabsf(x), t = a > 1.0f ? 1.0f / a : a;
    const float s = t * t, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4, rest = t * s * $p;
    const float far = (0x1.921fb6p+0f - t) + (-0x1.777a5cp-25f - rest);
    return __builtin_copysignf(a > 1.0f ? far : t + rest, x);
}
"""

_ATAN2_F32 = """
OPK_INLINE float opk_atan2_f32(float y, float x) {
    const float angle = opk_angle_f32(__builtin_fabsf(y), __builtin_fabsf(x), __builtin_copysignf(1.0f, x) < 0.0f);
    return __builtin_copysignf(angle, y);
}
"""

_ASIN_F32 = """
OPK_INLINE float opk_asin_f32(float x) {
    const float a = __builtin_fabsf(x);
    const float s = a > 0.5f ? opk_fma_f32(-0.5f, a, 0.5f) : a * a, s2 = s * s, s4 = s2 * s2;
    const float root = a > 0.5f ? __builtin_sqrtf(s) : a;
    const float rest = root * s * $p;
    const float y = opk_fma_f32(-2.0f, root, 0x1.921fb6p+0f), lost = opk_fma_f32(-2.0f, root, 0x1.921fb6p+0f - y);
    const float far = y + opk_fma_f32(-2.0f, rest, lost - 0x1.777a5cp-25f);
    return __builtin_copysignf(a > 0.5f ? far : a + rest, x);
}
"""

_ACOS_F32 = """
OPK_INLINE float opk_acos_f32(float x) {
    const float a = __builtin_fabsf(x);
    const float s = a > 0.5f ? opk_fma_f32(-0.5f, a, 0.5f) : a * a, s2 = s * s, s4 = s2 * s2;
    const float root = a > 0.5f ? __builtin_sqrtf(s) : x;
    const float rest = root * s * $p;
    const float near = (0x1.921fb6p+0f - root) + (-0x1.777a5cp-25f - rest);
    const float left = opk_fma_f32(-2.0f, root, 0x1.921fb6p+1f) + opk_fma_f32(-2.0f, rest, -0x1.777a5cp-24f);
    const float far = x < 0.0f ? left : 2.0f * (root + rest);
    return a > 0.5f ? far : near;
}
"""

_INVERSE_TEXT = {
    "angle_f64": fill(_ANGLE, "f64", p=estrin("f64", "s", _ATAN)),
    "atan_f64": fill(_ATAN_F64, "f64"),
    "atan2_f64": fill(_ATAN2_F64, "f64"),
    "asin_f64": fill(_ASIN_F64, "f64", p=estrin("f64", "s", _ASIN)),
    "acos_f64": fill(_ACOS_F64, "f64", p=estrin("f64", "s", _ASIN)),
    "angle_f32": fill(_ANGLE_F32, "f32", p=estrin("f32", "s", _ATAN32)),
    "atan_f32": fill(_ATAN_F32, "f32", p=estrin("f32", "s", _ATAN32)),
    "atan2_f32": fill(_ATAN2_F32, "f32"),
    "asin_f32": fill(_ASIN_F32, "f32", p=estrin("f32", "s", _ASIN32)),
    "acos_f32": fill(_ACOS_F32, "f32", p=estrin("f32", "s", _ASIN32)),
}

TEXT = _HYPERBOLIC_TEXT | _INVERSE_TEXT
