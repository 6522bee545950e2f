"""Losses and their derivatives: a formula for each element, then the sum or the mean of all.

``binary_cross_entropy`` of a number that is not a probability is NaN; eager mode raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import ZERO, Index, index, product
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import Table, overloads
from opkit.compiler.lower.rules.indexing import check_dtype, checked_index, read
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Shape, Tensor, broadcast, formal

TABLE = Table()
Formula = Callable[..., Scalar]
_NONE, _MEAN = 0, 1  # ATen's numbers for reductions; 2 is the sum


# ---- losses of an element and its target ---------------------------------------------------------------------------------


def mse(x: Scalar, y: Scalar) -> Scalar:
    return (x - y) * (x - y)


def smooth_l1(x: Scalar, y: Scalar, beta: float = 1.0) -> Scalar:
    z = f.absolute(x - y)
    return f.where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta)


def huber(x: Scalar, y: Scalar, delta: float = 1.0) -> Scalar:
    z = f.absolute(x - y)
    return f.where(z < delta, 0.5 * z * z, delta * (z - 0.5 * delta))


def soft_margin(x: Scalar, y: Scalar) -> Scalar:
    return f.log(f.exp(-x * y) + 1)


def cross_entropy(x: Scalar, y: Scalar, weight: Scalar | None = None) -> Scalar:
    loss = (y - 1) * f.maximum(f.log1p(-x), -100) - y * f.maximum(f.log(x), -100)
    return loss if weight is None else loss * weight


def cross_entropy_of_logits(x: Scalar, y: Scalar, weight: Scalar | None, positive: Scalar | None) -> Scalar:
    log_sigmoid = f.minimum(x, 0) - f.log1p(f.exp(-f.absolute(x)))
    weighted = log_sigmoid if positive is None else ((positive - 1) * y + 1) * log_sigmoid
    loss = (1 - y) * x - weighted
    return loss if weight is None else loss * weight


def mse_slope(grad: Scalar, x: Scalar, y: Scalar) -> Scalar:
    return 2 * (x - y) * grad


def smooth_l1_slope(grad: Scalar, x: Scalar, y: Scalar, beta: float = 1.0) -> Scalar:
    d = x - y
    return f.where(d <= -beta, -grad, f.where(d >= beta, grad, d * grad / beta))


def huber_slope(grad: Scalar, x: Scalar, y: Scalar, delta: float = 1.0) -> Scalar:
    d = x - y
    return f.where(d <= -delta, -grad * delta, f.where(d >= delta, grad * delta, d * grad))


def soft_margin_slope(grad: Scalar, x: Scalar, y: Scalar) -> Scalar:
    z = f.exp(-y * x)
    return -y * z * grad / (z + 1)


def cross_entropy_slope(grad: Scalar, x: Scalar, y: Scalar, weight: Scalar | None = None) -> Scalar:
    slope = grad * (x - y) / f.maximum((1 - x) * x, 1e-12)
    return slope if weight is None else slope * weight


# The formula, and the number of tensors, which may be None, that the operator takes before its reduction.
_LOSSES: dict[str, tuple[Formula, int]] = {
    "mse_loss": (mse, 2),
    "smooth_l1_loss": (smooth_l1, 2),
    "huber_loss": (huber, 2),
    "soft_margin_loss": (soft_margin, 2),
    "binary_cross_entropy": (cross_entropy, 3),
    "binary_cross_entropy_with_logits": (cross_entropy_of_logits, 4),
}
_SLOPES: dict[str, tuple[Formula, int]] = {
    "mse_loss_backward": (mse_slope, 3),
    "smooth_l1_loss_backward": (smooth_l1_slope, 3),
    "huber_loss_backward": (huber_slope, 3),
    "soft_margin_loss_backward": (soft_margin_slope, 3),
    "binary_cross_entropy_backward": (cross_entropy_slope, 4),
}


def _operands(args: Sequence[Any], count: int) -> tuple[list[Tensor | None], int, Sequence[Any]]:
    """Return an operator's tensors, its reduction (by default the mean), and its other arguments."""
    tensors = [*args[:count], *[None] * (count - len(args))]
    return tensors, args[count] if len(args) > count else _MEAN, args[count + 1 :]


def _elements(tensors: Sequence[Tensor | None], shape: Shape, dtype: str) -> list[Scalar | None]:
    inner = DTYPES[dtype].compute
    return [None if t is None else element(t, shape, inner) for t in tensors]


def _loss(formula: Formula, count: int, b: Builder, *args: Any, **kwargs: Any) -> Tensor:
    tensors, reduction, rest = _operands(args, count)
    reduction = kwargs.pop("reduction", reduction)
    shape = broadcast(*(t.shape for t in tensors if t is not None))
    body = formula(*_elements(tensors, shape, b.result().dtype), *rest, **kwargs)
    if reduction != _NONE:
        body = _sum(b, body, shape)
    return b.cast_elementwise(body / product(shape) if reduction == _MEAN else body)


def _slope(formula: Formula, count: int, b: Builder, *args: Any, **kwargs: Any) -> Tensor:
    tensors, reduction, rest = _operands(args, count)
    reduction = kwargs.pop("reduction", reduction)
    kind = b.result()
    body = formula(*_elements(tensors, kind.shape, kind.dtype), *rest, **kwargs)
    if reduction == _MEAN:
        number = product(kind.shape)
        body = body * (1.0 / (f.number(number, body) if number.constant is None else max(number.constant, 1)))
    return b.cast_elementwise(body, kind)


def _sum(b: Builder, body: Scalar, shape: Shape) -> Scalar:
    """Return the sum of ``body`` over all of a shape, in the type that ``body`` has."""
    if not shape:
        return body
    return Scalar(b.reduce("sum", body, shape, range(len(shape)), body.dtype).at(()))


for _name, (_formula, _count) in _LOSSES.items():
    TABLE.rule(*overloads(_name))(functools.partial(_loss, _formula, _count))
for _name, (_formula, _count) in _SLOPES.items():
    TABLE.rule(*overloads(_name))(functools.partial(_slope, _formula, _count))


# ---- losses of classes -------------------------------------------------------------------------------------------------


def _batched(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with a dimension for the batch; the classes are along dimension 1."""
    if len(x.shape) > 1:
        return x, target
    return x.reshaped([index(1), *x.shape]), target.reshaped([index(1)])


def _class(x: Tensor, target: Tensor, at: Sequence[Index], ignored: Any) -> tuple[Scalar, Index]:
    """Return whether a target is not ignored, and its class; 0 for an ignored one."""
    label = f.cast(Scalar(target.at(at)), "i64")
    counts = f.unequal(label, ignored)
    return counts, checked_index(f.where(counts, label, 0), x.shape[1])


@TABLE.rule(*overloads("nll_loss_forward"), *overloads("nll_loss2d_forward"))
def nll_loss(
    b: Builder, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: Any
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the sum of the weights of the targets that are not ignored, for the derivative of a mean."""
    check_dtype(target, "u8", "i64")
    x, target = _batched(x, target)
    inner = DTYPES[x.dtype].compute
    first, *rest = axes = formal(target.shape)
    counts, label = _class(x, target, axes, ignored)
    factor = f.number(1, inner) if weight is None else f.cast(Scalar(read(weight, [label])), inner)
    factor = f.where(counts, factor, 0)
    loss = f.where(counts, -f.cast(Scalar(read(x, [first, label, *rest])), inner) * factor, 0)
    if reduction == _NONE and b.result().shape:  # for a single element, eager mode returns its weight
        return b.cast_elementwise(loss, b.result()), b.cast_elementwise(f.number(0, inner), b.result(1))
    weights, losses = _sum(b, factor, target.shape), _sum(b, loss, target.shape)
    loss = losses / weights if reduction == _MEAN else losses
    return b.cast_elementwise(loss), b.cast_elementwise(weights, b.result(1))


@TABLE.rule(*overloads("nll_loss_backward"), *overloads("nll_loss2d_backward"))
def nll_loss_backward(
    b: Builder,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: Any,
    weights: Tensor,
) -> Tensor:
    """Return the gradient without a scatter: each element compares its class with the target."""
    kind = b.result()
    x, target = _batched(x, target)
    inner = DTYPES[kind.dtype].compute
    first, own, *rest = formal(kind.shape) if len(kind.shape) > 1 else (ZERO, *formal(kind.shape))
    at = [first, *rest]
    counts, label = _class(x, target, at, ignored)
    slope = -f.cast(Scalar(grad.at(at if grad.shape else [])), inner)
    slope = slope / f.cast(Scalar(weights.at(())), inner) if reduction == _MEAN else slope
    slope = slope if weight is None else slope * f.cast(Scalar(weight.at([own])), inner)
    is_target = counts & f.equal(Scalar(expr.position(own)), Scalar(expr.position(label)))
    return b.cast_elementwise(f.where(is_target, slope, 0), kind)
