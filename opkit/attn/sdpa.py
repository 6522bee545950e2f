"""``torch.nn.functional.scaled_dot_product_attention`` by :func:`opkit.attention`: the function, and ways to put it in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from opkit.attn.api import attention
from opkit.attn.diagonals import Causal
from opkit.attn.masks import Dense, Mask, as_mask, causal_bias_of
from opkit.errors import ArgumentError, ShapeError
from opkit.op import torch_private as private

_TORCHS = F.scaled_dot_product_attention
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
    if _as_they_are(query, key, value, enable_gqa):
        mask = _CAUSAL if is_causal else None if attn_mask is None else as_mask(attn_mask)
        return attention(query, key, value, mask=mask, scale=scale, dropout_p=dropout_p)
    lead = _leading(query, key, value, enable_gqa)
    q, k, v = (_four(x, lead, enable_gqa) for x in (query, key, value))
    mask = _CAUSAL if is_causal else None if attn_mask is None else _mask(attn_mask, lead, query, key)
    out = attention(q, k, v, mask=mask, scale=scale, dropout_p=dropout_p)
    return (
        out
        if query.dim() == 4
        else out.reshape(*lead, *(query.shape[-3:-2] if query.dim() > 2 else ()), *out.shape[-2:])
    )


def _as_they_are(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether ``attention`` takes them without a change of shape: nothing is spread, and no heads are shared unasked."""
    wanted, given = query.shape, key.shape
    if len(wanted) == 4 and wanted == given == value.shape:
        return True
    spread = wanted[:1] if enable_gqa else wanted[:2]
    return (
        len(wanted) == len(given) == value.dim() == 4 and given[: len(spread)] == spread and value.shape[0] == spread[0]
    )


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The dimensions before the heads that all three broadcast to."""
    if any(x.dim() < 2 for x in (query, key, value)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ShapeError(f"{_NAME}: query, key and value have shapes {shapes}; each needs (..., sequence, head size).")
    if (
        not enable_gqa
        and query.dim() > 2
        and key.shape[-3:-2] != query.shape[-3:-2]
        and key.shape[-3:-2] not in ((), (1,))
    ):
        raise ShapeError(
            f"{_NAME}: query has {query.shape[-3]} heads and key {key.shape[-3]}. Give enable_gqa=True if heads share keys."
        )
    try:
        return tuple(torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value))))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ShapeError(f"{_NAME}: leading dimensions of shapes {shapes} do not broadcast.") from error


def _four(x: Tensor, lead: tuple[int, ...], enable_gqa: bool) -> Tensor:
    """(batch, heads, sequence, head size)."""
    if x.dim() == 4 and tuple(x.shape[:1]) == lead:
        return x
    heads = x if x.dim() > 2 else x.unsqueeze(0)
    spread = heads.expand(*lead, *heads.shape[-3:])
    return spread.flatten(0, -4) if lead else spread.unsqueeze(0)


def _mask(mask: Tensor, lead: tuple[int, ...], query: Tensor, key: Tensor) -> Mask:
    if causal_bias_of(mask) is not None:
        return as_mask(mask)
    if len(lead) > 1 and mask.dim() > 3:
        heads = mask.shape[-3]
        mask = mask.expand(*lead, heads, *mask.shape[-2:]).flatten(0, -4)
    return Dense(mask)


# ---- in place of torch's ---------------------------------------------------------------------------------------------


class sdpa_override(TorchFunctionMode):
    """Within it, calls of ``torch.nn.functional.scaled_dot_product_attention`` run :func:`opkit.attention`, compiled ones too.

    Of this thread alone; :func:`set_sdpa_override` is for all.

    >>> import opkit, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> x = torch.ones(1, 3, 8)
    >>> with opkit.sdpa_override():
    ...     out = layer(x)
    >>> torch.testing.assert_close(out, layer(x))
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ours for torch's."""
        return (scaled_dot_product_attention if func is _TORCHS else func)(*args, **(kwargs or {}))


def set_sdpa_override(enabled: bool) -> None:
    """Put :func:`scaled_dot_product_attention` in the place of torch's in ``torch.nn.functional``, or torch's back.

    It holds for all threads, and for code that calls the function by its place there; what has imported it by name keeps what
    it has. Compiled code is compiled again.

    >>> import opkit, torch
    >>> opkit.set_sdpa_override(True)
    >>> torch.nn.functional.scaled_dot_product_attention.__module__
    'opkit.attn.sdpa'
    >>> opkit.set_sdpa_override(False)
    """
    F.scaled_dot_product_attention = scaled_dot_product_attention if enabled else _TORCHS
    private.clear_overridable_functions()
