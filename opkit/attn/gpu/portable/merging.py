"""The kernel of ``opkit::merge_attention`` on GPUs: which calls it takes, and a call of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import overwritten
from opkit.attn.gpu.blocks import tiles_in
from opkit.kernels.triton.named import Named
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launch import PreparedLaunch

NAME = "triton"
MOST_PARTS, LARGEST = 8, 4096
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ELEMENTS = 2048  # of a program's rows
_MERGE = Named("opkit.attn.gpu.portable.device.merging", "merge_parts")
_NAMES = (*(f"out{i}" for i in range(MOST_PARTS)), *(f"lse{i}" for i in range(MOST_PARTS)), "out", "lse")


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::merge_attention`` its kernel for GPUs."""
    from opkit.attn.gpu.kernels import device

    op.register_kernel(device(), merge, when=takes, name=NAME, trusted=True)


def takes(outs: list[Tensor], lses: list[Tensor]) -> bool:
    """Whether :func:`merge` takes a call: at most eight parts, no float64, rows of at most 4096."""
    first, sums = outs[0], lses[0]
    dtypes = first.dtype in _DTYPES and sums.dtype == torch.float32
    same = all(x.shape == first.shape and x.dtype == first.dtype for x in outs)
    return dtypes and same and len(outs) == len(lses) <= MOST_PARTS and 0 < first.shape[-1] <= LARGEST


@functools.cache
def _kernel(count: int, columns: int) -> TritonKernel:
    wide = 1 << (columns - 1).bit_length()
    return triton_kernel(
        _MERGE, grid=lambda rows, ROWS: tiles_in(rows, ROWS), COUNT=count, D=columns, WIDE=wide,
        ROWS=max(1, _ELEMENTS // wide),
    )  # fmt: skip


@PreparedKernel
def merge(outs: list[Tensor], lses: list[Tensor]) -> Any:
    """The merged result and log-sum-exp; its arguments are those of :func:`opkit.attn.merging.reference`."""
    rows = lses[0].numel()
    new = [overwritten(torch.empty(x.shape, dtype=x.dtype, device=x.device)) for x in (outs[0], lses[0])]
    launch = PreparedLaunch(_kernel(len(outs), outs[0].shape[-1]), _NAMES, {"rows": rows})

    def run(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        read = [_padded([x.contiguous() for x in each]) for each in (outs, lses)]
        out, lse = (make() for make in new)
        if rows:
            launch(*read[0], *read[1], out, lse)
        return out, lse

    return run


def _padded(tensors: list[Tensor]) -> list[Tensor | None]:
    return [*tensors, *[None] * (MOST_PARTS - len(tensors))]
