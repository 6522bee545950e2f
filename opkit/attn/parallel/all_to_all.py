"""Attention to a divided sequence by an exchange: each process gets all positions of some heads, and gives its results back.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opkit.attn.parallel.layout import Layout


class Exchange(torch.autograd.Function):
    """(batch, heads, own positions, d) to (batch, own heads, all positions, d) if ``to_heads``, else back."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, x: Tensor, to_heads: bool) -> Tensor:
        ctx.layout, ctx.to_heads = layout, to_heads
        return _to_heads(layout, x) if to_heads else _to_positions(layout, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, Exchange.apply(ctx.layout, gradient, not ctx.to_heads), None


def _to_heads(layout: Layout, x: Tensor) -> Tensor:
    received = _exchanged(layout, x.unflatten(1, (layout.size, -1)).movedim(1, 0))  # rank, batch, heads, positions, d
    parts = received.unflatten(3, (layout.parts, -1)).movedim(3, 1).flatten(0, 1)
    return parts[layout.order(x.device)].movedim(0, 2).flatten(2, 3)


def _to_positions(layout: Layout, x: Tensor) -> Tensor:
    parts = x.unflatten(2, (layout.size * layout.parts, -1)).movedim(2, 0)
    parts = parts[layout.order(x.device).argsort()].unflatten(0, (layout.size, layout.parts))
    received = _exchanged(layout, parts.movedim(1, 3).flatten(3, 4))
    return received.movedim(0, 1).flatten(1, 2)


def _exchanged(layout: Layout, sent: Tensor) -> Tensor:
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=layout.group)
    return received
