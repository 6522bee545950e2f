"""Attention that returns its probabilities too: they are as large as the logits, so no kernel stores them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opkit.attn import reference
from opkit.attn.masks import biases, program
from opkit.attn.masks.algebra import Mask, as_mask, lower
from opkit.attn.masks.program import Grid
from opkit.attn.masks.program_builder import CallSizes


def with_probabilities(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None = None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the result of attention and the probabilities by which the values were weighted, in torch operations.

    Args:
        q: queries, (batch, heads, queries, d).
        k: keys, (batch, heads, keys, d) of ``q``'s dtype.
        v: values, (batch, heads, keys, d_v) of ``q``'s dtype.
        mask: as of :func:`opkit.attention`.
        dropout_p: the share of probabilities that is set to zero, by torch's own generator.

    Returns:
        (batch, heads, queries, d_v) and (batch, heads, queries, keys), of ``q``'s dtype, computed in float32, or float64 for
        float64 ``q``. A query that sees no key gives zeros, in both.

    >>> q = torch.zeros(1, 1, 2, 4)
    >>> with_probabilities(q, q, q)[1]
    tensor([[[[0.5000, 0.5000],
              [0.5000, 0.5000]]]])
    """
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys, values = k.to(dtype), v.to(dtype)
        logits, seen = _logits(q.to(dtype), keys, mask)
        weights = F.dropout(_softmax(logits), dropout_p)
        out = reference.product(weights, values, reference.finite(values), reference.contact(values, seen))
        return out.to(q.dtype), weights.to(q.dtype)


def _logits(q: Tensor, keys: Tensor, mask: Mask | Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the logits, minus infinity where the mask hides, and which of them are visible."""
    seen, added = mask_as_tensors(mask, q, keys)
    product = reference.product(q, keys.mT, reference.finite(keys).mT, reference.contact(keys, seen))
    logits = product * q.shape[-1] ** -0.5
    logits = logits if added is None else logits + added.to(logits.dtype)
    return (logits if seen is None else torch.where(seen, logits, -torch.inf)), seen


def _softmax(logits: Tensor) -> Tensor:
    """Return the softmax, zeros for a fully masked row, whose softmax is NaN."""
    masked = (logits == -torch.inf).all(-1, keepdim=True)
    return torch.where(masked, 0.0, torch.where(masked, 0.0, logits).softmax(-1))


def mask_as_tensors(mask: Mask | Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask as tensors of 4 dimensions that broadcast to the logits: which keys are visible, and what is added."""
    if mask is None:
        return None, None
    sizes = CallSizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
    lowered = lower(as_mask(mask), sizes)
    seen = program.visible(lowered.program, lowered.tensors, Grid(sizes.queries, sizes.keys, q.device))
    if not lowered.additive:
        return seen, None
    tensors: list[Tensor] = []
    words = [word for each in lowered.additive for word in biases.lower(each, sizes, tensors)]
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return seen, program.biased(zero, words, tensors, Grid(sizes.queries, sizes.keys, q.device))
