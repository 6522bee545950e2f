"""What kernels do with tensors around a call: allocate results and workspaces, see to dense rows, ask addresses."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from opkit.op import torch_private as private
from opkit.op.native.unfilled import unfilled

FEW = 2048  #: elements; with more, the time of a call is not that of allocating


def like(example: Tensor) -> Callable[[], Tensor]:
    """A function that makes tensors with the sizes, strides and dtype of a dense ``example``, on its device, not filled.

    It keeps a tensor like the example, which has no memory: ``empty_like`` takes less time than what is given sizes.

    >>> like(torch.empty(2, 3).t())().stride()
    (1, 3)
    """
    kept = torch.empty_like(example.detach())
    kept.untyped_storage().resize_(0)
    return functools.partial(torch.empty_like, kept)


def overwritten(example: Tensor) -> Callable[[], Tensor]:
    """:func:`like`, for what a kernel overwrites wholly: where torch fills new memory, with NaN, this is left out.

    Torch does so under ``torch.use_deterministic_algorithms(True)``. It fills a few numbers on a processor sooner than this
    leaves it out.

    >>> overwritten(torch.empty(200, 300).t())().stride()
    (1, 300)
    """
    empty, deterministic = like(example), private.deterministic
    soon = example.is_meta or (example.is_cpu and example.numel() <= FEW)
    if soon or type(example) is not Tensor or private.dispatch_modes():
        return empty
    sizes, strides = tuple(example.shape), example.stride()
    make_unfilled = functools.partial(unfilled, sizes, strides, dtype=example.dtype, device=example.device)

    def make() -> Tensor:
        return make_unfilled() if deterministic() else empty()

    return make


def allocate_scratch(x: Tensor, size: int | tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """``x.new_empty``, for what a kernel overwrites wholly: see :func:`overwritten`."""
    if not private.deterministic():
        return x.new_empty(size, dtype=dtype)
    sizes = (size,) if isinstance(size, int) else size
    return unfilled(sizes, None, dtype=x.dtype if dtype is None else dtype, device=x.device)


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
