"""JAX's functions for ATen's pointwise operators, by name.

Their tensors come converted to the dtype that torch promotes them to, and their results are converted to torch's dtype: see
:mod:`opkit.jax.interpreter`. Where JAX's derivative at a single point is another than torch's, a row is written so that it has
torch's: ``relu`` at 0, ``clamp`` at its bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_HALF = (jnp.bfloat16, jnp.float16)


def wide(x: Any) -> Any:
    """Return float32 for half precision: torch computes reductions, softmax and scans of it so."""
    return x.astype(jnp.float32) if x.dtype in _HALF else x


def _pow(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, (int, float)) and float(exponent).is_integer() and abs(exponent) <= 64:
        whole = int(exponent)
        return lax.integer_pow(base, whole) if whole >= 0 or jnp.issubdtype(base.dtype, jnp.inexact) else base**whole
    return jnp.power(base, exponent)


def _div(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return jnp.divide(a, b)
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if jnp.issubdtype(jnp.result_type(a, b), jnp.integer):
        return lax.div(*jnp.broadcast_arrays(jnp.asarray(a), jnp.asarray(b, jnp.result_type(a, b))))
    return jnp.trunc(jnp.divide(a, b))


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


def _round(x: Any, decimals: int = 0) -> Any:
    return jnp.round(x, decimals)


def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    below = (
        jnp.expm1(jnp.minimum(x, 0) * input_scale) * alpha
    )  # where x is large, no infinity that a derivative multiplies by 0
    return jnp.where(x > 0, x, below) * scale


def _sign(x: Any) -> Any:
    return jnp.where(jnp.isnan(x), 0, jnp.sign(x))


def _sgn(x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _sign(x)
    return jnp.where(x == 0, 0, x / jnp.where(x == 0, 1, jnp.abs(x)))


def _on_wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for half precision too, of which ``lax`` has no such function."""
    return lambda x: function(wide(x))


_SAME = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "conj", "cos", "cosh", "exp", "exp2", "expm1", "floor",
    "isfinite", "isinf", "isnan", "log", "log10", "log1p", "log2", "logical_not", "reciprocal", "signbit", "sin",
    "sinh", "sqrt", "tan", "tanh", "trunc", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_xor", "bitwise_not", "maximum", "minimum", "remainder", "fmod", "copysign", "hypot", "nextafter", "fmax",
    "fmin", "logaddexp", "logaddexp2", "floor_divide", "gcd", "lcm", "imag", "real", "i0",
)  # fmt: skip
_OTHER: dict[str, Callable[..., Any]] = {
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "_conj": jnp.conj,
    "_conj_physical": jnp.conj,
    "abs": jnp.abs,
    "add": lambda a, b, alpha=1: a + (b if alpha == 1 else alpha * b),
    "angle": jnp.angle,
    "atan2": jnp.arctan2,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
    "clamp": _clamp,
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "clamp_min": lambda x, min: _clamp(x, min),
    "complex": lax.complex,
    "conj_physical": jnp.conj,
    "digamma": _on_wide(lax.digamma),
    "div": _div,
    "elu": _elu,
    "eq": jnp.equal,
    "erf": _on_wide(lax.erf),
    "erfc": _on_wide(lax.erfc),
    "erfinv": _on_wide(lax.erf_inv),
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "lgamma": _on_wide(lax.lgamma),
    "lt": jnp.less,
    "masked_fill": lambda x, mask, value: jnp.where(mask.astype(bool), value, x),
    "mul": jnp.multiply,
    "ne": jnp.not_equal,
    "neg": jnp.negative,
    "pow": _pow,
    "relu": jax.nn.relu,
    "round": _round,
    "rsqrt": lax.rsqrt,
    "sgn": _sgn,
    "sigmoid": jax.nn.sigmoid,
    "sign": _sign,
    "softplus": lambda x, beta=1, threshold=20: jnp.where(
        x * beta > threshold, x, jax.nn.softplus(jnp.minimum(x * beta, threshold)) / beta
    ),
    "sub": lambda a, b, alpha=1: a - (b if alpha == 1 else alpha * b),
    "where": lambda condition, a, b: jnp.where(condition.astype(bool), a, b),
    "xlogy": jax.scipy.special.xlogy,
}
POINTWISE: dict[str, Callable[..., Any]] = {name: getattr(jnp, name) for name in _SAME} | _OTHER
