"""The base of the other functions: templates of C text, the bits of floats, rounding, division, and narrow floats.

A table of functions maps names to C text. In a template, ``$T`` is the C type, ``$t`` the IR's name of it, ``$f`` the suffix of
a number or of a builtin, ``$U`` and ``$I`` the integers of its width; other names are polynomials.

Narrow floats are bits in an unsigned short. Conversions from f32 round to the nearest, halves to even. bf16 is the upper half
of an f32: rounding adds half of the last place, less one where the upper half is even. NaN, which that would make infinite or a
number, gets its quiet bit instead; a comparison of floats on 32 bits chooses, because vectors are then narrowed once, and AVX2
has no comparison of unsigned integers. f16 is converted by bits where the compiler has no instruction: a product with 2**112
rescales normal and subnormal numbers alike, and adding a power of two rounds at its place.
"""

from __future__ import annotations

import string
from collections.abc import Mapping

_FLOATS = {
    "f32": {"T": "float", "f": "f", "U": "unsigned", "I": "int"},
    "f64": {"T": "double", "f": "", "U": "unsigned long long", "I": "long long"},
}


def fill(text: str, dtype: str, **values: str) -> str:
    """Return a template for one float type."""
    return string.Template(text).substitute(values, t=dtype, **_FLOATS[dtype]).strip() + "\n"


def both(templates: Mapping[str, str]) -> dict[str, str]:
    """Return each template for f32 and for f64, under its name with the type's."""
    return {f"{name}_{t}": fill(text, t) for name, text in templates.items() for t in _FLOATS}


def horner(dtype: str, variable: str, coefficients: str) -> str:
    """Return a polynomial as multiply-adds; the first coefficient is the constant term.

    >>> horner("f32", "x", "1.0 2.0 3.0")
    'opk_fma_f32(opk_fma_f32(3.0f, x, 2.0f), x, 1.0f)'
    """
    suffix = _FLOATS[dtype]["f"]
    *lower, value = [f"{c}{suffix}" for c in coefficients.split()]
    for c in reversed(lower):
        value = f"opk_fma_{dtype}({value}, {variable}, {c})"
    return value


def estrin(dtype: str, variable: str, coefficients: str) -> str:
    """Return the same polynomial with fewer steps that depend on each other, so that a processor computes several at once.

    The text uses the variables ``x2``, ``x4`` and so on for the powers of ``x``.

    >>> estrin("f32", "x", "1.0 2.0 3.0")
    'opk_fma_f32(3.0f, x2, opk_fma_f32(2.0f, x, 1.0f))'
    """
    return _estrin(dtype, variable, [f"{c}{_FLOATS[dtype]['f']}" for c in coefficients.split()])


def _estrin(dtype: str, variable: str, terms: list[str]) -> str:
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    low, high = _estrin(dtype, variable, terms[:half]), _estrin(dtype, variable, terms[half:])
    return f"opk_fma_{dtype}({high}, {variable}{half if half > 1 else ''}, {low})"


def through_f64(*names: str, arguments: tuple[str, ...] = ("x",)) -> dict[str, str]:
    """Return functions of f32 that call those of f64 and round, where f32 would lose too much accuracy."""
    takes = ", ".join(f"float {a}" for a in arguments)
    return {
        f"{name}_f32": f"OPK_INLINE float opk_{name}_f32({takes}) {{\n"
        f"    return (float)opk_{name}_f64({', '.join(arguments)});\n}}\n"
        for name in names
    }


# Without an instruction for it, __builtin_fma is a slow call. The functions are accurate with two roundings as well.
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

# The exact rounding error of p = a * b; without fused multiply-add, by Dekker's products of halves.
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

# The exact rounding error of s = a + b (Knuth).
_SUM_ERROR = """\
OPK_INLINE double opk_sum_error(double a, double b, double s) {
    const double c = s - a;
    return (a - (s - c)) + (b - c);
}
"""

_BITS_TEXT = {
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

# Exact: the significands are divided as integers, with eleven (forty) more bits of the quotient in each step. It has a
# loop, so a loop that calls it is not vectorised.
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

# As ATen: the quotient without the remainder is near an integer, and is rounded to it.
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

# Integers wrap around, and a division by zero returns zero. A division by -1 negates, since the lowest number does not fit.
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


_ROUNDING_TEXT = both(
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
_ROUNDING_TEXT |= {f"fmod_{t}": text for t, text in _FMOD_TEXT.items()}
_ROUNDING_TEXT |= {f"{op}_{t}": _integer(op, body, t) for op, body in _INTEGERS.items() for t in _INTS}

_TO_F16 = """\
OPK_INLINE unsigned short opk_f32_to_f16(float x) {
    const unsigned bits = opk_bits_f32(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    const unsigned odd = magnitude >> 13 & 1u;
    const unsigned normal = (magnitude + 0xfffu + odd - 0x38000000u) >> 13;
    const unsigned subnormal = opk_bits_f32(opk_from_bits_f32(magnitude) + 0.5f) - 0x3f000000u;
    const unsigned large = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : 0x7c00u;
    const unsigned finite = magnitude < 0x38800000u ? subnormal : normal;
    return (unsigned short)(sign | (magnitude >= 0x477ff000u ? large : finite));
}
"""

_FROM_F16 = """\
OPK_INLINE float opk_f16_to_f32(unsigned short h) {
    const unsigned sign = (unsigned)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    const float finite = opk_from_bits_f32(magnitude << 13) * 0x1p+112f;
    const unsigned large = magnitude << 13 | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
    return opk_from_bits_f32(sign | (magnitude >= 0x7c00u ? large : opk_bits_f32(finite)));
}
"""

_TO_BF16 = """\
OPK_INLINE unsigned short opk_f32_to_bf16(float x) {
    const unsigned bits = opk_bits_f32(x);
    const unsigned rounded = bits + (0x7fffu + (bits >> 16 & 1u)), quiet = bits | 0x400000u;
    return (unsigned short)((x != x ? quiet : rounded) >> 16);
}
"""

_FROM_BF16 = """\
OPK_INLINE float opk_bf16_to_f32(unsigned short h) {
    return opk_from_bits_f32((unsigned)h << 16);
}
"""

_NARROW_TEXT = {
    "f16_to_f32": _FROM_F16,
    "f32_to_f16": _TO_F16,
    "bf16_to_f32": _FROM_BF16,
    "f32_to_bf16": _TO_BF16,
}

TEXT = _BITS_TEXT | _ROUNDING_TEXT | _NARROW_TEXT
