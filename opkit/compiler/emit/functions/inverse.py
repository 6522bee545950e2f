"""asin, acos, atan and atan2; those of f32 are computed in f64.

atan: the angle of a point in the first quadrant, turned by 0, pi/4 or pi/2 so that its tangent t has |t| <= tan(pi/8),
is t + t**3 p(t**2). asin: x + x**3 p(x**2) up to 1/2, and pi/2 - 2 asin(sqrt((1 - x) / 2)) above. p is minimax.
"""

from __future__ import annotations

from opkit.compiler.emit.functions.templates import estrin, fill, through_f64

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
    const double s = a > 0.5 ? 0.5 - 0.5 * a : a * a, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    const double root = a > 0.5 ? __builtin_sqrt(s) : a;
    const double rest = root * s * $p;
    const double far = (0x1.921fb54442d18p+0 - 2.0 * root) + (0x1.1a62633145c07p-54 - 2.0 * rest);
    return __builtin_copysign(a > 0.5 ? far : a + rest, x);
}
"""

_ACOS_F64 = """
OPK_INLINE double opk_acos_f64(double x) {
    const double a = __builtin_fabs(x);
    const double s = a > 0.5 ? 0.5 - 0.5 * a : a * a, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    const double root = a > 0.5 ? __builtin_sqrt(s) : x;
    const double rest = root * s * $p;
    const double near = 0x1.921fb54442d18p+0 - (root - (0x1.1a62633145c07p-54 - rest));
    const double left = 0x1.921fb54442d18p+1 - (2.0 * root - (0x1.1a62633145c07p-53 - 2.0 * rest));
    const double far = x < 0.0 ? left : 2.0 * (root + rest);
    return a > 0.5 ? far : near;
}
"""

TEXT = {
    "angle_f64": fill(_ANGLE, "f64", p=estrin("f64", "s", _ATAN)),
    "atan_f64": fill(_ATAN_F64, "f64"),
    "atan2_f64": fill(_ATAN2_F64, "f64"),
    "asin_f64": fill(_ASIN_F64, "f64", p=estrin("f64", "s", _ASIN)),
    "acos_f64": fill(_ACOS_F64, "f64", p=estrin("f64", "s", _ASIN)),
    **through_f64("asin", "acos", "atan"),
    **through_f64("atan2", arguments=("y", "x")),
}
