"""Convolutions as products of matrices: those with few results, and those with windows of one element.

Torch copies the weight to a layout of its own in each call, which takes longer than the product itself where all images
together have few places. A row of the left operand is what the window lies on at one place, the right operand is the weight
as it is in memory. The derivatives are products, too (Chellapilla et al., 2006).

With windows of one element no row is gathered. Torch calls MKL for these where it has one thread and fewer than 16 images.
Where products are opkit's own, which they are on AMD's processors, they take 0.87 of MKL's time with AVX2 and 0.46 with AVX-512
(ResNet-50's, forward and backward). OneDNN, which torch calls otherwise, takes as long, and for gradients of weights less.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from opkit.compiler.ir.expr import Expr, const, op, position
from opkit.compiler.ir.index import Index, contiguous
from opkit.compiler.ir.index import product as size_of
from opkit.compiler.ir.program import Buffer
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder
from opkit.compiler.lower.rules.joining import within
from opkit.compiler.lower.rules.pooling import Windows
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Shape, Tensor, channels_last, formal

MIN_RATIO = 10
"""How many output channels for each row make a product faster: rows are gathered, and torch copies the weight."""

MIN_SIZE = 64
"""The fewest places and channels for which products are opkit's own (``cpp_ext/product/torch.cpp``)."""

MANY_IMAGES = 16
"""From how many images on torch calls oneDNN also with one thread."""


def is_product(b: Builder, weight: Tensor, results: Shape, windows: Windows, groups: int) -> bool:
    """Return whether a convolution with results of known sizes and its derivatives are products."""
    strided, (batch, channels, *sizes) = weight.strided(), results
    rows, columns, depth = (int(n.constant or 0) for n in (size_of([batch, *sizes]), channels, weight.shape[1]))
    if b.target.tiles is not None or groups != 1 or strided is None or weight.dtype not in ("f32", "f64"):
        return False
    if all(n == 1 for n in windows.size):
        slower = b.target.mkl_convolutions and int(batch.constant or 0) < MANY_IMAGES and weight.dtype == "f32"
        return slower and _is_pointwise(windows) and min(rows, columns, depth) >= MIN_SIZE
    return strided.strides == contiguous(weight.shape) and 0 < MIN_RATIO * rows <= columns


def _is_pointwise(windows: Windows) -> bool:
    """Return whether a window is one element, and each element has one."""
    return all(n == 1 for n in (*windows.size, *windows.step)) and all(n == 0 for n in windows.padding)


def convolved(b: Builder, x: Tensor, weight: Tensor, results: Shape, windows: Windows) -> Tensor:
    """Return the convolution, channels-last."""
    columns = _columns(b, x, results, windows)
    operands = (columns, _transposed(_matrix(weight)))
    return _images(b.call("aten.mm.default", operands, [_buffer(b, columns, results[1])], out=True)[0], results)


def weight_gradient(b: Builder, grad: Tensor, x: Tensor, weight: Tensor, windows: Windows) -> Tensor:
    """Return the gradient of the weight."""
    columns, rows = _columns(b, x, grad.shape, windows), _transposed(_rows(grad))
    gradient = b.call("aten.mm.default", (rows, columns), [_buffer(b, rows, columns.shape[1])], out=True)[0]
    return gradient.reshaped(weight.shape)


def image_gradient(b: Builder, grad: Tensor, weight: Tensor, shape: Shape, windows: Windows) -> Tensor:
    """Return the gradient of the images: at each element the sum over the elements of the windows that lie on it."""
    rows, matrix = _rows(grad), _matrix(weight)
    columns = b.call("aten.mm.default", (rows, matrix), [_buffer(b, rows, matrix.shape[1])], out=True)[0]
    places = grad.shape[2:]
    if _is_pointwise(windows):
        return _images(columns, shape)
    columns = columns.reshaped((grad.shape[0], *places, *weight.shape[1:]))
    axes = (*shape, *windows.size)
    image, channel, *at, row, column = formal(axes)
    begins = [a + p - w * d for a, p, w, d in zip(at, windows.padding, (row, column), windows.dilation, strict=True)]
    place = [begin // step for begin, step in zip(begins, windows.step, strict=True)]
    conditions = [
        op("eq", position(begin % step), const(0, "i64"))
        for begin, step in zip(begins, windows.step, strict=True)
        if step != 1
    ]
    inside = within(place, places)
    conditions += [inside] if inside is not None else []
    mask = functools.reduce(lambda x, y: op("and", x, y), conditions) if conditions else None
    body = _read(columns, (image, *place, channel, row, column), mask)
    return b.reduce("sum", body, axes, (4, 5), grad.dtype, strides=channels_last(shape))


def _columns(b: Builder, x: Tensor, results: Shape, windows: Windows) -> Tensor:
    """Return what the windows lie on: a row for each place, in the order of the weight's elements."""
    if _is_pointwise(windows):
        return _rows(x)
    batch, _, *places = results
    shape = (batch, *places, x.shape[1], *windows.size)
    image, row, column, channel, *window = formal(shape)
    begins = windows.begins((row, column))
    at = (image, channel, *(a + w * d for a, w, d in zip(begins, window, windows.dilation, strict=True)))
    columns = b.compute(b.new_buffer(x.dtype, shape), shape, _read(x, at, within(at, x.shape)).expr)
    return columns.reshaped((size_of(shape[:3]), size_of(shape[3:])))


def _read(x: Tensor, at: Sequence[Index], mask: Expr | None) -> Scalar:
    """Return an element, or 0 where ``mask`` is false."""
    inside = Scalar(x.at(at, mask))
    return inside if mask is None else f.where(Scalar(mask), inside, 0)


def _rows(x: Tensor) -> Tensor:
    """Return channels-last images as a row for each place."""
    batch, channels, height, width = x.shape
    image, row, column, channel = formal((batch, height, width, channels))
    rows = x.mapped((batch, height, width, channels), (image, channel, row, column))
    return rows.reshaped((batch * height * width, channels))


def _images(rows: Tensor, shape: Shape) -> Tensor:
    """Return a row for each place as images."""
    batch, channels, height, width = shape
    axes = formal(shape)
    return rows.reshaped((batch, height, width, channels)).mapped(shape, [axes[0], axes[2], axes[3], axes[1]])


def _matrix(weight: Tensor) -> Tensor:
    return weight.reshaped((weight.shape[0], size_of(weight.shape[1:])))


def _transposed(x: Tensor) -> Tensor:
    shape = tuple(reversed(x.shape))
    return x.mapped(shape, tuple(reversed(formal(shape))))


def _buffer(b: Builder, rows: Tensor, columns: Index) -> Buffer:
    return b.new_buffer(rows.dtype, (rows.shape[0], columns))
