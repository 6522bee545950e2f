"""Rounding, square roots, least and greatest, division and its remainders, of floats and of integers."""

from __future__ import annotations

from opkit.compiler.emit.functions.templates import both

# Without SSE4.1 the builtin calls libm. Adding and subtracting 2**23 (or 2**52) rounds a magnitude below it to an integer.
_ROUND = """
OPK_INLINE $T opk_round_$t($T x) {
#if defined(__SSE4_1__) || defined(__aarch64__)
    return __builtin_rint$f(x);
#else
    const $T large = (sizeof(x) == 4 ? 0x1p+23$f : 0x1p+52$f), a = __builtin_fabs$f(x);
    return __builtin_copysign$f(a < large ? (a + large) - large : a, x);
#endif
}
"""

_FLOOR = """
OPK_INLINE $T opk_floor_$t($T x) {
#if defined(__SSE4_1__) || defined(__aarch64__)
    return __builtin_floor$f(x);
#else
    const $T near = opk_round_$t(x);
    return __builtin_copysign$f(near - (near > x ? 1.0$f : 0.0$f), x);
#endif
}
"""

_CEIL = """
OPK_INLINE $T opk_ceil_$t($T x) {
#if defined(__SSE4_1__) || defined(__aarch64__)
    return __builtin_ceil$f(x);
#else
    const $T near = opk_round_$t(x);
    return __builtin_copysign$f(near + (near < x ? 1.0$f : 0.0$f), x);
#endif
}
"""

_TRUNC = """
OPK_INLINE $T opk_trunc_$t($T x) {
#if defined(__SSE4_1__) || defined(__aarch64__)
    return __builtin_trunc$f(x);
#else
    return __builtin_copysign$f(opk_floor_$t(__builtin_fabs$f(x)), x);
#endif
}
"""

_SQRT = "OPK_INLINE $T opk_sqrt_$t($T x) { return __builtin_sqrt$f(x); }"
_ABS = "OPK_INLINE $T opk_abs_$t($T x) { return __builtin_fabs$f(x); }"
_MIN = "OPK_INLINE $T opk_min_$t($T a, $T b) { return (a < b) | (a != a) ? a : b; }"
_MAX = "OPK_INLINE $T opk_max_$t($T a, $T b) { return (a > b) | (a != a) ? a : b; }"

FLOATS = both(
    {
        "round": _ROUND,
        "floor": _FLOOR,
        "ceil": _CEIL,
        "trunc": _TRUNC,
        "sqrt": _SQRT,
        "abs": _ABS,
        "min": _MIN,
        "max": _MAX,
    }
)

TEXT = FLOATS
