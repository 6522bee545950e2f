"""This module writes each op of the IR as C, from one table by op and kind of type, and conversions."""

from __future__ import annotations

from collections.abc import Sequence

from opkit.compiler.emit import functions
from opkit.compiler.emit.types import C_TYPES, NARROW
from opkit.compiler.ir.dtypes import DTYPES, is_float

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
    """C's conversion, by way of f32 for the narrow floats.

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
        return _whole(text, source, target)
    return f"({C_TYPES[target]}){text}"


def _whole(text: str, source: str, target: str) -> str:
    """Return a float as an integer: through a wide one, as ATen does, for C leaves open what does not fit."""
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
