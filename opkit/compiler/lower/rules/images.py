"""Layouts of what is computed from images."""

from __future__ import annotations

from opkit.compiler.ir.graph import TensorType
from opkit.compiler.lower.builder import Builder
from opkit.compiler.lower.tensors import Shape, Tensor, channels_last


def image_strides(b: Builder, kind: TensorType, *operands: Tensor) -> Shape:
    """Return the strides of a result that is computed from images, at any of their elements: channels-last if one's are."""
    if len(kind.shape) != 4 or not b.target.channels_last:
        return kind.strides
    layouts = [(x.shape, x.strided()) for x in operands if len(x.shape) == 4]
    found = any(strided is not None and strided.strides == channels_last(shape) for shape, strided in layouts)
    return channels_last(kind.shape) if found else kind.strides
