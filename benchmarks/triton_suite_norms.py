"""Norms, softmax and dropout for ``benchmarks/triton_kernels.py``: the operators of examples/kernels, and their peers.

A size is the length of a row; rows are as many as make 2**27 elements, more than any cache holds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_suite import Case

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "kernels"))

import rows
from add_rms_norm import add_rms_norm, add_rms_norm_backward
from dropout import dropout
from layer_norm import layer_norm, layer_norm_backward
from rms_norm import rms_norm, rms_norm_backward
from softmax import softmax, softmax_backward

ELEMENTS, EPS, P, SEED = 2**27, 1e-6, 0.1, 42
SIZES = (1024, 2048, 4096, 8192, 16384)
LONG = (65536, 131072)
Tensors = tuple[Tensor, ...]


# ---- inputs, and what must be moved ----------------------------------------------------------------------------------


def _given(wide: int, narrow: int = 0) -> Callable[[int, torch.dtype, Any], Tensors]:
    """So many matrices, and so many rows as weights and biases."""

    def inputs(size: int, dtype: torch.dtype, device: Any) -> Tensors:
        shapes = [(ELEMENTS // size, size)] * wide + [(size,)] * narrow
        return tuple(torch.randn(shape, dtype=dtype, device=device) for shape in shapes)

    return inputs


def _moved(wide: int, narrow: int = 0) -> Callable[[int, torch.dtype], int]:
    """The bytes of so many matrices and rows, read or written."""
    return lambda size, dtype: (wide * ELEMENTS + narrow * size) * dtype.itemsize


def _with_scale(size: int, dtype: torch.dtype, device: Any) -> Tensors:
    grad, x, weight = _given(2, 1)(size, dtype, device)
    return grad, x, weight, _scale(x)


def _with_sum_and_scale(size: int, dtype: torch.dtype, device: Any) -> Tensors:
    grad_total, grad, total, weight = _given(3, 1)(size, dtype, device)
    return grad_total, grad, total, weight, _scale(total)


def _with_mean_and_scale(size: int, dtype: torch.dtype, device: Any) -> Tensors:
    grad, x, weight, bias = _given(2, 2)(size, dtype, device)
    mean = x.float().mean(-1)
    return grad, x, weight, bias, mean, _scale(x - mean.to(x.dtype)[:, None])


def _with_softmax(size: int, dtype: torch.dtype, device: Any) -> Tensors:
    grad, x = _given(2)(size, dtype, device)
    return grad, x.softmax(-1)


def _with_mask(size: int, dtype: torch.dtype, device: Any) -> Tensors:
    (grad,) = _given(1)(size, dtype, device)
    return grad, torch.rand_like(grad) >= P


def _scale(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1) + EPS)


# ---- ours ------------------------------------------------------------------------------------------------------------


def _rms_norm_gradients(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensors:
    dx, partial = rms_norm_backward(grad, x, weight, EPS, rows.programs(x))
    return dx, rows.column_sums(partial, weight.dtype)


def _add_rms_norm_gradients(grad_total: Tensor, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor) -> Tensors:
    dx, partial = add_rms_norm_backward(grad_total, grad, total, weight, EPS, rows.programs(total))
    return dx, rows.column_sums(partial, weight.dtype)


def _layer_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor
) -> Tensors:
    dx, partial = layer_norm_backward(grad, x, weight, EPS, rows.programs(x))
    return dx, *rows.column_sums(partial, weight.dtype).unbind()


# ---- torch's, for torch.compile: what is saved between forward and backward is an argument, as for Liger's -------------------


def _plain_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensors:
    total = x + residual
    return total, F.rms_norm(total, weight.shape, weight, EPS)


def _plain_rms_norm_gradients(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensors:
    normal, h = x.float() * scale[:, None], grad.float() * weight.float()
    dx = (h - normal * (normal * h).mean(-1, keepdim=True)) * scale[:, None]
    return dx.to(x.dtype), (grad.float() * normal).sum(0).to(weight.dtype)


def _plain_add_rms_norm_gradients(
    grad_total: Tensor, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor
) -> Tensors:
    normal, h = total.float() * scale[:, None], grad.float() * weight.float()
    dx = (h - normal * (normal * h).mean(-1, keepdim=True)) * scale[:, None] + grad_total.float()
    return dx.to(total.dtype), (grad.float() * normal).sum(0).to(weight.dtype)


def _plain_layer_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor
) -> Tensors:
    normal, g = (x.float() - mean[:, None]) * scale[:, None], grad.float()
    h = g * weight.float()
    dx = (h - h.mean(-1, keepdim=True) - normal * (normal * h).mean(-1, keepdim=True)) * scale[:, None]
    return dx.to(x.dtype), (g * normal).sum(0).to(weight.dtype), g.sum(0).to(bias.dtype)


def _plain_softmax_gradient(grad: Tensor, y: Tensor) -> Tensor:
    g, p = grad.float(), y.float()
    return ((g - (g * p).sum(-1, keepdim=True)) * p).to(y.dtype)


# ---- Liger's ---------------------------------------------------------------------------------------------------------


def _liger(run: Callable[..., Any]) -> Callable[..., Any] | None:
    return None if importlib.util.find_spec("liger_kernel") is None else run


def _liger_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return rms_norm_forward(x, weight, EPS, 0.0, "llama", False)[0]


def _liger_rms_norm_gradients(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensors:
    from liger_kernel.ops import rms_norm as liger
    from liger_kernel.ops.utils import calculate_settings

    settings = calculate_settings(x.shape[-1])
    return liger.rms_norm_backward(
        grad, x, weight, scale, 0.0, liger._CASTING_MODE_LLAMA.value, *settings, False, False
    )


def _liger_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensors:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    return fused_add_rms_norm_forward(x, residual, weight, EPS, 0.0, "llama")[:2]


def _liger_add_rms_norm_gradients(
    grad_total: Tensor, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor
) -> Tensors:
    from liger_kernel.ops import fused_add_rms_norm as liger
    from liger_kernel.ops.utils import calculate_settings

    settings = calculate_settings(total.shape[-1])
    mode = liger._CASTING_MODE_LLAMA.value
    return liger.fused_add_rms_norm_backward(grad, grad_total, total, weight, scale, 0.0, mode, *settings, 2, False)


def _liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from liger_kernel.ops.layer_norm import layer_norm_forward

    return layer_norm_forward(x, weight, bias, EPS)[0]


def _liger_layer_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor
) -> Tensors:
    from liger_kernel.ops.layer_norm import layer_norm_backward

    return layer_norm_backward(grad, x, weight, bias, mean, scale)


def _liger_softmax(x: Tensor) -> Tensor:
    from liger_kernel.ops.softmax import _softmax_forward

    return _softmax_forward(x)[0]


def _liger_softmax_gradient(grad: Tensor, y: Tensor) -> Tensor:
    from liger_kernel.ops.softmax import _softmax_backward
    from liger_kernel.ops.utils import calculate_settings

    block, warps = calculate_settings(y.shape[-1])
    return _softmax_backward(grad, y, block, warps, y.shape[-1] > block)


CASES = [
    Case(
        "rms_norm", SIZES, _given(1, 1), lambda x, weight: rms_norm(x, weight, EPS),
        lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS), _liger(_liger_rms_norm), _moved(2, 1),
    ),
    Case(
        "rms_norm backward", SIZES, _with_scale, _rms_norm_gradients, _plain_rms_norm_gradients,
        _liger(_liger_rms_norm_gradients), _moved(3, 2),
    ),
    Case(
        "layer_norm", SIZES, _given(1, 2), lambda x, weight, bias: layer_norm(x, weight, bias, EPS),
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS), _liger(_liger_layer_norm), _moved(2, 2),
    ),
    Case(
        "layer_norm backward", SIZES, _with_mean_and_scale, _layer_norm_gradients, _plain_layer_norm_gradients,
        _liger(_liger_layer_norm_gradients), _moved(3, 3),
    ),
    Case(
        "add_rms_norm", SIZES, _given(2, 1), lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS),
        _plain_add_rms_norm, _liger(_liger_add_rms_norm), _moved(4, 1),
    ),
    Case(
        "add_rms_norm backward", SIZES, _with_sum_and_scale, _add_rms_norm_gradients, _plain_add_rms_norm_gradients,
        _liger(_liger_add_rms_norm_gradients), _moved(4, 2),
    ),
    Case("softmax", SIZES, _given(1), softmax, lambda x: x.softmax(-1), _liger(_liger_softmax), _moved(2)),
    Case("softmax of long rows", LONG, _given(1), softmax, lambda x: x.softmax(-1), None, _moved(2)),
    Case(
        "softmax backward", SIZES, _with_softmax, softmax_backward, _plain_softmax_gradient,
        _liger(_liger_softmax_gradient), _moved(3),
    ),
    Case("softmax backward of long rows", LONG, _with_softmax, softmax_backward, _plain_softmax_gradient, None, _moved(3)),
    Case(
        "dropout", SIZES[2:3], _given(1), lambda x: dropout(x, P, SEED), lambda x: F.dropout(x, P), None, _moved(2),
        random=True,
    ),
    Case(
        "dropout backward", SIZES[2:3], _with_mask, lambda grad, mask: dropout(grad, P, SEED),
        lambda grad, mask: grad * mask * (1 / (1 - P)), None, _moved(2), random=True,
    ),
]  # fmt: skip
