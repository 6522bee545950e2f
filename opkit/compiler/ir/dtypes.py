"""The table of the IR's element types, by the short names that it prints."""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["bool", "int", "float", "complex", "bits"]


@dataclasses.dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: how the IR prints it.
        kind: what its values are; "bits": numbers that kernels move and do not compute with.
        bytes: the size of one element in memory.
        signed: whether its values can be negative.
        torch: the name of the same type in torch.
        compute: the name of the type in which its arithmetic is done: float32 for the two narrow floats.
    """

    name: str
    kind: Kind
    bytes: int
    signed: bool
    torch: str
    compute: str


_ROWS = (
    DType("b1", "bool", 1, False, "bool", "b1"),
    DType("u8", "int", 1, False, "uint8", "u8"),
    DType("u16", "int", 2, False, "uint16", "u16"),
    DType("u32", "int", 4, False, "uint32", "u32"),
    DType("u64", "int", 8, False, "uint64", "u64"),
    DType("i8", "int", 1, True, "int8", "i8"),
    DType("i16", "int", 2, True, "int16", "i16"),
    DType("i32", "int", 4, True, "int32", "i32"),
    DType("i64", "int", 8, True, "int64", "i64"),
    DType("f16", "float", 2, True, "float16", "f32"),
    DType("bf16", "float", 2, True, "bfloat16", "f32"),
    DType("f32", "float", 4, True, "float32", "f32"),
    DType("f64", "float", 8, True, "float64", "f64"),
    DType("c32", "complex", 4, True, "complex32", "c64"),
    DType("c64", "complex", 8, True, "complex64", "c64"),
    DType("c128", "complex", 16, True, "complex128", "c128"),
    DType("f8e4m3", "bits", 1, True, "float8_e4m3fn", "f8e4m3"),
    DType("f8e5m2", "bits", 1, True, "float8_e5m2", "f8e5m2"),
    DType("f8e4m3fnuz", "bits", 1, True, "float8_e4m3fnuz", "f8e4m3fnuz"),
    DType("f8e5m2fnuz", "bits", 1, True, "float8_e5m2fnuz", "f8e5m2fnuz"),
    DType("f8e8m0", "bits", 1, False, "float8_e8m0fnu", "f8e8m0"),
)

DTYPES = {row.name: row for row in _ROWS}
OF_TORCH = {row.torch: row.name for row in _ROWS}
PARTS = {"c64": "f32", "c128": "f64"}
"""The type of the real and the imaginary part, of the complex types that are computed with."""


def dtype(name: str) -> DType:
    """Return the row of a type.

    >>> dtype("bf16").compute
    'f32'
    """
    return DTYPES[name]


def is_float(name: str) -> bool:
    return DTYPES[name].kind == "float"


def is_int(name: str) -> bool:
    """Return whether the values are integers; bool is not."""
    return DTYPES[name].kind == "int"


def is_complex(name: str) -> bool:
    return DTYPES[name].kind == "complex"


def is_bits(name: str) -> bool:
    """Return whether kernels can only move the values."""
    return DTYPES[name].kind == "bits"
