"""log and log1p.

Method: x = 2**k (1 + f) with 1 + f in [2/3, 4/3] (f32) or [sqrt(1/2), sqrt(2)] (f64), read from the bits; log(1 + f) as
f - f**2 / 2 + f**3 p(f) with p minimax in f32, as 2 atanh(f / (2 + f)) arranged as in FreeBSD's msun in f64; k ln 2 in two
parts. log1p finds f without the rounding of 1 + x: 2**-k x is exact, and so is 2**-k - 1 wherever it counts.
"""

from __future__ import annotations

from opkit.compiler.emit.functions.templates import estrin, fill

P32 = (
    "0x1.55551p-2 -0x1.fffe68p-3 0x1.99cce6p-3 -0x1.55b67ap-3 0x1.1f0502p-3 -0x1.f05db8p-4 0x1.1d9d66p-3 -0x1.0deaf8p-3"
)
P64 = (
    "0x1.5555555555558p-1 0x1.9999999995224p-2 0x1.2492492e03d05p-2 0x1.c71c62d055d81p-3 0x1.7462ba21759eap-3 "
    "0x1.39fdba1d27321p-3 0x1.2b5fb4a667867p-3"
)

# log(1 + f) + k ln 2; in f32, k is given times 2**23, as it stands in the bits.
_REDUCED_F32 = """
OPK_INLINE float opk_log_reduced_f32(float f, float k) {
    const float f2 = f * f, f4 = f2 * f2, p = opk_fma_f32($p, f, -0.5f);
    return opk_fma_f32(k, 0x1.62e4p-24f, opk_fma_f32(f2, p, opk_fma_f32(k, 0x1.7f7d1cp-43f, f)));
}
"""

_REDUCED_F64 = """
OPK_INLINE double opk_log_reduced_f64(double f, double k) {
    const double s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
    const double z2 = z * z, z4 = z2 * z2, r = z * $p;
    const double small = f - (half - opk_fma_f64(s, half + r, k * 0x1.a39ef35793c76p-33));
    return opk_fma_f64(k, 0x1.62e42feep-1, small);
}
"""

_LOG_F32 = """
OPK_INLINE float opk_log_f32(float x) {
    const int subnormal = x < 0x1p-126f;
    const unsigned scaled = opk_bits_f32(subnormal ? x * 0x1p+23f : x);
    const unsigned bits = subnormal ? scaled - (23u << 23) : scaled;
    const unsigned exponent = (bits - 0x3f2aaaabu) & 0xff800000u;
    const float f = opk_from_bits_f32(bits - exponent) - 1.0f;
    const float finite = opk_log_reduced_f32(f, (float)(int)exponent);
    const float known = x < __builtin_inff() ? finite : x;
    const float positive = x == 0.0f ? -__builtin_inff() : known;
    return x < 0.0f ? __builtin_nanf("") : positive;
}
"""

# What is written as 2**52 + 2048 + k becomes a double with no conversion from 64-bit integers, which AVX2 lacks.
_LOG_F64 = """
OPK_INLINE double opk_log_f64(double x) {
    const double y = x < 0x1p-1022 ? x * 0x1p+52 : x;
    const unsigned long long bits = opk_bits_f64(y);
    const unsigned long long k2048 = (bits - 0x3fe6a09e667f3bcdull + 0x8000000000000000ull) >> 52;
    const double k = opk_from_bits_f64(0x4330000000000000ull + k2048) - (0x1p+52 + 2048.0);
    const double f = opk_from_bits_f64(bits - (k2048 << 52) + 0x8000000000000000ull) - 1.0;
    const double finite = opk_log_reduced_f64(f, k - (x < 0x1p-1022 ? 52.0 : 0.0));
    const double low = x == 0.0 ? -__builtin_inf() : x < 0.0 ? __builtin_nan("") : x;
    return (x > 0.0) & (x < __builtin_inf()) ? finite : low;
}
"""

# scale is 2**(2 - k): 2**-k itself would be subnormal for the greatest x.
_LOG1P_F32 = """
OPK_INLINE float opk_log1p_f32(float x) {
    const int exponent = (int)(opk_bits_f32(1.0f + x) - 0x3f2aaaabu) & (int)0xff800000;
    const float scale = opk_from_bits_f32(0x40800000u - (unsigned)exponent);
    const float f = opk_fma_f32(0.25f * x, scale, opk_fma_f32(0.25f, scale, -1.0f));
    const float finite = opk_log_reduced_f32(f, (float)exponent);
    const float low = x == -1.0f ? -__builtin_inff() : x < -1.0f ? __builtin_nanf("") : x;
    return (x > -1.0f) & (x < __builtin_inff()) & (__builtin_fabsf(x) > 0x1p-30f) ? finite : low;
}
"""

_LOG1P_F64 = """
OPK_INLINE double opk_log1p_f64(double x) {
    const unsigned long long bits = opk_bits_f64(1.0 + x);
    const unsigned long long k2048 = (bits - 0x3fe6a09e667f3bcdull + 0x8000000000000000ull) >> 52;
    const double k = opk_from_bits_f64(0x4330000000000000ull + k2048) - (0x1p+52 + 2048.0);
    const double scale = opk_from_bits_f64(0xc010000000000000ull - (k2048 << 52));
    const double f = opk_fma_f64(0.25 * x, scale, opk_fma_f64(0.25, scale, -1.0));
    const double finite = opk_log_reduced_f64(f, k);
    const double low = x == -1.0 ? -__builtin_inf() : x < -1.0 ? __builtin_nan("") : x;
    return (x > -1.0) & (x < __builtin_inf()) & (__builtin_fabs(x) > 0x1p-60) ? finite : low;
}
"""

# log(2**k0 (high + low)), where low is what was lost when high was rounded, for a positive normal high.
_LOG_SUM = """
OPK_INLINE double opk_log_sum_f64(double high, double low, double k0) {
    const unsigned long long bits = opk_bits_f64(high);
    const unsigned long long k2048 = (bits - 0x3fe6a09e667f3bcdull + 0x8000000000000000ull) >> 52;
    const double k = opk_from_bits_f64(0x4330000000000000ull + k2048) - (0x1p+52 + 2048.0);
    const double m = opk_from_bits_f64(bits - (k2048 << 52) + 0x8000000000000000ull);
    const double scale = opk_from_bits_f64(0xbff0000000000000ull - (k2048 << 52));
    return opk_log_reduced_f64(opk_fma_f64(low, scale, m - 1.0), k + k0);
}
"""

TEXT = {
    "log_sum_f64": fill(_LOG_SUM, "f64"),
    "log_reduced_f32": fill(_REDUCED_F32, "f32", p=estrin("f32", "f", P32)),
    "log_reduced_f64": fill(_REDUCED_F64, "f64", p=estrin("f64", "z", P64)),
    "log_f32": fill(_LOG_F32, "f32"),
    "log_f64": fill(_LOG_F64, "f64"),
    "log1p_f32": fill(_LOG1P_F32, "f32"),
    "log1p_f64": fill(_LOG1P_F64, "f64"),
}
