"""The ops of the IR: one table, at most 60 rows. An op is defined here and spelled in every emitter, nowhere else.

An op of kind "scalar" computes one value from others: the numpy function in its row, applied to values of the type that
``result`` names: "same" as the arguments (which are all of one type), "b1", or "explicit" (the node says which).
Integers wrap around. ``div`` of integers rounds towards zero, ``floordiv`` and ``rem`` follow Python; by zero, integers
give 0 (where ATen raises, ``nonzero`` checks the divisor before). ``min`` and ``max`` give NaN if either is NaN.

An op of kind "leaf" has a meaning in a loop nest alone; see ``expr`` and ``kernel``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from opkit.compiler.ir.dtypes import DTYPES

Kind = Literal["scalar", "leaf"]
ResultKind = Literal["same", "b1", "explicit"]


@dataclasses.dataclass(frozen=True)
class Op:
    """A row of the table.

    Attributes:
        name: as printed.
        arity: the number of its arguments; None if that varies.
        kind: "scalar" or "leaf".
        result: the type of its value.
        takes: the kinds of its arguments' types: "b" (bool), "i" (int), "f" (float).
        numpy: the function that it computes, on arrays.
    """

    name: str
    arity: int | None
    kind: Kind = "scalar"
    result: ResultKind = "same"
    takes: str = "bif"
    numpy: Callable[..., Any] | None = None


def _is_float(a: Any) -> bool:
    return np.asarray(a).dtype.kind == "f"


def _quotient(a: Any, b: Any) -> Any:
    if _is_float(a):
        return a / b
    safe = np.where(b == 0, 1, b)
    truncated = (a - np.fmod(a, safe)) // safe
    return np.where(b == 0, 0, truncated).astype(np.asarray(a).dtype)


def _floor_quotient(a: Any, b: Any) -> Any:
    return np.floor_divide(a, b) if _is_float(a) else np.where(b == 0, 0, a // np.where(b == 0, 1, b))


def _remainder(a: Any, b: Any) -> Any:
    return np.mod(a, b) if _is_float(a) else np.where(b == 0, 0, np.remainder(a, np.where(b == 0, 1, b)))


def _c_remainder(a: Any, b: Any) -> Any:
    return np.fmod(a, b) if _is_float(a) else np.where(b == 0, 0, np.fmod(a, np.where(b == 0, 1, b)))


def _power(a: Any, b: Any) -> Any:
    """Return the power; of integers with a negative exponent, 1 over the power, rounded towards zero."""
    if _is_float(a):
        return np.power(a, b)
    odd = np.where(np.bitwise_and(b, 1), a, 1)
    inverse = np.where(a == 1, 1, np.where(a == -1, odd, 0))
    return np.where(b < 0, inverse, np.power(a, np.where(b < 0, 0, b))).astype(np.asarray(a).dtype)


def _erf(a: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.asarray(a).dtype])(a)


def _erfc(a: Any) -> Any:
    return np.vectorize(math.erfc, otypes=[np.asarray(a).dtype])(a)


_ROWS = (
    # leaves
    Op("const", 0, "leaf", "explicit"),  # a number; data: a Python bool, int or float
    Op("index", 0, "leaf", "explicit"),  # an Index as an i64; data: the Index
    Op(
        "load", None, "leaf", "explicit"
    ),  # an element; data: (buffer, coordinates); the argument, if any: whether it is there
    Op("var", 0, "leaf", "explicit"),  # what a let or an accumulator holds; data: its name
    Op(
        "random", 1, "leaf", "explicit"
    ),  # uniform in [0, 1), f32 or f64; data: the Index that counts draws; argument: the seed
    Op(
        "bound", 1, "leaf", "same"
    ),  # an index that must be in [-n, n), made at least 0; data: n; else the program stops
    Op("nonzero", 1, "leaf", "same"),  # an integer that must not be 0; else the program stops
    Op("call", None, "leaf", "explicit"),  # the value of a library's function; data: the Callee
    # choice and type
    Op("where", 3, "scalar", "explicit"),  # the condition is b1; the other two are of one type
    Op("cast", 1, "scalar", "explicit"),  # C's conversion; to b1: not 0. data: whether the user wrote it
    Op("bitcast", 1, "scalar", "explicit"),  # the same bits as another type of the same size
    # arithmetic
    Op("add", 2, numpy=np.add),
    Op("sub", 2, numpy=np.subtract, takes="if"),
    Op("mul", 2, numpy=np.multiply),
    Op("div", 2, numpy=_quotient, takes="if"),
    Op("floordiv", 2, numpy=_floor_quotient, takes="i"),
    Op("rem", 2, numpy=_remainder, takes="if"),
    Op("fmod", 2, numpy=_c_remainder, takes="if"),
    Op("neg", 1, numpy=np.negative, takes="if"),
    Op("abs", 1, numpy=np.abs, takes="if"),
    Op("min", 2, numpy=np.minimum),
    Op("max", 2, numpy=np.maximum),
    Op("pow", 2, numpy=_power, takes="if"),
    # bits
    Op("and", 2, numpy=np.bitwise_and, takes="bi"),
    Op("or", 2, numpy=np.bitwise_or, takes="bi"),
    Op("xor", 2, numpy=np.bitwise_xor, takes="bi"),
    Op("not", 1, numpy=np.invert, takes="bi"),
    Op("shl", 2, numpy=np.left_shift, takes="i"),
    Op("shr", 2, numpy=np.right_shift, takes="i"),
    # comparison
    Op("lt", 2, result="b1", numpy=np.less),
    Op("le", 2, result="b1", numpy=np.less_equal),
    Op("eq", 2, result="b1", numpy=np.equal),
    Op("ne", 2, result="b1", numpy=np.not_equal),
    # rounding
    Op("floor", 1, numpy=np.floor, takes="f"),
    Op("trunc", 1, numpy=np.trunc, takes="f"),
    Op("round", 1, numpy=np.rint, takes="f"),  # halves to even
    # functions
    Op("sqrt", 1, numpy=np.sqrt, takes="f"),
    Op("exp", 1, numpy=np.exp, takes="f"),
    Op("exp2", 1, numpy=np.exp2, takes="f"),
    Op("expm1", 1, numpy=np.expm1, takes="f"),
    Op("log", 1, numpy=np.log, takes="f"),
    Op("log2", 1, numpy=np.log2, takes="f"),
    Op("log10", 1, numpy=np.log10, takes="f"),
    Op("log1p", 1, numpy=np.log1p, takes="f"),
    Op("sin", 1, numpy=np.sin, takes="f"),
    Op("cos", 1, numpy=np.cos, takes="f"),
    Op("tan", 1, numpy=np.tan, takes="f"),
    Op("asin", 1, numpy=np.arcsin, takes="f"),
    Op("acos", 1, numpy=np.arccos, takes="f"),
    Op("atan", 1, numpy=np.arctan, takes="f"),
    Op("atan2", 2, numpy=np.arctan2, takes="f"),
    Op("sinh", 1, numpy=np.sinh, takes="f"),
    Op("cosh", 1, numpy=np.cosh, takes="f"),
    Op("tanh", 1, numpy=np.tanh, takes="f"),
    Op("asinh", 1, numpy=np.arcsinh, takes="f"),
    Op("acosh", 1, numpy=np.arccosh, takes="f"),
    Op("atanh", 1, numpy=np.arctanh, takes="f"),
    Op("erf", 1, numpy=_erf, takes="f"),
    Op("erfc", 1, numpy=_erfc, takes="f"),
)

OPS = {row.name: row for row in _ROWS}
assert len(OPS) == len(_ROWS) <= 60

# The op with which a reduction or an accumulator combines values, and its neutral value.
REDUCTIONS: dict[str, tuple[str, str]] = {
    "sum": ("add", "zero"),
    "prod": ("mul", "one"),
    "max": ("max", "least"),
    "min": ("min", "greatest"),
    "any": ("or", "zero"),
    "all": ("and", "one"),
    "argmax": ("max", "least"),  # the position of the first greatest; NaN is greater than all
    "argmin": ("min", "greatest"),
}


def neutral(reduction: str, dtype: str) -> bool | int | float:
    """Return the neutral value of a reduction.

    >>> neutral("prod", "f32"), neutral("max", "f32"), neutral("min", "i8"), neutral("any", "b1")
    (1, -inf, 127, 0)
    """
    start, row = REDUCTIONS[reduction][1], DTYPES[dtype]
    if start in ("zero", "one"):
        return int(start == "one")
    if row.kind == "float":
        return math.inf if start == "greatest" else -math.inf
    bits = 1 if row.kind == "bool" else 8 * row.bytes - row.signed
    return 2**bits - 1 if start == "greatest" else -(2**bits) if row.signed else 0
