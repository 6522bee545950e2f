"""Layer, group and batch normalisation, and their derivatives: means and squared differences, then elements.

Formulas of the derivatives: Ioffe and Szegedy, "Batch normalization", section 3; Ba, Kiros and Hinton, "Layer
normalization". Moments of parts: Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index, index, product
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import NoRule, Table, overloads
from opkit.compiler.lower.rules.creation import filled_like
from opkit.compiler.lower.rules.reductions import count, moments
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.tensors import Shape, Tensor, formal

TABLE = Table()
Maybe = Tensor | None


# ---- parts -----------------------------------------------------------------------------------------------------------


def _inverse_deviation(b: Builder, squares: Tensor, number: Scalar, eps: Any) -> Tensor:
    """Return 1 / sqrt(variance + eps), from the sum of squared differences of ``number`` elements."""
    body = 1 / f.sqrt(element(squares, squares.shape) / number + eps)
    return b.temporary(body.expr, squares.shape)


def _as_result(b: Builder, x: Tensor, number: int) -> Tensor:
    """Return a tensor as a result of the node: in its shape and type."""
    kind = b.result(number)
    reshaped = x.reshaped(kind.shape)
    return reshaped if x.dtype == kind.dtype else b.cast_elementwise(element(reshaped, kind.shape), kind)


def _affine(x: Scalar, weight: Maybe, bias: Maybe, shape: Shape) -> Scalar:
    scaled = x if weight is None else x * element(weight, shape, x.dtype)
    return scaled if bias is None else scaled + element(bias, shape, x.dtype)


def _summed(b: Builder, body: Scalar, shape: Shape, dims: Sequence[int], keep: bool = True) -> Tensor:
    return b.reduce("sum", body, shape, dims, body.dtype, keep)


def _sum_as_result(b: Builder, body: Scalar, shape: Shape, dims: Sequence[int], number: int) -> Tensor:
    """Return a sum that is one of the node's results."""
    kind = b.result(number)
    return b.reduce("sum", body, shape, dims, kind.dtype).reshaped(kind.shape)


def _input_gradient(
    grad: Scalar, normal: Scalar, rstd: Scalar, sums: Sequence[Tensor], shape: Shape, number: Scalar
) -> Scalar:
    """Return the gradient by the input, of normalisation over ``number`` elements.

    ``sums`` are those of ``grad`` and of ``grad * normal`` over the same elements.
    """
    sum_grad, sum_grad_normal = (element(s, shape) for s in sums)
    return rstd * (grad - (sum_grad + normal * sum_grad_normal) / number)


# ---- layer -----------------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("native_layer_norm"))
def layer_norm(
    b: Builder, x: Tensor, sizes: Sequence[Index], weight: Maybe, bias: Maybe, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    inner = DTYPES[x.dtype].compute
    dims = range(len(x.shape) - len(sizes), len(x.shape))
    average, squares = moments(b, x, dims, inner)
    rstd = _inverse_deviation(b, squares, f.number(count(x.shape, dims), inner), eps)
    normal = (element(x, x.shape, inner) - element(average, x.shape)) * element(rstd, x.shape)
    out = b.cast_elementwise(_affine(normal, weight, bias, x.shape), b.result(0))
    return out, _as_result(b, average, 1), _as_result(b, rstd, 2)


@TABLE.rule(*overloads("native_layer_norm_backward"))
def layer_norm_backward(
    b: Builder,
    grad: Tensor,
    x: Tensor,
    sizes: Sequence[Index],
    mean: Tensor,
    rstd: Tensor,
    weight: Maybe,
    bias: Maybe,
    output_mask: Sequence[bool],
) -> tuple[Maybe, Maybe, Maybe]:
    inner = DTYPES[x.dtype].compute
    shape = x.shape
    outer, dims = range(len(shape) - len(sizes)), range(len(shape) - len(sizes), len(shape))
    g, inverse = element(grad, shape, inner), element(rstd, shape, inner)
    normal = (element(x, shape, inner) - element(mean, shape, inner)) * inverse
    gx = gw = gb = None
    if output_mask[0]:
        scaled = _affine(g, weight, None, shape)
        sums = (_summed(b, scaled, shape, dims), _summed(b, scaled * normal, shape, dims))
        number = f.number(count(shape, dims), inner)
        body = _input_gradient(scaled, normal, inverse, sums, shape, number)
        gx = b.cast_elementwise(body, b.result(0))
    if output_mask[1] and weight is not None:
        gw = _sum_as_result(b, g * normal, shape, outer, 1)
    if output_mask[2] and bias is not None:
        gb = _sum_as_result(b, g, shape, outer, 2)
    return gx, gw, gb


# ---- group -----------------------------------------------------------------------------------------------------------


@TABLE.rule(*overloads("native_group_norm"))
def group_norm(
    b: Builder, x: Tensor, weight: Maybe, bias: Maybe, n: Index, channels: Index, inside: Index, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    inner = DTYPES[x.dtype].compute
    grouped = x.reshaped(_grouped(n, channels, inside, groups))
    number = f.number(count(grouped.shape, [2, 3]), inner)
    if _sums_by_channel(b, x, groups):
        average, squares = _moments_by_channel(b, x.reshaped([n, channels, inside]), groups, number)
    else:
        average, squares = moments(b, grouped, [2, 3], inner)
    rstd = _inverse_deviation(b, squares, number, eps)
    centre, inverse = (element(_over_elements(b, t, x, groups), x.shape) for t in (average, rstd))
    normal = (element(x, x.shape, inner) - centre) * inverse
    body = _affine(normal, _per_channel(weight, x), _per_channel(bias, x), x.shape)
    return b.cast_elementwise(body, b.result(0)), _as_result(b, average, 1), _as_result(b, rstd, 2)


def _channels_are_adjacent(b: Builder, x: Tensor) -> bool:
    """Return whether an image's channels lie next to each other, on a target that computes vectors along one axis."""
    return b.target.tiles is None and _ends_with_channels(x)


def _sums_by_channel(b: Builder, x: Tensor, groups: int) -> bool:
    """Return whether an image's groups are summed from channels; on GPUs large ones, whose few channels are part of an access."""
    tiles, number = b.target.tiles, product(x.shape[1:]).constant or 0
    return _ends_with_channels(x) and (tiles is None or number >= tiles.reread_row * groups)


def _ends_with_channels(x: Tensor) -> bool:
    strided = x.strided()
    return strided is not None and len(x.shape) > 2 and strided.strides[1] == 1 and strided.strides[2] != 1


def _sums_of_groups(b: Builder, body: Scalar, shape: Shape, groups: int) -> Tensor:
    """Return the sum of ``body``, over (n, channels, elements), in each group: of each channel first, by vectors of channels."""
    n, channels, _ = shape
    sums = _summed(b, body, shape, [2]).reshaped([n, index(groups), channels // groups, index(1)])
    return _summed(b, element(sums, sums.shape), sums.shape, [2])


def _moments_by_channel(b: Builder, x: Tensor, groups: int, number: Scalar) -> tuple[Tensor, Tensor]:
    """Return what ``moments`` does for the groups of (n, channels, elements)."""
    value = element(x, x.shape, number.dtype)
    sums = _sums_of_groups(b, value, x.shape, groups)
    average = b.temporary((element(sums, sums.shape) / number).expr, sums.shape)
    difference = value - element(_over_elements(b, average, x, groups), x.shape)
    return average, _sums_of_groups(b, difference * difference, x.shape, groups)


def _grouped(n: Any, channels: Any, inside: Any, groups: int) -> list[Index]:
    return [index(n), index(groups), index(channels) // groups, index(inside)]


def _over_elements(b: Builder, statistic: Tensor, x: Tensor, groups: int) -> Tensor:
    """Return a tensor of one number for each group as a tensor that broadcasts to the elements."""
    n, channels = x.shape[:2]
    expanded = statistic.reshaped([n, index(groups), index(1)]).expanded([n, index(groups), channels // groups])
    by_channel = expanded.reshaped([n, channels])
    if _channels_are_adjacent(b, x):  # in memory, so that vectors of channels are loaded and not gathered
        shape = (n, channels)
        by_channel = b.compute(b.new_buffer(statistic.dtype, shape), shape, element(by_channel, shape).expr)
    return by_channel.reshaped([n, channels] + [index(1)] * (len(x.shape) - 2))


def _per_channel(x: Maybe, like: Tensor) -> Any:
    """Return a tensor of one number for each channel as a tensor that broadcasts to the elements of ``like``; None for None."""
    return None if x is None else x.reshaped([like.shape[1]] + [index(1)] * (len(like.shape) - 2))


@TABLE.rule(*overloads("native_group_norm_backward"))
def group_norm_backward(
    b: Builder,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Maybe,
    n: Index,
    channels: Index,
    inside: Index,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Maybe, Maybe, Maybe]:
    inner = DTYPES[x.dtype].compute
    grouped = tuple(_grouped(n, channels, inside, groups))
    apart = _channels_are_adjacent(b, x)
    shape = (index(n), index(channels), index(inside)) if apart else grouped
    image = x.reshaped(shape)

    def spread(statistic: Tensor) -> Tensor:
        return _over_elements(b, statistic, image, groups) if apart else statistic.reshaped([*grouped[:2], 1, 1])

    def total(body: Scalar) -> Tensor:
        return _sums_of_groups(b, body, shape, groups) if apart else _summed(b, body, shape, [2, 3])

    g, inverse = element(grad.reshaped(shape), shape, inner), element(spread(rstd), shape, inner)
    normal = (element(image, shape, inner) - element(spread(mean), shape, inner)) * inverse
    gx = gw = gb = None
    if output_mask[0]:
        scaled = g if weight is None else g * element(weight.reshaped([*shape[1:-1], index(1)]), shape, inner)
        sums = spread(total(scaled)), spread(total(scaled * normal))
        number = f.number(product(grouped[2:]), inner)
        body = _input_gradient(scaled, normal, inverse, sums, shape, number)
        layout = (index(channels) * inside, index(1), index(channels)) if apart else None
        memory = b.new_buffer(x.dtype, shape, layout)
        gx = b.compute(memory, shape, f.cast(body, x.dtype).expr).reshaped(x.shape)
    if output_mask[1]:
        gw = _sum_as_result(b, g * normal, shape, [0, len(shape) - 1], 1)
    if output_mask[2]:
        gb = _sum_as_result(b, g, shape, [0, len(shape) - 1], 2)
    return gx, gw, gb


# ---- batch -----------------------------------------------------------------------------------------------------------


def _other_dims(x: Tensor) -> list[int]:
    return [0, *range(2, len(x.shape))]


def _batch_normal(b: Builder, x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe, bias: Maybe) -> Tensor:
    inner = DTYPES[x.dtype].compute
    centre, inverse = (element(_per_channel(t, x), x.shape, inner) for t in (mean, rstd))
    normal = (element(x, x.shape, inner) - centre) * inverse
    body = _affine(normal, _per_channel(weight, x), _per_channel(bias, x), x.shape)
    return b.cast_elementwise(body, b.result(0))


def _running_rstd(b: Builder, var: Tensor, dtype: str, eps: float) -> Tensor:
    """Return the inverse deviation of the running variance."""
    return b.temporary((1 / f.sqrt(element(var, var.shape, dtype) + eps)).expr, var.shape)


@TABLE.rule(*overloads("_native_batch_norm_legit_no_training"))
def batch_norm_inference(
    b: Builder, x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = _running_rstd(b, var, DTYPES[x.dtype].compute, eps)
    normal = _batch_normal(b, x, mean, rstd, weight, bias)
    if b.result(1).shape == mean.shape:  # as on GPUs; on CPUs they are empty
        return normal, _as_result(b, mean, 1), _as_result(b, rstd, 2)
    return normal, filled_like(b, 0, 1), filled_like(b, 0, 2)


def _trained(b: Builder, x: Tensor, weight: Maybe, bias: Maybe, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, mean, sum of squared differences and inverse deviation of each channel."""
    inner = DTYPES[x.dtype].compute
    average, squares = (t.reshaped([x.shape[1]]) for t in _moments_of_channels(b, x, inner))
    rstd = _inverse_deviation(b, squares, f.number(count(x.shape, _other_dims(x)), inner), eps)
    return _batch_normal(b, x, average, rstd, weight, bias), average, squares, rstd


def _moments_of_channels(b: Builder, x: Tensor, inner: str) -> tuple[Tensor, Tensor]:
    """Return the mean, and the sum of squared differences from it, of each channel.

    On a GPU these are moments of the moments of parts. The elements come from memory once: a part is small enough for the
    caches, and one kernel computes both of its moments.
    """
    dims = _other_dims(x)
    part = _rows_of_part(b, x)
    if part is None:
        return moments(b, x, dims, inner)
    shape = [*(x.shape[d] for d in dims), x.shape[1]]
    first, *inside, channel = formal(shape)
    last = x.mapped(shape, [first, channel, *inside])
    averages, squares = moments(b, last.reshaped([count(x.shape, dims) // part, index(part), x.shape[1]]), [1], inner)
    average, between = moments(b, averages, [0], inner)
    within = b.reduce("sum", element(squares, squares.shape), squares.shape, [0], inner, keep=True)
    total = element(within, within.shape) + element(between, within.shape) * part
    return average, b.temporary(total.expr, within.shape)


def _rows_of_part(b: Builder, x: Tensor) -> int | None:
    """Return of how many elements of each channel the moments are computed at once, or None for all."""
    tiles, rows, channels = b.target.tiles, count(x.shape, _other_dims(x)).constant, x.shape[1].constant
    if tiles is None or not rows or not channels:
        return None
    inside = max(1, rows // (x.shape[0].constant or 1))  # of one sample: a part is in one, or is several
    sizes = [n for n in range(tiles.min_column_part, min(tiles.long_column, rows // 2) + 1) if rows % n == 0]
    sizes = [n for n in sizes if inside % n == 0 or n % inside == 0]
    enough = tiles.programs / math.ceil(channels / tiles.adjacent_rows)
    return next((n for n in reversed(sizes) if rows // n >= enough), sizes[0] if sizes else None)


def _running(b: Builder, old: Tensor, new: Scalar, momentum: float, number: int) -> Tensor:
    inner = DTYPES[old.dtype].compute
    body = f.cast(new, inner) * momentum + element(old, old.shape, inner) * (1 - momentum)
    kind = b.result(number)  # float32 in torch 2.12 and newer, whatever the old one is
    return b.cast_elementwise(body, kind)


@TABLE.rule(*overloads("_native_batch_norm_legit_functional"))
def batch_norm_functional(
    b: Builder,
    x: Tensor,
    weight: Maybe,
    bias: Maybe,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    if not training:
        # in torch 2.12 and newer its fake returns float32 statistics, but its kernel those of the arguments' dtype
        statistics = _as_result(b, mean, 3), _as_result(b, var, 4)
        return *batch_norm_inference(b, x, weight, bias, mean, var, momentum, eps), *statistics
    out, average, squares, rstd = _trained(b, x, weight, bias, eps)
    number = f.number(count(x.shape, _other_dims(x)), squares.dtype)
    unbiased = element(squares, squares.shape) / (number - 1)
    new_mean = _running(b, mean, element(average, average.shape), momentum, 3)
    new_var = _running(b, var, unbiased, momentum, 4)
    return out, _as_result(b, average, 1), _as_result(b, rstd, 2), new_mean, new_var


@TABLE.rule(*overloads("_native_batch_norm_legit", "no_stats"))
def batch_norm_no_stats(
    b: Builder, x: Tensor, weight: Maybe, bias: Maybe, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    out, average, _, rstd = _trained(b, x, weight, bias, eps)
    return out, _as_result(b, average, 1), _as_result(b, rstd, 2)


@TABLE.rule(*overloads("native_batch_norm"))
def batch_norm(
    b: Builder,
    x: Tensor,
    weight: Maybe,
    bias: Maybe,
    mean: Maybe,
    var: Maybe,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if training and mean is None and var is None:
        return batch_norm_no_stats(b, x, weight, bias, training, momentum, eps)
    if training or mean is None or var is None:
        raise NoRule("running statistics that are written to")
    return batch_norm_inference(b, x, weight, bias, mean, var, momentum, eps)


@TABLE.rule(*overloads("native_batch_norm_backward"))
def batch_norm_backward(
    b: Builder,
    grad: Tensor,
    x: Tensor,
    weight: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    save_mean: Maybe,
    save_rstd: Maybe,
    training: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Maybe, Maybe, Maybe]:
    inner = DTYPES[x.dtype].compute
    if training:
        mean, rstd = save_mean, save_rstd
    else:
        assert running_var is not None
        mean, rstd = running_mean, _running_rstd(b, running_var, DTYPES[running_var.dtype].compute, eps)
    assert mean is not None
    assert rstd is not None
    shape, dims = x.shape, _other_dims(x)
    g, inverse = element(grad, shape, inner), element(_per_channel(rstd, x), shape, inner)
    normal = (element(x, shape, inner) - element(_per_channel(mean, x), shape, inner)) * inverse
    sums = (_summed(b, g, shape, dims), _summed(b, g * normal, shape, dims))
    gx = gw = gb = None
    if output_mask[0]:
        number = f.number(count(shape, dims), inner)
        body = _input_gradient(g, normal, inverse, sums, shape, number) if training else g * inverse
        gx = b.cast_elementwise(_affine(body, _per_channel(weight, x), None, shape), b.result(0))
    if output_mask[1]:
        gw = _as_result(b, sums[1], 1)
    if output_mask[2]:
        gb = _as_result(b, sums[0], 2)
    return gx, gw, gb
