"""The kernel of ``opkit::append_kv`` on GPUs: one launch writes keys and values, quantised where pages are narrow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.allocation import dense_rows
from opkit.attn.calls import dtypes_and_shapes
from opkit.attn.gpu.decode.decoding import FLOATS, NAME, where
from opkit.attn.gpu.decode.paged import MOST_SEQUENCES
from opkit.attn.gpu.decode.plan import power
from opkit.errors import KernelError
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

LARGEST = 4096  #: elements of a head, which one program holds
_LARGEST_NUMBERS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what a scale of 1 stands for


class AppendCall(NamedTuple):
    """The arguments of :func:`opkit.attn.paged.reference.append_kv`, which says what they are."""

    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    lengths_before: Tensor
    starts: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


def register_append(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::append_kv`` its kernel for GPUs."""
    op.register_kernel(where(), append, when=takes_append, name=NAME, trusted=True)


def takes_append(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, lengths_before: Tensor) -> bool:
    """Whether :func:`append` takes these dtypes and sizes; pages must have dense rows, as they are written to."""
    known = k_pages.dtype == v_pages.dtype and k_pages.dtype in (*FLOATS, *_LARGEST_NUMBERS)
    dense = all(x.stride(-1) == 1 or x.shape[-1] <= 1 for x in (k_pages, v_pages))
    small = max(k.shape[-1], v.shape[-1]) <= LARGEST and lengths_before.shape[0] <= MOST_SEQUENCES
    there = k_pages.shape[0] > 0 and k_pages.shape[1] > 0
    return known and dense and small and there and k.dtype in FLOATS and v.dtype in FLOATS


@PreparedKernel
def append(*given: Any) -> Callable[..., None]:
    """Write the tokens; those without a page of the table are written nowhere, as the GPU cannot refuse them.

    Raises:
        KernelError: it was forced on a call that it does not compute.
    """
    call = AppendCall(*given)
    if not takes_append(call.k, call.v, call.k_pages, call.v_pages, call.lengths_before):
        told = dtypes_and_shapes(call[:4])
        raise KernelError(f"opkit::append_kv: kernel {NAME!r} does not take k, v, k_pages, v_pages of {told}")
    if 0 in call.k.shape[:2] or call.lengths_before.shape[0] == 0:
        return lambda *_: None
    from opkit.attn.gpu.decode import append_launches

    constants = {
        "D": call.k.shape[2], "DV": call.v.shape[2], "D_WIDE": power(call.k.shape[2]), "DV_WIDE": power(call.v.shape[2]),
        "PAGE": call.k_pages.shape[1], "BATCH": power(call.lengths_before.shape[0]),
        "LARGEST": _LARGEST_NUMBERS.get(call.k_pages.dtype, 1.0), "FP8": call.k_pages.dtype == torch.float8_e4m3fn,
        "INT8": call.k_pages.dtype == torch.int8,
    }  # fmt: skip
    return _run(append_launches.kernel(call.k_scale is not None, call.v_scale is not None, tuple(constants.items())))


def _run(kernel: Any) -> Callable[..., None]:
    def run(*given: Any) -> None:
        call = AppendCall(*given)
        kernel(
            k=dense_rows(call.k), v=dense_rows(call.v), k_pages=_bytes(call.k_pages), v_pages=_bytes(call.v_pages),
            table=dense_rows(call.page_table), lengths=call.lengths_before.contiguous(), starts=call.starts.contiguous(),
            k_scale=call.k_scale, v_scale=call.v_scale, programs=call.k.shape[0] * call.k.shape[1],
        )  # fmt: skip

    return run


def _bytes(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages
