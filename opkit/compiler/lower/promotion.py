"""This module promotes dtypes of operands, as ``torch.result_type`` does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index
from opkit.compiler.lower.tensors import Tensor

_KINDS = ("bool", "int", "float", "complex")


def promoted(operands: Iterable[Any], default: str = "f32") -> str:
    """Return the common dtype of tensors and numbers.

    A tensor of no dimensions counts less than one with some, and a number less than both: they decide only where they are
    of a higher kind (bool, int, float). ``default`` is the dtype of Python's floats.
    """
    ranks: list[str | None] = [None, None, None]
    for operand in operands:
        rank, dtype = _ranked(operand, default)
        found = ranks[rank]
        ranks[rank] = dtype if found is None else joined(found, dtype)
    known = [dtype for dtype in ranks if dtype is not None]
    result = known[0]
    for dtype in known[1:]:
        result = joined(result, dtype) if _kind(dtype) > _kind(result) else result
    return result


def joined(a: str, b: str) -> str:
    """Return the dtype that holds values of both, floats preferred.

    >>> joined("u8", "i8"), joined("f16", "bf16"), joined("i64", "f16"), joined("f64", "c64")
    ('i16', 'f32', 'f16', 'c128')
    """
    if "complex" in (DTYPES[a].kind, DTYPES[b].kind) and "f64" in (a, b):
        return "c128"
    if a == b or _kind(a) != _kind(b):
        return a if _kind(a) >= _kind(b) else b
    x, y = sorted((DTYPES[a], DTYPES[b]), key=lambda d: d.bytes)
    if (x.kind == "int" and y.bytes == x.bytes) or (x.signed and not y.signed):
        return {1: "i16", 2: "i32", 4: "i64"}.get(y.bytes, "f32")
    return "f32" if x.bytes == y.bytes else y.name


def _kind(dtype: str) -> int:
    return _KINDS.index(DTYPES[dtype].kind)


def _ranked(operand: Any, default: str) -> tuple[int, str]:
    if isinstance(operand, Tensor):
        return (0 if operand.shape else 1), operand.dtype
    kinds: dict[type, str] = {bool: "b1", int: "i64", Index: "i64", float: default, complex: "c64"}
    return 2, kinds[type(operand)]
