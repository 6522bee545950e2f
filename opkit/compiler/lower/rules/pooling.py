"""Pooling over windows of the last dimensions: one reduction each, whose axes are the result's and then the window's.

Small windows are formulas without a loop instead. The padding is not read. Derivatives are sums over the windows that
contain an element; those of maxima are scatters on CPUs, and on GPUs where windows are large or dilated. If a large window
contains several NaN, the index is that of the first one, in eager mode of the last.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.index import ZERO, Index, IndexLike, contiguous, flat, index, product
from opkit.compiler.ir.ops import neutral
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.rules.images import image_strides
from opkit.compiler.lower.rules.indexing import checked_index, scattered, zeros
from opkit.compiler.lower.rules.joining import within
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Shape, Tensor, formal

TABLE = Table()
Sizes = Sequence[IndexLike]
MAX_UNROLLED = 25  # elements of a window, or windows of an element, over which a loop is unrolled


class Windows:
    """Windows over the last dimensions of a tensor, each with a size, a step, a padding and a dilation."""

    def __init__(self, rank: int, size: Any, step: Any = (), padding: Any = 0, dilation: Any = 1) -> None:
        self.rank = rank
        self.size = _each(size, rank)
        self.step = _each(step, rank) if step not in ([], (), None) else self.size
        self.padding = _each(padding, rank)
        self.dilation = _each(dilation, rank)

    @property
    def count(self) -> Index:
        return product(self.size)

    def begins(self, at: Sequence[Index]) -> list[Index]:
        """Return the first position of the window of a result; a negative one is in the padding."""
        return [a * s - p for a, s, p in zip(at[-self.rank :], self.step, self.padding, strict=True)]

    def elements(self, shape: Shape) -> list[list[Index]]:
        """Return the coordinates in the pooled tensor of each element of a result's window; the sizes of windows are known."""
        at = formal(shape)
        begins, sizes = self.begins(at), [n.constant or 0 for n in self.size]
        steps = itertools.product(*map(range, sizes))
        moved = [[a + k * d for a, k, d in zip(begins, each, self.dilation, strict=True)] for each in steps]
        return [[*at[: len(shape) - self.rank], *each] for each in moved]

    @property
    def overlaps(self) -> list[Index]:
        """Return the most windows that contain one element, along each dimension; they are not dilated."""
        return [(n + s - 1) // s for n, s in zip(self.size, self.step, strict=True)]

    def containing(self, at: Sequence[Index], earlier: Sequence[IndexLike], results: Shape) -> tuple[list[Index], Any]:
        """Return the result whose window contains the element ``at``, and a mask for where there is one.

        It is the last one along each dimension, or ``earlier`` ones before; ``results`` are the sizes of the results.
        """
        outer = at[: len(at) - self.rank]
        own = [a + p for a, p in zip(at[len(outer) :], self.padding, strict=True)]
        window = [a // s - j for a, s, j in zip(own, self.step, earlier, strict=True)]
        offset = [a % s + index(j) * s for a, s, j in zip(own, self.step, earlier, strict=True)]
        return [*outer, *window], within([*window, *offset], [*results[len(outer) :], *self.size])

    def read(self, shape: Shape) -> tuple[Shape, list[Index]]:
        """Return axes for a result of ``shape`` and its windows, and the coordinates in the pooled tensor over them."""
        axes = (*shape, *self.size)
        at = formal(axes)
        begins, steps = self.begins(at[: len(shape)]), at[len(shape) :]
        moved = [s + a * d for s, a, d in zip(begins, steps, self.dilation, strict=True)]
        return axes, [*at[: len(shape) - self.rank], *moved]


def _each(sizes: Any, rank: int) -> tuple[Index, ...]:
    """Return one number for each dimension."""
    numbers = list(sizes) if isinstance(sizes, list | tuple) else [sizes]
    return tuple(map(index, numbers * rank if len(numbers) == 1 else numbers))


def _is_unrolled(count: Index) -> bool:
    """Return whether a loop over so many elements is a formula without a loop, so that another dimension is vectorised."""
    return count.constant is not None and count.constant <= MAX_UNROLLED


def _read(x: Tensor, at: Sequence[Index], dtype: str, outside: Any) -> Scalar:
    """Return an element as ``dtype``; ``outside`` if the coordinates are not in the tensor."""
    mask = within(at, x.shape)
    inside = f.cast(Scalar(x.at(at, mask)), dtype)
    return inside if mask is None else f.where(Scalar(mask), inside, outside)


# ---- maxima ----------------------------------------------------------------------------------------------------------


def _maxima(b: Builder, x: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Return the maximum of each window, and its row-major position in the dimensions that are pooled."""
    if _is_unrolled(windows.count):
        return _maxima_unrolled(b, x, windows)
    kind, indices = b.result(0), b.result(1)
    inner = DTYPES[x.dtype].compute
    axes, at = windows.read(kind.shape)
    body = _read(x, at, inner, neutral("max", inner))
    dims = range(len(kind.shape), len(axes))
    values = b.reduce("max", body, axes, dims, kind.dtype, strides=kind.strides)
    in_window = b.reduce("argmax", body, axes, dims, "i64", strides=indices.strides)
    position = _linear(windows, Scalar(in_window.at(formal(kind.shape))), x, kind.shape)
    return values, b.elementwise(position.expr, indices)


def _maxima_unrolled(b: Builder, x: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Return the same, computed by a chain of comparisons for each element, which vectorises like any formula."""
    kind, indices = (dataclasses.replace(b.result(k), strides=image_strides(b, b.result(k), x)) for k in (0, 1))
    inner = DTYPES[x.dtype].compute
    strides = contiguous(x.shape[-windows.rank :])
    begins = windows.begins(formal(kind.shape))
    first = [_skip_padding(Scalar(expr.position(at)), d) for at, d in zip(begins, windows.dilation, strict=True)]
    greatest = f.number(neutral("max", inner), inner)
    # the narrowest type of positions
    count = product(x.shape[-windows.rank :]).constant
    short = "i32" if count is not None and count < 1 << 31 else "i64"
    index_of_greatest = f.cast(_sum([at * stride for at, stride in zip(first, strides, strict=True)]), short)
    for coordinates in windows.elements(kind.shape):
        here = _read(x, coordinates, inner, neutral("max", inner))
        greater = greatest < here
        replaces = f.apply("or", greater, f.is_nan(here)) if is_float(inner) else greater
        position = f.cast(Scalar(expr.position(flat(coordinates[-windows.rank :], strides))), short)
        greatest = f.where(replaces, here, greatest)
        index_of_greatest = f.where(replaces, position, index_of_greatest)
    values = b.cast_elementwise(greatest, kind)
    return values, b.cast_elementwise(index_of_greatest, indices)


def _skip_padding(at: Scalar, dilation: Index) -> Scalar:
    """Return the first coordinate from ``at`` on, in steps of the dilation, that is not negative."""
    return f.maximum(at, 0 if dilation == 1 else at - f.apply("floordiv", at, dilation) * dilation)


def _linear(windows: Windows, in_window: Scalar, x: Tensor, shape: Shape) -> Scalar:
    """Return the position in the tensor of a position in a window; one in the padding becomes the first in the tensor."""
    begins = [Scalar(expr.position(at)) for at in windows.begins(formal(shape))]
    steps = [f.apply("floordiv", in_window, step) for step in contiguous(windows.size)]
    offsets = [f.apply("rem", i, n) if k else i for k, (i, n) in enumerate(zip(steps, windows.size, strict=True))]
    at = [
        _skip_padding(begin + i * step, step) if pad != 0 else begin + i * step
        for begin, i, step, pad in zip(begins, offsets, windows.dilation, windows.padding, strict=True)
    ]
    strides = contiguous(x.shape[-windows.rank :])
    return _sum([a * stride for a, stride in zip(at, strides, strict=True)])


def _sum(summands: Sequence[Scalar]) -> Scalar:
    return functools.reduce(lambda a, z: a + z, summands)


def _max_pool(
    rank: int, b: Builder, x: Tensor, size: Any, step: Any = (), padding: Any = 0, dilation: Any = 1, *rest: Any
) -> tuple[Tensor, Tensor]:
    return _maxima(b, x, Windows(rank, size, step, padding, dilation))


def _max_pool_backward(
    rank: int, b: Builder, grad: Tensor, x: Tensor, size: Any, step: Any, padding: Any, dilation: Any, *rest: Any
) -> Tensor:
    windows = Windows(rank, size, step, padding, dilation)
    if b.target.tiles is None or not _is_unrolled(product(windows.overlaps)) or any(d != 1 for d in windows.dilation):
        return _scattered_maxima(rank, b, grad, x, rest[-1])
    return _gathered_maxima(b, grad, x, rest[-1], windows)


def _gathered_maxima(b: Builder, grad: Tensor, x: Tensor, indices: Tensor, windows: Windows) -> Tensor:
    """Return for each element the sum over the windows whose maximum it is."""
    kind = b.result()
    inner, at = DTYPES[kind.dtype].compute, formal(kind.shape)
    position = Scalar(expr.position(flat(at[-windows.rank :], contiguous(x.shape[-windows.rank :]))))
    total = f.number(0, inner)
    for earlier in itertools.product(*(range(n.constant or 0) for n in windows.overlaps)):
        window, mask = windows.containing(at, earlier, grad.shape)
        is_maximum = f.equal(Scalar(indices.at(window, mask)), position)
        inside = is_maximum if mask is None else f.apply("and", Scalar(mask), is_maximum)
        total = total + f.where(inside, f.cast(Scalar(grad.at(window, mask)), inner), 0)
    return b.cast_elementwise(total, dataclasses.replace(kind, strides=image_strides(b, kind, x)))


def _scattered_maxima(rank: int, b: Builder, grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    sizes = x.shape[-rank:]
    axes = formal(grad.shape)
    at = checked_index(Scalar(indices.at(axes)), product(sizes))
    steps = [at // step for step in contiguous(sizes)]
    target = [a % n if k else a for k, (a, n) in enumerate(zip(steps, sizes, strict=True))]
    strides = image_strides(b, b.result(), grad)
    return scattered(b, zeros(b), grad.shape, [*axes[:-rank], *target], element(grad, grad.shape), "add", None, strides)


# ---- means -----------------------------------------------------------------------------------------------------------


class Means:
    """The divisors of sums of windows."""

    def __init__(self, windows: Windows, sizes: Shape, ceil: bool, with_padding: bool, divisor: Any) -> None:
        self.windows, self.sizes = windows, sizes
        self.ceil, self.with_padding, self.divisor = ceil, with_padding, divisor

    def over(self, x: Scalar, at: Sequence[Index]) -> Scalar:
        """Return the mean for the sum ``x`` of the window of the result at coordinates."""
        if self.divisor is not None:
            return x / self.divisor
        padded = any(p != 0 for p in self.windows.padding)
        if not self.ceil and (self.with_padding or not padded):
            return x / self.windows.count
        extents = [self._extent(k, begin) for k, begin in enumerate(self.windows.begins(at))]
        return x / f.cast(functools.reduce(lambda a, z: a * z, extents), x.dtype)

    def _extent(self, k: int, begin: Index) -> Scalar:
        """Return how many elements of a window count along a dimension."""
        pad, size = self.windows.padding[k], self.sizes[k]
        start = Scalar(expr.position(begin))
        end = f.minimum(start + self.windows.size[k], size + pad)
        return end - start if self.with_padding else f.minimum(end, size) - f.maximum(start, 0)


def _means(
    x: Tensor, rank: int, size: Any, step: Any = (), padding: Any = 0, ceil: bool = False, *rest: Any, **kwargs: Any
) -> Means:
    """Return the divisors of an operator; its last two arguments, which may be missing, are as in ``Means``."""
    if not is_float(x.dtype):
        raise NoRule("means of integers")
    with_padding, divisor = [*rest, *(True, None)[len(rest) :]]
    windows = Windows(rank, size, step, padding)
    with_padding = kwargs.get("count_include_pad", with_padding)
    return Means(windows, x.shape[-rank:], ceil, with_padding, kwargs.get("divisor_override", divisor))


def _averaged(b: Builder, x: Tensor, means: Means) -> Tensor:
    kind, windows = b.result(), means.windows
    inner, at = DTYPES[kind.dtype].compute, formal(kind.shape)
    if _is_unrolled(windows.count):
        summands = [_read(x, coordinates, inner, 0) for coordinates in windows.elements(kind.shape)]
        return b.cast_elementwise(
            means.over(_sum(summands), at), dataclasses.replace(kind, strides=image_strides(b, kind, x))
        )
    axes, inside = windows.read(kind.shape)
    dims = range(len(kind.shape), len(axes))
    total = b.reduce("sum", _read(x, inside, inner, 0), axes, dims, inner, strides=kind.strides)
    return b.cast_elementwise(means.over(element(total, kind.shape), at), kind)


def _avg_pool(rank: int, b: Builder, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    return _averaged(b, x, _means(x, rank, *rest, **kwargs))


def _avg_pool_backward(rank: int, b: Builder, grad: Tensor, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    return _averaged_backward(b, grad, _means(x, rank, *rest, **kwargs))


def _averaged_backward(b: Builder, grad: Tensor, means: Means) -> Tensor:
    """Return for each element the sum over the windows that contain it: along each dimension the last one, and those before."""
    kind, windows = b.result(), means.windows
    inner = DTYPES[kind.dtype].compute

    def summand(at: Sequence[Index], earlier: Sequence[IndexLike]) -> Scalar:
        window, mask = windows.containing(at, earlier, grad.shape)
        mean = means.over(f.cast(Scalar(grad.at(window, mask)), inner), window)
        return mean if mask is None else f.where(Scalar(mask), mean, 0)

    if _is_unrolled(product(windows.overlaps)):
        each = itertools.product(*(range(n.constant or 0) for n in windows.overlaps))
        total = _sum([summand(formal(kind.shape), earlier) for earlier in each])
        return b.cast_elementwise(total, dataclasses.replace(kind, strides=image_strides(b, kind, grad)))
    axes = (*kind.shape, *windows.overlaps)
    rank = len(kind.shape)
    body = summand(formal(axes)[:rank], formal(axes)[rank:])
    return b.reduce("sum", body, axes, range(rank, len(axes)), kind.dtype, strides=kind.strides)


# ---- columns of images ---------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("col2im"))
def col2im(b: Builder, x: Tensor, sizes: Sizes, size: Sizes, dilation: Sizes, padding: Sizes, step: Sizes) -> Tensor:
    """Return for each element the sum over its positions in windows.

    Raises:
        NoRule: windows have a step, so that most positions are in no window; they are scattered instead.
    """
    kind, windows = b.result(), Windows(2, size, step, padding, dilation)
    if any(s != 1 for s in windows.step):
        raise NoRule("windows with a step")
    rank = len(kind.shape)
    axes = (*kind.shape, *windows.size)
    *outer, channel = formal(axes)[: rank - 2]
    at, inside = formal(axes)[rank - 2 : rank], formal(axes)[rank:]
    each = list(zip(at, inside, kind.shape[-2:], windows.size, windows.padding, windows.dilation, strict=True))
    window = [a + p - k * d for a, k, _, _, p, d in each]
    counts = [n + 2 * p - d * (m - 1) for _, _, n, m, p, d in each]
    mask = within(window, counts)
    row = flat([channel, *inside], contiguous((kind.shape[-3], *windows.size)))
    inner = DTYPES[kind.dtype].compute
    body = f.cast(Scalar(x.at([*outer, row, flat(window, contiguous(counts))], mask)), inner)
    body = body if mask is None else f.where(Scalar(mask), body, 0)
    return b.reduce("sum", body, axes, range(rank, len(axes)), kind.dtype, strides=kind.strides)


# ---- adaptive pooling --------------------------------------------------------------------------------------------------


def _dividing(sizes: Shape, results: Sizes) -> Windows:
    """Return windows without overlap that cover dimensions."""
    if any(n == 0 or n % index(m) != ZERO for n, m in zip(sizes, results, strict=True)):
        raise NoRule("windows of different sizes")
    return Windows(len(sizes), [n // index(m) for n, m in zip(sizes, results, strict=True)])


def _adaptive_avg_pool(rank: int, b: Builder, x: Tensor, sizes: Any) -> Tensor:
    windows = _dividing(x.shape[-rank:], b.result().shape[-rank:])
    return _averaged(b, x, Means(windows, x.shape[-rank:], False, True, None))


def _adaptive_avg_pool_backward(rank: int, b: Builder, grad: Tensor, x: Tensor) -> Tensor:
    windows = _dividing(x.shape[-rank:], grad.shape[-rank:])
    return _averaged_backward(b, grad, Means(windows, x.shape[-rank:], False, True, None))


def _adaptive_max_pool(rank: int, b: Builder, x: Tensor, sizes: Any) -> tuple[Tensor, Tensor]:
    return _maxima(b, x, _dividing(x.shape[-rank:], b.result(0).shape[-rank:]))


for _rank in (2, 3):
    TABLE.rule(*overloads(f"max_pool{_rank}d_with_indices"))(functools.partial(_max_pool, _rank))
    TABLE.rule(*overloads(f"max_pool{_rank}d_with_indices_backward"))(functools.partial(_max_pool_backward, _rank))
    TABLE.rule(*overloads(f"avg_pool{_rank}d"))(functools.partial(_avg_pool, _rank))
    TABLE.rule(*overloads(f"avg_pool{_rank}d_backward"))(functools.partial(_avg_pool_backward, _rank))
    TABLE.rule(*overloads(f"_adaptive_avg_pool{_rank}d"))(functools.partial(_adaptive_avg_pool, _rank))
    TABLE.rule(*overloads(f"_adaptive_avg_pool{_rank}d_backward"))(
        functools.partial(_adaptive_avg_pool_backward, _rank)
    )
    TABLE.rule(*overloads(f"adaptive_max_pool{_rank}d"))(functools.partial(_adaptive_max_pool, _rank))
    TABLE.rule(*overloads(f"adaptive_max_pool{_rank}d_backward"))(functools.partial(_scattered_maxima, _rank))
