"""Launches of :mod:`opkit.attn.gpu.device.mla`, and of the kernel that merges its splits where there are some."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl

from opkit.attn.gpu.decode_launches import merged
from opkit.attn.gpu.device.mla import mla
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel, tensor_descriptor
from opkit.op.triton.launch import PreparedLaunch

VALUES = 512  #: channels of values
ROWS = 64  #: heads of a tile
_HALF, _KEYS, _REST = 256, 64, 64
_REGISTERS, _LOADER_REGISTERS, _ALL_REGISTERS = 240, 24, 168  # the last of each thread before they are shared out
_TENSORS = ("q", "k", "out", "lse", "sinks", "partial", "table", "lengths", "starts")


class Plan(NamedTuple):
    """The launches of calls of some shapes.

    Attributes:
        kernel: the launch of the kernel.
        merge: that of the kernel that merges splits; None where there is one split.
        partial: elements of what is merged.
        paged: whether results are of (total, heads), of which the kernel makes (1, heads, total).
    """

    kernel: PreparedLaunch
    merge: PreparedLaunch | None
    partial: int
    paged: bool

    def run(
        self, q: Tensor, k: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *pages: Tensor | None
    ) -> None:
        """Launch on what is read and what is written, and on the table of pages, lengths and starts, each perhaps None."""
        partial = lse if self.merge is None else lse.new_empty(self.partial)
        given = lse if sinks is None else sinks
        written = (out.transpose(0, 1).unsqueeze(0), lse.t().unsqueeze(0)) if self.paged else (out, lse)
        self.kernel(q, k, *written, given, partial, *pages)
        if self.merge is not None:
            self.merge(partial, out, lse, given, *pages[1:])


class Form(NamedTuple):
    """What kernels are compiled for; the parameters of the device function with these names in capitals."""

    group: int
    capped: bool = False
    sinks: bool = False
    lengths: int = 0
    page: int = 0
    batch: int = 1


def plan(form: Form, splits: int, slots: int, kv_heads: int, overlaps: bool, numbers: dict[str, Any]) -> Plan:
    """The launches of a division into ``slots`` of tiles for each of ``kv_heads``, and of each into ``splits``.

    ``overlaps``: the GPU may start a kernel before the one that it depends on has ended. ``numbers`` are those of the device
    function that follow from no tensor.
    """
    shared = {"slots": slots, "splits": splits, "kv_heads": kv_heads}
    launch = PreparedLaunch(_kernel(form, splits > 1), _TENSORS, {**numbers, **shared})
    if splits == 1:
        return Plan(launch, None, 0, form.page > 0)
    constants = {
        "GROUP": form.group, "DV": VALUES, "DV_WIDE": VALUES, "DV_REST": 0, "ROWS": ROWS, "BATCH": form.batch,
        "PAGE": form.page, "SINKS": form.sinks, "PDL": overlaps,
    }  # fmt: skip
    keys = {"keys": numbers["keys"]} if form.page else {}
    merge = merged(constants, {**shared, **keys, "height": min(form.group, ROWS)})
    return Plan(launch, merge, slots * kv_heads * splits * ROWS * (VALUES + 2), form.page > 0)


@functools.cache
def _kernel(form: Form, split: bool) -> TritonKernel:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    rows, keys = (1, ROWS, 1, _HALF), (lambda size: (1, _KEYS, 1, size) if form.page else (1, 1, _KEYS, size))
    strides = {f"{x}_{d}": f"{x}_stride_{n}" for x in ("q", "lse") for n, d in enumerate("bht")}
    sizes = {"batch": "q_size_0", "queries": "q_size_2"}
    if form.page:
        sizes |= {"batch": "lengths_size_0", "pages": "k_size_0", "table_b": "table_stride_0"}
    else:
        sizes |= {"keys": "k_size_2"}
    return triton_kernel(
        mla,
        grid=lambda slots, kv_heads, splits: slots * kv_heads * splits,
        bind={**strides, **sizes},
        q_desc=tensor_descriptor("q", block=rows, layout=layout),
        half_desc=tensor_descriptor("k", block=keys(_HALF), layout=layout),
        rest_desc=tensor_descriptor("k", block=keys(_REST), layout=layout),
        out_desc=tensor_descriptor("out", block=rows, layout=layout),
        **{name.upper(): value for name, value in form._asdict().items()},
        **({} if form.page else {"pages": 0, "table_b": 0}),
        SPLIT=split,
        REGISTERS=_REGISTERS,
        LOADER_REGISTERS=_LOADER_REGISTERS,
        num_warps=4,
        maxnreg=_ALL_REGISTERS,
        targets=("sm_90",),
    )
