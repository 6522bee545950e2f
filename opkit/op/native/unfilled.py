"""Memory that a kernel overwrites wholly, which torch fills under deterministic algorithms: allocated without that."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opkit.op import torch_private as private


def fills() -> bool:
    """Whether torch fills what it allocates: ``torch.use_deterministic_algorithms(True)`` says so, but for a setting."""
    return private.deterministic() and private.fills_if_deterministic()


def unfilled(
    sizes: tuple[int, ...], strides: tuple[int, ...] | None, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A dense tensor, of the allocator of its device as any other, whose memory is left as it is.

    >>> unfilled((2, 3), None, dtype=torch.float32, device=torch.device("cpu")).stride()
    (3, 1)
    """
    if private.dispatch_modes() or not fills():
        if strides is None:
            return torch.empty(sizes, dtype=dtype, device=device)
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    storage = torch.UntypedStorage(math.prod(sizes) * dtype.itemsize, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, sizes, *(() if strides is None else (strides,)))
