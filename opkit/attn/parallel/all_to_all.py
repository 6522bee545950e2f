"""Attention to a divided sequence by an exchange: each process gets all positions of some heads, and gives its results back.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opkit.attn.parallel.agreement import agree
from opkit.attn.parallel.layout import Layout
from opkit.errors import ShapeError
from opkit.op.definition import custom_op


@custom_op("opkit::exchange_heads", mutates_args=(), opaque=True, tags=torch.Tag.cudagraph_unsafe)
def exchange_heads(tensors: list[Tensor], to_heads: bool, group: str, balanced: bool, call: str) -> list[Tensor]:
    """Return tensors (batch, heads, own positions, d) as (batch, own heads, all positions, d) if ``to_heads``, else back.

    Args:
        tensors: of one device.
        group: the name of the process group.
        balanced: how the sequence is divided; see :class:`Layout`.
        call: what the processes compare before they exchange heads, together with the tensors' dtypes and shapes; "": nothing.

    Raises:
        ArgumentError: on every process, if they make different calls.
        ShapeError: the heads cannot be divided.
    """
    layout = Layout.named(group, balanced)
    if call:
        agree("opkit.attention", layout, tensors, call)
    if to_heads:
        _check_heads(tensors, layout.size)
    exchanged = _to_heads if to_heads else _to_positions
    return [exchanged(layout, x).contiguous() for x in tensors]


@exchange_heads.register_fake
def _(tensors: list[Tensor], to_heads: bool, group: str, balanced: bool, call: str) -> list[Tensor]:
    size, results = Layout.named(group, balanced).size, []
    if to_heads:
        _check_heads(tensors, size)
    for x in tensors:
        batch, heads, positions, d = x.shape
        sizes = (heads // size, positions * size) if to_heads else (heads * size, positions // size)
        results.append(x.new_empty((batch, *sizes, d)))
    return results


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.options = inputs[1:4]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    to_heads, group, balanced = ctx.options
    given = [each for each in gradients if each is not None]
    returned = iter(exchange_heads(given, not to_heads, group, balanced, "") if given else [])
    return [None if each is None else next(returned) for each in gradients], None, None, None, None


exchange_heads.register_autograd(_backward, setup_context=_setup_context)


def _check_heads(tensors: Sequence[Tensor], size: int) -> None:
    if any(x.shape[1] % size for x in tensors):
        raise ShapeError(
            f"opkit.attention: {tensors[0].shape[1]} heads of queries and {tensors[-1].shape[1]} of keys cannot be divided among "
            f'{size} processes. Use opkit.context_parallel(..., method="ring").'
        )


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
