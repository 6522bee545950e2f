"""The kernel of latent attention for sm_90, for ``opkit::paged_attention``: keys in pages of a multiple of 64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import dense_rows, like
from opkit.attn.calls import PagedCall, dtypes_and_shapes, predicate
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.decode.paged import paged as split_paged
from opkit.attn.gpu.decode.plan import device_of, power, splits_of
from opkit.attn.gpu.hopper.calls import describable, on_hopper
from opkit.attn.gpu.hopper.mla import (
    DTYPES,
    MOST,
    NAME,
    ROWS,
    STEP,
    VALUES,
    MlaDivision,
    MlaForm,
    MlaLaunches,
    Queries,
    factors,
    launches_of,
)
from opkit.errors import KernelError
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

MOST_SEQUENCES = 1024  #: each program finds its own among all of them at once
_PLACES = 64  # of a page, or a multiple: what is loaded at once
_PRIORITY = 1  # above the kernel that takes all pages


def register_paged(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::paged_attention`` the kernel for latent attention."""
    when = predicate(PagedCall, takes_pages)
    op.register_kernel("cuda", paged, when=when, name=NAME, priority=_PRIORITY, trusted=True)


def takes_pages(call: PagedCall) -> bool:
    """Return whether a call is for :func:`paged`: what it says there, on a GPU of compute capability 9.0."""
    return fits(call) and on_hopper(call.q)


def fits(call: PagedCall) -> bool:
    """Return whether :func:`paged` can compute a call."""
    (q, k_pages, v_pages), sinks = call[:3], call.sinks
    if q.dtype not in DTYPES or k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        return False
    if 0 in q.shape or 0 in k_pages.shape or not 0 < call.lengths.shape[0] <= MOST_SEQUENCES:
        return False
    (_, page, kv_heads, channels), heads = k_pages.shape, q.shape[1]
    latent = VALUES == v_pages.shape[3] < channels <= MOST and k_pages.stride() == v_pages.stride()
    tiled = heads % (_PLACES * kv_heads) == 0 and page % _PLACES == 0 and describable(k_pages)
    unscaled = call.k_scale is None and call.v_scale is None
    plain = not call.mask and not call.bias and call.scale > 0 and call.lower <= -decoding.FAR
    return latent and tiled and unscaled and plain and (sinks is None or tuple(sinks.shape) == (heads,))


@PreparedKernel
def paged(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp; the arguments are a :class:`opkit.attn.calls.PagedCall`.

    It takes bfloat16 and float16; keys of more than 512 and at most 576 channels, the first 512 of which are the values; pages
    of a multiple of 64; heads that 64 divides to each of keys; no window, no scales and no functions; up to 1024 sequences.
    Lengths, starts and pages are read on the GPU alone, as the kernel "split" does, to which values are left that lie elsewhere
    than in the keys.

    Raises:
        KernelError: it was forced on a call that it does not compute, or batch invariance is set.
    """
    call = PagedCall(*args)
    if not fits(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::paged_attention: kernel {NAME!r} does not take q, k_pages, v_pages of {shapes}, lower={call.lower}, "
            f"scale={call.scale}, mask={call.mask}, bias={call.bias}: it takes {VALUES} values that are the first channels of "
            f"the keys, and pages of a multiple of {_PLACES}. Leave the choice to opkit, or force kernel='reference'."
        )
    decoding.refuse_batch_invariance("opkit::paged_attention", NAME)
    new_out = like(call.q.new_empty((*call.q.shape[:2], VALUES)))
    new_lse = like(call.q.new_empty(call.q.shape[:2], dtype=torch.float32))
    queries, others = Queries(_one_batch(call.q), lambda: _plan(call)), _Others()

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, table, lengths, starts, _, _, _, _, sinks, *_ = args
        if k.data_ptr() != v.data_ptr() or k.data_ptr() % 16:
            return others(args)
        out, lse = new_out(), new_lse()
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        q, found = queries(_one_batch(q))
        found.run(q, k, out, lse, sinks, dense_rows(table), lengths.contiguous(), starts.contiguous())
        return out, lse

    return run


class _Others:
    """Calls whose values are not columns of their keys."""

    def __init__(self) -> None:
        self.run: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __call__(self, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        self.run = self.run or split_paged.prepare(*args)
        return self.run(*args)


def _one_batch(q: Tensor) -> Tensor:
    """Queries of all sequences, (total, heads, size), as (1, heads, total, size)."""
    return q.transpose(0, 1).unsqueeze(0)


def _plan(call: PagedCall) -> MlaLaunches:
    (total, heads, channels), (_, page, kv_heads, _) = call.q.shape, call.k_pages.shape
    batch, keys, group = call.lengths.shape[0], call.page_table.shape[1] * page, heads // kv_heads
    gpu = device_of(decoding.index_of(call.q))
    form = MlaForm(
        group, call.softcap > 0, call.sinks is not None, page=page, batch=max(128, power(batch))
    )  # fmt: skip
    tiles = batch * kv_heads * -(-group * -(-total // batch) // ROWS)
    splits, slots = splits_of(tiles, gpu.processors, -(-keys // STEP)), total * group // ROWS + batch
    upper = max(-decoding.FAR, min(call.upper, decoding.FAR))
    numbers = {
        "lower": -decoding.FAR, "upper": upper, "channels": channels, "keys": keys, **factors(call.scale, call.softcap)
    }  # fmt: skip
    return launches_of(form, MlaDivision(slots, splits, kv_heads), gpu, numbers)
