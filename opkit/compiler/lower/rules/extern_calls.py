"""Products of matrices, attention and convolutions: calls of torch, of operands in the type and layout it is fastest with.

A bias is added by a step of its own, which joins what comes after; torch's ``addmm`` would copy it into the result first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.graph import TensorType
from opkit.compiler.ir.index import Index, index
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.tensors import Tensor, channels_last, formal, is_dense

TABLE = Table()

_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"


# ---- matrices --------------------------------------------------------------------------------------------------------


@TABLE.rule("aten.mm.default", "aten.bmm.default")
def _product(b: Builder, x: Tensor, y: Tensor, out_dtype: Any = None) -> Tensor:
    if out_dtype is not None:
        raise NoRule("the call names a type of the result")
    return _rounded(b, _multiplied(b, b.node.target, x, y), b.result())


@TABLE.rule("aten.addmm.default", "aten.baddbmm.default")
def _product_plus(b: Builder, bias: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if beta != 1 or alpha != 1:
        raise NoRule("the product is scaled")
    kind = b.result()
    if not DTYPES[kind.dtype].kind == "float":
        raise NoRule("a product of integers")
    if kind.dtype in ("bf16", "f16") and b.target.narrow_products:  # oneDNN adds the bias before it rounds
        return b.call(b.node.target, (bias, x, y), [b.new_buffer(kind.dtype, kind.shape)], out=True)[0]
    product = _multiplied(b, "aten.mm.default" if len(kind.shape) == 2 else "aten.bmm.default", x, y)
    inner = product.dtype
    return b.elementwise(f.cast(element(product, kind.shape) + element(bias, kind.shape, inner), kind.dtype).expr, kind)


def _multiplied(b: Builder, target: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the product, in the type in which it is computed."""
    x, y = _operand(b, x), _operand(b, y)
    out = b.new_buffer(x.dtype, (*x.shape[:-1], y.shape[-1]))
    return b.call(target, (x, y), [out], out=True)[0]


def _operand(b: Builder, x: Tensor) -> Tensor:
    return x if b.target.narrow_products else _wide(b, x)


def _wide(b: Builder, x: Tensor) -> Tensor:
    """Return a tensor of a narrow float as float32, in memory laid out as it is."""
    if x.dtype not in ("bf16", "f16"):
        return x
    strided = x.strided()
    strides = strided.strides if strided is not None and is_dense(x.shape, strided.strides) else None
    buffer = b.new_buffer("f32", x.shape, strides)
    return b.compute(buffer, x.shape, f.cast(element(x, x.shape), "f32").expr)


def _rounded(b: Builder, x: Tensor, kind: TensorType) -> Tensor:
    """Return a result in the type that the graph has for it."""
    return x if x.dtype == kind.dtype else b.elementwise(f.cast(element(x, x.shape), kind.dtype).expr, kind)


# ---- attention -------------------------------------------------------------------------------------------------------


@TABLE.rule(f"{_FLASH}.default", f"{_FLASH}_backward.default")
def _attention(b: Builder, *args: Any, **kwargs: Any) -> Any:
    """Attention of narrow floats in float32; ATen's own tiles are products, too."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if b.target.narrow_products or not any(t.dtype in ("bf16", "f16") for t in tensors):
        raise NoRule("")
    kinds = b.node.result
    assert isinstance(kinds, tuple)
    outs = [_widened(b, kind) for kind in kinds if isinstance(kind, TensorType)]
    wide = [_wide(b, a) if isinstance(a, Tensor) else a for a in args]
    wide_kwargs = {k: _wide(b, a) if isinstance(a, Tensor) else a for k, a in kwargs.items()}
    found = b.call(b.node.target, wide, outs, wide_kwargs)
    return tuple(_rounded(b, x, kind) for x, kind in zip(found, kinds, strict=True) if isinstance(kind, TensorType))


def _widened(b: Builder, kind: TensorType) -> Any:
    dtype = "f32" if kind.dtype in ("bf16", "f16") else kind.dtype
    return b.extern_buffer(dataclasses.replace(kind, dtype=dtype))


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
    out = b.extern_buffer(_in_type(b, kind, channels_last(kind.shape)))
    found = b.call(b.node.target, (_image(b, x), _operand(b, weight), None, *settings), [out])[0]
    if bias is None:
        return _rounded(b, found, dataclasses.replace(kind, strides=channels_last(kind.shape)))
    body = element(found, kind.shape) + element(_by_channel(bias, kind.shape), kind.shape, found.dtype)
    return b.elementwise(f.cast(body, kind.dtype).expr, dataclasses.replace(kind, strides=channels_last(kind.shape)))


@TABLE.rule("aten.convolution_backward.default")
def _convolution_backward(
    b: Builder, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *settings: Any, **_: Any
) -> tuple[Tensor | None, ...]:
    *rest, transposed, output_padding, groups, mask = settings
    _check_images(b, x, None, transposed)
    kinds: Any = b.node.result
    outs = [
        b.extern_buffer(_in_type(b, kind, strides)) if isinstance(kind, TensorType) else None
        for kind, strides in zip(kinds[:2], (channels_last(x.shape), channels_last(weight.shape)), strict=True)
    ]
    output_mask = [bool(m) and out is not None for m, out in zip(mask, outs, strict=False)]
    image = _image(b, grad)
    arguments = (
        image,
        _image(b, x),
        _operand(b, weight),
        None,
        *rest,
        transposed,
        output_padding,
        groups,
        [*output_mask, False],
    )
    found = b.call(b.node.target, arguments, [*outs, None])
    results = [
        _rounded(b, x, dataclasses.replace(k, strides=channels_last(k.shape)))
        if isinstance(k, TensorType) and x
        else None
        for x, k in zip(found[:2], kinds[:2], strict=True)
    ]
    return (*results, _bias_gradient(b, image, kinds[2]))


def _bias_gradient(b: Builder, grad: Tensor, kind: Any) -> Tensor | None:
    if not isinstance(kind, TensorType):
        return None
    dims = [k for k in range(len(grad.shape)) if k != 1]
    return b.reduce("sum", f.cast(element(grad, grad.shape), DTYPES[kind.dtype].compute), grad.shape, dims, kind.dtype)


def _check_images(b: Builder, x: Tensor, kind: TensorType | None, transposed: Any) -> None:
    if not b.target.channels_last or len(x.shape) != 4 or transposed or DTYPES[x.dtype].kind != "float":
        raise NoRule("")
    if any(n.constant is None or n == 0 for n in (*x.shape, *(kind.shape if kind else ()))):
        raise NoRule("its sizes are not known")
    if x.shape[1] == 1:
        raise NoRule("")  # torch takes a single channel for both layouts


def _image(b: Builder, x: Tensor) -> Tensor:
    """Return a batch of images with the channels innermost, in the type in which products are computed."""
    strides, strided = channels_last(x.shape), x.strided()
    narrow = x.dtype in ("bf16", "f16") and not b.target.narrow_products
    if strided is not None and strided.strides == strides and not narrow:
        return x
    dtype = "f32" if narrow else x.dtype
    return b.compute(b.new_buffer(dtype, x.shape, strides), x.shape, f.cast(element(x, x.shape), dtype).expr)


def _in_type(b: Builder, kind: TensorType, strides: tuple[Index, ...]) -> TensorType:
    narrow = kind.dtype in ("bf16", "f16") and not b.target.narrow_products
    return dataclasses.replace(kind, dtype="f32" if narrow else kind.dtype, strides=strides)


def _by_channel(bias: Tensor, shape: Sequence[Index]) -> Tensor:
    return bias.mapped((bias.shape[0], 1, 1), [formal((bias.shape[0], index(1), index(1)))[0]])


_OUT: dict[str, Any] = {"out": True}
_PLAIN: dict[str, Any] = {}

EXTERNS: dict[str, dict[str, Any]] = {
    **dict.fromkeys([f"aten.{name}.default" for name in ("addmv", "mv", "dot")], _OUT),
    **dict.fromkeys([*overloads("sort", "default", "stable"), *overloads("topk")], _PLAIN),
    **dict.fromkeys([*overloads("_local_scalar_dense"), *overloads("_fft_c2c"), *overloads("_fft_r2c")], _PLAIN),
    **dict.fromkeys([*overloads("_fft_c2r"), *overloads("randperm")], _PLAIN),
}
"""Options of extern calls, by the operator's name: fields of ``Extern``."""

ALIASING = overloads("real") + overloads("imag") + overloads("view_as_real") + overloads("view_as_complex")
ALIASING += overloads("view", "dtype") + overloads("_conj") + overloads("_neg_view") + overloads("conj")

FROM_STORAGE = frozenset(f"aten.as_strided{kind}.default" for kind in ("", "_copy", "_scatter"))
"""Operators whose offset is one into a tensor's storage, wherever in it the tensor begins."""
