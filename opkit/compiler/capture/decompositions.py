"""Decompositions for operators whose fake implementations return other dtypes or strides than their kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any) -> Any:
    """Compute group norm of narrow floats with float32 weights as its kernel does: in float32, with float32 statistics.

    Its fake returns statistics of the values' dtype, and its backward's fake a gradient of the weight's (torch 2.11 to 2.14).
    """
    if weight is None or weight.dtype == x.dtype:
        return NotImplemented
    y, mean, rstd = aten.native_group_norm(x.to(weight.dtype), weight, bias, *sizes)
    return y.to(x.dtype), mean, rstd


def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *sizes: Any
) -> Any:
    if weight is None or weight.dtype == x.dtype:
        return NotImplemented
    wide = (grad.to(weight.dtype), x.to(weight.dtype))
    in_x, in_weight, in_bias = aten.native_group_norm_backward(*wide, mean, rstd, weight, *sizes)
    return None if in_x is None else in_x.to(x.dtype), in_weight, in_bias


def _batch_norm(op: Any, x: Tensor, *rest: Any) -> Any:
    """Compute batch norm of narrow floats with float32 weights or running statistics with float32 statistics, as its CPU kernel.

    Its fake returns saved statistics of the values' dtype on CPUs (torch 2.11 to 2.14).
    """
    wide = next((t.dtype for t in rest if isinstance(t, Tensor)), x.dtype)
    if wide == x.dtype or wide != torch.promote_types(wide, x.dtype) or x.device.type != "cpu":
        return NotImplemented
    y, *statistics = op(x.to(wide), *rest)
    return y.to(x.dtype), *statistics


def _roll(x: Tensor, shifts: Any, dims: Any = ()) -> Any:
    """Roll as the kernel does, which preserves channels-last strides; the fake returns row-major strides (torch 2.11 to 2.14)."""
    if x.is_contiguous() or not dims or not x.numel():
        return NotImplemented
    for shift, dim in zip(shifts, dims, strict=True):
        extent = x.shape[dim]
        begin = (extent - shift) % extent
        x = torch.cat([x.narrow(dim, begin, extent - begin), x.narrow(dim, 0, begin)], dim)
    return x


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.roll.default: _roll,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    **{
        op: functools.partial(_batch_norm, op)
        for op in (
            aten.native_batch_norm.default,
            aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default,
            aten._native_batch_norm_legit_no_training.default,
        )
    },
}
