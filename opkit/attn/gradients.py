"""The gradients of attention: an operator of their own, and the rule that gives them to ``opkit::attention``.

With P the probabilities, delta of each row the sum of its result times the result's gradient, less the gradient of its
log-sum-exp, and dS = P (gradient v^T - delta): dq = dS k, dk = dS^T q, dv = P^T gradient, and dS is the gradient of biases
(Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135, appendix B).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn import philox, program, reference
from opkit.attn.calls import GradientCall
from opkit.attn.program import Grid
from opkit.op.definition import custom_op
from opkit.op.operator import CustomOp

_contact, _finite, _product = reference.contact, reference.finite, reference.product
_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def attention_backward(
    gradient: Tensor,
    of_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    mask: list[int],
    bias: list[int],
    scale: float,
    softcap: float,
    heads_inside: bool,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``q``, ``k`` and ``v``, in their dtypes, and each row's delta, in the dtype of ``lse``.

    Args:
        gradient: that of ``out``, of its shape.
        of_lse: that of ``lse``, or None.
        q: and what follows: the arguments and results of :func:`opkit.attn.reference.attention`.
        heads_inside: lay the gradients out as (batch, sequence, heads, head size) in memory.
    """
    call = GradientCall(
        gradient, of_lse, q, k, v, out, lse, mask_tensors, bias_tensors, mask, bias, scale, softcap, heads_inside, seed, dropout_p
    )  # fmt: skip
    found, _, delta = formula(call)
    laid = [reference.laid_out(each, heads_inside) for each in found]
    return laid[0], laid[1], laid[2], delta


def formula(call: GradientCall) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """The gradients of ``q``, ``k`` and ``v``; that of the logits before the mask, in the dtype of ``lse``; and delta."""
    gradient, of_lse, q, k, v, out, lse, mask_tensors, bias_tensors, mask, bias, scale, softcap, _, seed, dropout_p = (
        call
    )
    dtype, heads, grid = lse.dtype, q.shape[1], Grid(q.shape[2], k.shape[2], q.device)
    keys, values = (reference.spread(x.to(dtype), heads) for x in (k, v))
    gradient, queries = gradient.to(dtype), q.to(dtype)
    delta = (gradient * out.to(dtype)).sum(-1) - (0.0 if of_lse is None else of_lse)
    visible = program.visible(mask, mask_tensors, grid)
    products = _product(queries, keys.mT, _finite(keys).mT, _contact(keys, visible)) * scale
    capped = torch.tanh(products / softcap) if softcap > 0 else None
    logits = program.biased(products if capped is None else softcap * capped, bias, bias_tensors, grid)
    seen = (lse > -torch.inf).unsqueeze(-1)
    seen = seen if visible is None else seen & visible
    base = torch.where(lse > -torch.inf, lse, 0.0).unsqueeze(-1)
    weights = torch.where(seen, torch.exp(torch.where(seen, logits - base, 0.0)), 0.0)
    slopes = _product(gradient, values.mT, _finite(values).mT, _contact(values, visible))
    kept = weights
    if dropout_p > 0 and seed is not None:
        factor = philox.kept(seed, dropout_p, q.shape[0], heads, grid) * (
            0.0 if dropout_p >= 1 else 1 / (1 - dropout_p)
        )
        slopes, kept = slopes * factor, weights * factor
    of_logits = torch.where(seen, weights * (slopes - delta.unsqueeze(-1)), 0.0)
    inner = of_logits * scale if capped is None else of_logits * (1 - capped.square()) * scale
    inner = torch.where(seen, inner, 0.0)
    found = (
        (inner @ _finite(keys)).to(q.dtype),
        _gathered(inner.mT @ _finite(queries), k.shape[1]).to(k.dtype),
        _gathered(kept.mT @ gradient, v.shape[1]).to(v.dtype),
    )
    return found, of_logits, delta


def _gathered(x: Tensor, kv_heads: int) -> Tensor:
    """The sum over the query heads that share a head of keys."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


# ---- the rule --------------------------------------------------------------------------------------------------------


@functools.cache
def backward_operator() -> CustomOp[Any, _Four]:
    """``opkit::attention_backward``, defined when it is first asked for."""
    return custom_op("opkit::attention_backward", mutates_args=(), inline=False)(attention_backward)


def setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    """Keep what :func:`backward` reads."""
    q, k, v, mask_tensors, bias_tensors, sinks, seed, *rest = inputs
    optional = [each for each in (sinks, seed) if each is not None]
    ctx.present, ctx.counts = (sinks is not None, seed is not None), (len(mask_tensors), len(bias_tensors))
    ctx.rest = rest
    ctx.set_materialize_grads(False)  # of the log-sum-exp there is seldom a gradient
    ctx.save_for_backward(q, k, v, *output, *mask_tensors, *bias_tensors, *optional)


def backward(ctx: Any, gradient: Tensor | None, of_lse: Tensor | None) -> tuple[Any, ...]:
    """The gradients of the operator's arguments: by ``opkit::attention_backward``, or by its formula where biases have
    gradients, which are as large as the logits."""
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    masks, biases = ctx.counts
    mask_tensors, bias_tensors, optional = tensors[:masks], tensors[masks : masks + biases], tensors[masks + biases :]
    gradient = torch.zeros_like(out) if gradient is None else gradient
    sinks = optional[0] if ctx.present[0] else None
    seed = optional[-1] if ctx.present[1] else None
    mask, bias, scale, softcap, dropout_p, heads_inside = ctx.rest
    call = GradientCall(
        gradient, of_lse, q, k, v, out, lse, mask_tensors, bias_tensors, mask, bias, scale, softcap, heads_inside, seed, dropout_p
    )  # fmt: skip
    of_biases: list[Tensor | None] = [None] * biases
    if not any(ctx.needs_input_grad[4] or ()):
        *found, delta = backward_operator()(*call)
    else:
        found, of_logits, delta = formula(call)
        of_biases = program.bias_gradients(of_logits, bias, bias_tensors)
    of_sinks = None if sinks is None else _of_sinks(sinks, lse, delta)
    return (*found, [None] * masks, of_biases, of_sinks, None, *[None] * 6)


def _of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink has a probability and no value."""
    column = sinks.to(lse.dtype)[None, :, None]
    alive = lse > -torch.inf
    weights = torch.where(alive, torch.exp(column - torch.where(alive, lse, 0.0)), 0.0)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)
