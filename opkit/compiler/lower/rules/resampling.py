"""Images of other sizes: nearest neighbours, padding by what is inside, and channels that become pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opkit.compiler.ir import expr
from opkit.compiler.ir.index import Index, index, value
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.context import Builder
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.rules import views
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Shape, Tensor, formal

TABLE = Table()


# ---- nearest neighbours ----------------------------------------------------------------------------------------------


def _nearest(b: Builder, x: Tensor, scales: Sequence[float | None]) -> Tensor:
    shape = b.result().shape
    outer = len(shape) - len(scales)
    axes = formal(shape)
    moved = [_source(axes[k], shape[k], x.shape[k], scales[k - outer]) for k in range(outer, len(shape))]
    return x.mapped(shape, [*axes[:outer], *moved], copied=True)


def _source(at: Index, result: Index, size: Index, scale: float | None) -> Index:
    """``at * size // result``, where ATen's float32 gives that for every position."""
    if result == size:
        return at
    if result.constant is None or size.constant is None:
        raise NoRule("nearest neighbours in dimensions of symbolic sizes")
    exact = np.arange(result.constant) * size.constant // result.constant
    if result != size * 2 and not np.array_equal(exact, _rounded(result.constant, size.constant, scale)):
        raise NoRule("nearest neighbours that rounding decides")
    return at * size // result


def _rounded(result: int, size: int, scale: float | None) -> Any:
    """Return where ATen finds the neighbours."""
    ratio = np.float32(1.0 / scale) if scale is not None and scale > 0 else np.float32(size) / np.float32(result)
    found = np.floor(np.arange(result).astype(np.float32) * ratio).astype(np.int64)
    return np.minimum(found, size - 1)


def _upsample(rank: int) -> Any:
    def rule(b: Builder, x: Tensor, sizes: Any, *scales: float | None) -> Tensor:
        return _nearest(b, x, [*scales, *[None] * (rank - len(scales))])

    return rule


def _upsample_vec(rank: int) -> Any:
    return lambda b, x, sizes, scales=None: _nearest(b, x, scales or [None] * rank)


# ---- padding ---------------------------------------------------------------------------------------------------------


def _replicated(at: Scalar, size: Index) -> Scalar:
    return f.minimum(f.maximum(at, 0), size - 1)


def _reflected(at: Scalar, size: Index) -> Scalar:
    last = f.number(size - 1, at)
    return last - f.absolute(last - f.absolute(at))


def _padded(where: Any) -> Any:
    """Return a rule of padding: ``where`` says which element stands at a position outside of the tensor."""

    def rule(b: Builder, x: Tensor, pad: Sequence[Any]) -> Tensor:
        shape = b.result().shape
        at = list(formal(shape))
        for k in range(len(pad) // 2):
            dim = len(shape) - 1 - k
            at[dim] = _moved(where, at[dim] - index(pad[2 * k]), shape, x.shape, dim)
        return b.elementwise(x.at(at))

    return rule


def _moved(where: Any, at: Index, shape: Shape, sizes: Shape, dim: int) -> Index:
    return at if shape[dim] == sizes[dim] else value(where(Scalar(expr.position(at)), sizes[dim]).expr)


for _rank in (1, 2, 3):
    TABLE.rule(*overloads(f"upsample_nearest{_rank}d"))(_upsample(_rank))
    TABLE.rule(*overloads(f"upsample_nearest{_rank}d", "vec"))(_upsample_vec(_rank))
    TABLE.rule(*overloads(f"replication_pad{_rank}d"))(_padded(_replicated))
    TABLE.rule(*overloads(f"reflection_pad{_rank}d"))(_padded(_reflected))


# ---- channels and pixels ---------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("pixel_shuffle"))
def pixel_shuffle(b: Builder, x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    apart = x.reshaped([*batch, channels // (factor * factor), index(factor), index(factor), height, width])
    return _together(b, apart, len(batch), [0, 3, 1, 4, 2])


@TABLE.rule(*overloads("pixel_unshuffle"))
def pixel_unshuffle(b: Builder, x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    apart = x.reshaped([*batch, channels, height // factor, index(factor), width // factor, index(factor)])
    return _together(b, apart, len(batch), [0, 2, 4, 1, 3])


def _together(b: Builder, apart: Tensor, batch: int, order: Sequence[int]) -> Tensor:
    turned = views.permute(b, apart, [*range(batch), *(batch + k for k in order)])
    shape = b.result().shape
    return turned.reshaped(shape).mapped(shape, formal(shape), copied=True)
