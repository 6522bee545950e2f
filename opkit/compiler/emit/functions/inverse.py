"""asin, acos, atan and atan2.

atan: the angle of a point in the first quadrant, turned by 0, pi/4 or pi/2 so that its tangent t has |t| <= tan(pi/8),
is t + t**3 p(t**2); in f32 the lesser of x and 1 / x is t. asin: x + x**3 p(x**2) up to 1/2, and
pi/2 - 2 asin(sqrt((1 - x) / 2)) above. p is minimax, in f32 to 2**-28.5 of atan and to 2**-27.6 of asin.
"""

from __future__ import annotations

from opkit.compiler.emit.functions.templates import estrin, fill

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

# The angle of (b, a), or of (-b, a) if left, for a and b that are not negative.
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

# Scaling keeps sums from overflowing and quotients of subnormal numbers exact; two infinities are as far as each other.
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

# Up to pi / 4 it is the arctangent of the quotient of the lesser by the greater, and above pi / 2 less it; no scaling
# is needed, as a quotient that underflows is what then is to be rounded.
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

TEXT = {
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
