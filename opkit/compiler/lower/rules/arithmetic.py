"""Pointwise operators with arguments that are no operands: scaled sums, division modes, powers, choices, limits, casts.

Operators on lists of tensors (``_foreach_add`` and the like, of optimisers) apply the operator's own rule to each tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import NoRule, Rule, Table, overloads
from opkit.compiler.lower.rules import pointwise
from opkit.compiler.lower.rules.pointwise import (
    TENSOR_OR_NUMBER,
    Formula,
    Operand,
    clamped_above,
    clamped_below,
    computed,
    floor_divided,
    operand,
    promoted,
    reciprocal,
    truncated,
)
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Tensor

TABLE = Table()


@TABLE.rule(*overloads("add", *TENSOR_OR_NUMBER))
def add(b: Builder, x: Operand, y: Operand, alpha: Any = 1) -> Tensor:
    return computed(b, lambda x, y: x | y if x.dtype == "b1" else x + _scaled(y, alpha), x, y)


@TABLE.rule(*overloads("sub", *TENSOR_OR_NUMBER))
def sub(b: Builder, x: Operand, y: Operand, alpha: Any = 1) -> Tensor:
    return computed(b, lambda x, y: x - _scaled(y, alpha), x, y)


@TABLE.rule(*overloads("rsub", *TENSOR_OR_NUMBER))
def rsub(b: Builder, x: Operand, y: Operand, alpha: Any = 1) -> Tensor:
    return computed(b, lambda x, y: y - _scaled(x, alpha), x, y)


def _scaled(x: Scalar, alpha: Any) -> Scalar:
    if isinstance(alpha, Tensor):
        raise NoRule("a number that is read from memory")
    return x if alpha == 1 else x * alpha


@TABLE.rule(*overloads("div", "Tensor", "Scalar", "Tensor_mode", "Scalar_mode"))
@TABLE.rule(*overloads("true_divide", *TENSOR_OR_NUMBER))
def div(b: Builder, x: Operand, y: Operand, rounding_mode: str | None = None) -> Tensor:
    formulas: dict[str | None, Formula] = {None: lambda x, y: x / y, "floor": floor_divided, "trunc": truncated}
    return computed(b, formulas[rounding_mode], x, y)


@TABLE.rule(*overloads("pow", "Tensor_Scalar"))
def pow_number(b: Builder, x: Tensor, exponent: Any) -> Tensor:
    special = _POWERS.get(exponent) if isinstance(exponent, int | float) else None
    if special is not None and (is_float(b.result().dtype) or exponent in (0, 1, 2, 3)):
        return computed(b, special, x)
    return computed(b, f.power, x, exponent)


# What ATen computes for these exponents.
_POWERS: dict[float, Formula] = {
    0: lambda x: f.number(1, x),
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: f.sqrt,
    -0.5: lambda x: 1 / f.sqrt(x),
    -1: reciprocal,
    -2: lambda x: 1 / (x * x),
}


@TABLE.rule(*overloads("pow", "Tensor_Tensor", "Scalar"))
def pow_(b: Builder, x: Operand, exponent: Tensor) -> Tensor:
    return computed(b, f.power, x, exponent)


@TABLE.rule(*overloads("where", "self", "ScalarSelf", "ScalarOther", "Scalar"))
def where(b: Builder, condition: Tensor, yes: Operand, no: Operand) -> Tensor:
    kind = b.result()
    chosen = f.truth(element(condition, kind.shape))
    body = f.where(chosen, operand(yes, kind, kind.dtype), operand(no, kind, kind.dtype))
    return b.elementwise(body.expr, kind)


@TABLE.rule(*overloads("masked_fill", *TENSOR_OR_NUMBER))
def masked_fill(b: Builder, x: Tensor, mask: Tensor, value: Operand) -> Tensor:
    return where(b, mask, value, x)


@TABLE.rule(*overloads("clamp", "default", "Tensor"))
def clamp(b: Builder, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    operands = [bound for bound in (low, high) if bound is not None]
    if any(isinstance(bound, float) and math.isnan(bound) for bound in operands):
        return computed(b, lambda x: f.number(math.nan, x), x)

    def formula(x: Scalar, *bounds: Scalar) -> Scalar:
        values = iter(bounds)
        at_least = x if low is None else _limited(clamped_below, f.maximum, low)(x, next(values))
        return at_least if high is None else _limited(clamped_above, f.minimum, high)(at_least, next(values))

    return computed(b, formula, x, *operands)


def _limited(plain: Formula, with_nan: Formula, bound: Any) -> Formula:
    """Return the formula for a bound; a bound that is read from memory may be NaN, which then is the result."""
    return with_nan if isinstance(bound, Tensor) else plain


@TABLE.rule(*overloads("clamp_min", "default", "Tensor"))
def clamp_min(b: Builder, x: Tensor, low: Any) -> Tensor:
    return clamp(b, x, low)


@TABLE.rule(*overloads("clamp_max", "default", "Tensor"))
def clamp_max(b: Builder, x: Tensor, high: Any) -> Tensor:
    return clamp(b, x, None, high)


@TABLE.rule(*overloads("lerp", *TENSOR_OR_NUMBER))
def lerp(b: Builder, start: Tensor, end: Tensor, weight: Operand) -> Tensor:
    def formula(a: Scalar, z: Scalar, w: Scalar) -> Scalar:
        return f.where(f.absolute(w) < 0.5, a + w * (z - a), z - (z - a) * (1 - w))

    return computed(b, formula, start, end, weight)


@TABLE.rule(*overloads("addcmul"))
def addcmul(b: Builder, x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return computed(b, lambda x, y, z: x + _scaled(y, value) * z, x, y, z)


@TABLE.rule(*overloads("addcdiv"))
def addcdiv(b: Builder, x: Tensor, y: Tensor, z: Tensor, *, value: Any = 1) -> Tensor:
    return computed(b, lambda x, y, z: x + _scaled(y, value) / z, x, y, z)


@TABLE.rule(*overloads("nan_to_num"))
def nan_to_num(b: Builder, x: Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Tensor:
    if not is_float(x.dtype):
        return computed(b, lambda x: x, x)
    limit = _LARGEST[x.dtype]
    highest, least = limit if posinf is None else posinf, -limit if neginf is None else neginf

    def formula(x: Scalar) -> Scalar:
        finite = f.where(f.equal(x, math.inf), highest, f.where(f.equal(x, -math.inf), least, x))
        return f.where(f.is_nan(x), 0.0 if nan is None else nan, finite)

    return computed(b, formula, x)


_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38, "f64": 1.7976931348623157e308}


@TABLE.rule(*overloads("round", "decimals"))
def round_to(b: Builder, x: Tensor, *, decimals: int = 0) -> Tensor:
    raise NoRule("rounding to decimals")


@TABLE.rule("prims.convert_element_type.default", *overloads("_to_copy"), *overloads("to", "dtype"))
def convert(b: Builder, x: Operand, *rest: Any, **kwargs: Any) -> Tensor:
    kind = b.result()
    inner = DTYPES[kind.dtype].compute if is_float(kind.dtype) else promoted([x])  # of a number
    found = element(x, kind.shape) if isinstance(x, Tensor) else f.number(x, inner)
    return b.elementwise(f.cast(found, kind.dtype, asked=True).expr, kind)


# ---- lists of tensors --------------------------------------------------------------------------------------------------

_RULES = {**pointwise.TABLE, **TABLE}

# The overloads of _foreach_<name>, with the overload of aten.<name> that each tensor uses.
_OVERLOADS = {"Scalar": "Scalar", "List": "Tensor", "Tensor": "Tensor", "ScalarList": "Scalar"}
_UNARY = ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "tanh", "sin", "cos", "round")
_BINARY = ("add", "sub", "mul", "div")
_OTHERS = {
    "addcmul": {"Scalar": "aten.addcmul.default", "ScalarList": "aten.addcmul.default"},
    "addcdiv": {"Scalar": "aten.addcdiv.default", "ScalarList": "aten.addcdiv.default"},
    "lerp": {"Scalar": "aten.lerp.Scalar", "List": "aten.lerp.Tensor"},
    "maximum": {"List": "aten.maximum.default", "Scalar": "aten.clamp_min.default"},
    "minimum": {"List": "aten.minimum.default", "Scalar": "aten.clamp_max.default"},
    "clamp_min": {"List": "aten.clamp_min.Tensor", "Scalar": "aten.clamp_min.default"},
    "clamp_max": {"List": "aten.clamp_max.Tensor", "Scalar": "aten.clamp_max.default"},
    "pow": {"Scalar": "aten.pow.Tensor_Scalar", "List": "aten.pow.Tensor_Tensor"},
}


def _for_each(rule: Rule, keywords: tuple[str, ...], b: Builder, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Apply a rule to the k-th items of all lists among the arguments, for each k.

    ``keywords`` name the last positional arguments for rules that take them by name.
    """
    node = b.node
    assert isinstance(node.result, tuple)
    results: list[Tensor] = []
    for k, kind in enumerate(node.result):
        b.node = dataclasses.replace(node, name=f"{node.name}_{k}", result=kind)
        own = [a[k] if isinstance(a, list | tuple) else a for a in args]
        named = dict(zip(keywords, own[3:], strict=False)) if keywords else {}
        results.append(rule(b, *(own[:3] if keywords else own), **named, **kwargs))
    b.node = node
    return tuple(results)


def _register(name: str, overload: str, target: str) -> None:
    keywords = ("value",) if name.startswith("addc") else ()
    TABLE.rule(f"aten._foreach_{name}.{overload}")(functools.partial(_for_each, _RULES[target], keywords))


for _name in _UNARY:
    _register(_name, "default", f"aten.{_name}.default")
for _name in _BINARY:
    for _overload, _target in _OVERLOADS.items():
        _register(_name, _overload, f"aten.{_name}.{_target}")
for _name, _targets in _OTHERS.items():
    for _overload, _target in _targets.items():
        _register(_name, _overload, _target)
