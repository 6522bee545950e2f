"""JAX's functions for ATen's convolutions and pooling, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opkit.jax.pointwise import wide


def _convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> Any:  # fmt: skip
    spatial = weight.ndim - 2
    stride, padding, dilation, output_padding = (
        list(each) * (spatial if len(each) == 1 else 1) for each in (stride, padding, dilation, output_padding)
    )
    pads, lhs_dilation = [(p, p) for p in padding], None
    if transposed:  # (in, out / groups, ...) becomes (out, in / groups, ...), turned around
        grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        weight = jnp.swapaxes(grouped, 1, 2).reshape(-1, weight.shape[0] // groups, *weight.shape[2:])
        weight = jnp.flip(weight, tuple(range(2, weight.ndim)))
        spans = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = [(span - p, span - p + o) for span, p, o in zip(spans, padding, output_padding, strict=True)]
        stride, lhs_dilation = [1] * spatial, stride
    letters = "DHW"[-spatial:]
    out = lax.conv_general_dilated(
        x, weight, stride, pads, lhs_dilation, dilation, (f"NC{letters}", f"OI{letters}", f"NC{letters}"),
        feature_group_count=groups, precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    return out if bias is None else out + bias.reshape(-1, *[1] * spatial)


def _convolution_backward(grad: Any, x: Any, weight: Any, bias_sizes: Any, *rest: Any) -> list[Any]:
    *options, wanted = rest
    _, pull = jax.vjp(lambda x, weight: _convolution(x, weight, None, *options), x, weight)
    return [*pull(grad.astype(x.dtype)), grad.sum((0, *range(2, grad.ndim)))] if any(wanted) else [None] * 3


def _windows(kernel: Any, stride: Any, padding: Any, ndim: int) -> tuple[Any, ...]:
    spatial = len(kernel) if len(kernel) > 1 else ndim
    kernel, stride, padding = (list(e) * (spatial if len(e) == 1 else 1) for e in (kernel, stride or kernel, padding))
    return kernel, stride, padding


def _avg_pool(ndim: int) -> Callable[..., Any]:
    def pool(
        x: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Any:  # fmt: skip
        if ceil_mode:
            raise NotImplementedError("avg_pool with ceil_mode")
        kernel, stride, padding = _windows(kernel_size, stride, padding, ndim)
        ahead = x.ndim - ndim
        form = (
            (1,) * ahead + tuple(kernel),
            (1,) * ahead + tuple(stride),
            [(0, 0)] * ahead + [(p, p) for p in padding],
        )
        x, zero = wide(x), np.zeros((), wide(x).dtype)  # a number, so that JAX knows the derivative
        total = lax.reduce_window(x, zero, lax.add, *form)
        if divisor_override is not None:
            return total / divisor_override
        if count_include_pad:
            return total / math.prod(kernel)
        return total / lax.reduce_window(jnp.ones_like(x), zero, lax.add, *form)

    return pool


def _max_pool(
    x: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> tuple[Any, Any]:
    if ceil_mode:
        raise NotImplementedError("max_pool2d with ceil_mode")
    kernel, stride, padding = _windows(kernel_size, stride, padding, 2)
    dilation = list(dilation) * (2 if len(dilation) == 1 else 1)
    rows, columns = (
        jnp.arange((n + 2 * p - d * (k - 1) - 1) // s + 1)[:, None] * s + jnp.arange(k) * d - p
        for n, k, s, p, d in zip(x.shape[-2:], kernel, stride, padding, dilation, strict=True)
    )
    at = rows[:, None, :, None], columns[None, :, None, :]
    inside = (at[0] >= 0) & (at[0] < x.shape[-2]) & (at[1] >= 0) & (at[1] < x.shape[-1])
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    places = jnp.broadcast_to(at[0] * x.shape[-1] + at[1], inside.shape).reshape(*inside.shape[:2], -1)
    values = jnp.where(inside, x[..., at[0].clip(0, x.shape[-2] - 1), at[1].clip(0, x.shape[-1] - 1)], lowest)
    values = values.reshape(*values.shape[:-2], -1)
    best = values.argmax(-1)
    found = jnp.take_along_axis(values, best[..., None], -1)[..., 0]
    return found, jnp.take_along_axis(jnp.broadcast_to(places, values.shape), best[..., None], -1)[..., 0]


WINDOWS: dict[str, Callable[..., Any]] = {
    "avg_pool1d": _avg_pool(1),
    "avg_pool2d": _avg_pool(2),
    "avg_pool3d": _avg_pool(3),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices": _max_pool,
}
