"""Types, constants, indices and the ops of the IR as Triton. Narrow floats are computed in float32 and rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.index import Atom, Div, Index, Mod, is_nonnegative, lower


class NotEmittable(Exception):
    """A kernel has something that this emitter does not write; the message says what."""


TYPES = {
    "b1": "tl.int1", "u8": "tl.uint8", "u16": "tl.uint16", "u32": "tl.uint32", "u64": "tl.uint64", "i8": "tl.int8",
    "i16": "tl.int16", "i32": "tl.int32", "i64": "tl.int64", "f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32",
    "f64": "tl.float64", **{row.name: "tl.uint8" for row in DTYPES.values() if row.kind == "bits"},
}  # fmt: skip
POINTERS = {
    "b1": "*i1", "u8": "*u8", "u16": "*u16", "u32": "*u32", "u64": "*u64", "i8": "*i8", "i16": "*i16", "i32": "*i32",
    "i64": "*i64", "f16": "*fp16", "bf16": "*bf16", "f32": "*fp32", "f64": "*fp64",
    **{row.name: "*u8" for row in DTYPES.values() if row.kind == "bits"},
}  # fmt: skip
NARROW = frozenset({"f16", "bf16"})

# ``-x`` is 0 - x in Triton, which is not -0.0 for 0.0.
# {a} {b} {c} are the arguments, {bits} the size of their type, {ones} all of its bits.
# Floats without a row are functions of libdevice.
SPELLED: dict[str, dict[str, str]] = {
    "where": dict.fromkeys("bif", "tl.where({a}, {b}, {c})"),
    "add": {"b": "({a} | {b})", "i": "({a} + {b})", "f": "({a} + {b})"},
    "sub": {"i": "({a} - {b})", "f": "({a} - {b})"},
    "mul": {"b": "({a} & {b})", "i": "({a} * {b})", "f": "({a} * {b})"},
    "div": {"i": "opk_div({a}, {b})", "f": "({a} / {b})"},
    "floordiv": {"i": "opk_floordiv({a}, {b})"},
    "rem": {"i": "opk_rem({a}, {b})", "f": "opk_rem_float({a}, {b})"},
    "fmod": {"i": "opk_fmod({a}, {b})"},
    "neg": {"i": "(0 - {a})", "f": "({a} * -1.0)"},
    "abs": {"i": "tl.abs({a})", "f": "tl.abs({a})"},
    "min": {"b": "({a} & {b})", "i": "opk_min({a}, {b})", "f": "opk_min_nan({a}, {b})"},
    "max": {"b": "({a} | {b})", "i": "opk_max({a}, {b})", "f": "opk_max_nan({a}, {b})"},
    "pow": {"i": "opk_pow({a}, {b})"},
    "and": dict.fromkeys("bi", "({a} & {b})"),
    "or": dict.fromkeys("bi", "({a} | {b})"),
    "xor": dict.fromkeys("bi", "({a} ^ {b})"),
    "not": {"b": "({a} == 0)", "i": "({a} ^ {ones})"},
    "shl": {"i": "opk_shl({a}, {b}, {bits})"},
    "shr": {"i": "opk_shr({a}, {b}, {bits})"},
    "lt": {"b": "(({a} == 0) & {b})", **dict.fromkeys("if", "({a} < {b})")},
    "le": {"b": "(({a} == 0) | {b})", **dict.fromkeys("if", "({a} <= {b})")},
    "eq": {"b": "(({a} ^ {b}) == 0)", **dict.fromkeys("if", "({a} == {b})")},
    "ne": {"b": "({a} ^ {b})", **dict.fromkeys("if", "({a} != {b})")},
    "floor": {"f": "tl.floor({a})"},
    "sqrt": {"f": "tl.sqrt({a})"},
    "exp": {"f": "tl.exp({a})"},
    "exp2": {"f": "tl.exp2({a})"},
}  # fmt: skip
ROUNDED = {
    "div": "tl.div_rn({a}, {b})",
    "sqrt": "tl.sqrt_rn({a})",
}  # of float32: what SPELLED has is not rounded to the nearest
LIBDEVICE = {"round": "rint"}
COMPARISONS = frozenset({"lt", "le", "eq", "ne"})
REDUCERS = {"sum": "opk_add", "prod": "opk_mul", "max": "opk_max", "min": "opk_min", "any": "opk_or", "all": "opk_and"}
ATOMICS = {"add": "tl.atomic_add", "max": "tl.atomic_max", "min": "tl.atomic_min"}


def computed(dtype: str) -> str:
    """Return Triton's name of the type in which values of a type are computed."""
    return TYPES[DTYPES[dtype].compute]


def number(value: bool | int | float, dtype: str) -> str:
    """Return a number as Python.

    >>> number(1, "f32"), number(float("inf"), "f32"), number(-1, "u8"), number(True, "b1")
    ('1.0', 'float("inf")', '255', '1')
    """
    row = DTYPES[dtype]
    if row.kind == "float":
        converted = float(value)
        return repr(converted) if math.isfinite(converted) else f'float("{converted}")'
    if row.kind == "bool":
        return str(int(bool(value)))
    wrapped = int(value) % 2 ** (8 * row.bytes)
    return str(wrapped - 2 ** (8 * row.bytes) if row.signed and wrapped >= 2 ** (8 * row.bytes - 1) else wrapped)


def constant(value: bool | int | float, dtype: str) -> str:
    """Return a number as a value of Triton's."""
    if dtype in NARROW:
        return f"{constant(value, 'f32')}.to({TYPES[dtype]})"
    text = f"tl.full([], {number(value, dtype)}, {TYPES[dtype]})"
    negative_zero = is_float(dtype) and value == 0 and math.copysign(1, value) < 0
    return f"({text} * -1.0)" if negative_zero else text


def tensor(text: str, dtype: str) -> str:
    """Return an index, which may be a number of Python's, as a value of Triton's of at least a type."""
    return f"(tl.full([], 0, {TYPES[dtype]}) + ({text}))"


def reducer(reduction: str, dtype: str) -> str:
    """Return the function that combines two values of a reduction."""
    return REDUCERS[reduction] + ("_nan" if reduction in ("max", "min") and is_float(dtype) else "")


def applied(op: str, dtype: str, texts: Sequence[str], exact: bool = True) -> str:
    """Return an op of values of a type; of narrow floats, the rounded result of the op in float32.

    ``exact``: quotients and roots of float32 are rounded to the nearest.

    >>> applied("add", "i32", ["x", "y"]), applied("tanh", "f32", ["x"]), applied("neg", "bf16", ["x"])
    ('(x + y)', 'libdevice.tanh(x)', '(x.to(tl.float32) * -1.0).to(tl.bfloat16)')
    """
    row = DTYPES[dtype]
    if dtype in NARROW and op != "where":
        inside = applied(op, "f32", [f"{text}.to(tl.float32)" for text in texts], exact=False)
        return inside if op in COMPARISONS else f"{inside}.to({TYPES[dtype]})"
    if op == "abs" and row.kind == "int" and not row.signed:
        return texts[0]
    text = SPELLED.get(op, {}).get(row.kind[0])
    if dtype == "f32" and exact:
        text = ROUNDED.get(op, text)
    if op == "shr" and not row.signed:
        text = "opk_shr_unsigned({a}, {b}, {bits})"
    if text is None:
        if row.kind != "float":
            raise NotEmittable(f"an op {op} of {dtype}")
        return f"libdevice.{LIBDEVICE.get(op, op)}({', '.join(texts)})"
    return text.format(**dict(zip("abc", texts, strict=False)), bits=8 * row.bytes, ones=constant(-1, dtype))


def converted(text: str, source: str, target: str) -> str:
    """Return a value as another type, as C converts it; floats become narrow integers by way of wider ones."""
    if source == target:
        return text
    if target == "b1":
        return f"({text} != 0)"
    if target in NARROW and source != "f32":
        return f"{text}.to(tl.float32).to({TYPES[target]})"
    row = DTYPES[target]
    if source in NARROW and target != "f32":
        return converted(f"{text}.to(tl.float32)", "f32", target)
    if is_float(source) and row.kind == "int" and (row.bytes < 4 or target == "u32"):
        return f"{text}.to({'tl.int64' if target == 'u32' else 'tl.int32'}).to({TYPES[target]})"
    return f"{text}.to({TYPES[target]})"


def index_text(at: Index, spell: Callable[[Atom], str]) -> str:
    """Return an index; ``spell`` writes axes, sizes and values."""

    def spelled(atom: Atom) -> str:
        if not isinstance(atom, Div | Mod):
            return spell(atom)
        a, b = index_text(atom.dividend, spell), index_text(atom.divisor, spell)
        low = lower(atom.dividend)
        if low is None or not is_nonnegative(low):
            name = "opk_floordiv" if isinstance(atom, Div) else "opk_rem"
            return f"{name}({tensor(a, 'i32')}, {tensor(b, 'i32')})"
        return f"(({a}) {atom.operator} ({b}))"

    terms = ["*".join([*map(spelled, m), *([] if c == 1 and m else [str(c)])]) for m, c in at.terms.items()]
    return " + ".join(terms) or "0"
