"""Launches of :mod:`opkit.attn.gpu.mla.device.decode`, and of the kernel that merges its splits where there are some."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from opkit.attn.allocation import allocate_scratch
from opkit.attn.gpu.decode.launches import merged
from opkit.attn.gpu.decode.plan import Device
from opkit.kernels.triton.named import Layout, Named
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel, tensor_descriptor
from opkit.op.triton.launch import PreparedLaunch

VALUES = 512  #: channels of values
ROWS = 64  #: heads of a tile
_REGISTERS, _LOADER_REGISTERS, _ALL_REGISTERS = 240, 24, 168  # the last of each thread before they are shared out
_MLA = Named("opkit.attn.gpu.mla.device.decode", "mla")
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

    def run(self, q: Tensor, k: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *pages: Tensor | None) -> None:
        """Launch on what is read and what is written, and on the table of pages, lengths and starts, each perhaps None."""
        partial = lse if self.merge is None else allocate_scratch(lse, self.partial)
        given = lse if sinks is None else sinks
        written = (out.transpose(0, 1).unsqueeze(0), lse.t().unsqueeze(0)) if self.paged else (out, lse)
        self.kernel(q, k, *written, given, partial, *pages)
        if self.merge is not None:
            self.merge(partial, out, lse, given, *pages[1:])


class Form(NamedTuple):
    """What the kernel is compiled for: the parameters of the device function with these names in capitals."""

    group: int
    capped: bool = False
    sinks: bool = False
    lengths: int = 0
    page: int = 0
    batch: int = 1


class Division(NamedTuple):
    """How a call is divided: slots of tiles for each head of keys, splits of each tile, and heads of keys of a sequence."""

    slots: int
    splits: int
    kv_heads: int


def plan(form: Form, division: Division, gpu: Device, numbers: dict[str, Any]) -> Plan:
    """The launches of a division of a call; ``numbers`` are those of the device function that follow from no tensor."""
    shared = division._asdict()
    launch = PreparedLaunch(_kernel(form, division.splits > 1), _TENSORS, {**numbers, **shared})
    if division.splits == 1:
        return Plan(launch, None, 0, form.page > 0)
    constants = {
        "GROUP": form.group, "DV": VALUES, "DV_WIDE": VALUES, "DV_REST": 0, "ROWS": ROWS, "BATCH": form.batch,
        "PAGE": form.page, "SINKS": form.sinks, "PDL": gpu.overlaps,
    }  # fmt: skip
    keys = {"keys": numbers["keys"]} if form.page else {}
    merge = merged(constants, {**shared, **keys, "height": min(form.group, ROWS)})
    programs = division.slots * division.splits * division.kv_heads
    return Plan(launch, merge, programs * ROWS * (VALUES + 2), form.page > 0)


@functools.cache
def _kernel(form: Form, split: bool) -> TritonKernel:
    layout = Layout("NVMMASharedLayout", swizzle_byte_width=128, element_bitwidth=16, rank=4)
    rows, half, rest = (1, ROWS, 1, 256), (1, 1, 64, 256), (1, 1, 64, 64)
    if form.page:
        half, rest = ((x[0], x[2], x[1], x[3]) for x in (half, rest))
    strides = {f"{x}_{d}": f"{x}_stride_{n}" for x in ("q", "lse") for n, d in enumerate("bht")}
    sizes = {"batch": "q_size_0", "queries": "q_size_2"}
    constants: dict[str, Any] = {name.upper(): value for name, value in form._asdict().items()}
    if form.page:
        sizes |= {"batch": "lengths_size_0", "pages": "k_size_0", "table_b": "table_stride_0"}
    else:
        sizes |= {"keys": "k_size_2"}
        constants |= {"pages": 0, "table_b": 0}
    return triton_kernel(
        _MLA,
        grid=lambda slots, kv_heads, splits: slots * kv_heads * splits,
        bind={**strides, **sizes},
        q_desc=tensor_descriptor("q", block=rows, layout=layout),
        half_desc=tensor_descriptor("k", block=half, layout=layout),
        rest_desc=tensor_descriptor("k", block=rest, layout=layout),
        out_desc=tensor_descriptor("out", block=rows, layout=layout),
        **constants,
        SPLIT=split,
        REGISTERS=_REGISTERS,
        LOADER_REGISTERS=_LOADER_REGISTERS,
        num_warps=4,
        maxnreg=_ALL_REGISTERS,
        targets=("sm_90",),
    )
