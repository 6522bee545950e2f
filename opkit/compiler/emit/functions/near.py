"""sin, cos and tan of arguments that are not far from zero, in fewer steps than of those of any size.

Method: Cody and Waite's reduction, x less its quarter turns, which are three numbers of the type long. With fused
multiply-add the first difference is exact, and what the second one is rounded by is known; without it these functions are
the others. ``LIMITS`` has the greatest argument: 2**17 and 2**30, far below where the third number does not suffice.
"""

from __future__ import annotations

from opkit.compiler.emit.functions.templates import estrin, fill, horner
from opkit.compiler.emit.functions.trigonometric import COS32, SIN32, TAN32

LIMITS = {f"{op}_{t}": limit for op in ("sin", "cos", "tan") for t, limit in (("f32", "0x1p+17f"), ("f64", "0x1p+30"))}
"""The functions that ``opk_<op>_near_<type>`` is a form of, and up to which size of the argument."""

_FMA = "defined(__FMA__) || defined(__aarch64__) || defined(__FP_FAST_FMA)"

# The angle as r + low, and the lowest bits of the number of quarter turns; -pi / 2 is c1 + c2 + c3.
_REDUCED = """
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

_QUARTER32 = """
OPK_INLINE float opk_quarter_near_f32(float x, unsigned more) {
    const float shifted = opk_fma_f32(x, 0x1.45f306p-1f, $round), n = shifted - $round;
    const float r = opk_fma_f32(n, $c3, opk_fma_f32(n, $c2, opk_fma_f32(n, $c1, x))), s = r * r;
    const float sine = opk_fma_f32(r * s, $sin, r);
    const float cosine = opk_fma_f32(s * s, $cos, opk_fma_f32(s, -0.5f, 1.0f));
    const unsigned quarter = opk_bits_f32(shifted) + more;
    return opk_from_bits_f32(opk_bits_f32(quarter & 1u ? cosine : sine) ^ (quarter & 2u) << 30);
}
"""

_QUARTER64 = """
OPK_INLINE double opk_quarter_near_f64(double x, unsigned long long more) {
    double low, rest;
    unsigned long long quarter;
    const double r = opk_reduced_near_f64(x, &low, &quarter);
    const double sine = opk_sine_f64(r, low, &rest), cosine = opk_cosine_f64(r, low, &rest);
    quarter += more;
    return opk_from_bits_f64(opk_bits_f64(quarter & 1 ? cosine : sine) ^ (quarter & 2) << 62);
}
"""

_TAN32 = """
    float low;
    unsigned quarter;
    const float r = opk_reduced_near_f32(x, &low, &quarter), s = r * r, s2 = s * s, s4 = s2 * s2;
    const float more = opk_fma_f32(r * s, $tan, opk_fma_f32(low, s, low));
    return opk_tangent_f32(x, quarter, r, more);
"""

_TAN64 = """
    double low;
    unsigned long long quarter;
    const double r = opk_reduced_near_f64(x, &low, &quarter);
    return opk_tangent_f64(x, quarter, r, low);
"""

_BODIES = {
    "sin_f32": "const float y = opk_quarter_near_f32(x, 0);\n    return x == 0.0f ? x : y;",
    "cos_f32": "return opk_quarter_near_f32(x, 1);",
    "tan_f32": fill(_TAN32, "f32", tan=estrin("f32", "s", TAN32)),
    "sin_f64": "const double y = opk_quarter_near_f64(x, 0);\n    return __builtin_fabs(x) < 0x1p-30 ? x : y;",
    "cos_f64": "return opk_quarter_near_f64(x, 1);",
    "tan_f64": _TAN64.strip(),
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


TEXT = {
    **{f"reduced_near_{t}": fill(_REDUCED, t, **parts) for t, parts in _PARTS.items()},
    "quarter_near_f32": fill(
        _QUARTER32,
        "f32",
        sin=horner("f32", "s", SIN32),
        cos=horner("f32", "s", COS32),
        **{name: f"{part}f" for name, part in _PARTS["f32"].items()},
    ),
    "quarter_near_f64": fill(_QUARTER64, "f64"),
    **{"{}_near_{}".format(*name.split("_")): _function(name) for name in LIMITS},
}
