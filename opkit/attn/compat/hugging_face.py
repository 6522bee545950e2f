"""``attn_implementation="opkit"`` for models of Hugging Face's transformers, and their mask functions as masks of the algebra."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from opkit.attn.api import attention
from opkit.attn.masks.algebra import Dense, Mask
from opkit.attn.masks.diagonals import Causal
from opkit.attn.masks.sequences import KeyPadding
from opkit.attn.masks.traced import TracedMask
from opkit.attn.reference import mask_as_tensors
from opkit.errors import ArgumentError

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# transformers need not be installed


def register_transformers(name: str = "opkit") -> None:
    """Make :func:`opkit.attention` known to transformers: ``from_pretrained(..., attn_implementation="opkit")``.

    Padded batches, caches, sliding windows, soft caps (Gemma 2) and sinks (gpt-oss) are as in transformers' own. The mask
    functions of models, transformers' and one's own, are traced, so that no tensor of queries times keys is made; in compiled
    code they are bool tensors.

    Args:
        name: by which models ask for it.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask_interface)  # without an entry models would pass no mask, and see padding


def sdpa_configs(model: torch.nn.Module) -> list[Any]:
    """Return the configurations of transformers in a model that ask for "sdpa" attention and may ask for another.

    The list is empty if a model of transformers in it computes attention otherwise than by its configuration's implementation.
    """
    parts = list(model.modules())
    owners: list[Any] = [type(each) for each in parts if hasattr(type(each), "_can_set_attn_implementation")]
    if not owners or not all(owner._can_set_attn_implementation() for owner in owners):
        return []
    configs = {id(config): config for each in parts if (config := getattr(each, "config", None)) is not None}
    return [each for each in configs.values() if getattr(each, "_attn_implementation_internal", None) == "sdpa"]


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
    """Return what transformers calls: ``query`` (batch, heads, queries, d), ``key`` and ``value`` with their own heads.

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


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A mask on its way through a model of transformers: it is asked here and there for what a tensor of 4 dimensions has."""

    mask: Mask
    shape: tuple[int, int, int, int]
    ndim: int = 4

    def contiguous(self) -> Prepared:
        """Itself."""
        return self


def mask_interface(**call: Any) -> Any:
    """Return what transformers calls for a mask: a :class:`Prepared` one, a bool tensor (batch, 1, queries, keys), or None.

    It is a tensor in compiled code, and for caches whose places are tensors.

    Args:
        call: as transformers' own ``sdpa_mask`` has them.
    """
    if isinstance(call.get("attention_mask"), Prepared):  # it comes back where it was made before the model was called
        return call["attention_mask"]
    mask = _mask(call)
    if mask is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(**call)
    return Prepared(mask, (call["batch_size"], 1, call["q_length"], call["kv_length"]))


def _mask(call: dict[str, Any]) -> Mask | None:
    """Return the mask that a call asks for, None where its positions are tensors or symbolic."""
    names = ("q_length", "kv_length", "q_offset", "kv_offset")
    numbers: list[Any] = [call.get(name) for name in names]
    if torch.compiler.is_compiling() or not all(type(number) is int for number in numbers):
        return None
    _, keys, q_offset, kv_offset = numbers
    function, padding = call["mask_function"], call.get("attention_mask")

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return function(b, h, q_idx + q_offset, kv_idx + kv_offset)

    device = torch.device(call.get("device") or ("cpu" if padding is None else padding.device))
    found = TracedMask.of(mask, device)
    shown = None if padding is None else _of_padding(_columns(padding, keys, kv_offset))
    return found if shown is None else found & shown


def fitted(prepared: Prepared, query: Tensor, key: Tensor) -> Mask:
    """Return the mask for these queries and keys; of fewer keys than it was made for, the first."""
    if (query.shape[2], key.shape[2]) == prepared.shape[2:]:
        return prepared.mask
    whole = key.new_empty((key.shape[0], 1, prepared.shape[3], 0))
    seen, _ = mask_as_tensors(prepared.mask, query[:, :1], whole)
    return Dense(
        torch.ones((1, 1, 1, 1), dtype=torch.bool, device=key.device) if seen is None else seen[..., : key.shape[2]]
    )


def _of_padding(shown: Tensor) -> Mask | None:
    """Return the mask of the keys that are shown: bool, (batch, keys)."""
    if shown.all():
        return None
    lengths = shown.sum(-1)
    first = torch.arange(shown.shape[1], device=shown.device) < lengths.unsqueeze(-1)
    return KeyPadding(lengths) if torch.equal(first, shown) else Dense(shown[:, None, None])


def _columns(padding: Tensor, keys: int, kv_offset: int) -> Tensor:
    """Return which keys are no padding: bool, (batch, keys); those after the last column are hidden."""
    missing = max(kv_offset + keys - padding.shape[-1], 0)
    return torch.nn.functional.pad(padding.bool(), (0, missing))[:, kv_offset : kv_offset + keys]
