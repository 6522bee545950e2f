"""erf and erfc.

erf in f32: x + x p(x**2) below 0.84; above, 1 - 2**p(|x|) with p minimax for log2(erfc), which needs no scaling as the
power is in [2**-25, 0.24]; |x| > 3.92 rounds to 1.
"""

from __future__ import annotations

from opkit.compiler.emit.functions.templates import estrin, fill

_NEAR_F32 = "0x1.06eba8p-3 -0x1.812722p-2 0x1.ce2554p-4 -0x1.b73ad2p-6 0x1.4bb254p-8 -0x1.4e4e78p-11"
_FAR_F32 = "-0x1.1c2e04p-13 -0x1.a0a4ccp+0 -0x1.d61c5ap-1 -0x1.350edp-3 0x1.0a969ep-5 -0x1.27b8p-8 0x1.35b106p-12"
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
    return __builtin_copysignf(a >= 0.84f ? 1.0f - rest : near, x);
}
"""

TEXT = {
    "erf_f32": fill(
        _ERF_F32,
        "f32",
        near=estrin("f32", "s", _NEAR_F32),
        far=estrin("f32", "y", _FAR_F32),
        exp2=estrin("f32", "r", _EXP2_F32),
    ),
}
