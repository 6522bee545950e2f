"""Kernels for GPUs whose result for a row does not depend, to the last bit, on the rest of the batch.

It is the portable forward with tiles of one size for all calls, in order, and none of them treated otherwise than the rest; keys
that a query does not see add nothing to its sums, not even a rounding. Those for processors are in
:mod:`opkit.attn.batch_invariant`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import dense_bytes, dense_rows, like
from opkit.attn.batch_invariant import NAME, switched_on
from opkit.attn.calls import AttentionCall, PagedCall
from opkit.attn.gpu import arguments, blocks, plans
from opkit.attn.gpu.decode.paged import takes_pages
from opkit.attn.gpu.limits import LARGEST_HEAD, LARGEST_VALUES, devices, takes
from opkit.attn.gpu.portable import forward as portable
from opkit.errors import KernelError
from opkit.kernels.triton.named import Named
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp
from opkit.op.triton.declare import triton_kernel

_PAGED = Named("opkit.attn.gpu.portable.device.forward", "attention_forward_paged")
_FIRST = 10  # of priorities, above those of all other kernels
_TENSORS = ("q", "k", "v", "out", "lse", "sinks", "table", "lengths", "starts", "k_scale", "v_scale")


def name() -> str:
    """Its name; in a process in which Triton interprets, processors' kernels have that of GPUs'."""
    return NAME + "_triton" if "cpu" in devices() else NAME


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel: it runs where it is forced, or for all calls with ``OPKIT_BATCH_INVARIANT=1``."""
    op.register_kernel(devices(), forward, when=switched_on, name=name(), priority=_FIRST, trusted=True)


def register_paged(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::paged_attention`` the kernel."""
    op.register_kernel(devices(), paged, when=switched_on, name=name(), priority=_FIRST, trusted=True)


@PreparedKernel
def forward(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp; the arguments are the operator's.

    Raises:
        KernelError: it does not take the call.
    """
    call = AttentionCall(*args)
    if call.dropout_p != 0 or not takes(call):
        _refuse("opkit::attention", f"q of {call.q.dtype} {tuple(call.q.shape)} with dropout_p={call.dropout_p}")
    return portable.prepare_forward(call, ordered=True)


@PreparedKernel
def paged(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """As :func:`forward` of the same keys, bit by bit; pages of another dtype than ``q``'s are computed in float32.

    Its arguments are a :class:`opkit.attn.calls.PagedCall`. Lengths, starts and pages are read on the GPU alone, and what of
    them is out of range is taken as the nearest that is not: nothing waits for the GPU.

    Raises:
        KernelError: it does not take the call.
    """
    call = PagedCall(*args)
    small = call.q.shape[-1] <= LARGEST_HEAD and call.v_pages.shape[-1] <= LARGEST_VALUES
    if call.mask or call.bias:
        _refuse("opkit::paged_attention", "functions of positions")
    if not small or not takes_pages(call):
        _refuse(
            "opkit::paged_attention",
            f"q of {call.q.dtype} {tuple(call.q.shape)} with k_pages {tuple(call.k_pages.shape)}",
        )
    new_out = like(call.q.new_empty((*call.q.shape[:2], call.v_pages.shape[-1])))
    new_lse = like(call.q.new_empty(call.q.shape[:2], dtype=torch.float32))
    if 0 in (*call.q.shape[:2], call.lengths.shape[0]):
        return lambda *_: (new_out().zero_(), new_lse().fill_(-torch.inf))
    launch = _launch(call)
    bytes_of = dense_bytes if call.k_pages.dtype == torch.float8_e4m3fn else dense_rows

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, table, lengths, starts, _, _, _, _, sinks, k_scale, v_scale, *_ = args
        out, lse = new_out(), new_lse()
        sinks = None if sinks is None else sinks.contiguous()
        pages = dense_rows(table), lengths.contiguous(), starts.contiguous(), k_scale, v_scale
        launch(dense_rows(q), bytes_of(k), bytes_of(v), out, lse, sinks, *pages)
        return out, lse

    return run


def _launch(call: PagedCall) -> Callable[..., Any]:
    (total, heads, d), (pages, page, kv_heads, e) = call.q.shape, call.v_pages.shape
    same = call.k_scale is None and call.v_scale is None and call.k_pages.dtype == call.q.dtype
    compute = call.q.dtype if same else torch.float32
    size = blocks.invariant(max(d, e), compute.itemsize, blocks.shared_memory(call.q.device))
    d0, d1 = blocks.parts(d)
    constants = {
        "D": d, "D0": d0, "D1": d1, "E": e, "E0": blocks.parts(e)[0], "PAGE": page, "CAPPED": call.softcap > 0,
        "FOLDED": call.softcap == 0 and call.scale > arguments.MIN_SCALE, "FP8": call.k_pages.dtype == torch.float8_e4m3fn,
        "COMPUTE": compute, "ROWS": size.rows, "KEYS": size.keys, "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
    numbers = {
        "tall": blocks.tiles_in(total, size.rows), "programs": call.lengths.shape[0] * heads, "heads": heads,
        "group": heads // kv_heads, "pages": pages, "width": call.page_table.shape[1], "lower": plans.narrow(call.lower),
        "upper": plans.narrow(call.upper), "scale": call.scale, "softcap": call.softcap,
    }  # fmt: skip
    return arguments.launcher(_kernel, tuple(constants.items()), compute, _TENSORS, numbers)


@functools.cache
def _kernel(constants: tuple[tuple[str, Any], ...]) -> Any:
    return triton_kernel(_PAGED, grid=lambda tall, programs: (tall, programs), **dict(constants))


def _refuse(operator: str, details: str) -> None:
    raise KernelError(
        f"{operator}: no batch-invariant kernel for GPUs takes {details}. It takes float32, bfloat16, float16 without dropout, "
        f"and heads of at most {LARGEST_HEAD} (of values {LARGEST_VALUES}). Convert the call, or make it outside "
        "of opkit.batch_invariant and OPKIT_BATCH_INVARIANT."
    )
