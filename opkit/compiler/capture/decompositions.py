"""Operators that AOTAutograd takes apart, as their fakes give other dtypes than their kernels do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any) -> Any:
    """Of narrow floats with float32 weights: as its kernel does, in float32 with float32 statistics.

    Its fake gives statistics of the values' dtype, and its backward's fake a gradient of the weight's (torch 2.11 to 2.14).
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


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
}
