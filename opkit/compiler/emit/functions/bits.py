"""What the other functions are made of: the bits of a float, powers of two, fused multiply-add."""

from __future__ import annotations

from opkit.compiler.emit.functions.templates import both

# Where there is no instruction for it, __builtin_fma is a slow call: the functions are accurate with two roundings too.
_FMA = """
OPK_INLINE $T opk_fma_$t($T a, $T b, $T c) {
#if defined(__FMA__) || defined(__aarch64__) || defined(__FP_FAST_FMA)
    return __builtin_fma$f(a, b, c);
#else
    return a * b + c;
#endif
}
"""

_BITS = """
OPK_INLINE $U opk_bits_$t($T x) {
    $U bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
"""

_FROM_BITS = """
OPK_INLINE $T opk_from_bits_$t($U bits) {
    $T x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
"""

# The error of p = a * b, exact: where there is no fused multiply-add, by Dekker's products of halves.
_PRODUCT_ERROR = """\
OPK_INLINE double opk_product_error(double a, double b, double p) {
#if defined(__FMA__) || defined(__aarch64__) || defined(__FP_FAST_FMA)
    return __builtin_fma(a, b, -p);
#else
    const double c = 0x1.0000002p+27 * a, d = 0x1.0000002p+27 * b;
    const double ah = c - (c - a), bh = d - (d - b), al = a - ah, bl = b - bh;
    return ((ah * bh - p) + ah * bl + al * bh) + al * bl;
#endif
}
"""

# The error of s = a + b, exact (Knuth).
_SUM_ERROR = """\
OPK_INLINE double opk_sum_error(double a, double b, double s) {
    const double c = s - a;
    return (a - (s - c)) + (b - c);
}
"""

TEXT = {
    "product_error": _PRODUCT_ERROR,
    "sum_error": _SUM_ERROR,
    **both({"fma": _FMA, "bits": _BITS, "from_bits": _FROM_BITS}),
    # 2**n for -126 <= n <= 127, and for -1022 <= n <= 1023
    "power_f32": "OPK_INLINE float opk_power_f32(int n) { return opk_from_bits_f32((unsigned)(n + 127) << 23); }\n",
    "power_f64": """\
OPK_INLINE double opk_power_f64(long long n) {
    return opk_from_bits_f64((unsigned long long)(n + 1023) << 52);
}
""",
}
