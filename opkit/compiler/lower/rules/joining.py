"""Join, pad and resize tensors, replace parts of them, and the derivatives of views."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr, const, op, position
from opkit.compiler.ir.expr import where as chosen
from opkit.compiler.ir.graph import TensorType
from opkit.compiler.ir.index import ZERO, Index, contiguous, flat, index, is_below, is_nonnegative, product, value
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.rules.images import image_strides
from opkit.compiler.lower.rules.views import clamped, from_end, permute
from opkit.compiler.lower.rules.writes import may_write, write
from opkit.compiler.lower.scalar import Scalar, cast, number
from opkit.compiler.lower.tensors import Tensor, formal, lazy

TABLE = Table()
_MAX_TERMS = 8
"""Overlapping windows whose gradients a formula adds."""
Sizes = Sequence[Index | int]


# ---- joined and padded with a constant ---------------------------------------------------------------------------------


@TABLE.rule(*overloads("cat"), *overloads("concat"))
def cat(b: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    kind = b.result()
    buffer = b.new_buffer(kind.dtype, kind.shape, image_strides(b, kind, *tensors))
    dim = dim % len(buffer.shape)
    begin = ZERO
    joined: Tensor | None = None
    for x in tensors:
        if len(x.shape) != len(buffer.shape):  # torch ignores an empty tensor of one dimension
            continue
        target = [a + begin if k == dim else a for k, a in enumerate(formal(x.shape))]
        joined = b.compute(buffer, x.shape, _as(x.at(formal(x.shape)), buffer.dtype), target)
        begin = begin + x.shape[dim]
    if joined is None:
        raise NoRule("a list of empty tensors")
    return joined


@TABLE.rule(*overloads("stack"))
def stack(b: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= len(b.result().shape)
    shape = tensors[0].shape
    return cat(b, [x.reshaped([*shape[:dim], index(1), *shape[dim:]]) for x in tensors], dim)


@TABLE.rule(*overloads("constant_pad_nd"))
def constant_pad_nd(b: Builder, x: Tensor, pad: Sizes, value: Any = 0) -> Tensor:
    kind = b.result()
    shape, rank = kind.shape, len(kind.shape)
    before = [index(pad[2 * (rank - 1 - k)]) if 2 * (rank - k) <= len(pad) else ZERO for k in range(rank)]
    axes = [a - p for a, p in zip(formal(shape), before, strict=True)]
    inside = within(axes, x.shape, shape)
    fill = number(value, x.dtype).expr
    buffer = b.new_buffer(kind.dtype, shape, image_strides(b, kind, x))
    return b.compute(buffer, shape, x.at(axes) if inside is None else chosen(inside, x.at(axes, inside), fill))


# ---- a part replaced -------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("slice_scatter"))
def slice_scatter(
    b: Builder, x: Tensor, part: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    dim %= len(x.shape)
    begin = clamped(0 if start is None else start, x.shape[dim])
    return _replaced(b, x, part, dim, begin, step)


@TABLE.rule(*overloads("slice_backward"))
def slice_backward(b: Builder, grad: Tensor, sizes: Sizes, dim: int, start: Any, end: Any, step: int) -> Tensor:
    return slice_scatter(b, _zeros(b), grad, dim, start, end, step)


@TABLE.rule(*overloads("unfold_backward"))
def unfold_backward(b: Builder, grad: Tensor, sizes: Sizes, dim: int, size: int, step: int) -> Tensor:
    """Return the sum over the windows that an element is in: a term for each window that can reach it."""
    shape = b.result().shape
    terms = -(-size // step)
    if not shape or terms > _MAX_TERMS:
        raise NoRule("windows of a number, or windows of which many overlap")
    dim %= len(shape)
    axes = formal(shape)
    total = number(0, DTYPES[grad.dtype].compute)
    for back in range(terms):
        window, inside = axes[dim] // step - back, axes[dim] % step + back * step
        mask = within([window, inside], [grad.shape[dim], index(size)])
        read = cast(Scalar(grad.at([*axes[:dim], window, *axes[dim + 1 :], inside], mask)), total.dtype)
        total = total + (read if mask is None else f.where(Scalar(mask), read, number(0, total.dtype)))
    return b.elementwise(_as(total.expr, grad.dtype))


@TABLE.rule(*overloads("select_scatter"))
def select_scatter(b: Builder, x: Tensor, part: Tensor, dim: int, position: Any) -> Tensor:
    dim %= len(x.shape)
    one = (*x.shape[:dim], index(1), *x.shape[dim + 1 :])
    return _replaced(b, x, part.reshaped(one), dim, from_end(position, x.shape[dim]), 1)


@TABLE.rule(*overloads("select_backward"))
def select_backward(b: Builder, grad: Tensor, sizes: Sizes, dim: int, position: Any) -> Tensor:
    return select_scatter(b, _zeros(b), grad, dim, position)


@TABLE.rule(*overloads("diagonal_scatter"))
def diagonal_scatter(b: Builder, x: Tensor, part: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rank = len(x.shape)
    dim1, dim2 = dim1 % rank, dim2 % rank
    axes = formal(x.shape)
    row, column = axes[dim1] - max(-offset, 0), axes[dim2] - max(offset, 0)
    rest = [a for k, a in enumerate(axes) if k not in (dim1, dim2)]
    inside = within([row], part.shape[-1:])
    on_diagonal = op("eq", position(row), position(column))
    mask = on_diagonal if inside is None else op("and", on_diagonal, inside)
    return b.elementwise(chosen(mask, _as(part.at([*rest, row], mask), x.dtype), x.at(axes)))


@TABLE.rule(*overloads("as_strided_scatter"))
def as_strided_scatter(b: Builder, x: Tensor, part: Tensor, shape: Sizes, strides: Sizes, offset: Any = None) -> Tensor:
    """Replace elements of a tensor whose elements are all of its memory, in order, by those of a view without overlaps."""
    (kind,) = (node.result for node in b.graph.nodes if node.name == b.node.args[0].name)
    assert isinstance(kind, TensorType)
    numbers = [index(n).constant for n in (*kind.shape, *kind.strides, *shape, *strides, kind.offset, offset or 0)]
    if (
        None in numbers
        or kind.offset != 0
        or any(n != 1 and s != t for n, s, t in zip(kind.shape, kind.strides, contiguous(kind.shape), strict=True))
    ):
        raise NoRule("a view of a tensor with gaps, or in another order")
    axes = formal(x.shape)
    place = flat(axes, contiguous(kind.shape))
    at, rest, span = [ZERO] * len(shape), place - index(offset or 0), 1
    order = sorted((k for k, n in enumerate(shape) if n != 1), key=lambda k: _number(strides[k]))
    for k in order:
        if _number(strides[k]) < span:
            raise NoRule("a view with overlaps")
        span += (_number(shape[k]) - 1) * _number(strides[k])
    if _number(offset or 0) + span > _number(product(x.shape)):
        raise NoRule("a view that is larger")
    for k in reversed(order):
        at[k], rest = rest // strides[k], rest % strides[k]
    mask = within([at[k] for k in order], [index(shape[k]) for k in order])
    if not is_below(rest, index(1)):
        on_element = op("eq", position(rest), const(0, "i64"))
        mask = on_element if mask is None else op("and", mask, on_element)
    body = _as(part.at(at, mask), x.dtype)
    return b.elementwise(body if mask is None else chosen(mask, body, x.at(axes)))


def _number(of: Index | int) -> int:
    return int(index(of).constant or 0)


@TABLE.rule(*overloads("diagonal_backward"))
def diagonal_backward(b: Builder, grad: Tensor, sizes: Sizes, offset: int, dim1: int, dim2: int) -> Tensor:
    return diagonal_scatter(b, _zeros(b), grad, offset, dim1, dim2)


def _zeros(b: Builder) -> Tensor:
    kind = b.result()
    return lazy(number(0, kind.dtype).expr, kind.shape)


def _replaced(b: Builder, x: Tensor, part: Tensor, dim: int, begin: Index, step: int) -> Tensor:
    """Return ``x`` with ``part`` in place of every ``step``-th element of a dimension from ``begin`` on."""
    if may_write(b, x):
        axes = formal(part.shape)
        target = [begin + a * step if k == dim else a for k, a in enumerate(axes)]
        return write(b, x, part.shape, target, _as(part.at(axes), x.dtype))
    axes = formal(x.shape)
    offset = axes[dim] - begin
    at = [offset // step if k == dim else a for k, a in enumerate(axes)]
    mask = None if part.shape[dim] == x.shape[dim] else within([at[dim]], [part.shape[dim]])
    if step != 1:
        on_step = op("eq", position(offset % step), const(0, "i64"))
        mask = on_step if mask is None else op("and", mask, on_step)
    body = _as(part.at(at, mask), x.dtype)
    return b.elementwise(body if mask is None else chosen(mask, body, x.at(axes)))


def within(at: Sequence[Index], extents: Sequence[Index], whole: Sequence[Index] | None = None) -> Expr | None:
    """Return whether coordinates are in extents, or None if they always are; the axes of ``whole`` are in its extents."""
    conditions: list[Expr] = []
    for k, (a, n) in enumerate(zip(at, extents, strict=True)):
        if whole is not None and whole[k] == n and a == formal(whole)[k]:
            continue
        if not is_nonnegative(a):
            conditions.append(op("le", const(0, "i64"), position(a)))
        if not is_below(a, n):
            conditions.append(op("lt", position(a), position(n)))
    return functools.reduce(lambda x, y: op("and", x, y), conditions) if conditions else None


def _as(x: Expr, dtype: str) -> Expr:
    return cast(Scalar(x), dtype).expr


# ---- nearest neighbours ----------------------------------------------------------------------------------------------


def _nearest(b: Builder, x: Tensor, scales: Sequence[float | None]) -> Tensor:
    shape = b.result().shape
    outer = len(shape) - len(scales)
    axes = formal(shape)
    moved = [_source(axes[k], shape[k], x.shape[k], scales[k - outer]) for k in range(outer, len(shape))]
    return x.mapped(shape, [*axes[:outer], *moved], copied=True)


def _source(at: Index, result: Index, size: Index, scale: float | None) -> Index:
    """Return ``at * size // result``, if ATen's computation in float32 results in that for every position."""
    if result == size:
        return at
    if result.constant is None or size.constant is None:
        raise NoRule("nearest neighbours in dimensions of symbolic sizes")
    exact = np.arange(result.constant) * size.constant // result.constant
    if result != size * 2 and not np.array_equal(exact, _rounded(result.constant, size.constant, scale)):
        raise NoRule("nearest neighbours that depend on rounding")
    return at * size // result


def _rounded(result: int, size: int, scale: float | None) -> Any:
    """Return the positions of the neighbours that ATen computes."""
    ratio = np.float32(1.0 / scale) if scale is not None and scale > 0 else np.float32(size) / np.float32(result)
    return np.minimum(np.floor(np.arange(result).astype(np.float32) * ratio).astype(np.int64), size - 1)


def _upsample(rank: int, b: Builder, x: Tensor, sizes: Any, *scales: float | None) -> Tensor:
    return _nearest(b, x, [*scales, *[None] * (rank - len(scales))])


def _upsample_vec(rank: int, b: Builder, x: Tensor, sizes: Any, scales: Sequence[float] | None = None) -> Tensor:
    return _nearest(b, x, scales or [None] * rank)


# ---- padding ---------------------------------------------------------------------------------------------------------


def _replicated(at: Scalar, size: Index) -> Scalar:
    """Return the nearest position in the tensor."""
    return f.minimum(f.maximum(at, 0), size - 1)


def _reflected(at: Scalar, size: Index) -> Scalar:
    """Return the position mirrored at the first or the last element."""
    last = f.number(size - 1, at)
    return last - f.absolute(last - f.absolute(at))


def _padded(source: Callable[[Scalar, Index], Scalar], b: Builder, x: Tensor, pad: Sequence[Any]) -> Tensor:
    """Pad a tensor; ``source`` maps a position, also outside of the tensor, to that of the element to read."""
    shape = b.result().shape
    at = list(formal(shape))
    for k in range(len(pad) // 2):
        dim = len(shape) - 1 - k
        at[dim] = at[dim] - index(pad[2 * k])
        if shape[dim] != x.shape[dim]:
            at[dim] = value(source(Scalar(position(at[dim])), x.shape[dim]).expr)
    return b.elementwise(x.at(at))


for _rank in (1, 2, 3):
    TABLE.rule(*overloads(f"upsample_nearest{_rank}d"))(functools.partial(_upsample, _rank))
    TABLE.rule(*overloads(f"upsample_nearest{_rank}d", "vec"))(functools.partial(_upsample_vec, _rank))
    TABLE.rule(*overloads(f"replication_pad{_rank}d"))(functools.partial(_padded, _replicated))
    TABLE.rule(*overloads(f"reflection_pad{_rank}d"))(functools.partial(_padded, _reflected))


# ---- channels and pixels ---------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("pixel_shuffle"))
def pixel_shuffle(b: Builder, x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    split = x.reshaped([*batch, channels // (factor * factor), index(factor), index(factor), height, width])
    return _permuted_copy(b, split, len(batch), [0, 3, 1, 4, 2])


@TABLE.rule(*overloads("pixel_unshuffle"))
def pixel_unshuffle(b: Builder, x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    split = x.reshaped([*batch, channels, height // factor, index(factor), width // factor, index(factor)])
    return _permuted_copy(b, split, len(batch), [0, 2, 4, 1, 3])


def _permuted_copy(b: Builder, x: Tensor, batch: int, order: Sequence[int]) -> Tensor:
    """Return the tensor with the dimensions after ``batch`` permuted, in the result's shape."""
    shape = b.result().shape
    permuted = permute(b, x, [*range(batch), *(batch + k for k in order)])
    return permuted.reshaped(shape).mapped(shape, formal(shape), copied=True)
