"""exp, exp2, expm1, erf and erfc.

Exponentials: Cody and Waite's reduction, x = n ln 2 + r with |r| <= ln 2 / 2. ln 2 is in two parts, the first so short that n
times it is exact. exp(r) = 1 + r + r**2 q(r) with q a minimax polynomial; there is no table. 2**n is multiplied in two halves,
so that results may be subnormal and infinite. Adding and subtracting 1.5 * 2**23 (or 2**52) rounds to the nearest integer,
whose bits are then the lowest ones of the sum.

erf in f32: x + x p(x**2) below 0.92. Above it, 1 - 2**p(|x|) with p minimax for log2(erfc): no scaling is needed, because the
power is in [2**-25, 0.2]. |x| > 3.92 rounds to 1.

erf in f64: 1 - exp(-x - x p(x)), by the steps of expm1, with p minimax for -log(erfc(x)) / x - 1 on [0, 5.95] to 2**-56 of
erf(x); the greatest |x| that does not round to 1 is below 5.93.

erfc in f32, computed in f64: t 2**(p(t) - x**2 log2(e)) with t = 1 / (1 + 0.45 x) and p minimax for the remaining factor on [0,
10.1], to 2**-30. In f64: exp(-x**2) p(q) / (1 + 2 x) with q = (x - 4) / (x + 4), after Shepherd and Laframboise, with the
rounding errors of x**2 and of the quotient. p is minimax for x in [0.45, 28].
"""

from __future__ import annotations

from opkit.compiler.emit.c.functions.floats import estrin, fill

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

# The lowest bits of the shifted sum are n + 254. Its two halves are the biased exponents of two factors of 2**n.
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

# exp(x) 2**k for -2 <= k <= 200; finite for |x| < 712.
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

# exp(x + low), rounded about once: the rounding errors of 1 + r and of r are added back.
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

# 2**x with an error of 2**-29, for results in f32; |x| is at most 1000.
_EXP2_WIDE = """
OPK_INLINE double opk_exp2_wide(double x) {
    const double shifted = x + 0x1.8p+52, r = x - (shifted - 0x1.8p+52), r2 = r * r, r4 = r2 * r2;
    return opk_from_bits_f64(opk_bits_f64($p) + (opk_bits_f64(shifted) << 52));
}
"""

_EXPONENTIAL_TEXT = {
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

_ERF_NEAR_F32 = "0x1.06eba6p-3 -0x1.8126eep-2 0x1.ce1bep-4 -0x1.b69eecp-6 0x1.47a77p-8 -0x1.3bb75p-11"
_ERF_FAR_F32 = "-0x1.280e5p-12 -0x1.a07bfcp+0 -0x1.d6a93ep-1 -0x1.33146cp-3 0x1.06b05cp-5 -0x1.1fba98p-8 0x1.286792p-12"
_POWER_OF_TWO_F32 = "0x1p+0 0x1.62e43p-1 0x1.ebfa4ap-3 0x1.c6aeecp-5 0x1.3cbf76p-7 0x1.5f48c8p-10"

_ERF_F32 = """
OPK_INLINE float opk_erf_f32(float x) {
    const float a = __builtin_fabsf(x), s = x * x, s2 = s * s, s4 = s2 * s2;
    const float near = opk_fma_f32(a, $near, a);
    const float y = a > 3.92f ? 3.92f : a, y2 = y * y, y4 = y2 * y2;
    const float power = $far;
    const float shifted = power + 0x1.8p+23f;
    const float r = power - (shifted - 0x1.8p+23f), r2 = r * r, r4 = r2 * r2;
    const float fraction = $exp2;
    const float rest = opk_from_bits_f32(opk_bits_f32(fraction) + (opk_bits_f32(shifted) << 23));
    return __builtin_copysignf(a >= 0.92f ? 1.0f - rest : near, x);
}
"""

_ERFC_NEAR_F64 = (
    "0x1.06eba8214db69p-3 -0x1.812746b0379e6p-2 0x1.ce2f21a042b34p-4 -0x1.b82ce31284f38p-6 0x1.565bcd0dbd921p-8 "
    "-0x1.c02db3db49762p-11 0x1.f9a321e4b84f9p-14 -0x1.f4d1e434bc0cfp-17 0x1.b9df305cad6f7p-20 -0x1.5f1f40faeea79p-23 "
    "0x1.f7b99d7c8709ap-27 -0x1.38ac2290d3965p-30 0x1.062759c5be8ecp-34"
)
_ERFC_FAR_F64 = (
    "-0x1.1df1ad154a28ep-3 0x1.f7f5df66fd4f6p-7 0x1.16ecefcfa53bbp-4 -0x1.9ddb23c3e7921p-4 "
    "0x1.7fee004e1217cp-4 -0x1.0fb06dfe70ce6p-4 0x1.3079edf683507p-5 -0x1.0962387c9f67fp-6 0x1.49c67289b9f4fp-8 "
    "-0x1.8d4aa2544cecbp-11 -0x1.a1df2c2c36684p-13 0x1.3be0e4b2bb99cp-13 -0x1.9957c7d15e04ep-16 -0x1.78a604966cf97p-17 "
    "0x1.7f10a7fdd5cc2p-18 0x1.4215acf0eee0fp-22 -0x1.b93b77fbb7dd7p-21 0x1.1e67b23168f13p-24 0x1.c3a5ea5ce2d5bp-24 "
    "-0x1.9fdcb3ddd8e67p-27 -0x1.6231eab0ea6fcp-27"
)

_ERFC_F32_TERMS = (
    "-0x1.fa4d0b43a5653p+0 0x1.71367658d31b5p+0 0x1.2a198f80f821ep-1 0x1.0652350afc582p-3 0x1.31cad217662c8p-2 "
    "-0x1.6d104193ab29ap+0 0x1.95fea63ff4bc4p+1 -0x1.79d2115cc4e45p+2 0x1.baf8116a96df6p+2 -0x1.2ae63efeb6d11p+2 "
    "0x1.b0a35137b543fp+0 -0x1.070a398660eeap-2"
)
_LOG_ERFC_F64 = (
    "0x1.06eba8214db68p-3 0x1.45f306dc9c897p-1 0x1.a4f4e2a1b206dp-4 -0x1.39668593d77e6p-6 -0x1.b6b68bf03a4f4p-13 "
    "0x1.bca67bd2bd9ffp-10 -0x1.35654fac9dd2bp-11 0x1.b22bcad0cff8bp-16 0x1.0e7f95fa3ap-14 -0x1.f2af9f046b453p-16 "
    "0x1.c94e609da2234p-19 0x1.7c89b0e715251p-19 -0x1.d3845df9b9f03p-20 0x1.693f5cca77524p-22 0x1.267de748a5ae2p-23 "
    "-0x1.30601c4ef560dp-23 0x1.1a466023be135p-24 -0x1.6811bb0638993p-26 0x1.575e1d7ea72f4p-28 -0x1.f32deb2e25245p-31 "
    "0x1.12735a24d617dp-33 -0x1.bb908a5cfed29p-37 0x1.f1c60a19d2cb9p-41 -0x1.5aaccf085ff4ap-45 0x1.c363b2c6b1d51p-51"
)

# erfc(a) for a >= 0.45.
_ERFC_FAR = """
OPK_INLINE double opk_erfc_far_f64(double x) {
    const double a = x > 28.0 ? 28.0 : x, square = a * a, lost = opk_product_error(a, a, square);
    const double q = (a - 4.0) / (a + 4.0), q2 = q * q, q4 = q2 * q2, q8 = q4 * q4, q16 = q8 * q8;
    const double u = q * $far, p = 0x1.3ba5916e9fd7fp+0 + u, p_low = (0x1.3ba5916e9fd7fp+0 - p) + u;
    const double d = 2.0 * a + 1.0, t = p / d, again = t * d;
    const double d_low = opk_sum_error(1.0, 2.0 * a, d);
    const double t_low = (((p - again) - opk_product_error(t, d, again)) + opk_fma_f64(-t, d_low, p_low)) / d;
    const double e = opk_exp_times_f64(-square, 100), rest = opk_fma_f64(-t, lost, t_low);
    const double r = e * t;
    return (r + opk_fma_f64(e, rest, opk_product_error(e, t, r))) * 0x1p-100;
}
"""

# erfc(a) = exp(-a - a p(a)), and erf(a) is 1 minus that, by the steps of expm1.
_ERF_F64 = """
OPK_INLINE double opk_erf_f64(double x) {
    const double size = __builtin_fabs(x), a = size > 5.95 ? 5.95 : size;
    const double a2 = a * a, a4 = a2 * a2, a8 = a4 * a4, a16 = a8 * a8, power = opk_fma_f64(-a, $log, -a);
    const double shifted = opk_fma_f64(power, 0x1.71547652b82fep+0, 0x1.8p+52);
    const double n = shifted - 0x1.8p+52;
    const double r = opk_fma_f64(n, -0x1.a39ef35793c76p-33, opk_fma_f64(n, -0x1.62e42feep-1, power));
    const double r2 = r * r, r4 = r2 * r2, r8 = r4 * r4, e = opk_fma_f64($q, r2, r);
    const double scale = opk_from_bits_f64((opk_bits_f64(shifted) << 52) + 0x3ff0000000000000ull);
    return __builtin_copysign(opk_fma_f64(-scale, e, 1.0 - scale), x);
}
"""

_ERFC_F64 = """
OPK_INLINE double opk_erfc_f64(double x) {
    const double a = __builtin_fabs(x), s = x * x, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    const double near = opk_fma_f64(-x, $near, 1.0 - x), far = opk_erfc_far_f64(a);
    const double left = x < 0.0 ? 2.0 - far : far;
    return a >= 0.45 ? left : near;
}
"""

_ERFC_F32 = """
OPK_INLINE float opk_erfc_f32(float x) {
    const float size = __builtin_fabsf(x), least = size > 10.1f ? 10.1f : size;
    const double a = least, t = 1.0 / opk_fma_f64(a, 0.45, 1.0), t2 = t * t, t4 = t2 * t2, t8 = t4 * t4;
    const double power = opk_fma_f64(a * -0x1.71547652b82fep+0, a, $wide);
    const float far = (float)(t * opk_exp2_wide(power));
    return x < 0.0f ? 2.0f - far : far;
}
"""

_ERROR_TEXT = {
    "erfc_f32": fill(_ERFC_F32, "f32", wide=estrin("f64", "t", _ERFC_F32_TERMS)),
    "erf_f32": fill(
        _ERF_F32,
        "f32",
        near=estrin("f32", "s", _ERF_NEAR_F32),
        far=estrin("f32", "y", _ERF_FAR_F32),
        exp2=estrin("f32", "r", _POWER_OF_TWO_F32),
    ),
    "erfc_far_f64": fill(_ERFC_FAR, "f64", far=estrin("f64", "q", _ERFC_FAR_F64)),
    "erf_f64": fill(_ERF_F64, "f64", log=estrin("f64", "a", _LOG_ERFC_F64), q=estrin("f64", "r", Q64)),
    "erfc_f64": fill(_ERFC_F64, "f64", near=estrin("f64", "s", _ERFC_NEAR_F64)),
}

TEXT = _EXPONENTIAL_TEXT | _ERROR_TEXT
