"""Decoding from pages for sm_90a in CUDA C++: what :mod:`opkit.attn.gpu.hopper.decode_cuda` launches, of keys in pages.

Each query is a tile for itself, so that all of its rows see the same keys: it is for calls with about one query to a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit import config
from opkit.attn.allocation import dense_rows, overwritten
from opkit.attn.calls import predicate
from opkit.attn.gpu import plans
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.decode.paged import paged as split_paged
from opkit.attn.gpu.hopper import forward as hopper
from opkit.attn.gpu.hopper import library
from opkit.attn.gpu.hopper.decode_cuda import HEADS, MOST, MOST_ROWS, NAME, Pages, Problem, launched, splits_of
from opkit.attn.gpu.hopper.library import Rows
from opkit.attn.paged.cpu import PagedCall
from opkit.errors import KernelError
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

MOST_SEQUENCES = 1024  #: each warp looks for its own among all of them
_BOX = 16  #: keys that are loaded at once: a page has a multiple
_PRIORITY = 1  # above the kernel in Triton
_WHOLE = (torch.int32, torch.int64)


def register_paged(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::paged_attention`` the kernel."""
    when = predicate(PagedCall, takes_pages)
    op.register_kernel("cuda", paged, when=when, name=NAME, priority=_PRIORITY, trusted=True)


def takes_pages(call: PagedCall) -> bool:
    """Whether a call is for :func:`paged`: few queries and some keys, on a GPU of compute capability 9.0 beside an nvcc."""
    if not fits(call) or not hopper.on_hopper(call.q) or config.get().batch_invariant:
        return False
    some = call.page_table.shape[1] * call.k_pages.shape[1] >= decoding.MANY
    few = call.q.shape[0] <= call.lengths.shape[0]
    return some and few and _described(call.k_pages, call.v_pages) and library.there("decode", call.q.dtype)


def fits(call: PagedCall) -> bool:
    """Whether :func:`paged` can compute a call, but for the strides of pages."""
    q, k, v, table, lengths, starts = call[:6]
    (tokens, heads, size), (count, page, kv_heads, _) = q.shape, k.shape
    if q.dtype not in hopper.DTYPES or not q.dtype == k.dtype == v.dtype or 0 in (*q.shape, *k.shape, *table.shape):
        return False
    same = size == k.shape[3] == v.shape[3] and size in HEADS and heads % kv_heads == 0 and page % _BOX == 0
    few = (
        heads // kv_heads <= MOST_ROWS.get(size, 0)
        and max(tokens, kv_heads) <= MOST
        and 0 < lengths.shape[0] <= MOST_SEQUENCES
    )
    plain = call.softcap == 0 and call.scale > 0 and call.k_scale is None and call.v_scale is None
    whole = all(each.dtype in _WHOLE for each in (table, lengths, starts))
    return same and few and plain and whole and table.shape[1] * page < decoding.FAR and count < decoding.FAR


def _described(*pages: Tensor) -> bool:
    return all(hopper.describable(each) for each in pages)


@PreparedKernel
def paged(*given: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator's result and log-sum-exp; its arguments are a :class:`opkit.attn.paged.cpu.PagedCall`.

    It takes what :func:`opkit.attn.gpu.hopper.decode_cuda.decode` takes, of pages of a multiple of 16 keys and of q's dtype, one
    or more queries of each sequence, and bands. Lengths, starts and pages are read on the GPU alone, and what of them is out of
    range is taken as the nearest that is not: nothing waits for the GPU, and a CUDA graph of a call serves other lengths. Keys
    and values that are hidden do not reach a result, whatever they hold. Queries that ``starts`` leaves out see nothing.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no nvcc. One that refuses the source is warned of, and the kernel in Triton is called.
    """
    call = PagedCall(*given)
    decoding.refuse_batch_invariance("opkit::paged_attention")
    if not fits(call) or not _described(call.k_pages, call.v_pages):
        told = ", ".join(f"{each.dtype} {tuple(each.shape)} with strides {each.stride()}" for each in call[:3])
        raise KernelError(
            f"opkit::paged_attention: kernel {NAME!r} does not take q, k_pages, v_pages of {told}, scale={call.scale}, "
            f"softcap={call.softcap}, k_scale={call.k_scale}, v_scale={call.v_scale}: it takes pages of q's dtype and of a "
            f"multiple of {_BOX} keys, heads of {HEADS}, and as many heads to one of keys as {MOST_ROWS} says. Leave the choice "
            "to opkit, or force kernel='split'."
        )
    return _prepared(call)


def _prepared(call: PagedCall) -> Callable[..., tuple[Tensor, Tensor]]:
    launch = library.launcher_or_none("decode", call.q.dtype)
    if launch is None:
        return split_paged.prepare(*call)
    new_out = overwritten(call.q.new_empty(call.q.shape))
    new_lse = overwritten(call.q.new_empty(call.q.shape[:2], dtype=torch.float32))
    common, gpu = _problem(call), call.q.get_device()
    dense = call.q.stride(2) == 1 and all(stride % 8 == 0 for stride in call.q.stride()[:2])

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        q, k, v, table, lengths, starts, _, _, _, _, sinks, _, _ = given
        problem = Problem.from_buffer_copy(common)
        if not dense or q.data_ptr() % 16:
            q = q.clone(memory_format=torch.contiguous_format)
        if (k.data_ptr() | v.data_ptr()) % 16:
            k, v = (each.clone(memory_format=torch.contiguous_format) for each in (k, v))
            problem.k, problem.v = map(_pages_of, (k, v))
        problem.q, problem.k.data, problem.v.data = Rows(q.data_ptr(), *q.stride()[:2]), k.data_ptr(), v.data_ptr()
        pages = problem.pages
        table, lengths, starts = dense_rows(table), lengths.contiguous(), starts.contiguous()
        pages.table.data, pages.lengths.data = table.data_ptr(), lengths.data_ptr()
        pages.starts.data, pages.row = starts.data_ptr(), table.stride(0)
        return launched(launch, problem, new_out(), new_lse(), sinks, gpu)

    return run


def _problem(call: PagedCall) -> Problem:
    """What is the same for all calls like this one."""
    (tokens, heads, size), (count, page, kv_heads, _) = call.q.shape, call.k_pages.shape
    keys = call.page_table.shape[1] * page
    ends = {"lower": plans.narrow(call.lower), "upper": plans.narrow(call.upper)}
    pages = Pages(sequences=call.lengths.shape[0], count=count, size=page, keys=keys, **ends)
    for name, numbers in (("table", call.page_table), ("lengths", call.lengths), ("starts", call.starts)):
        getattr(pages, name).wide = numbers.dtype == torch.int64
    return Problem(
        k=_pages_of(call.k_pages), v=_pages_of(call.v_pages), out=Rows(0, heads * size, size), batch=tokens, heads=heads,
        key_heads=kv_heads, group=heads // kv_heads, queries=1, head_size=size, device=call.q.get_device(),
        factor=call.scale * hopper.LOG2E, pages=pages,
        splits=splits_of(tokens * kv_heads, keys, size, hopper.processors(call.q.device)),
    )  # fmt: skip


def _pages_of(x: Tensor) -> Rows:
    """Pages as batches of heads of keys."""
    return Rows(0, x.stride(0), x.stride(2), x.stride(1))
