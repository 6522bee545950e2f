"""How the C text of a function is written down: once for both types where it can be, polynomials as lists.

A table of functions maps names to C text. In a template, ``$T`` is the C type, ``$t`` the IR's name of it, ``$f`` the
suffix of a number or of a builtin, ``$U`` and ``$I`` the integers of its width; other names are polynomials.
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
    """Return a polynomial, the coefficient of the power zero first, as multiplications and additions that are fused if they can.

    >>> horner("f32", "x", "1.0 2.0 3.0")
    'opk_fma_f32(opk_fma_f32(3.0f, x, 2.0f), x, 1.0f)'
    """
    suffix = _FLOATS[dtype]["f"]
    *lower, value = [f"{c}{suffix}" for c in coefficients.split()]
    for c in reversed(lower):
        value = f"opk_fma_{dtype}({value}, {variable}, {c})"
    return value


def estrin(dtype: str, variable: str, coefficients: str) -> str:
    """Return the same in fewer steps after one another: processors wait for results more than they lack units for them.

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
    """Functions of f32 that call those of f64 and round: for what would lose too much in f32."""
    takes = ", ".join(f"float {a}" for a in arguments)
    return {
        f"{name}_f32": f"OPK_INLINE float opk_{name}_f32({takes}) {{\n"
        f"    return (float)opk_{name}_f64({', '.join(arguments)});\n}}\n"
        for name in names
    }
