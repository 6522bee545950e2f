"""The decompositions that the backend passes to AOTAutograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from opkit.compiler.capture import torch_private as private

aten = torch.ops.aten

# ---- operators whose fake returns other dtypes or strides than their kernels -----------------------------------------


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


def _zero(x: Tensor) -> Tensor:
    """Return zeros with the strides of the kernel's result; the fake returns row-major strides (torch 2.11)."""
    return torch.zeros_like(x)


def _laid_out_as_sum(op: Any, x: Tensor, y: Tensor) -> Any:
    """Compute on operands in the order of the kernel's result in memory, which is that of a sum.

    The fake takes another order if the operands' layouts differ (torch 2.11 to 2.14).
    """
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return NotImplemented
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if all(t.dim() == 0 or (t.shape == shape and t.is_contiguous()) for t in (x, y)):
        return NotImplemented
    with private.without_modes():  # symbolic strides of these results are not in the graph
        strides, of_fake = (x + y).stride(), op(x, y).stride()
        if strides == of_fake:
            return NotImplemented
        order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    dtype = torch.result_type(x, y)
    x, y = (t if t.dim() == 0 else t.to(dtype).expand(shape).permute(order).contiguous() for t in (x, y))
    return op(x, y).permute([order.index(dim) for dim in range(len(shape))])


# ---- cross-entropy in steps, on a GPU --------------------------------------------------------------------------------
#
# A backward then recomputes probabilities from the logits and two numbers for each row. Without these, torch's partitioner saves
# the log-softmax, which is twice as large as logits of narrow floats. Kernels return row-major results whatever they are given.


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    if not _is_on_gpu(x) or x.dim() == 0 or x.shape[dim] == 0:
        return NotImplemented
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    shifted = wide - wide.amax(dim, keepdim=True)
    result = (shifted - shifted.exp().sum(dim, keepdim=True).log()).contiguous()
    return result if half_to_float else result.to(x.dtype)


def _log_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Any:
    if not _is_on_gpu(y):
        return NotImplemented
    wide = torch.promote_types(y.dtype, torch.float32)
    grad, y = grad.to(wide), y.to(wide)
    return (grad - y.exp() * grad.sum(dim, keepdim=True)).to(dtype).contiguous()


def _nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, total: Tensor
) -> Any:
    if not _is_on_gpu(x) or x.dim() != 2:
        return NotImplemented
    labels = target.unsqueeze(1)
    chosen = (torch.arange(x.shape[1], device=x.device) == labels) & (labels != ignored)
    scale = grad.unsqueeze(1) if reduction == 0 else grad / total if reduction == 1 else grad
    value = -scale if weight is None else -scale * weight
    return torch.where(chosen, value, 0.0).to(x.dtype)


def _nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> Any:
    if not _is_on_gpu(x) or x.dim() != 2 or target.dtype not in (torch.int64, torch.uint8):
        return NotImplemented
    counted = target != ignored
    labels = torch.where(counted, target, 0)
    weights = counted.to(x.dtype) if weight is None else torch.where(counted, weight[labels], 0.0)
    losses = torch.where(counted, -x.gather(1, labels.unsqueeze(1)).squeeze(1), 0.0)
    losses = losses if weight is None else losses * weights
    if reduction == 0:
        return losses, x.new_zeros(())
    total = weights.sum()
    return (losses.sum() / total if reduction == 1 else losses.sum()), total


def _weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of the direction ``v`` and the length ``g``; torch has a decomposition of the forward alone."""
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    norms = norms.to(g.dtype)
    along = (grad * v).sum(others, keepdim=True) / norms
    return g / norms * (grad - v * along / norms), along


def _col2im(x: Tensor, sizes: Any, size: Any, dilation: Any, padding: Any, step: Any) -> Any:
    """Scatter windows that have a step; the rule divides for each element by it, which takes longer."""
    if all(s == 1 for s in step):
        return NotImplemented
    return _COL2IM(x, sizes, size, dilation, padding, step)


def _detach(x: Tensor) -> Any:
    return aten.alias.default(x) if _is_on_gpu(x) else NotImplemented  # torch's partitioner may recompute an alias


def _is_on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.is_floating_point()


_COL2IM = get_decompositions([aten.col2im])[aten.col2im.default]

_OF_TORCH = (
    aten.glu, aten.glu_backward, aten._prelu_kernel, aten._prelu_kernel_backward, aten._weight_norm_interface, aten.tril_indices,
    aten.triu_indices, aten.im2col, aten._fused_rms_norm, aten._fused_rms_norm_backward,
)  # fmt: skip

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **get_decompositions(_OF_TORCH),
    aten.col2im.default: _col2im,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.roll.default: _roll,
    aten.zero.default: _zero,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.detach.default: _detach,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    **{
        op: functools.partial(_laid_out_as_sum, op)
        for op in (
            aten.complex.default,
            aten.copysign.Tensor,
            aten.floor_divide.default,
            aten.heaviside.default,
            aten.logaddexp.default,
            aten.logaddexp2.default,
            aten.logical_and.default,
            aten.logical_or.default,
            aten.logical_xor.default,
            aten.polar.default,
            aten.special_xlog1py.default,
            aten.xlogy.Tensor,
        )
    },
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
