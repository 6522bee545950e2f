"""What autocast means for attention: it computes in autocast's dtype, as ``scaled_dot_product_attention`` does."""

from __future__ import annotations

import torch
from torch import Tensor

from opkit.attn import float8

_AUTOCASTING = frozenset(
    device
    for device in ("cpu", "cuda", "hpu", "ipu", "maia", "mps", "mtia", "privateuseone", "xla", "xpu")
    if torch.amp.is_autocast_available(device)
)  # computed at import, since torch 2.11's compiler cannot trace the query


def is_on(device: str) -> bool:
    """Return whether autocast is enabled for a type of device."""
    return device in _AUTOCASTING and torch.is_autocast_enabled(device)


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to autocast's dtype, except float64 and float8."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    unchanged = (torch.float64, *float8.DTYPES)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype not in unchanged else x for x in tensors)
