"""``opkit.merge_attention``: combine attention to parts of the keys into attention to all, as where sequences share a prefix."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.gpu.portable import merging as on_gpu
from opkit.errors import ArgumentError, DtypeError, ShapeError
from opkit.op.definition import custom_op
from opkit.op.operator import CustomOp

_LSES = (torch.float32, torch.float64)


@functools.cache
def merge_attention_operator() -> CustomOp[Any, tuple[Tensor, Tensor]]:
    """Return ``opkit::merge_attention``; the first call defines it and registers its kernel."""
    op = custom_op("opkit::merge_attention", mutates_args=())(reference)
    on_gpu.register(op)
    return op


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the result of attention to all keys, from its results for parts of them: each key is in one part.

    Sequences that share a prefix attend to it together, each to the rest of its own keys alone, and the two results are
    merged. Gradients reach all parts.

    Args:
        parts: the result and the log-sum-exp of each, as ``return_lse=True`` returns them: (..., d_v), of one shape and dtype,
            and (...), float32 or float64. Without a sink, or with it in one part alone.

    Returns:
        The result, of the parts' shape and dtype, and the log-sum-exp; zeros and minus infinity where no part sees a key.
        A part that sees none does not count, whatever its result holds. The number of a part's keys is known from its
        log-sum-exp only: for logits so large that float32 rounds the logarithm of a sum away (``finfo.min`` throughout, as in
        padded rows), parts count alike.

    Raises:
        ArgumentError: there are no parts.
        ShapeError, DtypeError: the parts do not fit each other.

    >>> import opkit, torch
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4)
    >>> first = opkit.attention(q, k[:, :, :4], v[:, :, :4], return_lse=True)
    >>> rest = opkit.attention(q, k[:, :, 4:], v[:, :, 4:], return_lse=True)
    >>> out, lse = opkit.merge_attention([first, rest])
    >>> torch.allclose(out, opkit.attention(q, k, v), atol=1e-6)
    True

    Source: Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding", 2024.
    """
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    _check(outs, lses)
    return merge_attention_operator()(outs, lses)


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not outs:
        raise ArgumentError("opkit.merge_attention: parts is empty; it needs a result and its log-sum-exp at least.")
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1] or out.dim() == 0:
            raise ShapeError(
                f"opkit.merge_attention: part {number} has a result of {tuple(out.shape)} and a log-sum-exp of "
                f"{tuple(lse.shape)}; expected {tuple(outs[0].shape)} and {tuple(outs[0].shape[:-1])}, as of part 0."
            )
        if out.dtype != outs[0].dtype or lse.dtype != lses[0].dtype or lse.dtype not in _LSES:
            raise DtypeError(
                f"opkit.merge_attention: part {number} has a result of {out.dtype} and a log-sum-exp of {lse.dtype}; expected "
                f"{outs[0].dtype} and {lses[0].dtype}, as of part 0, the latter float32 or float64."
            )


def reference(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge in plain torch: the weights of the parts are the softmax of their log-sum-exps."""
    each = torch.stack(lses)
    masked = (each == -torch.inf).all(0)
    each = torch.where(masked, 0.0, each)  # with nothing but minus infinity these have no derivative
    lse, weights = each.logsumexp(0), torch.where(masked, 0.0, each.softmax(0)).unsqueeze(-1)
    total = outs[0].new_zeros(outs[0].shape, dtype=torch.promote_types(lses[0].dtype, torch.float32))  # dense
    for out, weight in zip(outs, weights, strict=True):
        total = total + weight * torch.where(weight > 0, out.to(total.dtype), 0.0)
    return total.to(outs[0].dtype), torch.where(masked, -torch.inf, lse)
