"""exp, exp2 and expm1.

Method: Cody and Waite's reduction, x = n ln 2 + r with |r| <= ln 2 / 2 and ln 2 in two parts, the first so short that
n times it is exact; exp(r) = 1 + r + r**2 q(r) with q a minimax polynomial; no table. 2**n is multiplied on in two
halves, so that results may be subnormal and infinite. Adding and subtracting 1.5 * 2**23 (or 2**52) rounds to the nearest
integer, whose bits are then the lowest ones of the sum.
"""

from __future__ import annotations

from opkit.compiler.emit.functions.templates import estrin, fill

Q32 = "0x1p-1 0x1.555488p-3 0x1.555456p-5 0x1.1240b6p-7 0x1.6dbb5cp-10"
Q64 = (
    "0x1p-1 0x1.5555555555559p-3 0x1.555555555555ap-5 0x1.111111110f748p-7 0x1.6c16c16c1456p-10 0x1.a01a01afb06cbp-13 "
    "0x1.a01a01b073a27p-16 0x1.71ddf8c93bed5p-19 0x1.27e4c619dd6f3p-22 0x1.af5e074bd664ep-26 0x1.1f94c1b25c00fp-29"
)
EXP2 = (
    "0x1.00000002624a4p+0 0x1.62e430c7f2b49p-1 0x1.ebfbdadc34e6p-3 0x1.c6aed4b1c56bfp-5 0x1.3b2dbbe0b5138p-7 "
    "0x1.5f456d670cb05p-10 0x1.41d32c5be15ecp-13"
)
_Q = {"q": estrin("f32", "r", Q32)}
_P = {"q": estrin("f64", "r", Q64)}

# The lowest bits of the shifted sum are n + 254, whose two halves are the biased exponents of two factors of 2**n.
# Measured on every 64th float: 1.07 ulp at most.
_EXP_F32 = """
OPK_INLINE float opk_exp_f32(float x) {
    const float shifted = opk_fma_f32(x, 0x1.715476p+0f, 0x1.8001fcp+23f);
    const float n = shifted - 0x1.8001fcp+23f;
    const float r = opk_fma_f32(n, -0x1.7f7d1cp-20f, opk_fma_f32(n, -0x1.62e4p-1f, x)), r2 = r * r, r4 = r2 * r2;
    const float e = opk_fma_f32($q, r2, r);
    const unsigned whole = opk_bits_f32(shifted), half = whole >> 1;
    const float scale = opk_from_bits_f32(half << 23);
    const float finite = opk_fma_f32(scale, e, scale) * opk_from_bits_f32((whole - half) << 23);
    const float positive = x > 89.0f ? __builtin_inff() : finite;
    return x < -104.0f ? 0.0f : positive;
}
"""

# 2**x = 2**n exp((x - n) ln 2), where x - n is exact.
_EXP2_F32 = """
OPK_INLINE float opk_exp2_f32(float x) {
    const float shifted = x + 0x1.8001fcp+23f, d = x - (shifted - 0x1.8001fcp+23f);
    const float r = opk_fma_f32(d, 0x1.62e430p-1f, d * -0x1.05c610p-29f), r2 = r * r, r4 = r2 * r2;
    const float e = opk_fma_f32($q, r2, r);
    const unsigned whole = opk_bits_f32(shifted), half = whole >> 1;
    const float scale = opk_from_bits_f32(half << 23);
    const float finite = opk_fma_f32(scale, e, scale) * opk_from_bits_f32((whole - half) << 23);
    const float positive = x >= 128.0f ? __builtin_inff() : finite;
    return x < -150.0f ? 0.0f : positive;
}
"""

_EXP2_F64 = """
OPK_INLINE double opk_exp2_f64(double x) {
    const double shifted = x + 0x1.8p+52, d = x - (shifted - 0x1.8p+52);
    const double r = d * 0x1.62e42fefa39efp-1, lost = opk_product_error(d, 0x1.62e42fefa39efp-1, r);
    const double low = opk_fma_f64(d, 0x1.abc9e3b39803fp-56, lost);
    const double r2 = r * r, r4 = r2 * r2, r8 = r4 * r4;
    const double e = opk_fma_f64($q, r2, low) + r;
    const unsigned long long whole = opk_bits_f64(shifted) - 0x4338000000000000ull + 2046, half = whole >> 1;
    const double scale = opk_from_bits_f64(half << 52);
    const double finite = opk_fma_f64(scale, e, scale) * opk_from_bits_f64((whole - half) << 52);
    const double positive = x >= 1024.0 ? __builtin_inf() : finite;
    return x < -1075.0 ? 0.0 : positive;
}
"""

# exp(x) 2**k for -2 <= k <= 200, of |x| < 712 if it is to be finite.
_EXP_TIMES_F64 = """
OPK_INLINE double opk_exp_times_f64(double x, long long k) {
    const double shifted = opk_fma_f64(x, 0x1.71547652b82fep+0, 0x1.8p+52);
    const double n = shifted - 0x1.8p+52;
    const double r = opk_fma_f64(n, -0x1.a39ef35793c76p-33, opk_fma_f64(n, -0x1.62e42feep-1, x));
    const double r2 = r * r, r4 = r2 * r2, r8 = r4 * r4;
    const double e = opk_fma_f64($q, r2, r);
    const unsigned long long whole = opk_bits_f64(shifted) - 0x4338000000000000ull + 2046 + (unsigned long long)k;
    const unsigned long long half = whole >> 1;
    const double scale = opk_from_bits_f64(half << 52);
    const double finite = opk_fma_f64(scale, e, scale) * opk_from_bits_f64((whole - half) << 52);
    const double positive = x > 712.0 ? __builtin_inf() : finite;
    return x < -748.0 ? 0.0 : positive;
}
"""

# exp(x + low), rounded but once, or nearly: what 1 + r and r were rounded by is kept.
_EXP_SUM_F64 = """
OPK_INLINE double opk_exp_sum_f64(double x, double low) {
    const double shifted = opk_fma_f64(x, 0x1.71547652b82fep+0, 0x1.8p+52);
    const double n = shifted - 0x1.8p+52, near = opk_fma_f64(n, -0x1.62e42feep-1, x);
    const double r = opk_fma_f64(n, -0x1.a39ef35793c76p-33, near) + low;
    const double rest = opk_fma_f64(n, -0x1.a39ef35793c76p-33, near - r) + low;
    const double r2 = r * r, r4 = r2 * r2, r8 = r4 * r4, high = 1.0 + r;
    const double value = high + opk_fma_f64($q, r2, opk_fma_f64(rest, high, (1.0 - high) + r));
    const unsigned long long whole = opk_bits_f64(shifted) - 0x4338000000000000ull + 2046, half = whole >> 1;
    const double finite = opk_from_bits_f64(half << 52) * value * opk_from_bits_f64((whole - half) << 52);
    const double positive = x > 712.0 ? __builtin_inf() : finite;
    return x < -748.0 ? 0.0 : positive;
}
"""

_EXP_F64 = "OPK_INLINE double opk_exp_f64(double x) { return opk_exp_times_f64(x, 0); }"

# exp(x) - 1 = 2**n (exp(r) - 1) + (2**n - 1), half of it where n is 128 and 2**n would be infinite.
_EXPM1_F32 = """
OPK_INLINE float opk_expm1_f32(float x) {
    const float below = x > 89.0f ? 89.0f : x;
    const float y = below < -30.0f ? -30.0f : below;
    const float shifted = opk_fma_f32(y, 0x1.715476p+0f, 0x1.8p+23f);
    const float n = shifted - 0x1.8p+23f;
    const float r = opk_fma_f32(n, -0x1.7f7d1cp-20f, opk_fma_f32(n, -0x1.62e4p-1f, y)), r2 = r * r, r4 = r2 * r2;
    const float e = opk_fma_f32(r2, $q, r);
    const float scale = opk_power_f32((int)(opk_bits_f32(shifted) - 0x4b400000u) - 1);
    const float result = 2.0f * opk_fma_f32(scale, e, scale - 0.5f);
    return __builtin_copysignf(n == 0.0f ? e : result, x);
}
"""

_EXPM1_F64 = """
OPK_INLINE double opk_expm1_f64(double x) {
    const double below = x > 710.0 ? 710.0 : x;
    const double y = below < -60.0 ? -60.0 : below;
    const double shifted = opk_fma_f64(y, 0x1.71547652b82fep+0, 0x1.8p+52);
    const double n = shifted - 0x1.8p+52;
    const double r = opk_fma_f64(n, -0x1.a39ef35793c76p-33, opk_fma_f64(n, -0x1.62e42feep-1, y));
    const double r2 = r * r, r4 = r2 * r2, r8 = r4 * r4;
    const double e = opk_fma_f64(r2, $q, r);
    const double scale = opk_power_f64(opk_bits_f64(shifted) - 0x4338000000000000ull - 1);
    const double result = 2.0 * opk_fma_f64(scale, e, scale - 0.5);
    return __builtin_copysign(n == 0.0 ? e : result, x);
}
"""

# 2**x to 2**-29, for what is rounded to f32; |x| is at most 1000.
_EXP2_WIDE = """
OPK_INLINE double opk_exp2_wide(double x) {
    const double shifted = x + 0x1.8p+52, r = x - (shifted - 0x1.8p+52), r2 = r * r, r4 = r2 * r2;
    return opk_from_bits_f64(opk_bits_f64($p) + (opk_bits_f64(shifted) << 52));
}
"""

TEXT = {
    "exp2_wide": fill(_EXP2_WIDE, "f64", p=estrin("f64", "r", EXP2)),
    "exp_f32": fill(_EXP_F32, "f32", **_Q),
    "exp2_f32": fill(_EXP2_F32, "f32", **_Q),
    "exp2_f64": fill(_EXP2_F64, "f64", **_P),
    "exp_times_f64": fill(_EXP_TIMES_F64, "f64", **_P),
    "exp_sum_f64": fill(_EXP_SUM_F64, "f64", **_P),
    "exp_f64": fill(_EXP_F64, "f64"),
    "expm1_f32": fill(_EXPM1_F32, "f32", **_Q),
    "expm1_f64": fill(_EXPM1_F64, "f64", **_P),
}
