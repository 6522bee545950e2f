"""Allocate results and scratch memory for kernels, make rows dense, and read addresses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from opkit.op import torch_private as private
from opkit.op.layout.outputs import unfilled

SMALL = 2048  #: elements; for more, allocation takes little of a call's time


def like(example: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes tensors with the sizes, strides and dtype of a dense ``example``, on its device, not filled.

    It holds a tensor like the example without memory: ``empty_like`` takes less time than functions that take sizes.

    >>> like(torch.empty(2, 3).t())().stride()
    (1, 3)
    """
    prototype = torch.empty_like(example.detach())
    prototype.untyped_storage().resize_(0)
    return functools.partial(torch.empty_like, prototype)


def overwritten(example: Tensor) -> Callable[[], Tensor]:
    """Do what :func:`like` does, for results that a kernel overwrites fully: skip torch's filling of new memory with NaN.

    Torch fills it under ``torch.use_deterministic_algorithms(True)``. On a CPU a few numbers are filled faster than this.

    >>> overwritten(torch.empty(200, 300).t())().stride()
    (1, 300)
    """
    empty, deterministic = like(example), private.deterministic
    small = example.is_meta or (example.is_cpu and example.numel() <= SMALL)
    if small or type(example) is not Tensor or private.dispatch_modes():
        return empty
    sizes, strides = tuple(example.shape), example.stride()
    make_unfilled = functools.partial(unfilled, sizes, strides, dtype=example.dtype, device=example.device)

    def make() -> Tensor:
        return make_unfilled() if deterministic() else empty()

    return make


def allocate_scratch(x: Tensor, size: int | tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x.new_empty(size)``, for memory that a kernel overwrites fully: see :func:`overwritten`."""
    if not private.deterministic():
        return x.new_empty(size, dtype=dtype)
    sizes = (size,) if isinstance(size, int) else size
    return unfilled(sizes, None, dtype=x.dtype if dtype is None else dtype, device=x.device)


def rows(q: Tensor, size: int, out_is_bshd: bool) -> Tensor:
    """Return an empty (batch, heads, sequence, size) for rows of q; in memory heads come third if ``out_is_bshd``."""
    batch, heads, length, _ = q.shape
    if out_is_bshd:
        return q.new_empty((batch, length, heads, size)).transpose(1, 2)
    return q.new_empty((batch, heads, length, size))


def dense_rows(x: Tensor) -> Tensor:
    """Return ``x``, or a copy of it, whose last dimension is dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def dense_bytes(x: Tensor) -> Tensor:
    """Return the bytes of ``x``, or of a copy of it, in dense rows: few GPU architectures have the types of float8."""
    return dense_rows(x).view(torch.uint8)


def address(x: Tensor | None) -> int:
    """Return the address of the elements of ``x``; 0 for None."""
    return 0 if x is None else x.data_ptr()


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Return the addresses of tensors."""
    return [each.data_ptr() for each in tensors]
