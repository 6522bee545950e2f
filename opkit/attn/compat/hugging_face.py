"""``attn_implementation="opkit"`` for models of Hugging Face's transformers, and their mask functions as masks of the algebra."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.api import attention
from opkit.attn.masks.algebra import And, Dense, KeyPadding, Mask, Or, Segments
from opkit.attn.masks.diagonals import Align, Causal, SlidingWindow
from opkit.attn.reference import mask_as_tensors
from opkit.errors import ArgumentError

_EVERYTHING = SlidingWindow()
_DISTANCES = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
)

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# transformers need not be installed


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


# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# transformers need not be installed


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A mask on its way through a model of transformers: it is asked here and there for what a tensor of 4 dimensions has."""

    mask: Mask
    shape: tuple[int, int, int, int]
    ndim: int = 4

    def contiguous(self) -> Prepared:
        """Itself."""
        return self


class _Call(NamedTuple):
    """The numbers of queries and keys, the positions of the first of each, and where the diagonal lies."""

    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    align: Align
    device: Any

    def of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of ``ids``, (batch, positions), that are the queries' and the keys'."""
        queries = ids[:, self.q_offset : self.q_offset + self.queries]
        return queries, ids[:, self.kv_offset : self.kv_offset + self.keys]


def mask_interface(**call: Any) -> Any:
    """Return what transformers calls for a mask: a :class:`Prepared` one, a bool tensor (batch, 1, queries, keys), or None.

    It is a tensor for functions that are not known, in compiled code, and for caches whose places are tensors.

    Args:
        call: as transformers' own ``sdpa_mask`` has them.
    """
    if isinstance(call.get("attention_mask"), Prepared):  # it comes back where it was made before the model was called
        return call["attention_mask"]
    mask = _algebraic(call)
    if mask is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(**call)
    if mask is _EVERYTHING and call.get("allow_is_bidirectional_skip"):
        return None
    return Prepared(mask, (call["batch_size"], 1, call["q_length"], call["kv_length"]))


def _algebraic(call: dict[str, Any]) -> Mask | None:
    """Return the mask that a call asks for, or None."""
    names = ("q_length", "kv_length", "q_offset", "kv_offset")
    numbers: list[Any] = [call.get(name) for name in names]
    if torch.compiler.is_compiling() or not all(type(number) is int for number in numbers):
        return None
    queries, keys, q_offset, kv_offset = numbers
    align = _align(queries, keys, q_offset, kv_offset)
    if align is None:
        return None
    place = _Call(queries, keys, q_offset, kv_offset, align, call.get("device", "cpu"))
    return _combined(call["mask_function"], call.get("attention_mask"), place)


def fitted(prepared: Prepared, query: Tensor, key: Tensor) -> Mask:
    """Return the mask for these queries and keys; of fewer keys than it was made for, the first."""
    if (query.shape[2], key.shape[2]) == prepared.shape[2:]:
        return prepared.mask
    whole = key.new_empty((key.shape[0], 1, prepared.shape[3], 0))
    seen, _ = mask_as_tensors(prepared.mask, query[:, :1], whole)
    return Dense(
        torch.ones((1, 1, 1, 1), dtype=torch.bool, device=key.device) if seen is None else seen[..., : key.shape[2]]
    )


def _align(queries: int, keys: int, q_offset: int, kv_offset: int) -> Align | None:
    """Return where a query and a key of the same position lie on the same diagonal; None where no name is for it."""
    if q_offset == kv_offset:
        return "top-left"
    return "bottom-right" if q_offset + queries == kv_offset + keys else None


def _combined(function: Any, padding: Tensor | None, call: _Call) -> Mask | None:
    """Return a function's mask, and padding's; None if the function is not known."""
    mask = known(function, call)
    if mask is None or padding is None:
        return mask
    of_keys = _columns(padding, call)
    if of_keys.all():
        return mask
    lengths = of_keys.sum(-1)
    first = torch.arange(call.keys, device=of_keys.device) < lengths.unsqueeze(-1)
    shown = KeyPadding(lengths) if torch.equal(first, of_keys) else Dense(of_keys[:, None, None])
    return shown if mask is _EVERYTHING else mask & shown


def _columns(padding: Tensor, call: _Call) -> Tensor:
    """Bool, (batch, keys); keys after the last column are hidden."""
    missing = max(call.kv_offset + call.keys - padding.shape[-1], 0)
    full = torch.nn.functional.pad(padding.bool(), (0, missing))
    return full[:, call.kv_offset : call.kv_offset + call.keys]


def known(function: Any, call: _Call) -> Mask | None:
    """Return the mask that a function of transformers is, or None."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return None
    make = _KNOWN.get(function.__qualname__.replace(".<locals>.", "."))
    return None if make is None else make(_closure(function), call)


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _chunks(inside: dict[str, Any], call: _Call) -> Mask:
    first, size = inside["left_padding"].to(call.device).unsqueeze(-1), inside["chunk_size"]
    ends = ((call.q_offset, call.queries), (call.kv_offset, call.keys))
    found = [(torch.arange(at, at + count, device=call.device) - first) // size for at, count in ends]
    return Segments(*found)


def _groups(inside: dict[str, Any], call: _Call) -> Mask:
    queries, keys = call.of(inside["block_sequence_ids"])
    return Segments(queries.clamp(min=-1), torch.where(keys < 0, -2, keys))  # -1 is no group


def _all(inside: dict[str, Any], call: _Call) -> Mask | None:
    found = [known(part, call) for part in _without_positions(inside["mask_functions"])]
    kept = [mask for mask in found if mask is not None and mask is not _EVERYTHING]
    if None in found:
        return None
    return And(tuple(kept)) if len(kept) > 1 else kept[0] if kept else _EVERYTHING


def _any(inside: dict[str, Any], call: _Call) -> Mask | None:
    found = [known(part, call) for part in inside["mask_functions"]]
    return None if None in found else Or(tuple(mask for mask in found if mask is not None))


def _without_positions(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Parts of a conjunction without positions: within packed sequences of consecutive ones, distances are those of places."""
    if [_name(part) for part in parts] != ["packed_sequence_mask_function", "remap_positions_for_packed_sequence"]:
        return parts
    ids, inside = _closure(parts[0])["packed_sequence_mask"], _closure(parts[1])
    consecutive = (inside["position_ids"].diff() == 1) | (ids.diff() != 0)
    ascending = (ids.diff() >= 0).all()  # so that no sequence comes back after another
    plain = ascending and consecutive.all() and _of_distance(inside["mask_function"])
    return (parts[0], inside["mask_function"]) if plain else parts


def _of_distance(function: Any) -> bool:
    """Return whether a function depends on positions by their distances alone."""
    if _name(function) == "and_masks":
        return all(map(_of_distance, _closure(function)["mask_functions"]))
    return _name(function) in _DISTANCES


def _name(function: Any) -> str:
    """Return that of the function of transformers that made it, or its own."""
    return getattr(function, "__qualname__", "").split(".")[0]


_KNOWN: dict[str, Callable[[dict[str, Any], _Call], Mask | None]] = {
    "causal_mask_function": lambda inside, call: Causal(call.align),
    "bidirectional_mask_function": lambda inside, call: _EVERYTHING,
    "sliding_window_overlay.inner_mask": lambda inside, call: SlidingWindow(
        inside["sliding_window"] - 1, None, call.align
    ),
    "sliding_window_bidirectional_overlay.inner_mask": lambda inside, call: SlidingWindow(
        inside["sliding_window"], inside["sliding_window"], call.align
    ),
    "chunked_overlay.inner_mask": _chunks,
    "packed_sequence_mask_function.inner_mask": lambda inside, call: Segments(*call.of(inside["packed_sequence_mask"])),
    "blockwise_overlay.inner_mask": _groups,
    "and_masks.and_mask": _all,
    "or_masks.or_mask": _any,
}
