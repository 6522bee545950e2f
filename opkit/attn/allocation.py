"""What kernels for processors do with tensors around a call: allocate results, see to dense rows, ask addresses."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

FEW = 2048  #: elements; with more, the time of a call is not that of allocating


def like(example: Tensor) -> Callable[[], Tensor]:
    """A function that makes tensors with the sizes, strides and dtype of a dense ``example``, on its device, not filled.

    A small example is kept: ``empty_like`` takes half the time of the functions that are given sizes.

    >>> like(torch.empty(2, 3).t())().stride()
    (1, 3)
    """
    if example.numel() <= FEW:
        return functools.partial(torch.empty_like, example.detach())
    strides, options = example.stride(), {"dtype": example.dtype, "device": example.device}
    return functools.partial(torch.empty_strided, tuple(example.shape), strides, **options)


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
