"""erf and erfc.

erf in f32: x + x p(x**2) below 0.92; above, 1 - 2**p(|x|) with p minimax for log2(erfc), which needs no scaling as the
power is in [2**-25, 0.2]; |x| > 3.92 rounds to 1.

erf in f64: 1 - exp(-x - x p(x)), by the steps of expm1, with p minimax for -log(erfc(x)) / x - 1 on [0, 5.95] to 2**-56 of
erf(x); the greatest |x| that does not round to 1 is below 5.93.

erfc in f32, computed in f64: t 2**(p(t) - x**2 log2(e)) with t = 1 / (1 + 0.45 x), p minimax for what is left on [0, 10.1],
to 2**-30. In f64: exp(-x**2) p(q) / (1 + 2 x) with q = (x - 4) / (x + 4), after Shepherd and Laframboise; what x**2 and
the quotient were rounded by is kept. p is minimax for x in [0.45, 28].
"""

from __future__ import annotations

from opkit.compiler.emit.functions.exponential import Q64
from opkit.compiler.emit.functions.templates import estrin, fill

_NEAR_F32 = "0x1.06eba6p-3 -0x1.8126eep-2 0x1.ce1bep-4 -0x1.b69eecp-6 0x1.47a77p-8 -0x1.3bb75p-11"
_FAR_F32 = "-0x1.280e5p-12 -0x1.a07bfcp+0 -0x1.d6a93ep-1 -0x1.33146cp-3 0x1.06b05cp-5 -0x1.1fba98p-8 0x1.286792p-12"
_EXP2_F32 = "0x1p+0 0x1.62e43p-1 0x1.ebfa4ap-3 0x1.c6aeecp-5 0x1.3cbf76p-7 0x1.5f48c8p-10"

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

_NEAR_F64 = (
    "0x1.06eba8214db69p-3 -0x1.812746b0379e6p-2 0x1.ce2f21a042b34p-4 -0x1.b82ce31284f38p-6 0x1.565bcd0dbd921p-8 "
    "-0x1.c02db3db49762p-11 0x1.f9a321e4b84f9p-14 -0x1.f4d1e434bc0cfp-17 0x1.b9df305cad6f7p-20 -0x1.5f1f40faeea79p-23 "
    "0x1.f7b99d7c8709ap-27 -0x1.38ac2290d3965p-30 0x1.062759c5be8ecp-34"
)
_FAR_F64 = (
    "-0x1.1df1ad154a28ep-3 0x1.f7f5df66fd4f6p-7 0x1.16ecefcfa53bbp-4 -0x1.9ddb23c3e7921p-4 "
    "0x1.7fee004e1217cp-4 -0x1.0fb06dfe70ce6p-4 0x1.3079edf683507p-5 -0x1.0962387c9f67fp-6 0x1.49c67289b9f4fp-8 "
    "-0x1.8d4aa2544cecbp-11 -0x1.a1df2c2c36684p-13 0x1.3be0e4b2bb99cp-13 -0x1.9957c7d15e04ep-16 -0x1.78a604966cf97p-17 "
    "0x1.7f10a7fdd5cc2p-18 0x1.4215acf0eee0fp-22 -0x1.b93b77fbb7dd7p-21 0x1.1e67b23168f13p-24 0x1.c3a5ea5ce2d5bp-24 "
    "-0x1.9fdcb3ddd8e67p-27 -0x1.6231eab0ea6fcp-27"
)

_WIDE = (
    "-0x1.fa4d0b43a5653p+0 0x1.71367658d31b5p+0 0x1.2a198f80f821ep-1 0x1.0652350afc582p-3 0x1.31cad217662c8p-2 "
    "-0x1.6d104193ab29ap+0 0x1.95fea63ff4bc4p+1 -0x1.79d2115cc4e45p+2 0x1.baf8116a96df6p+2 -0x1.2ae63efeb6d11p+2 "
    "0x1.b0a35137b543fp+0 -0x1.070a398660eeap-2"
)
_LOG_F64 = (
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

# erfc(a) = exp(-a - a p(a)), and erf(a) is 1 less it, as expm1 finds it.
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

TEXT = {
    "erfc_f32": fill(_ERFC_F32, "f32", wide=estrin("f64", "t", _WIDE)),
    "erf_f32": fill(
        _ERF_F32,
        "f32",
        near=estrin("f32", "s", _NEAR_F32),
        far=estrin("f32", "y", _FAR_F32),
        exp2=estrin("f32", "r", _EXP2_F32),
    ),
    "erfc_far_f64": fill(_ERFC_FAR, "f64", far=estrin("f64", "q", _FAR_F64)),
    "erf_f64": fill(_ERF_F64, "f64", log=estrin("f64", "a", _LOG_F64), q=estrin("f64", "r", Q64)),
    "erfc_f64": fill(_ERFC_F64, "f64", near=estrin("f64", "s", _NEAR_F64)),
}
