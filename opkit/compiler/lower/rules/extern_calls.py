"""Operators that become calls of torch: products of matrices, attention, convolutions, sorts, FFTs.

Products of float32 on AMD's processors are called as torch's, and are opkit's own (``run/driver.py``).

Products and convolutions are called with operands of the dtype and layout that torch is fastest with.

A bias is added by a step of its own, which joins what comes after; torch's ``addmm`` would copy it into the result first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import where
from opkit.compiler.ir.graph import TensorType
from opkit.compiler.ir.index import Index, contiguous
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.rules.convolution_products import convolved, image_gradient, is_product, weight_gradient
from opkit.compiler.lower.rules.joining import within
from opkit.compiler.lower.rules.pooling import Windows
from opkit.compiler.lower.rules.winograd import is_winograd, winograd
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.target import LoweringTarget
from opkit.compiler.lower.tensors import Shape, Tensor, channels_last, formal, is_dense

TABLE = Table()

MIN_PADDED = 256
"""A product with a smaller size is not padded: copies would take as long as what they save."""

MIN_WEIGHT_RATIO = 4
"""How many times as large as its images the weight of a convolution is that is called with contiguous images."""

MIN_CHANNELS, MIN_WINDOW = 16, 16
"""Of a depthwise convolution whose weight has its gradient from a kernel: channels, and elements of the window."""

_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


# ---- matrices --------------------------------------------------------------------------------------------------------


@TABLE.rule("aten.mm.default", "aten.bmm.default")
def _product(b: Builder, x: Tensor, y: Tensor, out_dtype: Any = None) -> Tensor:
    if out_dtype is not None:
        raise NoRule("the result has another dtype than the operands")
    return _rounded(b, _multiplied(b, b.node.target, x, y), b.result())


@TABLE.rule("aten.addmm.default", "aten.baddbmm.default")
def _product_plus(b: Builder, bias: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if beta != 1 or alpha != 1:
        raise NoRule("the product is scaled")
    kind = b.result()
    if not DTYPES[kind.dtype].kind == "float":
        raise NoRule("a product of integers")
    narrow = kind.dtype in ("bf16", "f16") and b.target.narrow_products
    sizes, strided = [*x.shape[-2:], y.shape[-1]], x.strided()
    adjacent = strided is not None and strided.strides[-2] == 1
    padded = is_padded(b.target, b.graph.sizes, x.dtype, sizes, adjacent)
    if narrow and not padded:  # libraries add the bias before they round
        return b.call(b.node.target, (bias, x, y), [b.new_buffer(kind.dtype, kind.shape)], out=True)[0]
    product = _multiplied(b, "aten.mm.default" if len(kind.shape) == 2 else "aten.bmm.default", x, y)
    inner = product.dtype
    return b.cast_elementwise(element(product, kind.shape) + element(bias, kind.shape, inner), kind)


def _multiplied(b: Builder, target: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the product, in the type in which it is computed."""
    if x.dtype != y.dtype:
        raise NoRule("its operands have different dtypes")
    x, y = _wide(b, x), _wide(b, y)
    *batch, rows, inner, columns = *x.shape, y.shape[-1]
    step = _padding_step(b.target, b.graph.sizes, x.dtype, [rows, inner, columns])
    strided = x.strided()
    x = _padded(b, x, step if strided is not None and strided.strides[-2] == 1 else 1, step)
    y = _padded(b, y, step, step)
    out = b.new_buffer(x.dtype, (*x.shape[:-1], y.shape[-1]))
    product = b.call(target, (x, y), [out], out=True)[0]
    shape = (*batch, rows, columns)
    return product if product.shape == shape else product.mapped(shape, formal(shape))


def is_padded(
    target: LoweringTarget, known: Mapping[str, int], dtype: str, sizes: Sequence[Index], adjacent: bool
) -> bool:
    """Return whether operands of a product of these sizes are padded.

    The number of rows matters only to a left operand whose rows lie next to each other (``adjacent``): of others it is no
    distance in memory.
    """
    step = _padding_step(target, known, dtype, sizes)
    return any(_multiple(n, step) != n for n in sizes[0 if adjacent else 1 :])


def _padding_step(target: LoweringTarget, known: Mapping[str, int], dtype: str, sizes: Sequence[Index]) -> int:
    """Return what the sizes of a product should be multiples of: 1 if it is too small to gain from padded copies."""
    small = min(estimate(n, known) for n in sizes) < MIN_PADDED
    return 1 if small or dtype not in ("bf16", "f16") else target.product_alignment


def _padded(b: Builder, x: Tensor, *steps: int) -> Tensor:
    """Return a matrix, or a batch of them, with zeros after its rows and columns, laid out as it is in memory."""
    shape = (*x.shape[:-2], *map(_multiple, x.shape[-2:], steps))
    if shape == x.shape:
        return x
    strided = x.strided()
    if strided is not None and strided.strides[-2] == 1:
        return _transposed(_padded(b, _transposed(x), *reversed(steps)))
    axes = formal(shape)
    inside = within(axes, x.shape, shape)
    assert inside is not None
    body = where(inside, x.at(axes, inside), f.number(0, x.dtype).expr)
    return b.compute(b.new_buffer(x.dtype, shape), shape, body)


def _multiple(n: Index, step: int) -> Index:
    return n if n.constant is None else n + -n.constant % step


def _transposed(x: Tensor) -> Tensor:
    *batch, rows, columns = x.shape
    *axes, column, row = formal((*batch, columns, rows))
    return x.mapped((*batch, columns, rows), (*axes, row, column))


def _wide(b: Builder, x: Tensor) -> Tensor:
    """Return a tensor as products are computed: a narrow float as float32 on some targets, in memory laid out as it is."""
    if b.target.narrow_products or x.dtype not in ("bf16", "f16"):
        return x
    strided = x.strided()
    strides = strided.strides if strided is not None and is_dense(x.shape, strided.strides) else None
    buffer = b.new_buffer("f32", x.shape, strides)
    return b.compute(buffer, x.shape, f.cast(element(x, x.shape), "f32").expr)


def _rounded(b: Builder, x: Tensor, kind: TensorType) -> Tensor:
    """Return a result in the type that the graph has for it."""
    return x if x.dtype == kind.dtype else b.cast_elementwise(element(x, x.shape), kind)


# ---- attention -------------------------------------------------------------------------------------------------------


@TABLE.rule(f"{_FLASH}.default", f"{_FLASH}_backward.default")
def _attention(b: Builder, *args: Any, **kwargs: Any) -> Any:
    """Call attention of narrow floats with float32, as ATen computes tiles by products."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if b.target.narrow_products or not any(t.dtype in ("bf16", "f16") for t in tensors):
        raise NoRule("")
    kinds = b.node.result
    assert isinstance(kinds, tuple)
    types = [kind for kind in kinds if isinstance(kind, TensorType)]
    outs = [b.extern_buffer(_in_type(b, kind, kind.strides)) for kind in types]
    wide = [_wide(b, a) if isinstance(a, Tensor) else a for a in args]
    wide_kwargs = {k: _wide(b, a) if isinstance(a, Tensor) else a for k, a in kwargs.items()}
    results = b.call(b.node.target, wide, outs, wide_kwargs)
    return tuple(_rounded(b, x, kind) for x, kind in zip(results, kinds, strict=True) if isinstance(kind, TensorType))


# ---- convolutions ----------------------------------------------------------------------------------------------------


@TABLE.rule("aten.convolution.default")
def _convolution(
    b: Builder,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    kind = b.result()
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    _check_images(b, x, kind, transposed)
    windows = Windows(2, weight.shape[2:], stride, padding, dilation)
    if is_product(b, weight, kind.shape, windows, groups):
        kind = dataclasses.replace(kind, strides=channels_last(kind.shape))
        image = convolved(b, x, weight, kind.shape, windows)
    elif is_winograd(b, x, weight, kind.shape, windows, groups):
        kind = dataclasses.replace(kind, strides=channels_last(kind.shape))
        image = winograd(b, as_image(b, x), weight, kind.shape, windows.padding, False)
    else:
        layout = _image_layout(b, weight, x.shape, kind.shape)
        kind = dataclasses.replace(kind, strides=layout(kind.shape))
        out = b.extern_buffer(_in_type(b, kind, kind.strides))
        image = b.call(b.node.target, (as_image(b, x, layout(x.shape)), _wide(b, weight), None, *settings), [out])[0]
    if bias is None:
        return _rounded(b, image, kind)
    by_channel = bias.reshaped((bias.shape[0], 1, 1))
    return b.cast_elementwise(element(image, kind.shape) + element(by_channel, kind.shape, image.dtype), kind)


@TABLE.rule("aten.convolution_backward.default")
def _convolution_backward(
    b: Builder, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *settings: Any, **_: Any
) -> tuple[Tensor | None, ...]:
    *rest, transposed, _, groups, _ = settings
    _check_images(b, x, None, transposed)
    kinds: Any = b.node.result
    windows = Windows(2, weight.shape[2:], *rest)
    if is_product(b, weight, grad.shape, windows, groups):
        image = as_image(b, grad)
        results = [
            image_gradient(b, image, weight, x.shape, windows) if isinstance(kinds[0], TensorType) else None,
            weight_gradient(b, image, x, weight, windows) if isinstance(kinds[1], TensorType) else None,
        ]
    else:
        layout = _image_layout(b, weight, x.shape, grad.shape)
        image = as_image(b, grad, layout(grad.shape))
        results = _called_gradients(b, image, x, weight, layout, settings)
    kind = kinds[2]
    if not isinstance(kind, TensorType):
        return (*results, None)
    dims = [k for k in range(len(image.shape)) if k != 1]
    body = element(image, image.shape, DTYPES[kind.dtype].compute)
    return (*results, b.reduce("sum", body, image.shape, dims, kind.dtype))


def _called_gradients(
    b: Builder, image: Tensor, x: Tensor, weight: Tensor, layout: Callable[[Shape], Shape], settings: Sequence[Any]
) -> list[Tensor | None]:
    """Return the gradients of the images and of the weight, which torch computes, or Winograd's method and a kernel."""
    kinds: Any = b.node.result
    *rest, transposed, output_padding, groups, mask = settings
    stride, (height, width) = rest[0], weight.shape[2:]
    own = _by_own_kernel(b, weight, x, groups) and isinstance(kinds[1], TensorType)
    windows = Windows(2, weight.shape[2:], *rest)
    fewer = is_winograd(b, x, weight, image.shape, windows, groups) and isinstance(kinds[0], TensorType)
    outs = [
        b.extern_buffer(_in_type(b, kind, layout(kind.shape))) if isinstance(kind, TensorType) and not skipped else None
        for kind, skipped in zip(kinds[:2], (fewer, own), strict=True)
    ]
    output_mask = [bool(m) and out is not None for m, out in zip(mask, outs, strict=False)]
    # oneDNN writes out of bounds for these in channels-last layout (torch 2.14)
    fails = height == 1 and width == 1 and any(step != 1 for step in stride) and int(x.shape[1].constant or 0) < 16
    operands = (image, as_image(b, x, (contiguous if fails else layout)(x.shape)), _wide(b, weight), None)
    settings = (*rest, transposed, output_padding, groups, [*output_mask, False])
    gradients = b.call(b.node.target, (*operands, *settings), [*outs, None]) if any(output_mask) else [None, None]
    results: list[Tensor | None] = [
        _rounded(b, gradient, dataclasses.replace(kind, strides=layout(kind.shape)))
        if isinstance(kind, TensorType) and gradient
        else None
        for gradient, kind in zip(gradients[:2], kinds[:2], strict=True)
    ]
    if fewer:
        results[0] = winograd(b, as_image(b, image), weight, x.shape, windows.padding, True)
    if own:
        results[1] = _depthwise_weight_gradient(b, image, x, kinds[1], *rest)
    return results


def _by_own_kernel(b: Builder, weight: Tensor, x: Tensor, groups: int) -> bool:
    """Return whether a kernel computes the gradient of a convolution's weight: where each channel has a large window.

    Torch takes 2 to 13 times as long for windows of 5 x 5 and 7 x 7, and less for 3 x 3.
    """
    channels, rest, *window = (int(n.constant or 0) for n in weight.shape)
    depthwise = rest == 1 and channels == groups == x.shape[1].constant
    return b.target.tiles is None and depthwise and channels >= MIN_CHANNELS and math.prod(window) >= MIN_WINDOW


def _depthwise_weight_gradient(
    b: Builder, grad: Tensor, x: Tensor, kind: TensorType, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Return the sum over images and places of a gradient times what the window's element lay on."""
    stride, padding, dilation = ([*each] * (2 // len(each)) for each in (stride, padding, dilation))
    batch, channels, *sizes = x.shape
    shape = (batch, channels, *(n + 2 * p for n, p in zip(sizes, padding, strict=True)))
    image, channel, *at = formal(shape)
    place = (image, channel, *(a - p for a, p in zip(at, padding, strict=True)))
    inside = within(place, x.shape)
    body = x.at(place) if inside is None else where(inside, x.at(place, inside), f.number(0, x.dtype).expr)
    bordered = b.compute(b.new_buffer(x.dtype, shape, channels_last(shape)), shape, body)
    axes = (*kind.shape, grad.shape[0], *grad.shape[2:])
    channel, _, *window, image, row, column = formal(axes)
    read = [w * d + a * s for w, d, a, s in zip(window, dilation, (row, column), stride, strict=True)]
    inner = DTYPES[kind.dtype].compute
    factors = (grad.at((image, channel, row, column)), bordered.at((image, channel, *read)))
    first, second = (f.cast(Scalar(each), inner) for each in factors)
    return b.reduce("sum", first * second, axes, (4, 5, 6), kind.dtype)


def _image_layout(b: Builder, weight: Tensor, *images: Shape) -> Callable[[Shape], Shape]:
    """Return the layout of a convolution's images, by their sizes: channels-last, except for small images and a large weight.

    Torch copies the weight, and its gradient, to the layout of the images if that is channels-last.
    """
    strided = weight.strided()
    numbers = [[int(n.constant or 0) for n in shape] for shape in (weight.shape, *images)]
    size, *others = map(math.prod, numbers)
    copied = any(n != 1 for n in numbers[0][2:]) and strided is not None and strided.strides == contiguous(weight.shape)
    return contiguous if b.target.tiles is None and copied and size > MIN_WEIGHT_RATIO * sum(others) else channels_last


def _check_images(b: Builder, x: Tensor, kind: TensorType | None, transposed: Any) -> None:
    if not b.target.channels_last or len(x.shape) != 4 or transposed or DTYPES[x.dtype].kind != "float":
        raise NoRule("")
    if any(n.constant is None or n == 0 for n in (*x.shape, *(kind.shape if kind else ()))):
        raise NoRule("its sizes are not known")
    if x.shape[1] == 1:
        raise NoRule("")  # with a single channel, torch sees both layouts in any tensor


def as_image(b: Builder, x: Tensor, strides: tuple[Index, ...] | None = None) -> Tensor:
    """Return a batch of images in a layout, channels-last or another, in the type in which products are computed."""
    strides, strided = strides or channels_last(x.shape), x.strided()
    narrow = x.dtype in ("bf16", "f16") and not b.target.narrow_products
    if strided is not None and strided.strides == strides and not narrow:
        return x
    dtype = "f32" if narrow else x.dtype
    return b.compute(b.new_buffer(dtype, x.shape, strides), x.shape, f.cast(element(x, x.shape), dtype).expr)


def _in_type(b: Builder, kind: TensorType, strides: tuple[Index, ...]) -> TensorType:
    """Return the type of a result as the call computes it: with these strides, and float32 if it computes narrow floats so."""
    narrow = kind.dtype in ("bf16", "f16") and not b.target.narrow_products
    return dataclasses.replace(kind, dtype="f32" if narrow else kind.dtype, strides=strides)


_OUT: dict[str, Any] = {"out": True}
_PLAIN: dict[str, Any] = {}

_RANDOM = (
    *(f"aten.{name}.default" for name in ("rand", "rand_like", "randn", "randn_like", "randperm", "uniform")),
    *overloads("normal_functional"),
    *overloads("bernoulli", "default", "p"),
    *overloads("randint", "default", "low"),
)
"""Random operators that draw the numbers of eager mode; a kernel would draw others, and of whatever comes after it."""

_OF_PACKAGES = (
    *("torchvision.nms.default", "torchvision.roi_align.default", "torchvision._roi_align_backward.default"),
    *("transformers.grouped_mm_fallback.default", "transformers.grouped_mm_fallback_backward.default"),
    *overloads("_grouped_mm"),
)
"""Kernels of torchvision, and products of groups of rows whose sizes the data decide: docs/model_zoo.md says why."""

EXTERNS: dict[str, dict[str, Any]] = {
    **dict.fromkeys([f"aten.{name}.default" for name in ("addmv", "mv", "dot", "_addmm_activation")], _OUT),
    **dict.fromkeys(["opkit.packed_linear.default", "opkit.packed_convolution.default"], _OUT),
    **dict.fromkeys([*overloads("sort", "default", "stable"), *overloads("topk")], _PLAIN),
    **dict.fromkeys([f"aten.{name}.default" for name in ("_fft_c2c", "_fft_r2c", "_fft_c2r")], _PLAIN),
    **dict.fromkeys(_RANDOM, _PLAIN),
    **dict.fromkeys(_OF_PACKAGES, _PLAIN),
}
"""Options of extern calls, by the operator's name: fields of ``Extern``."""

ALIASING = overloads("real") + overloads("imag") + overloads("view_as_real") + overloads("view_as_complex")
ALIASING += overloads("view", "dtype") + overloads("_conj") + overloads("_neg_view") + overloads("conj")
