"""``torch.nn.functional.scaled_dot_product_attention`` by :func:`opkit.attention`: the function, and ways to put it in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opkit.attn.api import attention
from opkit.attn.compat import torch_private
from opkit.attn.compat.flex import flex_attention
from opkit.attn.compat.torch_private import causal_bias_of
from opkit.attn.masks.algebra import Mask, as_mask
from opkit.attn.masks.diagonals import Causal
from opkit.errors import ArgumentError, ShapeError
from opkit.op import torch_private as private

_TORCHS = torch_private.sdpa
_CAUSAL = Causal()
_NAME = "opkit.nn.functional.scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, with its arguments and their meaning.

    Args:
        query: (..., heads, queries, d), with any number of leading dimensions, none included.
        key: (..., heads, keys, d); leading dimensions broadcast.
        value: (..., heads, keys, d_v).
        attn_mask: bool (True: is seen) or floating (is added), which broadcasts to (..., heads, queries, keys).
        dropout_p: the share of probabilities that is dropped.
        is_causal: query ``i`` sees the keys up to ``i``.
        scale: of logits; ``1 / sqrt(d)`` by default.
        enable_gqa: whether several heads of queries may share one of keys.

    Heads broadcast too, of keys and values alone as well, and none but the last two dimensions need be there. Nested tensors, and
    tensors that are made of others (``DTensor``), are left to torch's own function.

    Returns:
        (..., heads, queries, d_v) in the dtype of ``query``. A query that sees nothing gives zeros.

    Raises:
        ArgumentError: both ``attn_mask`` and ``is_causal`` are given.
        ShapeError: the shapes do not fit.

    >>> q = torch.ones(2, 3, 4)
    >>> scaled_dot_product_attention(q, q, q, is_causal=True).shape
    torch.Size([2, 3, 4])
    """
    if is_causal and attn_mask is not None:
        raise ArgumentError(f"{_NAME}: give attn_mask or is_causal=True, not both.")
    if any(x.is_nested or torch_private.is_wrapper(x) for x in (query, key, value)):
        return _TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if _as_they_are(query, key, value, enable_gqa):
        mask = _CAUSAL if is_causal else None if attn_mask is None else as_mask(attn_mask)
        return attention(query, key, value, mask=mask, scale=scale, dropout_p=dropout_p)
    lead, heads = _leading(query, key, value), _heads(query, key, value, enable_gqa)
    if private.or_false(heads[0] == 0) or private.or_false(
        query.shape[-1] == 0
    ):  # nothing to compute, but gradients to pass
        return _TORCHS(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    q, k, v = (_four(x, lead, count) for x, count in zip((query, key, value), heads, strict=True))
    mask = _CAUSAL if is_causal else None if attn_mask is None else _mask(attn_mask, lead)
    out = attention(q, k, v, mask=mask, scale=scale, dropout_p=dropout_p)
    dims = max(query.dim(), key.dim(), value.dim())
    return out if dims == 4 else out.reshape(*lead, *(out.shape[1:2] if dims > 2 else ()), *out.shape[-2:])


def _as_they_are(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Return whether ``attention`` takes them without a change of shape: nothing is spread, and no heads are shared unasked."""
    wanted, given = query.shape, key.shape
    if len(wanted) != 4 or not private.or_true(wanted[1] != 0) or not private.or_true(wanted[3] != 0):
        return False
    if wanted == given == value.shape:
        return True
    spread = wanted[:1] if enable_gqa else wanted[:2]
    return len(given) == value.dim() == 4 and given[: len(spread)] == spread and value.shape[:2] == given[:2]


def _leading(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return the dimensions before the heads that all three broadcast to."""
    shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
    if any(x.dim() < 2 for x in (query, key, value)):
        raise ShapeError(f"{_NAME}: query, key and value have shapes {shapes}; each needs (..., sequence, head size).")
    try:
        return tuple(torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value))))
    except RuntimeError as error:
        raise ShapeError(f"{_NAME}: leading dimensions of shapes {shapes} do not broadcast.") from error


def _heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, int, int]:
    """Return how many heads each of the three is to have: those of keys and values are the same, and divide those of queries."""
    of_q, of_k, of_v = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    if enable_gqa and of_k and of_v and of_q % of_k == 0 and of_q % of_v == 0:
        return of_q, *((of_k, of_v) if of_k == of_v else (of_q, of_q))
    for full in (of_q, of_k, of_v):
        if full != 1 and all(count in (1, full) for count in (of_q, of_k, of_v)):
            return full, *((of_k, of_v) if of_k == of_v else (full, full))
    if of_q == of_k == of_v:
        return of_q, of_k, of_v
    raise ShapeError(
        f"{_NAME}: query has {of_q} heads, key {of_k} and value {of_v}. Give enable_gqa=True if heads share keys."
    )


def _four(x: Tensor, lead: tuple[int, ...], heads: int) -> Tensor:
    """(batch, heads, sequence, head size), of so many heads, each of them in its place several times where there are fewer."""
    x = x if x.dim() > 2 else x.unsqueeze(0)
    if x.shape[-3] not in (1, heads):
        x = x.repeat_interleave(heads // x.shape[-3], -3)
    spread = x.expand(*lead, heads, *x.shape[-2:])
    return spread.flatten(0, -4) if lead else spread.unsqueeze(0)


def _mask(mask: Tensor, lead: tuple[int, ...]) -> Mask:
    if causal_bias_of(mask) is None and len(lead) > 1 and mask.dim() > 3:
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
    return as_mask(mask)


# ---- in place of torch's ---------------------------------------------------------------------------------------------


_MULTI_HEAD = torch_private.with_globals(
    F.multi_head_attention_forward, scaled_dot_product_attention=scaled_dot_product_attention
)
"""The function behind ``nn.MultiheadAttention`` and the layers of ``nn.Transformer``, by our attention."""


class sdpa_override(TorchFunctionMode):
    """Within it, calls of ``torch.nn.functional.scaled_dot_product_attention`` run :func:`opkit.attention`, compiled ones too.

    So do ``nn.MultiheadAttention`` and the layers of ``nn.Transformer``, in training and in inference, but for
    ``need_weights=True``, where torch computes probabilities in operations of its own. Of this thread alone;
    :func:`set_sdpa_override` is for all.

    >>> import opkit, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> x = torch.ones(1, 3, 8)
    >>> with opkit.sdpa_override():
    ...     out = layer(x)
    >>> torch.testing.assert_close(out, layer(x))
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ours for torch's."""
        if func is _TORCHS:
            func = scaled_dot_product_attention
        elif func is F.multi_head_attention_forward:  # within which this mode is off
            func = _MULTI_HEAD
        return func(*args, **(kwargs or {}))


def set_sdpa_override(enabled: bool) -> None:
    """Put opkit's ``scaled_dot_product_attention`` and ``flex_attention`` in the place of torch's, or torch's back.

    These places are ``torch.nn.functional`` and ``torch.nn.attention.flex_attention``. It holds for all threads, and for code
    that calls the functions by their places; what has imported one by name keeps what it has, and ``nn.MultiheadAttention`` keeps
    its fast path in inference, which does not call it. Compiled code is compiled
    again.

    >>> import opkit, torch
    >>> opkit.set_sdpa_override(True)
    >>> torch.nn.functional.scaled_dot_product_attention.__module__
    'opkit.attn.compat.sdpa'
    >>> opkit.set_sdpa_override(False)
    """
    F.scaled_dot_product_attention = scaled_dot_product_attention if enabled else _TORCHS
    torch_private.set_flex_attention(flex_attention if enabled else None)
    private.clear_overridable_functions()
