"""The reference of the attention operator, in torch operations on any device, differentiable any number of times.

A key or value that a query does not see must not reach its result or its gradient, not even as ``0 * NaN``. So each
product with keys or values is computed twice: once with keys and values whose rows with NaN or infinity are zeroed, for the
queries that see no such row, and once with all of them, for the queries that do and must get what arithmetic gives.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from opkit.attn.masks import biases, program
from opkit.attn.masks.algebra import Mask, as_mask
from opkit.attn.masks.lowering import lower
from opkit.attn.masks.program import Grid
from opkit.attn.masks.program_builder import CallSizes


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
    grid = Grid(q.shape[2], k.shape[2], q.device, q.shape[0], q.shape[1])
    keys, values = (spread(x.to(dtype), q.shape[1]) for x in (k, v))
    seen = program.visible(mask, mask_tensors, grid)
    logits = product(q.to(dtype), keys.mT, finite(keys).mT, contact(keys, seen)) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
    logits = program.biased(logits, bias, bias_tensors, grid)
    weights, logits, masked = softmax(logits, seen, sinks)
    lse = torch.where(masked.squeeze(-1), -math.inf, logits.logsumexp(-1))
    if dropout_p != 0 and seed is not None:
        drawn = retained(seed, dropout_p, weights.shape[0], weights.shape[1], grid)
        weights = torch.where(drawn, weights * (0.0 if dropout_p >= 1 else 1 / (1 - dropout_p)), 0.0)
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


def laid_out(out: Tensor, out_is_bshd: bool) -> Tensor:
    """Return ``out`` laid out in memory as (batch, queries, heads, d_v) if ``out_is_bshd``, else contiguous."""
    return out.transpose(1, 2).contiguous().transpose(1, 2) if out_is_bshd else out.contiguous()


# ---- dropout: Philox-4x32-10 of the positions of probabilities, in torch's integers, alike on every device ---
# Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405

_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


def philox_words(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four 32-bit words, in int64, of counters and a key of 32-bit words in int64.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox_words((zero,) * 4, (zero,) * 2)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        high0, low0 = _product_of_words(c0, _PHILOX_MULTIPLIERS[0])
        high1, low1 = _product_of_words(c2, _PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _PHILOX_KEY_STEPS[0]) & _WORD, (k1 + _PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product_of_words(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower word of a product of two words, without leaving int64."""
    left, right = word * (multiplier >> 16), word * (multiplier & 0xFFFF)
    middle = left + (right >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (right & 0xFFFF)


def retained(seed: Tensor, dropout_p: float, batch: int, heads: int, grid: Grid) -> Tensor:
    """Return which probabilities dropout retains: bool, (batch, heads, queries, keys).

    That of (b, h, i, j) is retained where word ``j % 4`` of the counter ``(j // 4, i, b * heads + h, 0)``, divided by 2**32, is
    not below ``dropout_p``. The key is the lower 32 bits of each of the two numbers in ``seed``, int64 (2,).
    """
    key = (seed[0] & _WORD, seed[1] & _WORD)
    rows = torch.arange(batch * heads, device=grid.device).reshape(batch, heads, 1, 1)
    quads = torch.arange((grid.keys + 3) // 4, device=grid.device)
    zero = torch.zeros((), dtype=torch.int64, device=grid.device)
    drawn = torch.stack(torch.broadcast_tensors(*philox_words((quads, grid.rows, rows, zero), key)), dim=-1)
    return drawn.flatten(-2)[..., : grid.keys].double() * 2.0**-32 >= dropout_p


# ---- attention that returns its probabilities too: they are as large as the logits, so no kernel stores them ---


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
        seen, added = mask_as_tensors(mask, q, keys)
        logits = product(q.to(dtype), keys.mT, finite(keys).mT, contact(keys, seen)) * q.shape[-1] ** -0.5
        weights, _, _ = softmax(logits if added is None else logits + added.to(dtype), seen, None)
        weights = F.dropout(weights, dropout_p)
        out = product(weights, values, finite(values), contact(values, seen))
        return out.to(q.dtype), weights.to(q.dtype)


def mask_as_tensors(mask: Mask | Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask as tensors of 4 dimensions that broadcast to the logits: which keys are visible, and what is added."""
    if mask is None:
        return None, None
    sizes = CallSizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
    lowered = lower(as_mask(mask), sizes)
    seen = program.visible(lowered.program, lowered.tensors, Grid(sizes.queries, sizes.keys, q.device, *q.shape[:2]))
    if not lowered.additive:
        return seen, None
    tensors: list[Tensor] = []
    words = [word for each in lowered.additive for word in biases.lower(each, sizes, tensors)]
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return seen, program.biased(zero, words, tensors, Grid(sizes.queries, sizes.keys, q.device))
