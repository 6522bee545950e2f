"""Convolutions of 3 x 3 taps by Winograd's method, with fewer multiplications than torch's (``cpp_ext/product/winograd.cpp``).

Tiles of 2 x 2 results take 16 multiplications for each pair of channels in place of 36. Next to float64 they err 0.6 times
as much as oneDNN's convolutions. The weight is transformed in each call, which pays only for many tiles. Where products are
opkit's own, which they are on AMD's processors, ResNet-50's convolutions with at most 256 channels take 0.55 to 0.65 of
oneDNN's time with AVX2, and 0.6 to 0.75 with AVX-512. The gradient of the images is such a convolution, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from opkit.compiler.lower.builder import Builder
from opkit.compiler.lower.rules.pooling import Windows
from opkit.compiler.lower.tensors import Shape, Tensor, channels_last

TARGET = "opkit.winograd"
"""The function of ``run/torch_operators.py``."""

PANEL, MIN_CHANNELS = 16, 32
"""The channels are a multiple of a panel's, and at least so many."""

MAX_WEIGHT = 1 << 17
"""The most pairs of channels. The transformed weight, 16 numbers for each, stays in a last-level cache."""

MIN_TILES = 64
"""The fewest tiles for which transforming the weight pays."""


def is_winograd(b: Builder, x: Tensor, weight: Tensor, results: Shape, windows: Windows, groups: int) -> bool:
    """Return whether a convolution, whose sizes are known, is computed so, and the gradient of its images."""
    if not b.target.own_products or groups != 1 or not x.dtype == weight.dtype == "f32" or weight.strided() is None:
        return False
    if [*windows.size, *windows.step, *windows.dilation] != [3, 3, 1, 1, 1, 1] or any(
        n not in (0, 1, 2) for n in windows.padding
    ):
        return False
    batch, channels, *sizes = (int(n.constant or 0) for n in results)
    depth = int(weight.shape[1].constant or 0)
    tiles = batch * -(-sizes[0] // 2) * -(-sizes[1] // 2)
    fits = min(channels, depth) >= MIN_CHANNELS and channels % PANEL == depth % PANEL == 0
    return fits and channels * depth <= MAX_WEIGHT and tiles >= MIN_TILES


def winograd(b: Builder, x: Tensor, weight: Tensor, shape: Sequence, padding: Sequence, transposed: bool) -> Tensor:
    """Return the convolution of images that are channels-last, or with ``transposed`` the transposed one, channels-last."""
    out = b.new_buffer(x.dtype, shape, channels_last(shape))
    return b.call(TARGET, (x, weight, [int(n.constant) for n in padding], transposed), [out], out=True)[0]
