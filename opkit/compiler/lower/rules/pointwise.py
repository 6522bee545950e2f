"""Arithmetic, comparison, logic, rounding and elementary functions: tables from an operator's name to a formula.

The formulas take elements that are already of the type in which the operator computes: that of the result (float32 for
the narrow floats), or for comparisons the common type of the operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.expr import make
from opkit.compiler.ir.graph import TensorType
from opkit.compiler.ir.index import Index
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import Table, overloads
from opkit.compiler.lower.scalar import Number, Scalar
from opkit.compiler.lower.tensors import Tensor

TABLE = Table()
Operand = Tensor | Number | Index | int | float | bool
Formula = Callable[..., Scalar]


# ---- rules of formulas -------------------------------------------------------------------------------------------------


def operand(x: Operand, kind: TensorType, inner: str) -> Scalar:
    """Return a tensor's element or a number, as a value of the type ``inner``."""
    return element(x, kind.shape, inner) if isinstance(x, Tensor) else f.number(x, inner)


def computed(b: Builder, formula: Formula, *operands: Operand, inner: str | None = None, number: int = 0) -> Tensor:
    """Return the tensor of ``formula`` of the operands' elements, computed in ``inner``."""
    kind = b.result(number)
    inner = inner or DTYPES[kind.dtype].compute
    body = formula(*(operand(x, kind, inner) for x in operands))
    return b.cast_elementwise(body, kind)


def _elementwise(formula: Formula) -> Any:
    return lambda b, *operands: computed(b, formula, *operands)


def _comparison(formula: Formula) -> Any:
    return lambda b, *operands: computed(b, formula, *operands, inner=DTYPES[promoted(operands)].compute)


def _of_truths(formula: Formula, b: Builder, *operands: Tensor) -> Tensor:
    """Apply a formula to whether each operand is not 0."""
    kind = b.result()
    return b.cast_elementwise(formula(*(f.truth(element(x, kind.shape)) for x in operands)), kind)


def _is_float(x: Scalar) -> bool:
    return is_float(x.dtype)


# ---- type promotion, as in ``torch.result_type`` --------------------------------------------------------------------------

_KINDS = ("bool", "int", "float", "complex")


def promoted(operands: Iterable[Any]) -> str:
    """Return the common dtype of tensors and numbers; that of Python's floats is f32.

    A tensor of no dimensions counts less than one with some, and a number less than both: they decide only where they are
    of a higher kind (bool, int, float).
    """
    numbers: dict[type, str] = {bool: "b1", int: "i64", Index: "i64", float: "f32", Number: "f32", complex: "c64"}
    ranks: list[list[str]] = [[], [], []]
    for x in operands:
        rank = 2 if not isinstance(x, Tensor) else 0 if x.shape else 1
        ranks[rank].append(x.dtype if isinstance(x, Tensor) else numbers[type(x)])
    result, *others = [functools.reduce(joined, dtypes) for dtypes in ranks if dtypes]
    for dtype in others:
        result = joined(result, dtype) if _kind(dtype) > _kind(result) else result
    return result


def joined(a: str, b: str) -> str:
    """Return the dtype that two dtypes promote to.

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


# ---- formulas --------------------------------------------------------------------------------------------------------


def reciprocal(x: Scalar) -> Scalar:
    return 1 / x


def sigmoid(x: Scalar) -> Scalar:
    return 1 / (1 + f.exp(-x))


def sign(x: Scalar) -> Scalar:
    if x.dtype == "b1":
        return x
    if not DTYPES[x.dtype].signed:
        return f.cast(x > 0, x.dtype)
    # 0 where x is NaN, as in ATen.
    return f.cast(x > 0, x.dtype) - f.cast(x < 0, x.dtype)


def angle(x: Scalar) -> Scalar:
    """Return the angle of a real number: pi if it is negative."""
    return f.where(f.is_nan(x), x, f.where(x < 0, f.number(math.pi, x), f.number(0, x)))


def absolute(x: Scalar) -> Scalar:
    return f.absolute(x) if DTYPES[x.dtype].signed and x.dtype != "b1" else x


def multiplied(x: Scalar, y: Scalar) -> Scalar:
    return x & y if x.dtype == "b1" else x * y


def remainder(x: Scalar, y: Scalar) -> Scalar:
    """Return the remainder with the sign of the divisor, as in Python; a zero of floats has the sign of the dividend."""
    if not _is_float(x):
        return f.apply("rem", x, f.nonzero(y))
    rest = f.fmod(x, y)
    return f.where(f.unequal(rest, 0) & ((y < 0) ^ (rest < 0)), rest + y, rest)


def floor_divided(x: Scalar, y: Scalar) -> Scalar:
    """Return Python's ``x // y``, which is exact also if the quotient rounds."""
    if not _is_float(x):
        return f.apply("floordiv", x, f.nonzero(y))
    rest = f.fmod(x, y)
    exact = (x - rest) / y
    lowered = f.where(f.unequal(rest, 0) & ((y < 0) ^ (rest < 0)), exact - 1, exact)
    whole = f.floor(lowered)
    nearest = f.where(lowered - whole > 0.5, whole + 1, whole)
    signed_zero = (x / y) * 0
    return f.where(f.equal(y, 0), x / y, f.where(f.unequal(lowered, 0), nearest, signed_zero))


def truncated(x: Scalar, y: Scalar) -> Scalar:
    return f.trunc(x / y) if _is_float(x) else x / f.nonzero(y)


def c_remainder(x: Scalar, y: Scalar) -> Scalar:
    """Return the remainder with the sign of the dividend, as in C."""
    return f.fmod(x, y if _is_float(x) else f.nonzero(y))


def clamped_below(x: Scalar, low: Scalar) -> Scalar:
    return f.where(x < low, low, x)


def clamped_above(x: Scalar, high: Scalar) -> Scalar:
    return f.where(high < x, high, x)


def _rounded(rounding: Formula) -> Formula:
    """Return a rounding function that returns integers unchanged."""
    return lambda x: rounding(x) if _is_float(x) else x


def _ignoring_nan(choose: Formula) -> Formula:
    return lambda x, y: f.where(f.is_nan(x), y, f.where(f.is_nan(y), x, choose(x, y))) if _is_float(x) else choose(x, y)


def hypotenuse(x: Scalar, y: Scalar) -> Scalar:
    """Return the square root of the sum of squares, scaled by the larger one, so that squares do not overflow."""
    a, b = f.absolute(x), f.absolute(y)
    big, small = f.maximum(a, b), f.minimum(a, b)
    ratio = small / big
    plain = f.where(f.equal(big, 0), big, big * f.sqrt(1 + ratio * ratio))
    return f.where(f.equal(a, math.inf) | f.equal(b, math.inf), math.inf, plain)


def logaddexp(x: Scalar, y: Scalar) -> Scalar:
    same_infinity = f.equal(x, y) & f.equal(f.absolute(x), math.inf)
    return f.where(same_infinity, x, f.maximum(x, y) + f.log1p(f.exp(-f.absolute(x - y))))


def xlogy(x: Scalar, y: Scalar) -> Scalar:
    return f.where(f.is_nan(y), math.nan, f.where(f.equal(x, 0), 0, x * f.log(y)))


def sign_bit(x: Scalar) -> Scalar:
    """Return whether the sign bit is set, also of -0.0 and NaN."""
    if not _is_float(x):
        return x < 0 if DTYPES[x.dtype].signed and x.dtype != "b1" else f.cast(x, "b1") & False
    whole = {"f32": "i32", "f64": "i64"}[x.dtype]
    return Scalar(make("bitcast", whole, (x.expr,))) < 0


def copysign(x: Scalar, y: Scalar) -> Scalar:
    size = f.absolute(x)
    return f.where(sign_bit(y), -size, size)


# ---- tables ----------------------------------------------------------------------------------------------------------

_FUNCTIONS = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "erf", "erfc"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)

_UNARY: dict[str, Formula] = {
    **{name: f.function(name) for name in _FUNCTIONS},
    "floor": _rounded(f.floor),
    "ceil": _rounded(f.ceil),
    "trunc": _rounded(f.trunc),
    "round": _rounded(f.function("round")),
    "abs": absolute,
    "neg": lambda x: -x,
    "reciprocal": reciprocal,
    "rsqrt": lambda x: 1 / f.sqrt(x),
    "sigmoid": sigmoid,
    "sign": sign,
    "sgn": sign,
    "angle": angle,
    "square": lambda x: x * x,
    "frac": lambda x: x - f.trunc(x),
    "positive": lambda x: x,
    "bitwise_not": lambda x: ~x,
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
    "relu": lambda x: clamped_below(x, f.number(0, x)),
    "special_expit": sigmoid,
}

_UNARY_OF_TYPE: dict[str, Formula] = {
    "isnan": f.is_nan,
    "isinf": lambda x: f.equal(f.absolute(x), math.inf) if _is_float(x) else f.unequal(x, x),
    "isfinite": lambda x: f.absolute(x) < math.inf if _is_float(x) else f.equal(x, x),
    "isposinf": lambda x: f.equal(x, math.inf) if _is_float(x) else f.unequal(x, x),
    "isneginf": lambda x: f.equal(x, -math.inf) if _is_float(x) else f.unequal(x, x),
    "signbit": sign_bit,
}

TENSOR_OR_NUMBER = ("Tensor", "Scalar")
_DEFAULT = ("default",)
_ALL = ("Tensor", "Scalar", "Scalar_Tensor")

_BINARY: dict[str, tuple[tuple[str, ...], Formula]] = {
    "mul": (TENSOR_OR_NUMBER, multiplied),
    "remainder": (_ALL, remainder),
    "fmod": (TENSOR_OR_NUMBER, c_remainder),
    "floor_divide": (("default", "Scalar"), floor_divided),
    "atan2": (_DEFAULT, f.function("atan2")),
    "maximum": (_DEFAULT, f.maximum),
    "minimum": (_DEFAULT, f.minimum),
    "fmax": (_DEFAULT, _ignoring_nan(f.maximum)),
    "fmin": (_DEFAULT, _ignoring_nan(f.minimum)),
    "hypot": (_DEFAULT, hypotenuse),
    "logaddexp": (_DEFAULT, logaddexp),
    "xlogy": (("Tensor", "Scalar_Other", "Scalar_Self"), xlogy),
    "copysign": (TENSOR_OR_NUMBER, copysign),
    "bitwise_and": (_ALL, lambda x, y: x & y),
    "bitwise_or": (_ALL, lambda x, y: x | y),
    "bitwise_xor": (_ALL, lambda x, y: x ^ y),
    "__and__": (TENSOR_OR_NUMBER, lambda x, y: x & y),
    "__or__": (TENSOR_OR_NUMBER, lambda x, y: x | y),
    "__xor__": (TENSOR_OR_NUMBER, lambda x, y: x ^ y),
}

_COMPARISONS: dict[str, Formula] = {
    "eq": f.equal,
    "ne": f.unequal,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}

_LOGIC: dict[str, Formula] = {
    "logical_and": lambda x, y: x & y,
    "logical_or": lambda x, y: x | y,
    "logical_xor": lambda x, y: x ^ y,
    "logical_not": lambda x: ~x,
}

for _name, _formula in _UNARY.items():
    TABLE.rule(*overloads(_name))(_elementwise(_formula))
for _name, _formula in _UNARY_OF_TYPE.items():
    TABLE.rule(*overloads(_name))(_comparison(_formula))
for _name, (_forms, _formula) in _BINARY.items():
    TABLE.rule(*overloads(_name, *_forms))(_elementwise(_formula))
for _name, _formula in _COMPARISONS.items():
    TABLE.rule(*overloads(_name, *TENSOR_OR_NUMBER))(_comparison(_formula))
for _name, _formula in _LOGIC.items():
    TABLE.rule(*overloads(_name))(functools.partial(_of_truths, _formula))
