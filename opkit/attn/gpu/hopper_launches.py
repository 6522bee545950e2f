"""Launches of the kernels for few queries on sm_90, and of the kernel that merges their splits where there are some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from opkit.attn.gpu.decode_launches import merged
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launch import PreparedLaunch

ROWS = 64  #: heads of a tile
_WRITTEN = ("out", "lse", "sinks", "partial")


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
        self, read: Sequence[Tensor], out: Tensor, lse: Tensor, sinks: Tensor | None, *pages: Tensor | None
    ) -> None:
        """Launch on what is read and what is written, and on the table of pages, lengths and starts, each perhaps None."""
        partial = lse if self.merge is None else lse.new_empty(self.partial)
        given = lse if sinks is None else sinks
        written = (out.transpose(0, 1).unsqueeze(0), lse.t().unsqueeze(0)) if self.paged else (out, lse)
        self.kernel(*read, *written, given, partial, *pages)
        if self.merge is not None:
            self.merge(partial, out, lse, given, *pages[1:])


class Form(NamedTuple):
    """What kernels are compiled for; the parameters of the device functions with these names in capitals."""

    group: int
    capped: bool = False
    sinks: bool = False
    lengths: int = 0
    page: int = 0
    batch: int = 1


class Division(NamedTuple):
    """How a call is divided.

    Attributes:
        slots: of tiles, for each head of keys.
        splits: of each tile.
        kv_heads: heads of keys of a sequence.
        columns: of values.
        wide: the same, padded.
    """

    slots: int
    splits: int
    kv_heads: int
    columns: int
    wide: int


def plan(
    kernel: TritonKernel,
    read: Sequence[str],
    form: Form,
    division: Division,
    overlaps: bool,
    numbers: dict[str, Any],
) -> Plan:
    """The launches of a division.

    Args:
        kernel: with the parameters of ``form``.
        read: the names of what it reads, of pages too.
        form: what it was compiled for.
        division: of the call.
        overlaps: whether the GPU may start a kernel before the one that it depends on has ended.
        numbers: the other values of the device function that follow from no tensor.
    """
    slots, splits, kv_heads, columns, wide = division
    shared = {"slots": slots, "splits": splits, "kv_heads": kv_heads}
    names = (*read, *_WRITTEN, "table", "lengths", "starts")
    launch = PreparedLaunch(kernel, names, {**numbers, **shared})
    if splits == 1:
        return Plan(launch, None, 0, form.page > 0)
    constants = {
        "GROUP": form.group, "DV": columns, "DV_WIDE": wide, "DV_REST": 0, "ROWS": ROWS, "BATCH": form.batch,
        "PAGE": form.page, "SINKS": form.sinks, "PDL": overlaps,
    }  # fmt: skip
    keys = {"keys": numbers["keys"]} if form.page else {}
    merge = merged(constants, {**shared, **keys, "height": min(form.group, ROWS)})
    return Plan(launch, merge, slots * kv_heads * splits * ROWS * (wide + 2), form.page > 0)
