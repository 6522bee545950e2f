"""Attention to keys that other processes hold.

In step ``t`` a process works on the keys of the rank that is ``t`` before its own, while those of the next step arrive. Keys that
none of a process's queries sees are not sent to it. Results for parts of the keys are merged by their log-sum-exps. The backward
gets the keys again, and sends the gradients of each part to its owner, which adds them.

With P the probabilities among the keys of one part, those among all keys are ``w P`` with ``w = exp(lse of the part - lse)``. So
the gradients of a part are those of attention to it alone, for the gradient ``w g`` of a result that is that of all keys.

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023,
https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opkit.attn import gradients
from opkit.attn.calls import AttentionCall
from opkit.attn.masks.algebra import Mask
from opkit.attn.merging import merge_attention
from opkit.attn.operator import attention_operator
from opkit.attn.parallel.blocks import Block, bias_of, mask_of
from opkit.attn.parallel.layout import Layout
from opkit.attn.parallel.options import Options


class _Seen(NamedTuple):
    """A block in which a query sees a key: where its queries and keys are in their processes, and the part of the mask."""

    rows: slice
    columns: slice
    block: Block
    mask: Mask | None


class Ring:
    """A call of attention to keys that are divided among processes.

    Args:
        layout: how they are divided.
        mask: that of the whole sequence.
        options: those of all calls.
        queries, keys: how many each process has.
    """

    def __init__(self, layout: Layout, mask: Mask | None, options: Options, queries: int, keys: int) -> None:
        self.layout, self.options = layout, options
        self._mask, self._queries, self._keys = mask, queries, keys
        self.seen = functools.cache(self._seen)

    def _seen(self, rank: int, owner: int) -> list[_Seen]:
        """Return the blocks of the queries of one rank and the keys of another in which a query sees a key."""
        found: list[_Seen] = []
        shift = (self._keys - self._queries) * self.layout.size
        for a, queries in enumerate(self.layout.positions(rank, self._queries)):
            for c, keys in enumerate(self.layout.positions(owner, self._keys)):
                block = Block(queries, keys, shift)
                part = mask_of(self._mask, block) if queries and keys else False
                if part is not False:
                    found.append(_Seen(_slice(a, queries), _slice(c, keys), block, None if part is True else part))
        return found

    def call(self, q: Tensor, k: Tensor, v: Tensor, seen: _Seen, biases: Sequence[Any]) -> AttentionCall:
        """Return the operator's arguments for a block, from all of this process's queries and the keys of another."""
        rows, columns, block, mask = seen
        parts = [part for bias in biases for part in bias_of(bias, block)]
        at = block.queries.start, block.keys.start
        return self.options.call(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask, parts, None, at)

    def arriving(self, own: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """Yield for each step a rank, and its keys if they are seen here; the first are this process's ``own``."""
        size, rank = self.layout.size, self.layout.rank

        def start(step: int) -> tuple[int, Tensor | None, list[Any]]:
            owner = (rank - step) % size
            received = torch.empty_like(own) if self.seen(rank, owner) else None
            sent = own if self.seen((rank + step) % size, rank) else None
            return owner, received, self.layout.exchange(step, sent, received)

        pending = start(1) if size > 1 else None
        yield rank, own if self.seen(rank, rank) else None
        for step in range(1, size):
            assert pending is not None
            owner, received, works = pending
            _wait(works)
            pending = start(step + 1) if step + 1 < size else None
            yield owner, received

    def returned(self, step: int, sent: Tensor | None, own: Tensor) -> tuple[Tensor | None, list[Any]]:
        """Send gradients to the owner of the keys of a step, and begin to receive those of this process's keys."""
        size, rank = self.layout.size, self.layout.rank
        received = torch.empty_like(own) if self.seen((rank + step) % size, rank) else None
        return received, self.layout.exchange(-step, sent, received)


def ring_attention(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, biases: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """Return the result and the log-sum-exp of this process's queries."""
    fields = [None if isinstance(bias, Tensor) else [f.name for f in dataclasses.fields(bias)] for bias in biases]
    tensors = [
        x for bias, names in zip(biases, fields, strict=True)
        for x in ([bias] if names is None else [getattr(bias, name) for name in names])
    ]  # fmt: skip

    def rebuilt(tensors: Sequence[Tensor]) -> list[Any]:
        """Return the biases with other tensors."""
        rest = iter(tensors)
        return [
            next(rest) if names is None else type(bias)(*itertools.islice(rest, len(names)))
            for bias, names in zip(biases, fields, strict=True)
        ]

    return _RingAttention.apply(ring, rebuilt, q, k, v, sinks, *tensors)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, rebuilt: Callable[[Sequence[Tensor]], list[Any]], q: Tensor, k: Tensor, v: Tensor,
        sinks: Tensor | None, *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        if sinks is not None:  # a part whose result is zero
            lse.copy_(sinks[:, None])
        of_parts: list[Tensor] = []
        biases = rebuilt(tensors)
        for owner, flat in ring.arriving(_flat(k, v)):
            if flat is None:
                continue
            keys, values = _shaped(flat, k, v)
            for seen in ring.seen(ring.layout.rank, owner):
                part, sums = attention_operator()(*ring.call(q, keys, values, seen, biases))
                rows = seen.rows
                of_parts.append(sums)
                merged = merge_attention([(out[:, :, rows], lse[:, :, rows]), (part.to(dtype), sums)])
                out[:, :, rows], lse[:, :, rows] = merged
        out = out.to(q.dtype)
        ctx.ring, ctx.rebuilt, ctx.tensors = ring, rebuilt, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *tensors, *of_parts)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, of_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *rest = ctx.saved_tensors
        gradient = torch.zeros_like(out) if gradient is None else gradient
        needed = ctx.needs_input_grad[6:]
        leaves = [x.detach().requires_grad_(each) for x, each in zip(rest[: ctx.tensors], needed, strict=True)]
        biases = functools.partial(ctx.rebuilt, leaves)
        of_q, of_keys = _gradients(ctx.ring, biases, gradient, of_lse, (q, k, v, out, lse), rest[ctx.tensors :])
        of_sinks = None
        if sinks is not None:
            delta = (gradient.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            of_sinks = gradients.sink_gradient(sinks, lse, delta if of_lse is None else delta - of_lse)
        of_tensors = [torch.zeros_like(x) if x.requires_grad and x.grad is None else x.grad for x in leaves]
        return None, None, of_q, *(x.contiguous() for x in _shaped(of_keys, k, v)), of_sinks, *of_tensors


def _gradients(
    ring: Ring, biases: Callable[[], list[Any]], gradient: Tensor, of_lse: Tensor | None, saved: Sequence[Tensor],
    of_parts: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of this process's queries, and of its keys and values, flat; add those of biases to their ``grad``."""
    q, k, v, out, lse = saved
    own, sums = _flat(k, v), iter(of_parts)
    of_q, total = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(own, dtype=lse.dtype)
    returning: list[Any] = []
    for step, (owner, flat) in enumerate(ring.arriving(own)):
        of_flat = None if flat is None else torch.zeros_like(total)
        if flat is not None and of_flat is not None:
            (keys, values), (of_keys, of_values) = _shaped(flat, k, v), _shaped(of_flat, k, v)
            for seen in ring.seen(ring.layout.rank, owner):
                with torch.enable_grad():  # from the tensors of biases to their parts
                    call = ring.call(q, keys, values, seen, biases())
                of_part, rows, columns = next(sums), seen.rows, seen.columns
                wanted = [n for n, part in enumerate(call.bias_tensors) if part.requires_grad]
                weight = torch.where(of_part > -torch.inf, torch.exp(of_part - lse[:, :, rows]), 0.0)
                scaled = weight.unsqueeze(-1) * gradient[:, :, rows]
                scaled_of_lse = None if of_lse is None else weight * of_lse[:, :, rows]
                of_block, of_biases = gradients.of_part(call, scaled, scaled_of_lse, out[:, :, rows], of_part, wanted)
                if wanted:
                    torch.autograd.backward([call.bias_tensors[n] for n in wanted], [of_biases[n] for n in wanted])
                of_q[:, :, rows] += of_block[0]
                of_keys[:, :, columns] += of_block[1]
                of_values[:, :, columns] += of_block[2]
        if step > 0:
            returning.append(ring.returned(step, None if of_flat is None else of_flat.to(own.dtype), own))
        elif of_flat is not None:
            total += of_flat
    for received, works in returning:
        _wait(works)
        if received is not None:
            total += received
    return of_q.to(q.dtype), total.to(own.dtype)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _slice(number: int, positions: range) -> slice:
    return slice(number * len(positions), (number + 1) * len(positions))


def _flat(k: Tensor, v: Tensor) -> Tensor:
    """Return keys and values as one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _shaped(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = flat.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)
