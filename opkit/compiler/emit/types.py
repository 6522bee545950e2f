"""This module holds C's names of the element types, and writes numbers of them."""

from __future__ import annotations

import math

import numpy as np

from opkit.compiler.ir.dtypes import DTYPES, is_float

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
}
NARROW = frozenset({"f16", "bf16"})

TYPEDEFS = "\n".join(
    f"typedef __{'U' if unsigned else ''}INT{bits}_TYPE__ {'u' if unsigned else ''}int{bits}_t;"
    for bits in (8, 16, 32, 64)
    for unsigned in (False, True)
)


def variable_type(dtype: str) -> str:
    """Return the type of a variable: as in memory, but truth values are C's own, which the vectoriser keeps as masks."""
    return "_Bool" if dtype == "b1" else C_TYPES[dtype]


def number(value: bool | int | float, dtype: str) -> str:
    """Return a constant.

    >>> number(1.5, "f32"), number(-0.0, "f64"), number(-3, "i32"), number(1.0, "bf16")
    ('0x1.8000000000000p+0f', '(-0x0.0p+0)', '(-3)', '0x3f80u')
    """
    if dtype in NARROW:
        return f"0x{bits(float(value), dtype):x}u"
    if is_float(dtype):
        return _real(float(value), dtype)
    if DTYPES[dtype].kind == "complex":
        return f"({C_TYPES[dtype]}){float(value)!r}"
    return _whole(int(value), dtype)


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


def _real(value: float, dtype: str) -> str:
    with np.errstate(all="ignore"):
        value = float(np.float32(value)) if dtype == "f32" else value
    suffix = "f" if dtype == "f32" else ""
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    text = f"__builtin_inf{suffix}()" if math.isinf(value) else abs(value).hex() + suffix
    return f"(-{text})" if math.copysign(1, value) < 0 else text


def _whole(value: int, dtype: str) -> str:
    """Wrapped into the type; the least i64 is written as a difference, for C has no such literal."""
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
