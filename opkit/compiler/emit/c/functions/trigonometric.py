"""sin, cos and tan: for arguments of any size without a branch, and in fewer steps for arguments near zero.

Any size: x / 2 pi less its whole part, after Payne and Hanek. x is multiplied by pieces of 1 / 2 pi. Each product is exact, and
its whole part is dropped before the products are added. Pieces whose product with x is a whole number are left out, so the
exponent of x decides which ones are used. f32: 2 / pi as a sum of two doubles, one of four such sums by comparison; the product
with the first, less its whole part, is rounded once. f64: products with their errors, and pieces from a table with a row for 32
exponents.

Then sin and cos of at most an eighth of a full turn by minimax polynomials, exchanged and negated by the quadrant.

Near zero: Cody and Waite's reduction, x less a number of quarter turns, with pi / 2 as a sum of three numbers of the argument's
type. With fused multiply-add the first difference is exact, and the rounding error of the second one is known; without it these
functions call the others. ``LIMITS`` has the greatest argument: 2**17 and 2**30, far below where the third number does not
suffice.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

from opkit.compiler.emit.c.functions.floats import estrin, fill, horner

SIN32 = "-0x1.55553ap-3 0x1.110322p-7 -0x1.97f88p-13"
COS32 = "0x1.555542p-5 -0x1.6c07a6p-10 0x1.98b652p-16"
TAN32 = "0x1.555584p-2 0x1.110492p-3 0x1.bc5914p-5 0x1.4e4bf6p-6 0x1.a8e028p-7 -0x1.3f9644p-9 0x1.6b55d2p-8"
_SIN64 = (
    "-0x1.5555555555549p-3 0x1.111111110f899p-7 -0x1.a01a019c13194p-13 0x1.71de357793ba7p-19 -0x1.ae5e654405a7dp-26 "
    "0x1.5d9286ab1a1e8p-33"
)
_COS64 = (
    "0x1.555555555554ep-5 -0x1.6c16c16c154dfp-10 0x1.a01a019cfa1e5p-16 -0x1.27e4f837cec82p-22 0x1.1eea07b836435p-29 "
    "-0x1.8fbb9d597602bp-37"
)

_BITS = 1300  # of 1 / 2 pi: the largest exponent, and the precision of a reduced argument next to the nearest multiple
_STARTS = (0, 50, 77, 103)  # exponents from which f32 takes the next pieces


@functools.cache
def _turns() -> int:
    """Return 2**_BITS / 2 pi, with Machin's formula for pi: 16 atan(1/5) - 4 atan(1/239)."""
    one = 1 << _BITS + 32

    def arctangent(n: int) -> int:
        return sum((-1) ** k * (one // n ** (2 * k + 1)) // (2 * k + 1) for k in range(_BITS // 4))

    pi = 16 * arctangent(5) - 4 * arctangent(239)
    return (one * one // (2 * pi)) >> 32


def _pieces(shift: int, whole: int, sizes: tuple[int, ...]) -> list[str]:
    """Return 2**shift / 2 pi, modulo 2**whole, as doubles with ``sizes`` bits."""
    scaled = (_turns() << shift) % (1 << _BITS + whole)
    pieces, top = [], scaled.bit_length()
    for size in sizes:
        top -= size
        pieces.append(math.ldexp(scaled >> top, top - _BITS).hex())
        scaled &= (1 << top) - 1
    return pieces


def _pair(start: int) -> tuple[str, str]:
    """Return 2 / pi modulo 2**(25 - start), the value nearest to zero, as a sum of two doubles, each rounded to the nearest.

    The part that is left out, times a float of at least 2**start, is a multiple of four quarter turns.
    """
    scaled, modulus = _turns() << 2, 1 << _BITS + 25 - start
    left = Fraction((scaled + modulus // 2) % modulus - modulus // 2, 1 << _BITS)
    high = float(left)
    return high.hex(), float(left - Fraction(high)).hex()


def _chosen(name: str, piece: int) -> str:
    """Return statements that select one of the pieces by the size of ``a``: one choice each, since gcc joins nested ones."""
    first, *others = [_pair(start)[piece] for start in _STARTS]
    lines, value = [], first
    for i, (start, other) in enumerate(zip(_STARTS[1:], others, strict=True), 1):
        into = name if i == len(others) else f"{name}_{i}"
        lines.append(f"const double {into} = a < 0x1p+{start} ? {value} : {other};")
        value = into
    return "\n    ".join(lines)


# x c + d with one rounding, for an x of 24 bits, where x c, or x c + d, is at most 2**51.
_FUSED24 = """
OPK_INLINE double opk_fused24(double x, double c, double d) {
#if defined(__FMA__) || defined(__aarch64__) || defined(__FP_FAST_FMA)
    return __builtin_fma(x, c, d);
#else
    const double high = opk_from_bits_f64(opk_bits_f64(c) & ~0x7ffffffull), p = x * high, sum = p + d;
    return sum + ((p - (sum - d)) + x * (c - high));
#endif
}
"""

# The reduced angle in f64, at most pi / 4 and a little; quarter: the lowest bits of the number of quarter turns.
_REDUCED32 = """
OPK_INLINE double opk_reduced_f32(double x, unsigned long long *quarter) {
    const double a = __builtin_fabs(x);
    $c1
    $c2
    const double shifted = opk_fused24(x, c1, 0x1.8p+52), n = shifted - 0x1.8p+52;
    *quarter = opk_bits_f64(shifted);
    return opk_fma_f64(x, c2, opk_fused24(x, c1, -n)) * 0x1.921fb54442d18p+0;
}
"""

_QUARTER32 = """
OPK_INLINE float opk_quarter_f32(float x, unsigned more) {
    unsigned long long wide;
    const float r = (float)opk_reduced_f32(x, &wide), s = r * r;
    const unsigned quarter = (unsigned)wide + more;
    const float sine = opk_fma_f32(r * s, $sin, r);
    const float cosine = opk_fma_f32(s * s, $cos, opk_fma_f32(s, -0.5f, 1.0f));
    return opk_from_bits_f32(opk_bits_f32(quarter & 1u ? cosine : sine) ^ (quarter & 2u) << 30);
}
"""

_SIN_F32 = """
OPK_INLINE float opk_sin_f32(float x) {
    const float y = opk_quarter_f32(x, 0);
    return x == 0.0f ? x : y;
}
"""

_COS_F32 = "OPK_INLINE float opk_cos_f32(float x) { return opk_quarter_f32(x, 1); }"

# The tangent of the reduced angle r + more, and from it that of x.
_TANGENT32 = """
OPK_INLINE float opk_tangent_f32(float x, unsigned quarter, float r, float more) {
    const float t = r + more, rest = (r - t) + more, inverse = -1.0f / t;
    const float y = quarter & 1u ? opk_fma_f32(rest * inverse, inverse, inverse) : t;
    return x == 0.0f ? x : y;
}
"""

# low: the rounding error of the angle; the slope of tan there is nearly 1 + r**2.
_TAN_F32 = """
OPK_INLINE float opk_tan_f32(float x) {
    unsigned long long quarter;
    const double angle = opk_reduced_f32(x, &quarter);
    const float r = (float)angle, low = (float)(angle - r), s = r * r, s2 = s * s, s4 = s2 * s2;
    const float more = opk_fma_f32(r * s, $tan, opk_fma_f32(low, s, low));
    return opk_tangent_f32(x, (unsigned)quarter, r, more);
}
"""

# The sum of the parts in two doubles: terms are added from the largest on, with every rounding error but the last ones.
_REDUCED64 = """
OPK_INLINE double opk_reduced_f64(double x, double *low, unsigned long long *quarter) {
    const unsigned long long biased = opk_bits_f64(x) >> 52 & 0x7ff;
    const unsigned long long row = biased < 1023 ? 0 : (biased - 1023) >> 5;
    const double y = x * opk_from_bits_f64((1023 - 32 * row) << 52);
    const double c1 = opk_turns[4 * row], c2 = opk_turns[4 * row + 1], c3 = opk_turns[4 * row + 2];
    const double p1 = y * c1, p2 = y * c2, p3 = y * c3;
    const double e1 = opk_product_error(y, c1, p1), e2 = opk_product_error(y, c2, p2);
    const double e3 = opk_fma_f64(y, opk_turns[4 * row + 3], opk_product_error(y, c3, p3));
    const double f1 = p1 - opk_round_f64(p1), g1 = e1 - opk_round_f64(e1), f2 = p2 - opk_round_f64(p2);
    const double s1 = f1 + g1, s2 = s1 + f2, u = e2 + p3;
    const double v1 = opk_sum_error(f1, g1, s1), v2 = opk_sum_error(s1, f2, s2), v3 = opk_sum_error(e2, p3, u);
    const double shifted = opk_fma_f64(s2, 4.0, 0x1.8p+52), h = opk_fma_f64(shifted - 0x1.8p+52, -0.25, s2);
    const double t = h + u, w = opk_sum_error(h, u, t), v = v1 + v2, c = w + v;
    const double high = t + c, rest = opk_sum_error(v1, v2, v) + opk_sum_error(w, v, c);
    const double tail = opk_sum_error(t, c, high) + ((v3 + rest) + e3);
    const double r = high * 0x1.921fb54442d18p+2;
    const double error = opk_product_error(high, 0x1.921fb54442d18p+2, r);
    *low = opk_fma_f64(tail, 0x1.921fb54442d18p+2, opk_fma_f64(high, 0x1.1a62633145c07p-52, error));
    *quarter = opk_bits_f64(shifted);
    return r;
}
"""

_SINE64 = """
OPK_INLINE double opk_sine_f64(double r, double low, double *rest) {
    const double s = r * r, s2 = s * s, s4 = s2 * s2;
    const double small = opk_fma_f64(r * s, $sin, low * opk_fma_f64(s, -0.5, 1.0)), sum = r + small;
    *rest = (r - sum) + small;
    return sum;
}
"""

_COSINE64 = """
OPK_INLINE double opk_cosine_f64(double r, double low, double *rest) {
    const double s = r * r, s2 = s * s, s4 = s2 * s2, half = 0.5 * s, w = 1.0 - half;
    const double s_low = 0.5 * opk_product_error(r, r, s);
    const double small = (((1.0 - w) - half) - s_low) + opk_fma_f64(s2, $cos, -r * low), sum = w + small;
    *rest = (w - sum) + small;
    return sum;
}
"""

_QUARTER64 = """
OPK_INLINE double opk_quarter_f64(double x, unsigned long long more) {
    double low, rest;
    unsigned long long quarter;
    const double r = opk_reduced_f64(x, &low, &quarter);
    const double sine = opk_sine_f64(r, low, &rest), cosine = opk_cosine_f64(r, low, &rest);
    quarter += more;
    return opk_from_bits_f64(opk_bits_f64(quarter & 1 ? cosine : sine) ^ (quarter & 2) << 62);
}
"""

_SIN_F64 = """
OPK_INLINE double opk_sin_f64(double x) {
    const double y = opk_quarter_f64(x, 0);
    return __builtin_fabs(x) < 0x1p-30 ? x : y;
}
"""

_COS_F64 = "OPK_INLINE double opk_cos_f64(double x) { return opk_quarter_f64(x, 1); }"

_TANGENT64 = """
OPK_INLINE double opk_tangent_f64(double x, unsigned long long quarter, double r, double low) {
    double sine_rest, cosine_rest;
    const double sine = opk_sine_f64(r, low, &sine_rest), cosine = opk_cosine_f64(r, low, &cosine_rest);
    const double up = quarter & 1 ? -cosine : sine, down = quarter & 1 ? sine : cosine;
    const double up_rest = quarter & 1 ? -cosine_rest : sine_rest, down_rest = quarter & 1 ? sine_rest : cosine_rest;
    const double q = up / down, p = q * down;
    const double left = ((up - p) - opk_product_error(q, down, p)) + opk_fma_f64(-q, down_rest, up_rest);
    return __builtin_fabs(x) < 0x1p-30 ? x : q + left / down;
}
"""

_TAN_F64 = """
OPK_INLINE double opk_tan_f64(double x) {
    double low;
    unsigned long long quarter;
    const double r = opk_reduced_f64(x, &low, &quarter);
    return opk_tangent_f64(x, quarter, r, low);
}
"""


def _table() -> str:
    rows = [_pieces(32 * row, 52 if row > 1 else 60, (53, 53, 53, 53)) for row in range(32)]
    numbers = ",\n    ".join(", ".join(row) for row in rows)
    return f"static const double opk_turns[128] = {{\n    {numbers},\n}};\n"


_ANY_SIZE_TEXT = {
    "turns": _table(),
    "reduced_f32": fill(_REDUCED32, "f32", c1=_chosen("c1", 0), c2=_chosen("c2", 1)),
    "fused24": fill(_FUSED24, "f64"),
    "quarter_f32": fill(_QUARTER32, "f32", sin=horner("f32", "s", SIN32), cos=horner("f32", "s", COS32)),
    "sin_f32": fill(_SIN_F32, "f32"),
    "cos_f32": fill(_COS_F32, "f32"),
    "tangent_f32": fill(_TANGENT32, "f32"),
    "tan_f32": fill(_TAN_F32, "f32", tan=estrin("f32", "s", TAN32)),
    "reduced_f64": fill(_REDUCED64, "f64"),
    "sine_f64": fill(_SINE64, "f64", sin=estrin("f64", "s", _SIN64)),
    "cosine_f64": fill(_COSINE64, "f64", cos=estrin("f64", "s", _COS64)),
    "quarter_f64": fill(_QUARTER64, "f64"),
    "sin_f64": fill(_SIN_F64, "f64"),
    "cos_f64": fill(_COS_F64, "f64"),
    "tangent_f64": fill(_TANGENT64, "f64"),
    "tan_f64": fill(_TAN_F64, "f64"),
}

LIMITS = {f"{op}_{t}": limit for op in ("sin", "cos", "tan") for t, limit in (("f32", "0x1p+17f"), ("f64", "0x1p+30"))}
"""The largest argument of each function that has a form ``opk_<op>_near_<type>``."""

_FMA = "defined(__FMA__) || defined(__aarch64__) || defined(__FP_FAST_FMA)"

# The angle as r + low, and the lowest bits of the number of quarter turns; -pi / 2 is c1 + c2 + c3.
_REDUCED_NEAR = """
OPK_INLINE $T opk_reduced_near_$t($T x, $T *low, $U *quarter) {
    const $T shifted = opk_fma_$t(x, 0x1.45f306dc9c883p-1$f, $round$f), n = shifted - $round$f;
    const $T first = opk_fma_$t(n, $c1$f, x), p = n * $c2$f, r = first + p;
    *low = opk_fma_$t(n, $c3$f, ((first - r) + p) + opk_fma_$t(n, $c2$f, -p));
    *quarter = opk_bits_$t(shifted);
    return r;
}
"""
_PARTS = {
    "f32": {"round": "0x1.8p+23", "c1": "-0x1.921fb6p+0", "c2": "0x1.777a5cp-25", "c3": "0x1.ee59dap-50"},
    "f64": {
        "round": "0x1.8p+52",
        "c1": "-0x1.921fb54442d18p+0",
        "c2": "-0x1.1a62633145c07p-54",
        "c3": "0x1.f1976b7ed8fbcp-110",
    },
}

_QUARTER_NEAR32 = """
OPK_INLINE float opk_quarter_near_f32(float x, unsigned more) {
    const float shifted = opk_fma_f32(x, 0x1.45f306p-1f, $round), n = shifted - $round;
    const float r = opk_fma_f32(n, $c3, opk_fma_f32(n, $c2, opk_fma_f32(n, $c1, x))), s = r * r;
    const float sine = opk_fma_f32(r * s, $sin, r);
    const float cosine = opk_fma_f32(s * s, $cos, opk_fma_f32(s, -0.5f, 1.0f));
    const unsigned quarter = opk_bits_f32(shifted) + more;
    return opk_from_bits_f32(opk_bits_f32(quarter & 1u ? cosine : sine) ^ (quarter & 2u) << 30);
}
"""

_QUARTER_NEAR64 = """
OPK_INLINE double opk_quarter_near_f64(double x, unsigned long long more) {
    double low, rest;
    unsigned long long quarter;
    const double r = opk_reduced_near_f64(x, &low, &quarter);
    const double sine = opk_sine_f64(r, low, &rest), cosine = opk_cosine_f64(r, low, &rest);
    quarter += more;
    return opk_from_bits_f64(opk_bits_f64(quarter & 1 ? cosine : sine) ^ (quarter & 2) << 62);
}
"""

_TAN_NEAR32 = """
    float low;
    unsigned quarter;
    const float r = opk_reduced_near_f32(x, &low, &quarter), s = r * r, s2 = s * s, s4 = s2 * s2;
    const float more = opk_fma_f32(r * s, $tan, opk_fma_f32(low, s, low));
    return opk_tangent_f32(x, quarter, r, more);
"""

_TAN_NEAR64 = """
    double low;
    unsigned long long quarter;
    const double r = opk_reduced_near_f64(x, &low, &quarter);
    return opk_tangent_f64(x, quarter, r, low);
"""

_BODIES = {
    "sin_f32": "const float y = opk_quarter_near_f32(x, 0);\n    return x == 0.0f ? x : y;",
    "cos_f32": "return opk_quarter_near_f32(x, 1);",
    "tan_f32": fill(_TAN_NEAR32, "f32", tan=estrin("f32", "s", TAN32)),
    "sin_f64": "const double y = opk_quarter_near_f64(x, 0);\n    return __builtin_fabs(x) < 0x1p-30 ? x : y;",
    "cos_f64": "return opk_quarter_near_f64(x, 1);",
    "tan_f64": _TAN_NEAR64.strip(),
}

_FUNCTION = """
OPK_INLINE $T opk_${op}_near_$t($T x) {
#if $fma
    $body
#else
    return opk_${op}_$t(x);
#endif
}
"""


def _function(name: str) -> str:
    op, t = name.split("_")
    return fill(_FUNCTION, t, op=op, body=_BODIES[name].strip(), fma=_FMA)


_NEAR_TEXT = {
    **{f"reduced_near_{t}": fill(_REDUCED_NEAR, t, **parts) for t, parts in _PARTS.items()},
    "quarter_near_f32": fill(
        _QUARTER_NEAR32,
        "f32",
        sin=horner("f32", "s", SIN32),
        cos=horner("f32", "s", COS32),
        **{name: f"{part}f" for name, part in _PARTS["f32"].items()},
    ),
    "quarter_near_f64": fill(_QUARTER_NEAR64, "f64"),
    **{"{}_near_{}".format(*name.split("_")): _function(name) for name in LIMITS},
}

TEXT = _ANY_SIZE_TEXT | _NEAR_TEXT
