"""``opkit.context_parallel``: attention of sequences that are divided among processes."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from opkit.attn import api
from opkit.attn.masks.program_builder import CallSizes
from opkit.attn.parallel.all_to_all import exchange_heads
from opkit.attn.parallel.blocks import check_whole
from opkit.attn.parallel.functions import TracedCall
from opkit.attn.parallel.layout import Layout, group_of
from opkit.attn.parallel.options import Options
from opkit.attn.parallel.ring import ring_attention
from opkit.errors import ArgumentError, ShapeError

Method = Literal["ring", "all_to_all"]


class ContextParallel:
    """What :func:`context_parallel` yields.

    Attributes:
        layout: which positions each process has.
        method: "ring", "all_to_all", or None for a choice by the call.
    """

    def __init__(self, layout: Layout, method: Method | None) -> None:
        self.layout = layout
        self.method: Method | None = method

    options = staticmethod(Options.drawn)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's part of a dimension that has all positions.

        Raises:
            ShapeError: the dimension is not a multiple of the number of parts.
        """
        layout, total = self.layout, x.shape[dim]
        if total % (layout.size * layout.parts):
            raise ShapeError(
                f"opkit.context_parallel: dimension {dim} of {tuple(x.shape)} has {total} positions; they must be a multiple of "
                f"{layout.size * layout.parts}, the number of parts of {layout.size} processes. Pad the sequence."
            )
        ranges = layout.positions(layout.rank, total // layout.size)
        return torch.cat([x.narrow(dim, each.start, len(each)) for each in ranges], dim)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Return all positions of a dimension of which each process has its part; without gradients."""
        layout = self.layout
        sent = x.detach().movedim(dim, 0).contiguous()
        received = [torch.empty_like(sent) for _ in range(layout.size)]
        dist.all_gather(received, sent, group=layout.group)
        parts = torch.stack(received).unflatten(1, (layout.parts, -1)).flatten(0, 1)
        return parts[layout.order(x.device)].flatten(0, 1).movedim(0, dim)

    def choose(self, q: Tensor, k: Tensor) -> tuple[Method, str]:
        """Return how a call of (batch, heads, positions, d) is computed, and why."""
        size, heads, shared = self.layout.size, q.shape[1], k.shape[1]
        if self.method is not None:
            return self.method, "it was asked for"
        if heads % size == 0 and shared % size == 0:
            return "all_to_all", f"{shared} heads of keys can be divided among {size} processes"
        return "ring", f"{shared} heads of keys cannot be divided among {size} processes"

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, sinks: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Return the result and the log-sum-exp of this process's queries, (batch, heads, positions, d)."""
        queries, keys = (x.shape[2] * self.layout.size for x in (q, k))
        whole = CallSizes(q.shape[0], q.shape[1], queries, keys, q.device)
        return self.attend(q, k, v, TracedCall.of(mask, bias, whole, q.dtype), sinks, options)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: TracedCall, sinks: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Return the same of a call whose functions are traced."""
        method, _ = self.choose(q, k)
        if method == "ring":
            return ring_attention(self.layout, call, options, q, k, v, sinks)
        return self._by_heads(q, k, v, call, sinks, options)

    def _by_heads(
        self, q: Tensor, k: Tensor, v: Tensor, call: TracedCall, sinks: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        layout = self.layout
        described = f"sinks: {sinks is not None}, {options.described(call.mask, call.biases)}"
        q, k, v = exchange_heads([q, k, v], True, layout.name, layout.balanced, described)
        count = q.shape[1]
        whole = CallSizes(q.shape[0], count * layout.size, q.shape[2], k.shape[2], q.device)
        check_whole(call.mask, call.biases, whole)
        heads = range(layout.rank * count, (layout.rank + 1) * count)
        sinks = None if sinks is None else sinks[heads.start : heads.stop]
        out, lse = call.part(heads).run(options, q, k, v, sinks, (heads.start, 0))
        out, lse = exchange_heads([out, lse.unsqueeze(-1)], False, layout.name, layout.balanced, "")
        return out, lse.squeeze(-1)


@contextlib.contextmanager
def context_parallel(mesh: Any, *, method: Method | None = None, balanced: bool = False) -> Generator[ContextParallel]:
    """Within it, :func:`opkit.attention` takes this process's part of each sequence, and attends to all of it.

    Queries, keys and values are plain tensors with the same number of positions on every process. Masks, biases and what their
    functions capture are those of the whole sequence, on every process; ``opkit.sdpa_override`` within it serves models that
    call torch's attention. Gradients of ``sinks``, biases and captured tensors are of this process's queries or heads: they are
    summed with those of the model's other parameters. Dropout draws one seed from torch's generator, which each part changes by
    its place in the sequence; which probabilities it sets to zero depends on ``method`` and the number of processes.

    Args:
        mesh: a ``DeviceMesh`` of one dimension, or a process group.
        method: "ring": the keys go from process to process, and results are merged; those that no query sees are not sent.
            "all_to_all": each process gets all positions of some heads, and gives the results back. None: "all_to_all" where the
            heads of keys can be divided, else "ring"; ``choose(q, k)`` of what is yielded says which, and why.
        balanced: whether a process has two parts of the sequence, one from its front and one from its back, so that with a
            causal mask all have equal work; else one part each, in the order of ranks. ``shard`` and ``unshard`` of what is
            yielded divide and join tensors accordingly.

    Raises:
        ArgumentError: at a call with a mask that cannot be divided; or, on every process, if the processes make different calls.
        ShapeError: at a call with "all_to_all" and heads that cannot be divided, or with "ring" and a ``RelativePosition`` whose
            grid's rows are divided.

    Example, in each process of ``torchrun --nproc-per-node 4``::

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
        with opkit.context_parallel(mesh, balanced=True) as parallel:
            q, k, v = (parallel.shard(x, 2) for x in (q, k, v))
            out = opkit.attention(q, k, v, mask=Causal())
            whole = parallel.unshard(out, 2)
    """
    if method not in (None, "ring", "all_to_all"):
        raise ArgumentError(f'opkit.context_parallel: method={method!r} must be "ring", "all_to_all" or None.')
    active = ContextParallel(Layout.of(group_of(mesh, "opkit.context_parallel"), balanced), method)
    previous, api.context = api.context, active
    try:
        yield active
    finally:
        api.context = previous
