"""``opkit::packed_linear`` and ``opkit::packed_convolution``: products with weights that were packed before, on CPUs.

A packed weight is a float32 tensor of one dimension: panels of 16 columns, each by rows of the depth (``cpp_ext/product``). For
convolutions by Winograd's method, which takes fewer multiplications, it has more numbers: the weight's values at the points of a
tile (``winograd.cpp``). It is the same on all processors. Importing this module defines the operators that exported models call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from opkit import _core
from opkit.errors import ArgumentError

PANEL = 16
"""The columns of a panel."""

_MAX_DEPTH = 768  # numbers that the kernels sum at once
_MIN_TILES = 32  # for which it is worth reading a weight at points, which is larger
_MAX_WEIGHT = 1e30  # its values at points, and their sums, are finite

_CHANNELS_LAST = torch.channels_last
_library = torch.library.Library("opkit", "FRAGMENT")
_LINEAR = "Tensor x, Tensor packed, int columns, Tensor? bias, str activation"
_CONVOLUTION = (
    "Tensor x, Tensor packed, Tensor? bias, Tensor? addend, int[2] kernel, int[2] stride, int[2] padding, int[2] dilation, "
    "int groups, int out_channels, int tile, str activation"
)
for _name, _arguments in (("packed_linear", _LINEAR), ("packed_convolution", _CONVOLUTION)):
    _library.define(f"{_name}({_arguments}) -> Tensor")
    _library.define(f"{_name}.out({_arguments}, *, Tensor(a!) out) -> Tensor(a!)")


def pack_linear(weight: Tensor) -> Tensor:
    """Pack the weight ``(out, in)`` of a product.

    Args:
        weight: a float32 tensor on the CPU, of any strides.

    Example:
        >>> packed = pack_linear(torch.eye(3))
        >>> torch.ops.opkit.packed_linear(torch.ones(2, 3), packed, 3, None, "none").shape
        torch.Size([2, 3])
    """
    columns, depth = weight.shape
    packed = torch.empty(_core.packed_floats(columns, depth))
    _core.pack(weight.data_ptr(), weight.stride(0), weight.stride(1), columns, depth, packed.data_ptr())
    return packed


def pack_convolution(weight: Tensor, groups: int, tile: int = 0) -> Tensor:
    """Pack the weight of a convolution.

    Args:
        weight: ``(out, in / groups, height, width)``, a float32 tensor on the CPU.
        groups: the convolution's.
        tile: 2 or 4, for Winograd's method with tiles of so many rows; 0 for the direct one.

    Raises:
        ArgumentError: Winograd's method cannot compute convolutions with this weight.
    """
    weight = weight.contiguous()
    out, inner, height, width = weight.shape
    if tile and not _suits_winograd(weight, groups, tile):
        raise ArgumentError(
            f"opkit.ship.products.pack_convolution: tile={tile} does not fit weights of {[*weight.shape]} and {groups} groups. "
            f"Winograd's method takes tiles of 2 and 4, one group, 3 x 3 taps, multiples of {PANEL} channels (at most "
            f"{_MAX_DEPTH} of the input), and weights below {_MAX_WEIGHT:.0e}. Pass tile=0."
        )
    packed = torch.empty(_packed_size(out, inner, (height, width), groups, tile))
    if tile:
        _core.pack_winograd(weight.data_ptr(), out, inner, tile, packed.data_ptr())
    else:
        _core.pack_convolution(weight.data_ptr(), out, inner, height, width, groups, packed.data_ptr())
    return packed


def winograd_tile(
    weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int, size: Sequence[int]
) -> int:
    """Return the tile for which a convolution is computed fastest; 0 is the direct method.

    It is the largest tile of which an image's result has 32: for fewer, the time goes into reading the weight, which is 16 / 9 as
    large with tiles of 2 and 4 times as large with tiles of 4.

    Args:
        weight: ``(out, in / groups, height, width)``.
        stride, dilation, groups: the convolution's.
        size: the height and width of its result.
    """
    if any(n != 1 for n in (*stride, *dilation)):
        return 0
    for tile in (4, 2):
        if math.prod(-(-n // tile) for n in size) >= _MIN_TILES and _suits_winograd(weight, groups, tile):
            return tile
    return 0


def _suits_winograd(weight: Tensor, groups: int, tile: int) -> bool:
    out, inner, *kernel = weight.shape
    shapes_fit = tile in (2, 4) and groups == 1 and kernel == [3, 3] and out % PANEL == inner % PANEL == 0
    return shapes_fit and 0 < inner <= _MAX_DEPTH and bool((weight.abs() < _MAX_WEIGHT).all())


def _packed_size(out: int, inner: int, kernel: Sequence[int], groups: int, tile: int) -> int:
    """Return how many numbers a convolution's packed weight has."""
    if tile:
        return _core.packed_winograd_floats(out, inner, tile)
    return _core.packed_convolution_floats(out, inner, kernel[0], kernel[1], groups)


def _linear(
    x: Tensor, packed: Tensor, columns: int, bias: Tensor | None, activation: str, *, out: Tensor | None = None
) -> Tensor:
    *outer, depth = x.shape
    if not x.is_contiguous():
        x = x.contiguous()
    y = _result((*outer, columns), torch.contiguous_format, out)
    rows = y.numel() // columns if columns else 0
    if (
        x.dtype is not torch.float32
        or packed.numel() != -(-columns // PANEL) * PANEL * depth
        or _is_odd(packed, columns, bias)
    ):
        raise ArgumentError(
            f"opkit::packed_linear: x {x.dtype} {[*x.shape]}, a packed weight of {packed.numel()} numbers and a bias "
            f"{None if bias is None else [*bias.shape]} do not fit {columns} columns. All must be float32; pack the weight by "
            "opkit.ship.products.pack_linear."
        )
    address = 0 if bias is None else bias.data_ptr()
    _core.linear(x.data_ptr(), depth, packed.data_ptr(), address, y.data_ptr(), rows, columns, depth, activation)
    return y if out is None or out is y else out.copy_(y)


def _is_odd(packed: Tensor, columns: int, bias: Tensor | None) -> bool:
    """Return whether the packed weight or the bias is not as the kernels read it."""
    if packed.dtype is not torch.float32 or not packed.is_contiguous():
        return True
    return bias is not None and (bias.dtype is not torch.float32 or bias.numel() != columns or not bias.is_contiguous())


def _convolution(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out_channels: int,
    tile: int,
    activation: str,
    *,
    out: Tensor | None = None,
) -> Tensor:
    batch, channels, height, width = x.shape
    if not x.is_contiguous(memory_format=_CHANNELS_LAST):
        x = x.contiguous(memory_format=_CHANNELS_LAST)
    size = _size(x, kernel, stride, padding, dilation)
    y = _result((batch, out_channels, *size), _CHANNELS_LAST, out)
    if addend is not None and not addend.is_contiguous(memory_format=_CHANNELS_LAST):
        addend = addend.contiguous(memory_format=_CHANNELS_LAST)
    if (
        x.dtype is not torch.float32
        or channels % groups
        or out_channels % groups
        or packed.numel() != _packed_size(out_channels, channels // groups, kernel, groups, tile)
        or (tile and (*kernel, *stride, *dilation, groups, channels % PANEL) != (3, 3, 1, 1, 1, 1, 1, 0))
        or _is_odd(packed, out_channels, bias)
        or (addend is not None and (addend.shape != y.shape or addend.dtype is not torch.float32))
    ):
        raise ArgumentError(
            f"opkit::packed_convolution: x {x.dtype} {[*x.shape]}, a packed weight of {packed.numel()} numbers, a bias "
            f"{None if bias is None else [*bias.shape]} and an addend {None if addend is None else [*addend.shape]} do not fit "
            f"{out_channels} channels, the kernel {[*kernel]}, {groups} groups and tile={tile}. All must be float32; pack the "
            "weight by opkit.ship.products.pack_convolution."
        )
    added = [0 if each is None else each.data_ptr() for each in (bias, addend)]
    sizes = (batch, channels, height, width, out_channels, *size)
    _core.convolution(
        x.data_ptr(), packed.data_ptr(), added[0], added[1], y.data_ptr(), sizes, kernel, stride, padding, dilation, groups,
        activation, tile, True,
    )  # fmt: skip
    return y if out is None or out is y else out.copy_(y)


def _result(shape: tuple[int, ...], layout: torch.memory_format, out: Tensor | None) -> Tensor:
    """Return a tensor that the kernels can write to: ``out`` if it is laid out so."""
    if out is None:
        return torch.empty(shape, memory_format=layout)
    if out.shape != shape or out.dtype is not torch.float32:
        raise ArgumentError(
            f"opkit: out= is a tensor of {out.dtype} {[*out.shape]}, and the result is of torch.float32 {[*shape]}."
        )
    return out if out.is_contiguous(memory_format=layout) else torch.empty(shape, memory_format=layout)


def _size(x: Tensor, *settings: Sequence[int]) -> list[int]:
    """Return the height and width of a convolution's result."""
    each = zip(x.shape[2:], *settings, strict=True)
    return [
        (n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for n, kernel, stride, padding, dilation in each
    ]


def _fake_linear(x: Tensor, packed: Tensor, columns: int, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns))


def _fake_convolution(
    x: Tensor, packed: Tensor, bias: object, addend: object, kernel: Sequence[int], *settings: object
) -> Tensor:
    stride, padding, dilation, _, channels, *_ = settings
    size = (x.shape[0], channels, *_size(x, kernel, stride, padding, dilation))  # pyright: ignore[reportArgumentType]
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=_CHANNELS_LAST)  # pyright: ignore


for _name, _function in (("packed_linear", _linear), ("packed_convolution", _convolution)):
    _library.impl(_name, _function, "CPU")
    _library.impl(f"{_name}.out", _function, "CPU")
torch.library.register_fake("opkit::packed_linear", _fake_linear, lib=_library)
torch.library.register_fake("opkit::packed_convolution", _fake_convolution, lib=_library)

FUNCTIONS = {"opkit.packed_linear.default": _linear, "opkit.packed_convolution.default": _convolution}
"""The functions of the operators, by their names in plans: loaded models call them without torch's dispatcher."""
