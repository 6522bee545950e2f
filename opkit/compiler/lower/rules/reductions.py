"""Reductions and scans: sums, extremes and their positions, variances, softmax, norms.

Narrow floats accumulate in float32, integers in int64. An operator that does several things (a softmax is a maximum, a sum and a
quotient) becomes a step for each.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.index import Index, index, product
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Shape, Tensor, formal

TABLE = Table()
Dims = Sequence[int] | int | None

MAX_UNROLLED = 8
"""Elements of a sum that becomes a formula on a target of tiles."""


# ---- dimensions and types --------------------------------------------------------------------------------------------


def dims_of(x: Tensor, dims: Dims) -> list[int]:
    """Return the dimensions, counted from 0 and sorted; all of them for None or an empty list."""
    if isinstance(dims, int):
        dims = [dims]
    rank = len(x.shape)
    return sorted(d % rank for d in dims) if dims and rank else list(range(rank))


def accumulator(dtype: str) -> str:
    """Return the accumulator's type of a sum with a result of ``dtype``: int64 for integers."""
    return "i64" if DTYPES[dtype].kind in ("int", "bool") else DTYPES[dtype].compute


def count(shape: Shape, dims: Sequence[int]) -> Index:
    """Return the number of elements that are reduced."""
    return product([shape[d] for d in dims])


def reduced(
    b: Builder, reduction: str, x: Tensor, dims: Sequence[int], dtype: str, keep: bool = False, inner: str | None = None
) -> Tensor:
    """Return a reduction of a tensor's elements, as values of ``inner``, with the node's strides if the rank is its result's."""
    inner = inner or DTYPES[dtype].compute
    kind = b.result()
    rank = len(x.shape) if keep else len(x.shape) - len(dims)
    strides = kind.strides if len(kind.shape) == rank else None
    return b.reduce(reduction, element(x, x.shape, inner), x.shape, dims, dtype, keep, strides)


# ---- sums ------------------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("sum", "default", "dim_IntList"))
def sum_(b: Builder, x: Tensor, dims: Dims = None, keepdim: bool = False, *, dtype: str | None = None) -> Tensor:
    kind, over = b.result(), dims_of(x, dims)
    inner, few = accumulator(kind.dtype), count(x.shape, over).constant or 0
    if b.target.tiles and 0 < few <= MAX_UNROLLED and len(x.shape) - 1 not in over:
        return b.cast_elementwise(_unrolled(x, over, keepdim, inner), kind)
    return reduced(b, "sum", x, over, kind.dtype, keepdim, inner)


def _unrolled(x: Tensor, dims: Sequence[int], keep: bool, inner: str) -> f.Scalar:
    """Return a sum over few elements as a formula: a tile with so few columns would have to add across threads."""
    shape = tuple(index(1) if k in dims else n for k, n in enumerate(x.shape) if keep or k not in dims)
    axes = iter(formal(shape))
    at = [next(axes) if keep or k not in dims else index(0) for k in range(len(x.shape))]
    places = itertools.product(*(range(x.shape[k].constant or 0) for k in dims))
    chosen = ([dict(zip(dims, place, strict=True)).get(k, a) for k, a in enumerate(at)] for place in places)
    addends = (f.cast(f.Scalar(x.at(each)), inner) for each in chosen)
    return functools.reduce(operator.add, addends)


@TABLE.rule(*overloads("prod", "default", "dim_int"))
def prod(b: Builder, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: str | None = None) -> Tensor:
    kind = b.result()
    return reduced(b, "prod", x, dims_of(x, dim), kind.dtype, keepdim, accumulator(kind.dtype))


@TABLE.rule(*overloads("mean", "default", "dim"))
def mean(b: Builder, x: Tensor, dims: Dims = None, keepdim: bool = False, *, dtype: str | None = None) -> Tensor:
    kind = b.result()
    reduced_dims = dims_of(x, dims)
    inner = DTYPES[kind.dtype].compute
    total = reduced(b, "sum", x, reduced_dims, inner, keepdim)
    body = element(total, kind.shape) / f.number(count(x.shape, reduced_dims), inner)
    return b.cast_elementwise(body, kind)


@TABLE.rule(*overloads("cumsum"))
def cumsum(b: Builder, x: Tensor, dim: int, *, dtype: str | None = None) -> Tensor:
    return _scan(b, x, dim, "sum")


@TABLE.rule(*overloads("cumprod"))
def cumprod(b: Builder, x: Tensor, dim: int, *, dtype: str | None = None) -> Tensor:
    return _scan(b, x, dim, "prod")


def _scan(b: Builder, x: Tensor, dim: int, reduction: str) -> Tensor:
    kind = b.result()
    body = element(x, x.shape, accumulator(kind.dtype))
    if not x.shape:
        return b.cast_elementwise(body)
    along = frozenset([dim % len(x.shape)])
    return b.compute(b.result_buffer(), x.shape, body.expr, reduction=f"scan:{reduction}", reduced=along)


# ---- extremes --------------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("amax"))
def amax(b: Builder, x: Tensor, dims: Dims = None, keepdim: bool = False) -> Tensor:
    return reduced(b, "max", x, dims_of(x, dims), x.dtype, keepdim)


@TABLE.rule(*overloads("amin"))
def amin(b: Builder, x: Tensor, dims: Dims = None, keepdim: bool = False) -> Tensor:
    return reduced(b, "min", x, dims_of(x, dims), x.dtype, keepdim)


@TABLE.rule(*overloads("max"))
def max_(b: Builder, x: Tensor) -> Tensor:
    return amax(b, x)


@TABLE.rule(*overloads("min"))
def min_(b: Builder, x: Tensor) -> Tensor:
    return amin(b, x)


@TABLE.rule(*overloads("max", "dim"))
def max_dim(b: Builder, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return amax(b, x, dim, keepdim), _position(b, "argmax", x, dim, keepdim)


@TABLE.rule(*overloads("min", "dim"))
def min_dim(b: Builder, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return amin(b, x, dim, keepdim), _position(b, "argmin", x, dim, keepdim)


@TABLE.rule(*overloads("argmax"))
def argmax(b: Builder, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _position(b, "argmax", x, dim, keepdim)


@TABLE.rule(*overloads("argmin"))
def argmin(b: Builder, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _position(b, "argmin", x, dim, keepdim)


def _position(b: Builder, reduction: str, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """Return the position of the first extreme along a dimension, or among all elements in row-major order."""
    inner = "u8" if x.dtype == "b1" else DTYPES[x.dtype].compute
    if dim is not None and x.shape:
        return reduced(b, reduction, x, dims_of(x, dim), "i64", keepdim, inner)
    whole = x.reshaped([product(x.shape)])
    position = b.reduce(reduction, element(whole, whole.shape, inner), whole.shape, [0], "i64")
    return position.reshaped([index(1)] * len(x.shape) if keepdim else [])


@TABLE.rule(*overloads("any", "default", "dim", "dims"))
def any_(b: Builder, x: Tensor, dims: Dims = None, keepdim: bool = False) -> Tensor:
    return _truths(b, "any", x, dims, keepdim)


@TABLE.rule(*overloads("all", "default", "dim", "dims"))
def all_(b: Builder, x: Tensor, dims: Dims = None, keepdim: bool = False) -> Tensor:
    return _truths(b, "all", x, dims, keepdim)


def _truths(b: Builder, reduction: str, x: Tensor, dims: Dims, keepdim: bool) -> Tensor:
    return reduced(b, reduction, x, dims_of(x, dims), b.result().dtype, keepdim, "b1")


# ---- variances -------------------------------------------------------------------------------------------------------


def moments(b: Builder, x: Tensor, dims: Sequence[int], inner: str, of_equal: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mean, and the sum of squared differences from it, with reduced dimensions of extent 1.

    With ``of_equal``, equal numbers have exactly their value as mean, and so no variance, if that needs no second reading. It
    is one more reduction: layer norms take 5 % longer on an H200.
    """
    number, value = count(x.shape, dims), element(x, x.shape, inner)

    def mean(of: Scalar) -> Scalar:
        total = b.reduce("sum", of, x.shape, dims, inner, keep=True)
        return element(total, total.shape) / number

    average = b.temporary(mean(value).expr, [index(1) if k in set(dims) else n for k, n in enumerate(x.shape)])
    if of_equal and _is_in_registers(b, x, dims):
        rounding = mean(value - element(average, x.shape))
        average = b.temporary((element(average, average.shape) + rounding).expr, average.shape)
    difference = value - element(average, x.shape)
    return average, b.reduce("sum", difference * difference, x.shape, dims, inner, keep=True)


def _is_in_registers(b: Builder, x: Tensor, dims: Sequence[int]) -> bool:
    """Whether the target's kernels have all elements of a row in registers."""
    tiles, number = b.target.tiles, count(x.shape, dims).constant
    if tiles is None or number is None:
        return False
    is_inner = min(dims, default=0) == len(x.shape) - len(dims)
    return number <= (tiles.row if is_inner else tiles.min_column_part)


def _variance(b: Builder, x: Tensor, dims: Dims, correction: Any, square_root: bool) -> tuple[Tensor, Tensor]:
    """Return the variance or its square root, and the mean in the type of the arithmetic, with reduced dimensions of extent 1."""
    kind = b.result()
    inner = DTYPES[kind.dtype].compute
    reduced_dims = dims_of(x, dims)
    average, squares = moments(b, x, reduced_dims, inner, of_equal=True)
    number = f.number(count(x.shape, reduced_dims), inner)
    body = element(squares, squares.shape) / f.maximum(number - (1 if correction is None else correction), 0)
    variance = b.temporary(f.cast(f.sqrt(body) if square_root else body, kind.dtype).expr, squares.shape)
    return variance, average


@TABLE.rule(*overloads("var", "correction"))
def var(b: Builder, x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _variance(b, x, dim, correction, False)[0].reshaped(b.result().shape)


@TABLE.rule(*overloads("std", "correction"))
def std(b: Builder, x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _variance(b, x, dim, correction, True)[0].reshaped(b.result().shape)


@TABLE.rule(*overloads("var_mean", "correction"))
def var_mean(
    b: Builder, x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, average = _variance(b, x, dim, correction, False)
    kind = b.result(1)
    average = b.cast_elementwise(element(average.reshaped(kind.shape), kind.shape), kind)
    return variance.reshaped(b.result(0).shape), average


@TABLE.rule(*overloads("linalg_vector_norm"))
def vector_norm(
    b: Builder, x: Tensor, order: Any = 2, dims: Dims = None, keepdim: bool = False, *, dtype: str | None = None
) -> Tensor:
    kind = b.result()
    inner = DTYPES[kind.dtype].compute
    reduced_dims = dims_of(x, dims)
    size = f.absolute(element(x, x.shape, inner))
    if isinstance(order, Index):
        raise NoRule("an order that is a size")
    if order in (math.inf, -math.inf):
        body, reduction = size, "max" if order > 0 else "min"
    elif order in (0, 1, 2):
        body, reduction = {0: f.cast(f.unequal(size, 0), inner), 1: size, 2: size * size}[order], "sum"
    else:
        body, reduction = f.power(size, order), "sum"
    total = b.reduce(reduction, body, x.shape, reduced_dims, inner, keepdim)
    norm = element(total, kind.shape)
    if order not in (0, 1, math.inf, -math.inf):
        norm = f.sqrt(norm) if order == 2 else f.power(norm, 1 / order)
    return b.cast_elementwise(norm, kind)


# ---- softmax ---------------------------------------------------------------------------------------------------------


def _greatest(b: Builder, x: Tensor, dims: Sequence[int], inner: str) -> Tensor:
    return b.reduce("max", element(x, x.shape, inner), x.shape, dims, inner, keep=True)


@TABLE.rule(*overloads("_softmax"), *overloads("_safe_softmax"))
def softmax(b: Builder, x: Tensor, dim: int, half_to_float: Any = False) -> Tensor:
    kind = b.result()
    inner = DTYPES[kind.dtype].compute
    dims = dims_of(x, dim)
    greatest = _greatest(b, x, dims, inner)
    shifted = element(x, x.shape, inner) - element(greatest, x.shape)
    exponential = element(b.temporary(f.exp(shifted).expr, x.shape), x.shape)  # a step, so that rows can be stored
    total = b.reduce("sum", exponential, x.shape, dims, inner, keep=True)
    if kind.dtype != inner:  # one division a row is exact enough for a result that is rounded to a narrow float
        inverse = b.temporary((1 / element(total, total.shape)).expr, total.shape)
        body = exponential * element(inverse, x.shape)
    else:
        body = exponential / element(total, x.shape)
    if "_safe_" in b.node.target:  # a row of -inf alone becomes zeros
        body = f.where(f.equal(element(greatest, x.shape), -math.inf), 0, body)
    return b.cast_elementwise(body, kind)


@TABLE.rule(*overloads("_log_softmax"))
def log_softmax(b: Builder, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    kind = b.result()
    inner = DTYPES[kind.dtype].compute
    dims = dims_of(x, dim)
    greatest = _greatest(b, x, dims, inner)
    shifted = element(x, x.shape, inner) - element(greatest, x.shape)
    total = b.reduce("sum", f.exp(shifted), x.shape, dims, inner, keep=True)
    return b.cast_elementwise(shifted - f.log(element(total, x.shape)), kind)


@TABLE.rule(*overloads("logsumexp"))
def logsumexp(b: Builder, x: Tensor, dims: Dims, keepdim: bool = False) -> Tensor:
    kind = b.result()
    inner = DTYPES[kind.dtype].compute
    reduced_dims = dims_of(x, dims)
    if not is_float(x.dtype) or any(x.shape[d] == 0 for d in reduced_dims):
        raise NoRule("a reduction of integers, or of no elements")
    greatest = _greatest(b, x, reduced_dims, inner)
    maximum = element(greatest, greatest.shape)
    shift = b.temporary(f.where(f.equal(f.absolute(maximum), math.inf), 0, maximum).expr, greatest.shape)
    exponential = f.exp(element(x, x.shape, inner) - element(shift, x.shape))
    total = b.reduce("sum", exponential, x.shape, reduced_dims, inner, keep=True)
    logarithm = f.log(element(total.reshaped(kind.shape), kind.shape))
    return b.cast_elementwise(logarithm + element(shift.reshaped(kind.shape), kind.shape), kind)


@TABLE.rule(*overloads("_softmax_backward_data"))
def softmax_backward(b: Builder, grad: Tensor, y: Tensor, dim: int, input_dtype: str) -> Tensor:
    kind = b.result()
    inner = DTYPES[kind.dtype].compute
    weighted = element(grad, y.shape, inner) * element(y, y.shape, inner)
    total = b.reduce("sum", weighted, y.shape, dims_of(y, dim), inner, keep=True)
    body = weighted - element(y, y.shape, inner) * element(total, y.shape)
    return b.cast_elementwise(body, kind)


@TABLE.rule(*overloads("_log_softmax_backward_data"))
def log_softmax_backward(b: Builder, grad: Tensor, y: Tensor, dim: int, input_dtype: str) -> Tensor:
    kind = b.result()
    inner = DTYPES[kind.dtype].compute
    total = b.reduce("sum", element(grad, y.shape, inner), y.shape, dims_of(y, dim), inner, keep=True)
    body = element(grad, y.shape, inner) - f.exp(element(y, y.shape, inner)) * element(total, y.shape)
    return b.cast_elementwise(body, kind)
