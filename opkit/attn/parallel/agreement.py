"""Compare the calls of all processes before they exchange tensors, which would hang or mix up memory where calls differ."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from opkit.attn.calls import dtypes_and_shapes
from opkit.attn.parallel.layout import Layout
from opkit.errors import ArgumentError


def agree(operator: str, layout: Layout, tensors: Sequence[Tensor], details: str = "") -> None:
    """Raise on every process if they call an operator with other tensors, or with other details.

    GPUs, which would have to wait, compare the first call of a kind.
    """
    group, call = layout.group, f"{dtypes_and_shapes(tensors)} {details}".strip()
    known = _agreed(group)
    if call in known and tensors[0].device.type != "cpu":
        return
    others: list[Any] = [None] * layout.size
    dist.all_gather_object(others, call, group=group)
    if len({*others}) > 1:
        listed = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(others))
        raise ArgumentError(f"{operator}: the processes make different calls. {listed}")
    known.add(call)


@functools.lru_cache(64)
def _agreed(group: Any) -> set[str]:
    return set()
