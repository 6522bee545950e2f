"""What the portable kernels take; Triton is not needed to say so."""

from __future__ import annotations

import torch
from torch import Tensor

from opkit.attn.memory_safety import bias_fits, mask_fits, shapes_fit

LARGEST_HEAD, LARGEST_VALUES = 576, 512
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BIASES = (*_DTYPES, torch.float64)


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    sinks: Tensor | None,
    mask: list[int],
    bias: list[int],
) -> bool:
    """Whether they take a call: no float64, heads of at most 576, values' of at most 512, all tensors there."""
    return q.dtype in _DTYPES and sizes_fit(q, k, v, mask_tensors, bias_tensors, sinks, mask, bias)


def sizes_fit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    sinks: Tensor | None,
    mask: list[int],
    bias: list[int],
) -> bool:
    """What :func:`takes` says of all but the dtype of queries."""
    if not shapes_fit(q, k, v) or q.shape[3] > LARGEST_HEAD:
        return False
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if v.shape[3] > LARGEST_VALUES or (sinks is not None and tuple(sinks.shape) != (q.shape[1],)):
        return False
    added = all(each.dtype in _BIASES for each in bias_tensors) and bias_fits(bias, bias_tensors, sizes)
    return q.shape[3] > 0 and added and mask_fits(mask, mask_tensors, sizes)
