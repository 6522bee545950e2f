"""erf and erfc.

erf in f32: x + x p(x**2) below 0.92; above, 1 - 2**p(|x|) with p minimax for log2(erfc), which needs no scaling as the
power is in [2**-25, 0.2]; |x| > 3.92 rounds to 1.

erfc, and erf above 1, in f64: exp(-x**2) p(q) / (1 + 2 x) with q = (x - 4) / (x + 4), after Shepherd and Laframboise;
what x**2 and the quotient were rounded by is kept. p is minimax for x in [0.45, 28].
"""

from __future__ import annotations

from opkit.compiler.emit.functions.templates import estrin, fill, horner

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
    "-0x1.01da8f7074ab2p-21 -0x1.20dd2355a12a5p+0 -0x1.45f609271536bp-1 -0x1.a4aedd19632e8p-4 0x1.3734eb2819fafp-6 "
    "0x1.a86bcf4ee1891p-12 -0x1.f4afbe3c43f36p-10 0x1.919132a23543fp-11 -0x1.151a8e58f6f26p-13 -0x1.6be609fb05332p-16 "
    "0x1.881666499db1cp-16 -0x1.285dfd9115dcp-17 0x1.23d43a5376901p-19 -0x1.982d6c7468e3bp-22 0x1.9664cb4bb4a5p-25 "
    "-0x1.13d1d1da009d4p-28 0x1.cb535d0df6f2p-33 -0x1.62b50155725c4p-38"
)

# erfc(a) for a >= 0.45.
_ERFC_FAR = """
OPK_INLINE double opk_erfc_far_f64(double x) {
    const double a = x > 28.0 ? 28.0 : x, square = a * a, lost = opk_product_error(a, a, square);
    const double q = (a - 4.0) / (a + 4.0);
    const double u = q * $far, p = 0x1.3ba5916e9fd7fp+0 + u, p_low = (0x1.3ba5916e9fd7fp+0 - p) + u;
    const double d = 2.0 * a + 1.0, t = p / d, again = t * d;
    const double d_low = opk_sum_error(1.0, 2.0 * a, d);
    const double t_low = (((p - again) - opk_product_error(t, d, again)) + (p_low - t * d_low)) / d;
    const double e = opk_exp_times_f64(-square, 100), rest = t_low - t * lost;
    const double r = e * t;
    return (r + (opk_product_error(e, t, r) + e * rest)) * 0x1p-100;
}
"""

# The last place of 1 - erfc(a) is far above what the logarithm of erfc(a), a polynomial, is off by.
_ERF_F64 = """
OPK_INLINE double opk_erf_f64(double x) {
    const double a = __builtin_fabs(x), s = x * x, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    const double near = opk_fma_f64(a, $near, a);
    const double y = a > 5.95 ? 5.95 : a, y2 = y * y, y4 = y2 * y2, y8 = y4 * y4, y16 = y8 * y8;
    const double far = 1.0 - opk_exp_moderate_f64($log);
    return __builtin_copysign(a >= 1.0 ? far : near, x);
}
"""

_ERFC_F64 = """
OPK_INLINE double opk_erfc_f64(double x) {
    const double a = __builtin_fabs(x), s = x * x, s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    const double near = (1.0 - x) - x * $near, far = opk_erfc_far_f64(a);
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
    "erfc_far_f64": fill(_ERFC_FAR, "f64", far=horner("f64", "q", _FAR_F64)),
    "erf_f64": fill(_ERF_F64, "f64", near=estrin("f64", "s", _NEAR_F64), log=estrin("f64", "y", _LOG_F64)),
    "erfc_f64": fill(_ERFC_F64, "f64", near=estrin("f64", "s", _NEAR_F64)),
}
