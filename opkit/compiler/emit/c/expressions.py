"""This module writes types, constants, indices and the ops of the IR as C.

Indices are sums of products of 64-bit integers. Narrow floats (``NARROW``) are held as bits and computed in f32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from opkit.compiler.emit.c import functions
from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.index import Atom, Axis, Div, Index, Mod, Symbol, is_nonnegative, lower, upper

# The narrow floats are the bits that memory holds; what is computed with them is converted first.
C_TYPES = {
    "b1": "uint8_t",
    "u8": "uint8_t",
    "u16": "uint16_t",
    "u32": "uint32_t",
    "u64": "uint64_t",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "int32_t",
    "i64": "int64_t",
    "f16": "uint16_t",
    "bf16": "uint16_t",
    "f32": "float",
    "f64": "double",
    "c32": "uint32_t",
    "c64": "_Complex float",
    "c128": "_Complex double",
    **{row.name: "uint8_t" for row in DTYPES.values() if row.kind == "bits"},
}
NARROW = frozenset({"f16", "bf16"})

TYPEDEFS = "\n".join(
    f"typedef __{'U' if unsigned else ''}INT{bits}_TYPE__ {'u' if unsigned else ''}int{bits}_t;"
    for bits in (8, 16, 32, 64)
    for unsigned in (False, True)
)


def variable_type(dtype: str) -> str:
    """Return the type of a variable: as in memory, but truth values are C's own, which the vectoriser represents as masks."""
    return "_Bool" if dtype == "b1" else C_TYPES[dtype]


def number(value: bool | int | float, dtype: str) -> str:
    """Return a constant.

    >>> number(1.5, "f32"), number(-0.0, "f64"), number(-3, "i32"), number(1.0, "bf16")
    ('0x1.8000000000000p+0f', '(-0x0.0p+0)', '(-3)', '0x3f80u')
    """
    if dtype in NARROW:
        return f"0x{bits(float(value), dtype):x}u"
    if is_float(dtype):
        return _float_literal(float(value), dtype)
    if DTYPES[dtype].kind == "complex":
        return f"({C_TYPES[dtype]}){float(value)!r}"
    return _integer_literal(int(value), dtype)


def bits(value: float, dtype: str) -> int:
    """Return a number as the sixteen bits of a narrow float.

    >>> hex(bits(1.0, "bf16")), hex(bits(1.0, "f16"))
    ('0x3f80', '0x3c00')
    """
    with np.errstate(all="ignore"):
        if dtype == "f16":
            return int(np.float16(value).view(np.uint16))
        whole = int(np.float32(value).view(np.uint32))
    return 0x7FC0 if math.isnan(value) else (whole + 0x7FFF + ((whole >> 16) & 1)) >> 16


def _float_literal(value: float, dtype: str) -> str:
    with np.errstate(all="ignore"):
        value = float(np.float32(value)) if dtype == "f32" else value
    suffix = "f" if dtype == "f32" else ""
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    text = f"__builtin_inf{suffix}()" if math.isinf(value) else abs(value).hex() + suffix
    return f"(-{text})" if math.copysign(1, value) < 0 else text


def _integer_literal(value: int, dtype: str) -> str:
    """Return an integer, wrapped into the type; the lowest one is written as a difference, since C has no literal of it."""
    size = 8 * DTYPES[dtype].bytes
    value = int(value != 0) if dtype == "b1" else value % 2**size
    if DTYPES[dtype].signed and value >= 2 ** (size - 1):
        value -= 2**size
    suffix = {"i64": "L", "u32": "u", "u64": "UL"}.get(dtype, "")
    if value == -(2**63):
        return "(-9223372036854775807L - 1)"
    if value == -(2**31):
        return "(-2147483647 - 1)"
    return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"


# ---- ops and conversions ---------------------------------------------------------------------------------------------

# {a} {b} {c} are the arguments, {w} narrows an integer to the result's type, {s} is the arguments' type,
# {f} the suffix of C's functions.
# An op without a row here is an elementary function: ``functions`` computes it, or else C's library.
SPELLED: dict[str, dict[str, str]] = {
    "where": dict.fromkeys("bifc", "({a} ? {b} : {c})"),
    "add": {"b": "({a} | {b})", "i": "{w}({a} + {b})", "f": "({a} + {b})", "c": "({a} + {b})"},
    "sub": {"i": "{w}({a} - {b})", "f": "({a} - {b})", "c": "({a} - {b})"},
    "mul": {"b": "({a} & {b})", "i": "{w}({a} * {b})", "f": "({a} * {b})", "c": "({a} * {b})"},
    "div": {"i": "opk_div_{s}({a}, {b})", "f": "({a} / {b})"},
    "floordiv": {"i": "opk_floordiv_{s}({a}, {b})"},
    "rem": {"i": "opk_rem_{s}({a}, {b})", "f": "opk_rem_{s}({a}, {b})"},
    "fmod": {"i": "opk_fmod_{s}({a}, {b})", "f": "__builtin_fmod{f}({a}, {b})"},
    "neg": {"i": "{w}(-{a})", "f": "(-{a})", "c": "(-{a})"},
    "abs": {"i": "opk_abs_{s}({a})", "f": "__builtin_fabs{f}({a})"},
    "min": {"b": "({a} & {b})", "i": "opk_min_{s}({a}, {b})", "f": "opk_min_{s}({a}, {b})"},
    "max": {"b": "({a} | {b})", "i": "opk_max_{s}({a}, {b})", "f": "opk_max_{s}({a}, {b})"},
    "pow": {"i": "opk_pow_{s}({a}, {b})"},
    "and": {"b": "({a} & {b})", "i": "{w}({a} & {b})"},
    "or": {"b": "({a} | {b})", "i": "{w}({a} | {b})"},
    "xor": {"b": "({a} ^ {b})", "i": "{w}({a} ^ {b})"},
    "not": {"b": "(!{a})", "i": "{w}(~{a})"},
    "shl": {"i": "opk_shl_{s}({a}, {b})"},
    "shr": {"i": "opk_shr_{s}({a}, {b})"},
    "lt": dict.fromkeys("bif", "({a} < {b})"),
    "le": dict.fromkeys("bif", "({a} <= {b})"),
    "eq": dict.fromkeys("bifc", "({a} == {b})"),
    "ne": dict.fromkeys("bifc", "({a} != {b})"),
    "floor": {"f": "__builtin_floor{f}({a})"},
    "trunc": {"f": "__builtin_trunc{f}({a})"},
    "round": {"f": "__builtin_rint{f}({a})"},
    "sqrt": {"f": "__builtin_sqrt{f}({a})"},
}


def apply(op: str, dtype: str, texts: Sequence[str], result: str) -> str:
    """Return an op on values of ``dtype`` that ``texts`` write (of ``where``, but the first); its value is of type ``result``.

    >>> apply("add", "f32", ["x", "y"], "f32"), apply("add", "bf16", ["x", "y"], "bf16")
    ('(x + y)', 'opk_f32_to_bf16((opk_bf16_to_f32(x) + opk_bf16_to_f32(y)))')
    """
    if dtype in NARROW and op != "where":
        inside = apply(op, "f32", [convert(text, dtype, "f32") for text in texts], "b1" if result == "b1" else "f32")
        return inside if result == "b1" else convert(inside, "f32", result)
    suffix = "" if dtype == "f64" else "f"
    row = SPELLED.get(op, {}).get(DTYPES[dtype].kind[0])
    if row is None:
        own = functions.SPELLED.get((op, dtype))
        return f"{f'__builtin_{op}{suffix}' if own is None else f'opk_{own}'}({', '.join(texts)})"
    narrowing = f"({C_TYPES[result]})" if DTYPES[result].bytes < 4 else ""  # C computes in int at least
    return row.format(**dict(zip("abc", texts, strict=False)), w=narrowing, s=dtype, f=suffix)


def convert(text: str, source: str, target: str) -> str:
    """Return a value converted as C does, by way of f32 for narrow floats.

    >>> convert("x", "f32", "b1"), convert("x", "bf16", "i64"), convert("x", "i64", "f16")
    ('(x != 0)', '(int64_t)opk_bf16_to_f32(x)', 'opk_f32_to_f16((float)x)')
    """
    if source == target:
        return text
    if source in NARROW:
        return convert(f"opk_{source}_to_f32({text})", "f32", target)
    if target in NARROW:
        return f"opk_f32_to_{target}({convert(text, source, 'f32')})"
    if target == "b1":
        return f"({text} != 0)"
    if is_float(source) and DTYPES[target].kind == "int":
        return _float_to_integer(text, source, target)
    return f"({C_TYPES[target]}){text}"


def _float_to_integer(text: str, source: str, target: str) -> str:
    """Return a float as an integer: through a wide one, as ATen does, since C does not define what happens to larger values."""
    if target == "u64":
        return f"opk_whole_{source}({text})"
    wide = "(int64_t)" if target == "u32" or (target == "u8" and source == "f64") else "(int32_t)"
    return f"({C_TYPES[target]}){'' if target in ('i32', 'i64') else wide}{text}"


def reinterpret(text: str, source: str, target: str) -> str:
    """Return the same bits as another type.

    >>> reinterpret("x", "f32", "i32"), reinterpret("x", "i64", "u64")
    ('opk_bits_f32_i32(x)', '(uint64_t)x')
    """
    if {source, target} & {"f32", "f64", "c64", "c128"} and source != target:
        return f"opk_bits_{source}_{target}({text})"
    return f"({C_TYPES[target]}){text}"


# ---- indices ---------------------------------------------------------------------------------------------------------

Spell = Callable[[Atom], str]


def index_text(index: Index, spell: Spell) -> str:
    """Return an index as C; ``spell`` writes the atoms. Terms of outer axes come first, so that an inner loop's own is last.

    >>> from opkit.compiler.ir.index import axis, size
    >>> index_text(axis(1, 8) + axis(0, 4) * 8 * size("n") - 3, atom_name)
    '-3 + a0*n_n*8 + a1'
    """

    def depth(term: tuple[tuple[Atom, ...], int]) -> int:
        return max((atom.number for atom in term[0] if isinstance(atom, Axis)), default=-1)

    terms: list[str] = []
    for monomial, coefficient in sorted(index.terms.items(), key=depth):
        literal = f"{coefficient}" if abs(coefficient) < 2**31 else f"{coefficient}L"
        terms.append("*".join([*map(spell, monomial), *([] if coefficient == 1 and monomial else [literal])]))
    return " + ".join(terms) or "0"


def atom_name(atom: Atom) -> str:
    """Return an axis or a size by the name of its variable."""
    assert isinstance(atom, Axis | Symbol), atom
    return f"a{atom.number}" if isinstance(atom, Axis) else f"n_{atom.name}"


def nested_text(atom: Atom) -> str:
    """Return an axis or a size by its name, quotients and remainders in full."""
    return division(atom, nested_text) if isinstance(atom, Div | Mod) else atom_name(atom)


def division(atom: Div | Mod, spell: Spell) -> str:
    """Return a quotient or remainder: unsigned where nothing is negative, in 32 bits where all fits, for these are fast.

    >>> from opkit.compiler.ir.index import axis, size
    >>> division(Div(axis(0, 8), axis(1, 4)), atom_name), division(Mod(axis(0, size("n")), size("m")), atom_name)
    ('(int64_t)((uint32_t)(a0)/(uint32_t)(a1))', '(int64_t)((uint64_t)(a0)%(uint64_t)(n_m))')
    """
    a, b = index_text(atom.dividend, spell), index_text(atom.divisor, spell)
    low, high = lower(atom.dividend), upper(atom.dividend)
    if low is None or not is_nonnegative(low):
        return f"opk_{'floordiv' if isinstance(atom, Div) else 'rem'}_i64({a}, {b})"
    most = high.constant if high is not None else None
    size = 32 if most is not None and most < 2**31 and _fits(atom.divisor) else 64
    sign = "/" if isinstance(atom, Div) else "%"
    return f"(int64_t)((uint{size}_t)({a}){sign}(uint{size}_t)({b}))"


def _fits(divisor: Index) -> bool:
    high = upper(divisor)
    return high is not None and high.constant is not None and high.constant < 2**31
