"""``attn_implementation="opkit"`` for models of Hugging Face's transformers."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# transformers need not be installed

from __future__ import annotations

from typing import Any

from torch import Tensor

from opkit.attn.api import attention
from opkit.attn.compat.hugging_face_masks import Prepared, fitted, mask_interface
from opkit.attn.masks.algebra import Dense, Mask
from opkit.attn.masks.diagonals import Causal
from opkit.errors import ArgumentError


def register_transformers(name: str = "opkit") -> None:
    """Make :func:`opkit.attention` known to transformers: ``from_pretrained(..., attn_implementation="opkit")``.

    Padded batches, caches, sliding windows, soft caps (Gemma 2) and sinks (gpt-oss) are as in transformers' own. Masks that
    transformers makes are masks of :mod:`opkit.masks` where their functions are known (causal, windows, chunks, packed
    sequences, groups of tokens; with padding), so that no tensor of queries times keys is made. In compiled code, and for
    functions of one's own, they are bool tensors.

    Args:
        name: by which models ask for it.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask_interface)  # without an entry models would pass no mask, and see padding


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Prepared | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: ``query`` (batch, heads, queries, d), ``key`` and ``value`` with their own heads.

    Returns:
        (batch, queries, heads, d_v), and None in place of the probabilities, which are never in memory.

    Raises:
        ArgumentError: a paged cache of transformers' continuous batching is given.
    """
    if more.get("cache") is not None:
        raise ArgumentError(
            "attn_implementation='opkit': a paged cache of transformers is not supported. Use 'sdpa_paged', or "
            "opkit.paged_attention."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask: Mask | None = None
    if isinstance(attention_mask, Prepared):
        mask = fitted(attention_mask, query, key)
    elif attention_mask is not None:
        mask = Dense(attention_mask[..., : key.shape[2]])
    elif causal and query.shape[2] > 1:
        mask = Causal()
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    how: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "bias": position_bias}
    return attention(q, k, v, mask=mask, dropout_p=dropout, layout="bshd", **how), None
