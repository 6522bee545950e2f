"""Rounding, square roots, least and greatest, division and its remainders, of floats and of integers."""

from __future__ import annotations

import string

from opkit.compiler.emit.functions.templates import both, fill

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

# Exact: the significands divided as whole numbers, eleven (forty) more bits of the quotient at a time. It has a loop, so
# a loop that calls it is not made a vector of.
_FMOD = """
OPK_INLINE unsigned long long opk_significand_$t($T a, int *exponent) {
    const $T normal = a < $least ? a * 0x1p+64$f : a;
    const $U bits = opk_bits_$t(normal);
    *exponent = (int)(bits >> $mantissa) - (a < $least ? 64 : 0);
    return (bits & ((($U)1 << $mantissa) - 1)) | (($U)1 << $mantissa);
}
OPK_INLINE $T opk_scaled_$t($T x, int exponent) {
    const int first = exponent < -$bias + 2 ? -$bias + 2 : exponent;
    return x * opk_power_$t(first) * opk_power_$t(exponent - first);
}
OPK_INLINE $T opk_fmod_$t($T x, $T y) {
    const $T a = __builtin_fabs$f(x), b = __builtin_fabs$f(y);
    if (!(a < __builtin_inf$f()) || b == 0.0$f || b != b) return __builtin_nan$f("");
    if (a < b) return x;
    int top, bottom;
    unsigned long long left = opk_significand_$t(a, &top);
    const unsigned long long by = opk_significand_$t(b, &bottom);
    left %= by;
    for (int more = top - bottom; more > 0 && left; more -= $step) left = (left << (more < $step ? more : $step)) % by;
    return __builtin_copysign$f(opk_scaled_$t(($T)left, bottom - $bias - $mantissa), x);
}
"""

_REM = """
OPK_INLINE $T opk_rem_$t($T x, $T y) {
    const $T left = opk_fmod_$t(x, y);
    return (left != 0.0$f) & ((left < 0.0$f) != (y < 0.0$f)) ? left + y : left;
}
"""

# As ATen divides: the quotient of what the remainder leaves is near a whole number, which it is rounded to.
_FLOORDIV = """
OPK_INLINE $T opk_floordiv_$t($T x, $T y) {
    const $T left = opk_fmod_$t(x, y), plain = x / y;
    const $T near = (x - left) / y - ((left != 0.0$f) & ((left < 0.0$f) != (y < 0.0$f)) ? 1.0$f : 0.0$f);
    const $T below = opk_floor_$t(near), whole = near - below > 0.5$f ? below + 1.0$f : below;
    const $T result = near != 0.0$f ? whole : __builtin_copysign$f(0.0$f, plain);
    return y == 0.0$f ? plain : result;
}
"""

_WIDTHS = {
    "f32": {"mantissa": "23", "least": "0x1p-126f", "bias": "127", "step": "40"},
    "f64": {"mantissa": "52", "least": "0x1p-1022", "bias": "1023", "step": "11"},
}
_FMOD_TEXT = {t: fill(_FMOD, t, **widths) for t, widths in _WIDTHS.items()}

_INTS = {"i8": "signed char", "i16": "short", "i32": "int", "i64": "long long"}
_INTS |= {"u8": "unsigned char", "u16": "unsigned short", "u32": "unsigned", "u64": "unsigned long long"}

# Integers wrap around, and by zero give zero. Dividing by -1 is negating: the least number by -1 does not fit.
_INTEGERS = {
    "min": "return a < b ? a : b;",
    "max": "return a > b ? a : b;",
    "div": "return b == 0 ? 0 : $minus_one ? ($T)(0 - ($U)a) : ($T)(a / b);",
    "fmod": "return b == 0 || $minus_one ? 0 : ($T)(a % b);",
    "rem": "const $T c = opk_fmod_$t(a, b); return c != 0 && (c < 0) != (b < 0) ? ($T)(c + b) : c;",
    "floordiv": "const $T c = opk_fmod_$t(a, b); return ($T)(($U)opk_div_$t(a, b) - (c != 0 && (c < 0) != (b < 0)));",
    "pow": "$U power = 1, base = ($U)a; for ($U n = ($U)b; n; n >>= 1) { power *= n & 1 ? base : 1; base *= base; } "
    "return $negative ? ($T)(a == 1 ? 1 : a == ($T)-1 ? (b & 1 ? -1 : 1) : 0) : ($T)power;",
}


def _integer(op: str, body: str, t: str) -> str:
    wide = "unsigned long long" if t.endswith("64") else "unsigned"
    tests = {"minus_one": "b == -1", "negative": "b < 0"} if t.startswith("i") else {"minus_one": "0", "negative": "0"}
    text = string.Template(body).substitute(T=_INTS[t], U=wide, t=t, **tests)
    return f"OPK_INLINE {_INTS[t]} opk_{op}_{t}({_INTS[t]} a, {_INTS[t]} b) {{\n    {text}\n}}\n"


TEXT = both(
    {
        "round": _ROUND,
        "floor": _FLOOR,
        "trunc": _TRUNC,
        "sqrt": _SQRT,
        "abs": _ABS,
        "min": _MIN,
        "max": _MAX,
        "rem": _REM,
        "floordiv": _FLOORDIV,
    }
)
TEXT |= {f"fmod_{t}": text for t, text in _FMOD_TEXT.items()}
TEXT |= {f"{op}_{t}": _integer(op, body, t) for op, body in _INTEGERS.items() for t in _INTS}
