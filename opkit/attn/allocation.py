"""What kernels for processors do with tensors around a call: allocate results, see to dense rows, ask addresses."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def like(example: Tensor) -> Callable[[], Tensor]:
    """A function that makes tensors with the sizes, strides and dtype of a dense ``example``, on its device, not filled.

    It keeps a tensor like the example, which has no memory: ``empty_like`` takes less time than what is given sizes.

    >>> like(torch.empty(2, 3).t())().stride()
    (1, 3)
    """
    kept = torch.empty_like(example.detach())
    kept.untyped_storage().resize_(0)
    return functools.partial(torch.empty_like, kept)


def rows(q: Tensor, size: int, heads_inside: bool) -> Tensor:
    """Rows of ``size`` for what has rows of q: (batch, heads, sequence, size), in memory perhaps the heads after the sequence."""
    batch, heads, length, _ = q.shape
    if heads_inside:
        return q.new_empty((batch, length, heads, size)).transpose(1, 2)
    return q.new_empty((batch, heads, length, size))


def dense_rows(x: Tensor) -> Tensor:
    """``x``, or a copy of it, whose last dimension is dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def address(x: Tensor | None) -> int:
    """Where the elements of ``x`` lie; 0 for None."""
    return 0 if x is None else x.data_ptr()
