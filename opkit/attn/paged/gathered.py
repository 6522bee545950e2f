"""Paged attention of many queries on CPUs: the tiles kernel on the gathered keys and values of a sequence.

The kernel for pages reads keys and values once for all rows, a row at a time; the tiles kernel computes products of matrices. For
the prompt of a sequence that is 1.5 to 3 times as fast, and gathering takes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from opkit.attn import cpu
from opkit.attn.calls import PagedCall
from opkit.attn.masks import program
from opkit.attn.paged import cpu as paged_cpu
from opkit.attn.paged.reference import gather_pages
from opkit.op.dispatch.selection import Refused
from opkit.op.kernel_kinds import PreparedKernel

MANY = 128  #: queries of a sequence


def takes(call: PagedCall) -> bool | Refused:
    """Return whether :func:`paged` takes a call: one in which a sequence may have many queries, without functions."""
    few = call.q.shape[0] - call.lengths.shape[0] + 1 < MANY
    return not (few or call.mask or call.bias) and call.q.dtype in cpu.NAMES and paged_cpu.takes_pages(call)


@PreparedKernel
def paged(*arguments: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute sequences with many queries by the tiles kernel, and the others by the kernel for pages.

    Raises:
        ValueError: a length, a start of queries or a page that is needed is out of range.
    """
    of_few = paged_cpu.paged.prepare(*arguments)

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        call = PagedCall(*arguments)
        many = call.starts.diff() >= MANY
        if not many.any():
            return of_few(*arguments)
        out, lse = of_few(*call._replace(lengths=call.lengths.masked_fill(many, 0)))
        attend(call, many.nonzero().flatten().tolist(), cpu.forward, out, lse)
        return out, lse

    return run


def attend(
    call: PagedCall, sequences: Iterable[int], kernel: Callable[..., tuple[Tensor, Tensor]], out: Tensor, lse: Tensor
) -> None:
    """Write the results of some sequences to ``out`` and ``lse``, computed by a kernel of ``opkit::attention``.

    Pages that are quantised or of another dtype than ``q`` are computed in float32.

    Raises:
        ValueError: a length or a page that is needed is out of range.
    """
    q, k_pages, v_pages, page_table, lengths, starts, lower, upper, scale, softcap, sinks, k_scale, v_scale, *_ = call
    same = k_scale is None and v_scale is None and k_pages.dtype == v_pages.dtype == q.dtype
    dtype = q.dtype if same else torch.float32
    ends, counts = starts.tolist(), lengths.tolist()
    for sequence in sequences:
        rows, length = slice(ends[sequence], ends[sequence + 1]), counts[sequence]
        pages = _pages(page_table[sequence], length, k_pages)
        k, v = (gather_pages(x, s, pages, dtype) for x, s in ((k_pages, k_scale), (v_pages, v_scale)))
        k, v = (x.flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0) for x in (k, v))
        some = q[rows].to(dtype).transpose(0, 1).unsqueeze(0)
        band = _band(lower, upper, length - some.shape[2])
        result, sums = kernel(some, k, v, [], [], sinks, None, band, [], scale, softcap, 0.0, True)
        out[rows], lse[rows] = result[0].transpose(0, 1).to(q.dtype), sums[0].mT


def _pages(table: Tensor, length: int, pages: Tensor) -> Tensor:
    """Return the numbers of the pages of a sequence."""
    most = table.shape[0] * pages.shape[1]
    if not 0 <= length <= most:
        raise ValueError(f"opkit::paged_attention: a length is {length}; it must be from 0 to {most}")
    found = table[: -(-length // max(pages.shape[1], 1))].long()
    if ((found < 0) | (found >= pages.shape[0])).any():
        raise ValueError(f"opkit::paged_attention: pages {found.tolist()} must be from 0 to {pages.shape[0] - 1}")
    return found


def _band(lower: int, upper: int, shift: int) -> list[int]:
    """Return the program of a band of positions; empty where there is no limit."""
    if lower <= -program.UNLIMITED and upper >= program.UNLIMITED:
        return []
    ends = (
        lower if lower <= -program.UNLIMITED else lower + shift,
        upper if upper >= program.UNLIMITED else upper + shift,
    )
    return [program.BAND, *ends]
