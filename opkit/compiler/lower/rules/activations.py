"""Activation functions and their derivatives: tables from an operator's name to its formula, as ATen has it.

A formula takes elements and the operator's numbers in the operator's order and with its defaults.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import Table, overloads
from opkit.compiler.lower.rules.pointwise import computed, sigmoid
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Tensor

TABLE = Table()

Formula = Callable[..., Scalar]
_SQRT1_2 = math.sqrt(0.5)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


# ---- functions -------------------------------------------------------------------------------------------------------


def _limited(x: Scalar, low: Any, high: Any) -> Scalar:
    at_least = f.where(x < low, low, x)
    return f.where(at_least > high, high, at_least)


def silu(x: Scalar) -> Scalar:
    return x / (1 + f.exp(-x))


def gelu(x: Scalar, approximate: str = "none") -> Scalar:
    if approximate == "tanh":
        return 0.5 * x * (1 + f.tanh(_TANH_SCALE * (x + _TANH_CUBIC * (x * x * x))))
    return 0.5 * x * (1 + f.erf(x * _SQRT1_2))


def leaky_relu(x: Scalar, slope: Any = 0.01) -> Scalar:
    return f.where(x > 0, x, x * slope)


def elu(x: Scalar, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Scalar:
    return f.where(x > 0, x * scale, f.expm1(x * input_scale) * (alpha * scale))


def hardtanh(x: Scalar, low: Any = -1, high: Any = 1) -> Scalar:
    return _limited(x, low, high)


def hardsigmoid(x: Scalar) -> Scalar:
    return _limited(x + 3, 0, 6) / 6


def hardswish(x: Scalar) -> Scalar:
    return x * _limited(x + 3, 0, 6) / 6


def softplus(x: Scalar, beta: Any = 1, threshold: Any = 20) -> Scalar:
    return f.where(x * beta > threshold, x, f.log1p(f.exp(x * beta)) / beta)


def mish(x: Scalar) -> Scalar:
    return x * f.tanh(f.log1p(f.exp(x)))


def softshrink(x: Scalar, limit: Any = 0.5) -> Scalar:
    shrunk = f.where(x > limit, x - limit, f.where(x < -limit, x + limit, 0))
    return f.where(f.is_nan(x), x, shrunk)


def hardshrink(x: Scalar, limit: Any = 0.5) -> Scalar:
    return f.where((x >= -limit) & (x <= limit), 0, x)


def threshold(x: Scalar, limit: Any, value: Any) -> Scalar:
    return f.where(x <= limit, value, x)


def logit(x: Scalar, eps: Any = None) -> Scalar:
    inside = x if eps is None else _limited(x, eps, 1 - eps)
    return f.log(inside / (1 - inside))


# ---- derivatives -----------------------------------------------------------------------------------------------------


def threshold_backward(grad: Scalar, x: Scalar, limit: Any) -> Scalar:
    return f.where(x <= limit, 0, grad)


def sigmoid_backward(grad: Scalar, y: Scalar) -> Scalar:
    return grad * (1 - y) * y


def tanh_backward(grad: Scalar, y: Scalar) -> Scalar:
    return grad * (1 - y * y)


def silu_backward(grad: Scalar, x: Scalar) -> Scalar:
    s = sigmoid(x)
    return grad * s * (1 + x * (1 - s))


def gelu_backward(grad: Scalar, x: Scalar, approximate: str = "none") -> Scalar:
    if approximate == "tanh":
        inner = f.tanh(_TANH_SCALE * (x + _TANH_CUBIC * (x * x * x)))
        slope = (1 - inner * inner) * (_TANH_SCALE * (1 + 3 * _TANH_CUBIC * (x * x)))
        return grad * (0.5 * (1 + inner) + 0.5 * x * slope)
    cdf = 0.5 * (1 + f.erf(x * _SQRT1_2))
    density = f.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return grad * (cdf + x * density)


def leaky_relu_backward(grad: Scalar, x: Scalar, slope: Any, is_result: bool) -> Scalar:
    return f.where(x > 0, grad, grad * slope)


def elu_backward(grad: Scalar, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Scalar) -> Scalar:
    if is_result:
        negative = grad * input_scale * (x + alpha * scale)
    else:
        negative = grad * (input_scale * (alpha * scale)) * f.exp(x * input_scale)
    return f.where(x <= 0, negative, grad * scale)


def hardtanh_backward(grad: Scalar, x: Scalar, low: Any, high: Any) -> Scalar:
    return f.where((x <= low) | (x >= high), 0, grad)


def hardsigmoid_backward(grad: Scalar, x: Scalar) -> Scalar:
    return f.where((x > -3) & (x < 3), grad * (1 / 6), 0)


def hardswish_backward(grad: Scalar, x: Scalar) -> Scalar:
    return f.where(x <= -3, 0, f.where(x < 3, grad * (x / 3 + 0.5), grad))


def softplus_backward(grad: Scalar, x: Scalar, beta: Any, threshold: Any) -> Scalar:
    z = f.exp(x * beta)
    return f.where(x * beta > threshold, grad, grad * z / (z + 1))


def mish_backward(grad: Scalar, x: Scalar) -> Scalar:
    inner = f.tanh(f.log1p(f.exp(x)))
    return grad * (inner + x * sigmoid(x) * (1 - inner * inner))


def log_sigmoid_backward(grad: Scalar, x: Scalar) -> Scalar:
    below, exponential = x < 0, f.exp(-f.absolute(x))
    slope = f.where(below, f.number(1, x), 0) - f.where(below, f.number(1, x), -1) * (exponential / (1 + exponential))
    return grad * slope


def softshrink_backward(grad: Scalar, x: Scalar, limit: Any) -> Scalar:
    return f.where((x >= -limit) & (x <= limit), 0, grad)


def logit_backward(grad: Scalar, x: Scalar, eps: Any = None) -> Scalar:
    slope = grad / (x * (1 - x))
    if eps is None:
        return f.where((x < 0) | (x > 1), math.nan, slope)
    return f.where((x < eps) | (x > 1 - eps), 0, slope)


# ---- table -----------------------------------------------------------------------------------------------------------

_FORMULAS: dict[str, Formula] = {
    "silu": silu,
    "gelu": gelu,
    "leaky_relu": leaky_relu,
    "elu": elu,
    "hardtanh": hardtanh,
    "hardsigmoid": hardsigmoid,
    "hardswish": hardswish,
    "softplus": softplus,
    "mish": mish,
    "softshrink": softshrink,
    "hardshrink": hardshrink,
    "threshold": threshold,
    "logit": logit,
    "celu": lambda x, alpha=1: elu(x, alpha, 1, 1 / alpha),
    "selu": lambda x: elu(x, _SELU_ALPHA, _SELU_SCALE),
    "relu6": lambda x: _limited(x, 0, 6),
    "sigmoid_backward": sigmoid_backward,
    "tanh_backward": tanh_backward,
    "threshold_backward": threshold_backward,
    "silu_backward": silu_backward,
    "gelu_backward": gelu_backward,
    "leaky_relu_backward": leaky_relu_backward,
    "elu_backward": elu_backward,
    "hardtanh_backward": hardtanh_backward,
    "hardsigmoid_backward": hardsigmoid_backward,
    "hardswish_backward": hardswish_backward,
    "softplus_backward": softplus_backward,
    "mish_backward": mish_backward,
    "softshrink_backward": softshrink_backward,
    "hardshrink_backward": softshrink_backward,
    "logit_backward": logit_backward,
}


def _apply(formula: Formula, b: Builder, *args: Any, **kwargs: Any) -> Tensor:
    """Apply a formula to the operator's arguments, with the elements of tensors in place of the tensors."""
    kind = b.result()
    inner = DTYPES[kind.dtype].compute
    operands = (element(a, kind.shape, inner) if isinstance(a, Tensor) else a for a in args)
    return b.cast_elementwise(formula(*operands, **kwargs), kind)


for _name, _formula in _FORMULAS.items():
    TABLE.rule(*overloads(_name))(functools.partial(_apply, _formula))


@TABLE.rule(*overloads("log_sigmoid_forward"))
def log_sigmoid_forward(b: Builder, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result, and what ATen needs for the derivative: exp(-abs(x)) on CPUs, nothing on GPUs."""
    result = computed(b, lambda x: f.minimum(f.number(0, x), x) - f.log1p(f.exp(-f.absolute(x))), x)
    if b.result(1).shape != x.shape:
        return result, b.elementwise(f.number(0, b.result(1).dtype).expr, b.result(1))
    return result, computed(b, lambda x: f.exp(-f.absolute(x)), x, number=1)


@TABLE.rule(*overloads("log_sigmoid_backward"))
def _log_sigmoid_backward(b: Builder, grad: Tensor, x: Tensor, _: Tensor) -> Tensor:
    return _apply(log_sigmoid_backward, b, grad, x)
