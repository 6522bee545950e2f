"""The reference of the attention operator, in torch operations on any device, differentiable any number of times.

A key or value that a query does not see must not reach its result or its gradient, not even as ``0 * NaN``. So each
product with keys or values is computed twice: once with keys and values whose rows with NaN or infinity are zeroed, for the
queries that see no such row, and once with all of them, for the queries that do and must get what arithmetic gives.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opkit.attn import philox
from opkit.attn.masks import program
from opkit.attn.masks.program import Grid


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    sinks: Tensor | None,
    seed: Tensor | None,
    mask: list[int],
    bias: list[int],
    scale: float,
    softcap: float,
    dropout_p: float,
    out_is_bshd: bool,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of queries to the keys that a mask's program lets them see.

    The logits are ``q @ k.mT * scale``, then ``softcap * tanh(logits / softcap)`` where ``softcap`` is not 0, then the
    biases are added, then what the mask hides is minus infinity. All of it is computed in float32, or float64 for
    float64 ``q``; probabilities are not rounded to a narrower dtype.

    Args:
        q: (batch, heads, queries, d), any floating dtype, any strides.
        k: (batch, key heads, keys, d) of ``q``'s dtype; ``heads`` is a multiple of the key heads.
        v: (batch, key heads, keys, d_v) of ``q``'s dtype.
        mask_tensors: the tensors that ``mask`` refers to.
        bias_tensors: the tensors that ``bias`` refers to.
        sinks: (heads,), one more logit for each row, which has no value.
        seed: int64 (2,), for dropout; needed where ``dropout_p`` is not 0.
        mask: a program of :mod:`opkit.attn.masks.program`; empty: every query sees every key.
        bias: a program of biases; empty: none.
        scale: a factor of the logits.
        softcap: a bound of the logits' magnitude; 0: none.
        dropout_p: the share of probabilities that dropout sets to zero; the others are divided by ``1 - dropout_p``.
        out_is_bshd: lay the result out as (batch, queries, heads, d_v) in memory.

    Returns:
        The result, (batch, heads, queries, d_v) of ``q``'s dtype, and the logarithm of the sum of the exponentials of each
        row's logits, (batch, heads, queries) in float32 or float64. A row that sees nothing is zeros and minus infinity.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    grid = Grid(q.shape[2], k.shape[2], q.device)
    keys, values = (spread(x.to(dtype), q.shape[1]) for x in (k, v))
    seen = program.visible(mask, mask_tensors, grid)
    logits = _logits(q.to(dtype), keys, seen, scale, softcap)
    logits = program.biased(logits, bias, bias_tensors, grid)
    weights, logits, masked = softmax(logits, seen, sinks)
    lse = torch.where(masked.squeeze(-1), -math.inf, logits.logsumexp(-1))
    weights = _dropped(weights, seed, dropout_p, grid)
    out = product(weights, values, finite(values), contact(values, seen)).to(q.dtype)
    return laid_out(out, out_is_bshd), lse


def spread(x: Tensor, heads: int) -> Tensor:
    """Return keys or values, repeated for the query heads that share a head of theirs."""
    if heads == x.shape[1]:
        return x
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def contact(x: Tensor, seen: Tensor | None) -> Tensor | None:
    """Return which queries see a row of ``x`` that is not finite, (batch, heads, queries, 1); None where each sees all rows."""
    return None if seen is None else (seen & ~x.isfinite().all(-1).unsqueeze(-2)).any(-1, keepdim=True)


def product(left: Tensor, right: Tensor, clean: Tensor, contact: Tensor | None) -> Tensor:
    """Return ``left @ right``, and ``left @ clean`` for the rows of ``left`` without ``contact``."""
    if contact is None:
        return left @ right
    without = torch.where(contact, 0.0, left) @ clean
    return torch.where(contact, torch.where(contact, left, 0.0) @ right, without)


def finite(x: Tensor) -> Tensor:
    """Return ``x`` with each row that has NaN or infinity zeroed."""
    return torch.where(x.isfinite().all(-1, keepdim=True), x, 0.0)


def _logits(q: Tensor, keys: Tensor, seen: Tensor | None, scale: float, softcap: float) -> Tensor:
    logits = product(q, keys.mT, finite(keys).mT, contact(keys, seen)) * scale
    return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits


def softmax(logits: Tensor, seen: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the probabilities without the sink's; all logits, 0 in fully masked rows; and which rows are fully masked."""
    if seen is not None:
        logits = torch.where(seen, logits, -math.inf)
    if sinks is not None:
        column = sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, column), dim=-1)
    masked = (logits == -math.inf).all(-1, keepdim=True)
    logits = torch.where(
        masked, 0.0, logits
    )  # a softmax of nothing but minus infinity is NaN, and so are its derivatives
    weights = torch.where(masked, 0.0, logits.softmax(-1))
    weights = weights if sinks is None else weights[..., :-1]
    return weights if seen is None else torch.where(seen, weights, 0.0), logits, masked


def _dropped(weights: Tensor, seed: Tensor | None, dropout_p: float, grid: Grid) -> Tensor:
    if dropout_p == 0 or seed is None:
        return weights
    retained = philox.retained(seed, dropout_p, weights.shape[0], weights.shape[1], grid)
    return torch.where(retained, weights * (0.0 if dropout_p >= 1 else 1 / (1 - dropout_p)), 0.0)


def laid_out(out: Tensor, out_is_bshd: bool) -> Tensor:
    """Return ``out`` laid out in memory as (batch, queries, heads, d_v) if ``out_is_bshd``, else contiguous."""
    return out.transpose(1, 2).contiguous().transpose(1, 2) if out_is_bshd else out.contiguous()
