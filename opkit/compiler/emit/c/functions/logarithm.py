"""log, log1p, pow, and logarithms to the bases 2 and 10, which are exact where the result is a whole number.

log: x = 2**k (1 + f) with 1 + f in [2/3, 4/3] (f32) or [sqrt(1/2), sqrt(2)] (f64), read from the bits. In f32, log(1 + f) is f
- f**2 / 2 + f**3 p(f) with p minimax; in f64 it is 2 atanh(f / (2 + f)), arranged as in FreeBSD's msun. k ln 2 is in two parts.
log1p computes f without the rounding of 1 + x: 2**-k x is exact, and so is 2**-k - 1 wherever it counts.

pow: exp(y log |x|); the sign follows from whether y is odd. f32 is computed in f64, with logarithms to base 2: log2(1 + f) is f
p(f) with p minimax, to 2**-38, for 1 + f in [sqrt(1/2), sqrt(2)]. In f64, log |x| and the product are sums of two doubles: the
logarithm is as above, with the first three terms of the series of atanh, the quotient and the products exact to about 2**-68.
"""

from __future__ import annotations

from opkit.compiler.emit.c.functions.floats import estrin, fill

P32 = (
    "0x1.55551p-2 -0x1.fffe68p-3 0x1.99cce6p-3 -0x1.55b67ap-3 0x1.1f0502p-3 -0x1.f05db8p-4 0x1.1d9d66p-3 -0x1.0deaf8p-3"
)
P64 = (
    "0x1.5555555555558p-1 0x1.9999999995224p-2 0x1.2492492e03d05p-2 0x1.c71c62d055d81p-3 0x1.7462ba21759eap-3 "
    "0x1.39fdba1d27321p-3 0x1.2b5fb4a667867p-3"
)

# log(1 + f) + k ln 2; in f32 the argument is k 2**23, as in the bits.
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

# The bits of 2**52 + 2048 + k are a double without a conversion from 64-bit integers, which AVX2 lacks.
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

# log(2**k0 (high + low)), where low is the rounding error of high, a positive normal number.
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

_LOGARITHM_TEXT = {
    "log_sum_f64": fill(_LOG_SUM, "f64"),
    "log_reduced_f32": fill(_REDUCED_F32, "f32", p=estrin("f32", "f", P32)),
    "log_reduced_f64": fill(_REDUCED_F64, "f64", p=estrin("f64", "z", P64)),
    "log_f32": fill(_LOG_F32, "f32"),
    "log_f64": fill(_LOG_F64, "f64"),
    "log1p_f32": fill(_LOG1P_F32, "f32"),
    "log1p_f64": fill(_LOG1P_F64, "f64"),
}

_LOG2 = (
    "0x1.71547652b58e3p+0 -0x1.71547651b2ec7p-1 0x1.ec709de32a356p-2 -0x1.7154788ffa345p-2 0x1.2776b6e17087ap-2 "
    "-0x1.ec6f2a02bdd95p-3 0x1.a61b716ad4913p-3 -0x1.71893a0b40286p-3 0x1.48212ba880bebp-3 -0x1.23d256fb22a99p-3 "
    "0x1.0aba291b4b49ep-3 -0x1.13bca78391badp-3 0x1.0fc00391be076p-3 -0x1.1e680880755a4p-4"
)

# The series 2 atanh(s) = 2 s + s z (2/3 + z (2/5 + z tail(z))), z = s**2.
_TAIL = (
    "0x1.2492492492497p-2 0x1.c71c71c71532cp-3 0x1.745d175523788p-3 0x1.3b13a517ff464p-3 0x1.1115a33120cbfp-3 "
    "0x1.e01f208df3eefp-4 0x1.d9cd2d49a39e8p-4"
)

_LOG_PAIR = """
OPK_INLINE double opk_log_pair_f64(double a, double *low) {
    const double normal = a < 0x1p-1022 ? a * 0x1p+52 : a;
    const unsigned long long bits = opk_bits_f64(normal);
    const unsigned long long k2048 = (bits - 0x3fe6a09e667f3bcdull + 0x8000000000000000ull) >> 52;
    const double k = opk_from_bits_f64(0x4330000000000000ull + k2048) - (0x1p+52 + 2048.0) - (a < 0x1p-1022 ? 52.0 : 0.0);
    const double f = opk_from_bits_f64(bits - (k2048 << 52) + 0x8000000000000000ull) - 1.0;
    const double d = 2.0 + f, d_low = (2.0 - d) + f, s = f / d, p = s * d;
    const double s_low = (((f - p) - opk_product_error(s, d, p)) - s * d_low) / d;
    const double z = s * s, z_low = opk_fma_f64(2.0 * s, s_low, opk_product_error(s, s, z)), z2 = z * z, z4 = z2 * z2;
    const double tail = z * $tail;
    const double v = 0x1.999999999999ap-2 + tail;
    const double v_low = ((0x1.999999999999ap-2 - v) + tail) - 0x1.999999999999ap-56;
    const double w = z * v, w_low = opk_fma_f64(z_low, v, opk_fma_f64(z, v_low, opk_product_error(z, v, w)));
    const double r = 0x1.5555555555555p-1 + w;
    const double r_low = ((0x1.5555555555555p-1 - r) + w) + (w_low + 0x1.5555555555555p-55);
    const double q = z * r, q_low = opk_fma_f64(z_low, r, opk_fma_f64(z, r_low, opk_product_error(z, r, q)));
    const double t = s * q, t_low = opk_fma_f64(s_low, q, opk_fma_f64(s, q_low, opk_product_error(s, q, t)));
    const double m = 2.0 * s + t, m_low = opk_sum_error(2.0 * s, t, m) + opk_fma_f64(2.0, s_low, t_low);
    const double whole = k * 0x1.62e42feep-1, sum = whole + m;
    const double rest = opk_sum_error(whole, m, sum) + opk_fma_f64(k, 0x1.a39ef35793c76p-33, m_low);
    const double high = sum + rest;
    *low = (sum - high) + rest;
    return high;
}
"""

# The rest is left out where the product is infinite.
_POW = """
OPK_INLINE double opk_pow_f64(double x, double y) {
    const double a = __builtin_fabs(x);
    double log_low;
    const double log = opk_log_pair_f64(a, &log_low);
    const double edge = a == 0.0 ? -__builtin_inf() : a < __builtin_inf() ? log : a;
    const double product = y * edge;
    const double rest = opk_fma_f64(y, log_low, opk_product_error(y, edge, product));
    const double one = y != y ? y : 0.0, power = a == 1.0 ? one : product;
    const double size = opk_exp_sum_f64(power, (__builtin_fabs(product) < 1000.0) & (a != 1.0) ? rest : 0.0);
    const double whole = opk_trunc_f64(y), half = 0.5 * whole;
    const double odd = opk_trunc_f64(half) != half ? -1.0 : 1.0;
    const double sign = __builtin_copysign(1.0, x) < 0.0 ? odd : 1.0;
    const double refused = (x < 0.0) & (a < __builtin_inf()) ? __builtin_nan("") : size;
    const double result = whole == y ? size * sign : refused;
    const double known = y != y ? y : result;
    return (x == 1.0) | (y == 0.0) ? 1.0 : known;
}
"""

# log2(a) of a positive normal a, for results in f32.
_LOG2_WIDE = """
OPK_INLINE double opk_log2_wide(double a) {
    const unsigned long long bits = opk_bits_f64(a);
    const unsigned long long k2048 = (bits - 0x3fe6a09e667f3bcdull + 0x8000000000000000ull) >> 52;
    const double k = opk_from_bits_f64(0x4330000000000000ull + k2048) - (0x1p+52 + 2048.0);
    const double f = opk_from_bits_f64(bits - (k2048 << 52) + 0x8000000000000000ull) - 1.0;
    const double f2 = f * f, f4 = f2 * f2, f8 = f4 * f4;
    return opk_fma_f64(f, $log, k);
}
"""

# An x of f32 is normal in f64.
_LOG_TO_BASE_F32 = """
OPK_INLINE float opk_$name(float x) {
    const float finite = (float)(opk_log2_wide(x)$times), known = x < __builtin_inff() ? finite : x;
    const float positive = x == 0.0f ? -__builtin_inff() : known;
    return x < 0.0f ? __builtin_nanf("") : positive;
}
"""

# log(x) as a sum of two doubles, times 1 / log(base) as another.
_LOG_TO_BASE_F64 = """
OPK_INLINE double opk_$name(double x) {
    double low;
    const double high = opk_log_pair_f64(x, &low), y = high * $factor;
    const double finite = y + opk_fma_f64(low, $factor, opk_fma_f64(high, $rest, opk_product_error(high, $factor, y)));
    const double edge = x == 0.0 ? -__builtin_inf() : x < 0.0 ? __builtin_nan("") : x;
    return (x > 0.0) & (x < __builtin_inf()) ? finite : edge;
}
"""

# Clamping y changes no result: any power except one of 1 is infinite or 0 there.
_POW_F32 = """
OPK_INLINE float opk_pow_f32(float x, float y) {
    const double a = __builtin_fabsf(x), finite = opk_log2_wide(a);
    const double known = a < __builtin_inf() ? finite : a, log = a == 0.0 ? -__builtin_inf() : known;
    const float most = y > 0x1p+40f ? 0x1p+40f : y, power = most < -0x1p+40f ? -0x1p+40f : most;
    const double product = power * log, below = product > 200.0 ? 200.0 : product;
    const float size = (float)opk_exp2_wide(below < -200.0 ? -200.0 : below);
    const float whole = opk_trunc_f32(y), half = 0.5f * whole;
    const int negative = __builtin_copysignf(1.0f, x) < 0.0f, odd = opk_trunc_f32(half) != half;
    const float refused = (x < 0.0f) & (whole != y) & (x > -__builtin_inff()) ? __builtin_nanf("") : size;
    const float result = negative & odd & (whole == y) ? -refused : refused;
    return (x == 1.0f) | (y == 0.0f) ? 1.0f : result;
}
"""

_POWER_TEXT = {
    "log_pair_f64": fill(_LOG_PAIR, "f64", tail=estrin("f64", "z", _TAIL)),
    "pow_f64": fill(_POW, "f64"),
    "log2_wide": fill(_LOG2_WIDE, "f64", log=estrin("f64", "f", _LOG2)),
    "pow_f32": fill(_POW_F32, "f32"),
    "log2_f32": fill(_LOG_TO_BASE_F32, "f32", name="log2_f32", times=""),
    "log10_f32": fill(_LOG_TO_BASE_F32, "f32", name="log10_f32", times=" * 0x1.34413509f79ffp-2"),
    "log2_f64": fill(
        _LOG_TO_BASE_F64, "f64", name="log2_f64", factor="0x1.71547652b82fep+0", rest="0x1.777d0ffda0d24p-56"
    ),
    "log10_f64": fill(
        _LOG_TO_BASE_F64, "f64", name="log10_f64", factor="0x1.bcb7b1526e50ep-2", rest="0x1.95355baaafad3p-57"
    ),
}

TEXT = _LOGARITHM_TEXT | _POWER_TEXT
