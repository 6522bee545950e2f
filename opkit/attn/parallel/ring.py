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

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opkit.attn import gradients
from opkit.attn.calls import AttentionCall
from opkit.attn.compat import torch_private
from opkit.attn.functions import graph_calls
from opkit.attn.functions.pending import SUBSTITUTES
from opkit.attn.functions.trace import Traced
from opkit.attn.masks.algebra import Mask
from opkit.attn.masks.program_builder import CallSizes
from opkit.attn.merging import merge_attention
from opkit.attn.operator import attention_operator
from opkit.attn.parallel.agreement import agree
from opkit.attn.parallel.blocks import Block, bias_of, check_divisible, check_whole, mask_of
from opkit.attn.parallel.encoding import decoded, encoded
from opkit.attn.parallel.functions import TracedCall, separated
from opkit.attn.parallel.layout import Layout
from opkit.attn.parallel.options import Options
from opkit.op.definition import custom_op


class _Seen(NamedTuple):
    """A block in which a query sees a key: where its queries and keys are in their processes, and the part of the mask.

    ``numbers`` are those of the parts of its queries and keys in their processes.
    """

    rows: slice
    columns: slice
    block: Block
    mask: Mask | None
    numbers: tuple[int, int]


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
                    own = None if part is True else part
                    found.append(_Seen(_slice(a, queries), _slice(c, keys), block, own, (a, c)))
        return found

    def call(self, q: Tensor, k: Tensor, v: Tensor, seen: _Seen, biases: Sequence[Any]) -> AttentionCall:
        """Return the operator's arguments for a block, from all of this process's queries and the keys of another."""
        rows, columns, block, mask, _ = seen
        parts = [part for bias in biases for part in bias_of(bias, block)]
        at = block.queries.start, block.keys.start
        return self.options.call(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask, parts, None, at)

    def blocks(self) -> Iterator[tuple[int, _Seen]]:
        """Yield the blocks of this process's queries, each with the owner of its keys, in the order of their computation."""
        size, rank = self.layout.size, self.layout.rank
        for step in range(size):
            owner = (rank - step) % size
            yield from ((owner, seen) for seen in self.seen(rank, owner))

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
    layout: Layout, call: TracedCall, options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the result and the log-sum-exp of this process's queries."""
    program, tensors = encoded(tuple(call.biases))
    if torch.compiler.is_compiling():
        words, of_mask = encoded(call.mask)

        def run() -> tuple[Tensor, Tensor]:
            out, lse, _ = ring_forward(
                q, k, v, of_mask, tensors, sinks, options.seed, words, program, options.scale, options.softcap,
                float(options.dropout_p), layout.name, layout.balanced,
            )  # fmt: skip
            return out, lse

        return graph_calls.call(run, call.functions, q)
    ring = _agreed(layout, call.mask, options, q, k, v, sinks, call.biases)
    return _RingAttention.apply(ring, program, q, k, v, sinks, *tensors)


def _agreed(
    layout: Layout, mask: Mask | None, options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    biases: Sequence[Any],
) -> Ring:  # fmt: skip
    """Return the call, which all processes make alike; raise on all of them if they do not, or if masks and biases do not fit."""
    agree("opkit.attention", layout, (q, k, v), f"sinks: {sinks is not None}, {options.described(mask, biases)}")
    queries, keys = (x.shape[2] * layout.size for x in (q, k))
    check_whole(mask, biases, CallSizes(q.shape[0], q.shape[1], queries, keys, q.device))
    for each in biases:
        check_divisible(each, k.shape[2] // layout.parts)
    return Ring(layout, mask, options, q.shape[2], k.shape[2])


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, program: list[int], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse, of_parts = _results(ring, decoded(program, tensors), q, k, v, sinks)
        ctx.ring, ctx.program, ctx.tensors = ring, program, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *tensors, *of_parts)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, of_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *rest = ctx.saved_tensors
        gradient = torch.zeros_like(out) if gradient is None else gradient
        tensors, of_parts = rest[: ctx.tensors], rest[ctx.tensors :]
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[6:]) if needed]
        saved = q, k, v, out, lse
        *of_inputs, of_biases = _gradients(ctx.ring, ctx.program, tensors, wanted, gradient, of_lse, saved, of_parts)
        of_sinks = None if sinks is None else _sink_gradient(sinks, gradient, of_lse, out, lse)
        return None, None, *of_inputs, of_sinks, *_each(of_biases, wanted, len(tensors))


def _results(
    ring: Ring, biases: Sequence[Any], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the result, its log-sum-exp, and the log-sum-exps of the blocks, as :meth:`Ring.blocks` yields them."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    if sinks is not None:  # a part whose result is zero
        lse.copy_(sinks[:, None])
    of_parts: list[Tensor] = []
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
    return out.to(q.dtype), lse, of_parts


def _sink_gradient(sinks: Tensor, gradient: Tensor, of_lse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    delta = (gradient.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return gradients.sink_gradient(sinks, lse, delta if of_lse is None else delta - of_lse)


def _each(computed: Sequence[Tensor], wanted: Sequence[int], count: int) -> list[Tensor | None]:
    found = dict(zip(wanted, computed, strict=True))
    return [found.get(n) for n in range(count)]


def _gradients(
    ring: Ring, program: Sequence[int], tensors: Sequence[Tensor], wanted: Sequence[int], gradient: Tensor,
    of_lse: Tensor | None, saved: Sequence[Tensor], of_parts: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Return the gradients of this process's queries, keys and values, and of those tensors of biases that are wanted."""
    q, k, v, out, lse = saved
    leaves = [x.detach().requires_grad_(n in wanted) for n, x in enumerate(tensors)]
    own, sums = _flat(k, v), iter(of_parts)
    of_q, total = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(own, dtype=lse.dtype)
    returning: list[Any] = []
    for step, (owner, flat) in enumerate(ring.arriving(own)):
        of_flat = None if flat is None else torch.zeros_like(total)
        if flat is not None and of_flat is not None:
            (keys, values), (of_keys, of_values) = _shaped(flat, k, v), _shaped(of_flat, k, v)
            for seen in ring.seen(ring.layout.rank, owner):
                with torch.enable_grad():  # from the tensors of biases to their parts
                    call = ring.call(q, keys, values, seen, decoded(program, leaves))
                of_part, rows, columns = next(sums), seen.rows, seen.columns
                needed = [n for n, part in enumerate(call.bias_tensors) if part.requires_grad]
                weight = torch.where(of_part > -torch.inf, torch.exp(of_part - lse[:, :, rows]), 0.0)
                scaled = weight.unsqueeze(-1) * gradient[:, :, rows]
                scaled_of_lse = None if of_lse is None else weight * of_lse[:, :, rows]
                of_block, of_biases = gradients.of_part(call, scaled, scaled_of_lse, out[:, :, rows], of_part, needed)
                if needed:
                    torch.autograd.backward([call.bias_tensors[n] for n in needed], [of_biases[n] for n in needed])
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
    of_keys, of_values = (x.to(k.dtype, copy=True) for x in _shaped(total, k, v))
    of_tensors = [torch.zeros_like(x) if x.grad is None else x.grad for x in (leaves[n] for n in wanted)]
    return of_q.to(q.dtype), of_keys, of_values, of_tensors


# ---- operators, which compilers call --------------------------------------------------------------------------------------


@custom_op("opkit::ring_attention", mutates_args=(), opaque=True, tags=torch.Tag.cudagraph_unsafe)
def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, mask_tensors: list[Tensor], bias_tensors: list[Tensor], sinks: Tensor | None,
    seed: Tensor | None, mask: list[int], bias: list[int], scale: float | None, softcap: float | None, dropout_p: float,
    group: str, balanced: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result, the log-sum-exp, and for each block of queries and keys its log-sum-exp, which the backward reads.

    Args:
        q, k, v: this process's, (batch, heads, positions, d).
        mask_tensors, mask: the mask of the whole sequence, from :func:`opkit.attn.parallel.encoding.encoded`.
        bias_tensors, bias: a tuple of its biases, likewise.
        seed, scale, softcap, dropout_p: see :class:`Options`.
        group, balanced: the process group's name, and how the sequence is divided; see :class:`Layout`.
    """
    layout, options = Layout.named(group, balanced), Options(scale, softcap, dropout_p, seed)
    biases = decoded(bias, bias_tensors)
    ring = _agreed(layout, decoded(mask, mask_tensors), options, q, k, v, sinks, biases)
    out, lse, of_parts = _results(ring, biases, q, k, v, sinks)
    sums = lse.new_full(_sums_shape(layout, q), -torch.inf)
    for (owner, seen), each in zip(ring.blocks(), of_parts, strict=True):
        sums[(owner, *seen.numbers)] = each
    return out, lse, sums


def _with_functions(
    q: Tensor, k: Tensor, v: Tensor, mask_tensors: Sequence[Tensor], bias_tensors: Sequence[Tensor], sinks: Tensor | None,
    seed: Tensor | None, mask: Sequence[int], bias: Sequence[int], *others: Any, functions: Sequence[Traced],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of :func:`ring_forward` with the expressions of functions in place of their numbers."""
    traced = decoded(mask, mask_tensors, functions), list(decoded(bias, bias_tensors, functions))
    of_mask, added = separated(*traced)
    (mask, mask_tensors), (bias, bias_tensors) = encoded(of_mask), encoded(tuple(added))
    return q, k, v, mask_tensors, bias_tensors, sinks, seed, mask, bias, *others


SUBSTITUTES["opkit.ring_attention.default"] = _with_functions


@ring_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse, lse.new_empty(_sums_shape(Layout.named(*others[-2:]), q))


def _sums_shape(layout: Layout, q: Tensor) -> tuple[int, ...]:
    return layout.size, layout.parts, layout.parts, *q.shape[:2], q.shape[2] // layout.parts


@custom_op("opkit::ring_attention_backward", mutates_args=(), opaque=True, tags=torch.Tag.cudagraph_unsafe)
def ring_backward(
    gradient: Tensor, of_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sums: Tensor,
    mask_tensors: list[Tensor], bias_tensors: list[Tensor], seed: Tensor | None, mask: list[int], bias: list[int],
    scale: float | None, softcap: float | None, dropout_p: float, group: str, balanced: bool, wanted: list[int],
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of ``q``, ``k`` and ``v``, and of the ``bias_tensors`` whose numbers are wanted."""
    options = Options(scale, softcap, dropout_p, seed)
    ring = Ring(Layout.named(group, balanced), decoded(mask, mask_tensors), options, q.shape[2], k.shape[2])
    of_parts = [sums[(owner, *seen.numbers)] for owner, seen in ring.blocks()]
    with torch_private.recording_again():
        *of_inputs, of_biases = _gradients(
            ring, bias, bias_tensors, wanted, gradient, of_lse, (q, k, v, out, lse), of_parts
        )
    return [*of_inputs, *of_biases]


@ring_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    q, k, v, biases, wanted = *arguments[2:5], arguments[9], arguments[-1]
    return [x.new_empty(x.shape) for x in (q, k, v, *(biases[n] for n in wanted))]


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    q, k, v, mask_tensors, bias_tensors, sinks, seed, *ctx.options = inputs
    ctx.counts = len(mask_tensors), len(bias_tensors)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sinks, seed, *mask_tensors, *bias_tensors)


def _backward(ctx: Any, gradient: Tensor | None, of_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, sums, sinks, seed, *tensors = ctx.saved_tensors
    masks, biases = ctx.counts
    gradient = torch.zeros_like(out) if gradient is None else gradient
    wanted = [n for n, needed in enumerate(ctx.needs_input_grad[4] or ()) if needed]
    rest: list[Any] = [tensors[:masks], tensors[masks:], seed, *ctx.options, wanted]
    of_q, of_k, of_v, *of_biases = ring_backward(gradient, of_lse, q, k, v, out, lse, sums, *rest)
    of_sinks = None if sinks is None else _sink_gradient(sinks, gradient, of_lse, out, lse)
    return of_q, of_k, of_v, [None] * masks, _each(of_biases, wanted, biases), of_sinks, *[None] * 8


ring_forward.register_autograd(_backward, setup_context=_setup_context)


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
