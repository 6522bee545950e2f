"""The kernel of ``opkit::paged_attention`` on GPUs: that of decoding, which reads keys and values through a page table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opkit.attn.allocation import dense_rows, like
from opkit.attn.calls import dtypes_and_shapes
from opkit.attn.gpu.decode.decoding import (
    FAR,
    FLOATS,
    LARGEST_HEAD,
    NAME,
    index_of,
    may_share,
    numbers_of,
    refuse_batch_invariance,
    where,
)
from opkit.attn.gpu.decode.division import Divided, divided, question_of
from opkit.attn.gpu.decode.plan import DecodeBlocks, DecodeShape, blocks_of, device_of, power
from opkit.attn.paged.cpu import PagedCall
from opkit.errors import KernelError
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

if TYPE_CHECKING:
    from opkit.attn.gpu.decode.launches import DecodeLaunches

MOST_SEQUENCES = 16384  #: each program finds its own among all of them at once
_NARROW = (torch.int8, torch.float8_e4m3fn)


def register_paged(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::paged_attention`` its kernel for GPUs."""
    op.register_kernel(where(), paged, when=takes_pages, name=NAME, trusted=True)


def takes_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, lengths: Tensor) -> bool:
    """Whether :func:`paged` takes these dtypes and sizes."""
    fits = k_pages.dtype == v_pages.dtype and k_pages.dtype in (*FLOATS, *_NARROW) and q.dtype in FLOATS
    grouped = k_pages.shape[2] > 0 and q.shape[1] % k_pages.shape[2] == 0
    small = max(q.shape[-1], v_pages.shape[-1]) <= LARGEST_HEAD and lengths.shape[0] <= MOST_SEQUENCES
    return fits and grouped and small and k_pages.shape[0] > 0 and k_pages.shape[1] > 0


@PreparedKernel
def paged(*given: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The operator's result and log-sum-exp; its arguments are a :class:`opkit.attn.paged.cpu.PagedCall`.

    Lengths, starts and pages are read on the GPU alone, and what of them is out of range is taken as the nearest that is
    not: nothing waits for the GPU, and a CUDA graph of a call serves other lengths. Of queries that ``starts`` leaves out,
    the results are not written.

    Raises:
        KernelError: it was forced on a call that it does not compute, or batch invariance is asked for.
    """
    call = PagedCall(*given)
    if not takes_pages(call.q, call.k_pages, call.v_pages, call.lengths):
        told = dtypes_and_shapes(call[:3])
        raise KernelError(f"opkit::paged_attention: kernel {NAME!r} does not take q, k_pages, v_pages of {told}")
    refuse_batch_invariance("opkit::paged_attention")
    new_out = like(call.q.new_empty((*call.q.shape[:2], call.v_pages.shape[-1])))
    new_lse = like(call.q.new_empty(call.q.shape[:2], dtype=torch.float32))
    if 0 in (*call.q.shape[:2], call.lengths.shape[0]):
        return lambda *_: (new_out().zero_(), new_lse().fill_(-torch.inf))
    given_too = {"sinks": call.sinks, "k_scale": call.k_scale, "v_scale": call.v_scale}
    names = ("q", "k", "v", "table", "lengths", "starts", *(name for name, x in given_too.items() if x is not None))
    launches = [_plan(call, shared).series(names, {"out": new_out, "lse": new_lse}) for shared in _shared(call)]
    bytes_of = _bytes if call.k_pages.dtype == torch.float8_e4m3fn else dense_rows

    def run(*given: Any) -> tuple[Tensor, ...]:
        q, k, v, table, lengths, starts, _, _, _, _, sinks, k_scale, v_scale = given
        launch = launches[len(launches) > 1 and k.data_ptr() == v.data_ptr()]
        read = (dense_rows(q), bytes_of(k), bytes_of(v), dense_rows(table), lengths.contiguous(), starts.contiguous())
        sinks = None if sinks is None else sinks.contiguous()
        return launch(*read, *[each for each in (sinks, k_scale, v_scale) if each is not None])

    return run


def _shared(call: PagedCall) -> tuple[bool, ...]:
    """Whether values may be the first columns of keys, and then also whether they may not."""
    scaled = call.k_scale is not None or call.v_scale is not None
    return (False, True) if may_share(call.k_pages, call.v_pages) and not scaled else (False,)


def _bytes(pages: Tensor) -> Tensor:
    """Float8 as bytes: few architectures have the type."""
    return dense_rows(pages).view(torch.uint8)


def _plan(call: PagedCall, shared: bool) -> DecodeLaunches | Divided:
    (total, heads, d), (_, page, kv_heads, dv) = call.q.shape, call.v_pages.shape
    batch, group, keys = call.lengths.shape[0], heads // kv_heads, call.page_table.shape[1] * page
    gpu = device_of(index_of(call.q))
    computed, numbers = _computed(call), numbers_of(call.lower, call.upper, call.scale, call.softcap)
    mixed = total > 1 and (numbers["lower"] > -FAR or numbers["upper"] < FAR)
    height, stored = group * -(-total // batch), call.k_pages.itemsize
    shape = DecodeShape(
        height, batch * kv_heads, keys, d, dv, computed.itemsize, stored, True, shared, mixed and group % 64 > 0
    )
    settled = {
        "PAGE": page, "BATCH": power(batch), "SHARED": shared, "CAPPED": call.softcap > 0,
        "SINKS": call.sinks is not None, "NEGATIVE": call.scale < 0, "WHOLE": False,
        "K_SCALED": call.k_scale is not None, "V_SCALED": call.v_scale is not None,
        "FP8": call.k_pages.dtype == torch.float8_e4m3fn,
    }  # fmt: skip

    def made(blocks: DecodeBlocks) -> DecodeLaunches:
        from opkit.attn.gpu.decode import launches as decode_launches

        constants = decode_launches.constants_of(blocks, group, (d, dv), computed, gpu)
        constants |= {**settled, "MIXED": mixed and group % blocks.rows != 0}
        slots, tall = total * group // blocks.rows + batch, min(blocks.rows, total * group)
        return decode_launches.plan(blocks, constants, slots, kv_heads, tall, {**numbers, "keys": keys})

    asked = question_of(shape, gpu, call.q.device, computed)
    return divided(asked, functools.partial(blocks_of, shape, gpu), made)


def _computed(call: PagedCall) -> torch.dtype:
    """The dtype of products: that of the queries, unless pages of another floating dtype have what it has not."""
    return call.q.dtype if call.k_pages.dtype in (call.q.dtype, *_NARROW) else torch.float32
