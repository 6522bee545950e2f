"""The gradients of attention: their operators, and the autograd rule of ``opkit::attention`` that calls them.

With P the probabilities, delta of each row the sum of its result times the result's gradient, less the gradient of its
log-sum-exp, and dS = P (gradient v^T - delta): dq = dS k, dk = dS^T q, dv = P^T gradient, and dS is the gradient of biases
(Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135, appendix B).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn import reference
from opkit.attn.calls import AttentionCall, BiasCall, GradientCall
from opkit.attn.masks import program
from opkit.attn.masks.program import Grid
from opkit.op.definition import custom_op
from opkit.op.operator import CustomOp

_contact, _finite, _product = reference.contact, reference.finite, reference.product
_Results = tuple[Tensor, Tensor, Tensor, Tensor]
_NO_OPTIONAL = (0, 0, False, False)  # numbers of mask and bias tensors, whether there are sinks and a seed
_NO_GRADIENTS = (None,) * 8  # for the sinks and all arguments after them


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
    out_is_bshd: bool,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``, in their dtypes, and each row's delta, in the dtype of ``lse``.

    Args:
        gradient: the gradient of ``out``, of its shape.
        of_lse: the gradient of ``lse``, or None.
        q: and what follows: the arguments and results of :func:`opkit.attn.reference.attention`.
        out_is_bshd: lay the gradients out as (batch, sequence, heads, head size) in memory.
    """
    call = GradientCall(
        gradient, of_lse, q, k, v, out, lse, mask_tensors, bias_tensors, mask, bias, scale, softcap, out_is_bshd, seed,
        dropout_p, sinks,
    )  # fmt: skip
    gradients, delta = reference_gradients(call)
    of_q, of_k, of_v = (reference.laid_out(each, out_is_bshd) for each in gradients)
    return of_q, of_k, of_v, delta


def attention_bias_backward(
    gradient: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    mask: list[int],
    bias: list[int],
    scale: float,
    softcap: float,
    wanted: list[int],
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradients of some of the tensors of a bias, each of its tensor's shape and dtype.

    Args:
        gradient: the gradient of the result of :func:`opkit.attn.reference.attention`, of its shape.
        delta: the last result of :func:`attention_backward`, (batch, heads, queries).
        q: and what follows: the arguments and the log-sum-exp of :func:`opkit.attn.reference.attention`.
        wanted: the numbers of these tensors, none of them twice.
    """
    call = BiasCall(
        gradient, delta, q, k, v, lse, mask_tensors, bias_tensors, mask, bias, scale, softcap, wanted, seed, dropout_p, sinks
    )  # fmt: skip
    gradients = _logit_gradients(call, delta).of_biases
    results: list[Tensor] = []
    for number in wanted:
        one = gradients[number]
        one = torch.zeros_like(bias_tensors[number]) if one is None else one
        results.append(one.clone() if any(one is other for other in results) else one)
    return results


def attention_whole_backward(
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
    out_is_bshd: bool,
    seed: Tensor | None,
    dropout_p: float,
    sinks: Tensor | None,
    wanted: list[int],
) -> list[Tensor]:
    """Return the results of :func:`attention_backward`, and then those of :func:`attention_bias_backward`, by both operators.

    Where a kernel exists it computes the scores once for both.
    """
    call = GradientCall(
        gradient, of_lse, q, k, v, out, lse, mask_tensors, bias_tensors, mask, bias, scale, softcap, out_is_bshd, seed,
        dropout_p, sinks,
    )  # fmt: skip
    *gradients, delta = backward_operator()(*call)
    of_biases = _of_biases(call, delta, wanted)
    return [*gradients, delta, *[each for each in of_biases if each is not None]]


def reference_gradients(call: GradientCall) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return the gradients of ``q``, ``k`` and ``v``; and delta."""
    gradient, of_lse, q, k, v, out, lse = call[:7]
    dtype, heads = lse.dtype, q.shape[1]
    gradient = gradient.to(dtype)
    delta = (gradient * out.to(dtype)).sum(-1) - (0.0 if of_lse is None else of_lse)
    _, of_products, weights, _ = _logit_gradients(call, delta)
    gradients = (
        (of_products @ _finite(reference.spread(k.to(dtype), heads))).to(q.dtype),
        _sum_shared_heads(of_products.mT @ _finite(q.to(dtype)), k.shape[1]).to(k.dtype),
        _sum_shared_heads(weights.mT @ gradient, v.shape[1]).to(v.dtype),
    )
    return gradients, delta


class _LogitGradients(NamedTuple):
    """The gradients of the logits and of the products of queries and keys; the weights of the values; a bias's gradients."""

    of_logits: Tensor
    of_products: Tensor
    weights: Tensor
    of_biases: list[Tensor | None]


def _logit_gradients(call: GradientCall | BiasCall, delta: Tensor) -> _LogitGradients:
    """Return them; the first three are (batch, heads, queries, keys) in the dtype of the log-sum-exp."""
    q, lse, scale, softcap = call.q, call.lse, call.scale, call.softcap
    dtype, heads, grid = lse.dtype, q.shape[1], Grid.of(call)
    keys, values = (reference.spread(x.to(dtype), heads) for x in (call.k, call.v))
    visible = program.visible(call.mask, call.mask_tensors, grid)
    products = _product(q.to(dtype), keys.mT, _finite(keys).mT, _contact(keys, visible)) * scale
    capped = torch.tanh(products / softcap) if softcap > 0 else None
    unbiased = products if capped is None else softcap * capped
    logits = program.biased(unbiased, call.bias, call.bias_tensors, grid)
    seen = (lse > -torch.inf).unsqueeze(-1)
    seen = seen if visible is None else seen & visible
    # Not exp(logits - lse): where logits are large, their maximum plus the logarithm of a sum is the maximum.
    weights = torch.where(seen, reference.softmax(logits, visible, call.sinks)[0], 0.0)
    of_weights = _product(call.gradient.to(dtype), values.mT, _finite(values).mT, _contact(values, visible))
    retained = weights
    if call.dropout_p > 0 and call.seed is not None:
        factor = 0.0 if call.dropout_p >= 1 else 1 / (1 - call.dropout_p)
        factor = reference.retained(call.seed, call.dropout_p, q.shape[0], heads, grid) * factor
        of_weights, retained = of_weights * factor, weights * factor
    of_logits = torch.where(seen, weights * (of_weights - delta.unsqueeze(-1)), 0.0)
    of_unbiased, of_biases = program.bias_gradients(of_logits, seen, unbiased, call.bias, call.bias_tensors, grid)
    inner = of_unbiased * scale if capped is None else of_unbiased * (1 - capped.square()) * scale
    return _LogitGradients(of_logits, torch.where(seen, inner, 0.0), retained, of_biases)


def _sum_shared_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Return the sum over the query heads that share a head of keys."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


# ---- the autograd rule --------------------------------------------------------------------------------------------------------


@functools.cache
def backward_operator() -> CustomOp[Any, _Results]:
    """Return ``opkit::attention_backward``; the first call defines it."""
    return custom_op("opkit::attention_backward", mutates_args=(), inline=False)(attention_backward)


@functools.cache
def bias_backward_operator() -> CustomOp[Any, list[Tensor]]:
    """Return ``opkit::attention_bias_backward``; the first call defines it."""
    return custom_op("opkit::attention_bias_backward", mutates_args=())(attention_bias_backward)


@functools.cache
def whole_backward_operator() -> CustomOp[Any, list[Tensor]]:
    """Return ``opkit::attention_whole_backward``; the first call defines it."""
    return custom_op("opkit::attention_whole_backward", mutates_args=(), inline=False)(attention_whole_backward)


def setup_context(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    """Save what :func:`backward` reads."""
    q, k, v, mask_tensors, bias_tensors, sinks, seed = inputs[:7]
    ctx.rest = inputs[7:13]
    ctx.optional = len(mask_tensors), len(bias_tensors), sinks is not None, seed is not None
    ctx.set_materialize_grads(False)  # the log-sum-exp seldom has a gradient
    if ctx.optional == _NO_OPTIONAL:
        ctx.save_for_backward(q, k, v, *output)
        return
    optional = [each for each in (sinks, seed) if each is not None]
    ctx.save_for_backward(q, k, v, *output, *mask_tensors, *bias_tensors, *optional)


def backward(ctx: Any, gradient: Tensor | None, of_lse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the operator's arguments."""
    saved: Sequence[Tensor] = ctx.saved_tensors
    mask, bias, scale, softcap, dropout_p, out_is_bshd = ctx.rest
    gradient = torch.zeros_like(saved[3]) if gradient is None else gradient
    if ctx.optional != _NO_OPTIONAL:
        return _backward_with_optional(ctx, gradient, of_lse, saved)
    of_q, of_k, of_v, _ = backward_operator()(
        gradient, of_lse, *saved, [], [], mask, bias, scale, softcap, out_is_bshd, None, dropout_p
    )
    return of_q, of_k, of_v, [], [], *_NO_GRADIENTS


def _backward_with_optional(
    ctx: Any, gradient: Tensor, of_lse: Tensor | None, saved: Sequence[Tensor]
) -> tuple[Any, ...]:
    """Do the same for a call that saved more tensors than q, k, v and the results."""
    q, k, v, out, lse, *tensors = saved
    masks, biases, has_sinks, has_seed = ctx.optional
    mask_tensors, bias_tensors, optional = tensors[:masks], tensors[masks : masks + biases], tensors[masks + biases :]
    sinks = optional[0] if has_sinks else None
    seed = optional[-1] if has_seed else None
    mask, bias, scale, softcap, dropout_p, out_is_bshd = ctx.rest
    call = GradientCall(
        gradient, of_lse, q, k, v, out, lse, mask_tensors, bias_tensors, mask, bias, scale, softcap, out_is_bshd, seed,
        dropout_p, sinks,
    )  # fmt: skip
    wanted = [number for number, needed in enumerate(ctx.needs_input_grad[4] or ()) if needed]
    of_biases: list[Tensor | None] = [None] * biases
    if wanted and q.device.type == "cpu":
        found = whole_backward_operator()(*call, wanted)
        gradients, delta = found[:3], found[3]
        for number, one in zip(wanted, found[4:], strict=True):
            of_biases[number] = one
    else:
        *gradients, delta = backward_operator()(*call)
        of_biases = _of_biases(call, delta, wanted) if wanted else of_biases
    of_sinks = None if sinks is None else sink_gradient(sinks, lse, delta)
    return (*gradients, [None] * masks, of_biases, of_sinks, *_NO_GRADIENTS[1:])


def of_part(
    call: AttentionCall, gradient: Tensor, of_lse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[int]
) -> tuple[Sequence[Tensor], list[Tensor | None]]:
    """Return the gradients of q, k and v of one of several calls whose results are merged, and those of its biases.

    Args:
        call: the arguments of ``opkit::attention``.
        gradient, of_lse: the gradients of the merged result and log-sum-exp, times the weight of this call's.
        out: the merged result.
        lse: the log-sum-exp of this call's.
        wanted: the numbers of the bias tensors whose gradients are needed; None is returned for the others.
    """
    own = GradientCall(
        gradient.to(call.q.dtype), of_lse, call.q, call.k, call.v, out, lse, call.mask_tensors, call.bias_tensors, call.mask,
        call.bias, call.scale, call.softcap, call.out_is_bshd, call.seed, call.dropout_p, call.sinks,
    )  # fmt: skip
    *of_inputs, delta = backward_operator()(*own)
    return of_inputs, _of_biases(own, delta, wanted) if wanted else [None] * len(call.bias_tensors)


def _of_biases(call: GradientCall, delta: Tensor, wanted: list[int]) -> list[Tensor | None]:
    """Return the gradients of the tensors that are wanted, None for the others."""
    computed = bias_backward_operator()(
        call.gradient, delta, call.q, call.k, call.v, call.lse, call.mask_tensors, call.bias_tensors, call.mask, call.bias,
        call.scale, call.softcap, wanted, call.seed, call.dropout_p, call.sinks,
    )  # fmt: skip
    gradients: list[Tensor | None] = [None] * len(call.bias_tensors)
    for number, one in zip(wanted, computed, strict=True):
        gradients[number] = one
    return gradients


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks, which have a probability and no value."""
    column = sinks.to(lse.dtype)[None, :, None]
    visible = lse > -torch.inf
    weights = torch.where(visible, torch.exp(column - torch.where(visible, lse, 0.0)), 0.0)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)
