"""Allocate outputs that a kernel overwrites completely, without the fill that torch adds under deterministic algorithms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opkit.op import torch_private as private


def fills() -> bool:
    """Return whether torch fills what it allocates: deterministic algorithms are on, and the setting for fills is, too."""
    return private.deterministic() and private.fills_if_deterministic()


def unfilled(
    sizes: tuple[int, ...], strides: tuple[int, ...] | None, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate a dense tensor, with its device's usual allocator, whose memory is not filled.

    >>> unfilled((2, 3), None, dtype=torch.float32, device=torch.device("cpu")).stride()
    (3, 1)
    """
    if private.dispatch_modes() or not fills():
        if strides is None:
            return torch.empty(sizes, dtype=dtype, device=device)
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    storage = torch.UntypedStorage(math.prod(sizes) * dtype.itemsize, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, sizes, *(() if strides is None else (strides,)))
