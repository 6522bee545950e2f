"""The results of all processes for their parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opkit.attn.parallel.agreement import agree
from opkit.attn.parallel.layout import Layout
from opkit.op.definition import custom_op


@custom_op("opkit::gather_parts", mutates_args=(), opaque=True, tags=torch.Tag.cudagraph_unsafe)
def gather_parts(out: Tensor, lse: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return the results and the log-sum-exps of all processes, (processes, ...).

    All processes compute the same from them, so their gradients are not sent.

    Raises:
        ArgumentError: on every process, if those have other shapes or dtypes.
    """
    layout = Layout.named(group)
    agree("opkit.merge_attention", layout, (out, lse))
    return _gathered(layout, out), _gathered(layout, lse)


@gather_parts.register_fake
def _(out: Tensor, lse: Tensor, group: str) -> tuple[Tensor, Tensor]:
    size = Layout.named(group).size
    return out.new_empty((size, *out.shape)), lse.new_empty((size, *lse.shape))


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.group = inputs[2]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    rank = Layout.named(ctx.group).rank
    return *(None if each is None else each[rank] for each in gradients), None


gather_parts.register_autograd(_backward, setup_context=_setup_context)


def _gathered(layout: Layout, x: Tensor) -> Tensor:
    sent = x.contiguous()
    received = sent.new_empty((layout.size, *sent.shape))
    dist.all_gather(list(received), sent, group=layout.group)
    return received
