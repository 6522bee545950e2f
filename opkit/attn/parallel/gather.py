"""The tensors of all processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Gather(torch.autograd.Function):
    """(...) of each process to (processes, ...). All processes compute the same from it, so no gradient is sent."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.rank = dist.get_rank(group)
        sent = x.contiguous()
        received = sent.new_empty((dist.get_world_size(group), *sent.shape))
        dist.all_gather(list(received), sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient[ctx.rank]
