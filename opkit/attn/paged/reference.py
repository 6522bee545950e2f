"""The references of paged attention and of appending to a paged KV cache, in plain torch, on any device."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from opkit.attn.functions.expression import Function
from opkit.attn.reference import softmax

_ELEMENTS = 1 << 26  # of gathered keys at a time
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def paged_attention(
    q: Float[Tensor, "total heads d"],
    k_pages: Shaped[Tensor, "pages size kv_heads d"],
    v_pages: Shaped[Tensor, "pages size kv_heads dv"],
    page_table: Integer[Tensor, "batch width"],
    lengths: Integer[Tensor, "batch"],
    starts: Integer[Tensor, "batch+1"],
    lower: int,
    upper: int,
    scale: float,
    softcap: float,
    sinks: Float[Tensor, "heads"] | None,
    k_scale: Float[Tensor, "pages size kv_heads"] | None,
    v_scale: Float[Tensor, "pages size kv_heads"] | None,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    mask: list[int],
    bias: list[int],
) -> tuple[Tensor, Tensor]:
    """Attention of ragged queries to pages of keys and values.

    Queries ``starts[b]`` to ``starts[b + 1]`` are the last of sequence ``b``, which has ``lengths[b]`` keys. The query at
    position p sees the key at j iff ``lower <= j - p <= upper``, and a function in ``mask`` does not hide it; one in ``bias`` is
    applied to logits. Each is a program of one ``FUNCTION`` (:mod:`opkit.attn.masks.program`) or is empty; its variables are the
    sequence, the head and the positions of query and key there.

    Returns ``(total, heads, dv)`` of ``q``'s dtype, and the log-sum-exp ``(total, heads)``, float32 (float64 for float64).
    """
    hides = _Function(Function.of(mask[1:]), mask_tensors) if mask else None
    scores = _Function(Function.of(bias[1:]), bias_tensors) if bias else None
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = page_table.shape[1] * k_pages.shape[1]
    out = q.new_zeros((*q.shape[:2], v_pages.shape[-1]))
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    tokens = torch.arange(q.shape[0], device=q.device)
    sequence, position = _positions(tokens, lengths, starts)
    block = max(1, _ELEMENTS // max(1, keys * k_pages.shape[2] * max(k_pages.shape[3], v_pages.shape[3])))
    for some in torch.split(tokens, block):
        pages = page_table[sequence[some]].clamp(0, max(k_pages.shape[0] - 1, 0)).long()
        visible = _visible(position[some], lengths[sequence[some]], keys, lower, upper)
        at = sequence[some], position[some], q.shape[1], keys
        seen = visible[:, None] if hides is None else visible[:, None] & hides.at(*at, None)
        k = _gathered(k_pages, k_scale, pages, seen.any(1), wide)
        v = _gathered(v_pages, v_scale, pages, seen.any(1), wide)
        score = None if scores is None else functools.partial(scores.at, *at)
        out[some], lse[some] = _attend(q[some].to(wide), k, v, seen, scale, softcap, sinks, q.dtype, score)
    return out, lse


class _Function(NamedTuple):
    function: Function
    tensors: list[Tensor]

    def at(self, sequence: Tensor, position: Tensor, heads: int, keys: int, score: Tensor | None) -> Tensor:
        """Return its value for queries of sequences at positions, (queries, heads, keys)."""
        h, j = (torch.arange(n, device=position.device, dtype=torch.int32) for n in (heads, keys))
        variables = {"b": sequence.int()[:, None, None], "h": h[:, None], "i": position.int()[:, None, None], "j": j}
        known = variables if score is None else {"score": score, **variables}
        return self.function.evaluate(known, self.tensors).expand(len(sequence), heads, keys)


def _positions(tokens: Tensor, lengths: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each query, and its position there."""
    sequence = torch.searchsorted(starts.to(tokens.dtype), tokens, right=True) - 1
    sequence = sequence.clamp(0, max(lengths.shape[0] - 1, 0))
    return sequence, lengths[sequence] - starts[sequence + 1] + tokens


def _visible(position: Tensor, lengths: Tensor, keys: int, lower: int, upper: int) -> Tensor:
    j = torch.arange(keys, device=position.device)
    distance = j - position[:, None]
    return (lower <= distance) & (distance <= upper) & (j < lengths[:, None])


def _gathered(pages: Tensor, scale: Tensor | None, wanted: Tensor, visible: Tensor, wide: torch.dtype) -> Tensor:
    """``(queries, keys, kv_heads, d)``: each query's keys, zeros where it sees none."""
    if pages.shape[0] == 0:
        return torch.zeros((*visible.shape, *pages.shape[2:]), dtype=wide, device=pages.device)
    return gather_pages(pages, scale, wanted, wide).flatten(1, 2).masked_fill(~visible[..., None, None], 0.0)


def gather_pages(pages: Tensor, scale: Tensor | None, wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the pages whose numbers are in ``wanted``, times their scales, ``(*wanted.shape, page size, heads, d)``."""
    # torch indexes few types of float8, hence the bytes
    dense = pages.view(torch.uint8)[wanted].view(pages.dtype) if pages.itemsize == 1 else pages[wanted]
    return dense.to(dtype) if scale is None else dense.to(dtype) * scale[wanted].to(dtype).unsqueeze(-1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    dtype: torch.dtype,
    score: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    grouped = q.unflatten(1, (k.shape[2], q.shape[1] // max(k.shape[2], 1)))
    logits = torch.einsum("thgd,tkhd->thgk", grouped, k).flatten(1, 2) * scale
    logits = torch.tanh(logits / softcap) * softcap if softcap > 0 else logits
    logits = logits if score is None else score(logits).to(logits.dtype)
    weights, logits, masked = softmax(logits.unsqueeze(2), visible.unsqueeze(2), sinks)  # one query a sequence
    lse = torch.where(masked.squeeze(-1), -torch.inf, logits.logsumexp(-1)).squeeze(2)
    weights = weights.squeeze(2).unflatten(1, grouped.shape[1:3])
    out = torch.einsum("thgk,tkhd->thgd", weights, v)
    if visible.shape[1] > 1:  # what some heads see may be no number, and hidden from others
        bad = ~v.isfinite()
        seen = visible.unflatten(1, grouped.shape[1:3]).to(weights.dtype)
        meets = torch.einsum("thgk,tkhd->thgd", seen, bad.to(weights.dtype)) > 0
        out = torch.where(meets, out, torch.einsum("thgk,tkhd->thgd", weights, v.masked_fill(bad, 0.0)))
    return out.flatten(1, 2).to(dtype), lse


def append_kv(
    k: Float[Tensor, "total kv_heads d"],
    v: Float[Tensor, "total kv_heads dv"],
    k_pages: Shaped[Tensor, "pages size kv_heads d"],
    v_pages: Shaped[Tensor, "pages size kv_heads dv"],
    page_table: Integer[Tensor, "batch width"],
    lengths_before: Integer[Tensor, "batch"],
    starts: Integer[Tensor, "batch+1"],
    k_scale: Float[Tensor, "pages size kv_heads"] | None,
    v_scale: Float[Tensor, "pages size kv_heads"] | None,
) -> None:
    """Write tokens ``starts[b]`` to ``starts[b + 1]`` after the first ``lengths_before[b]`` of sequence ``b``, in place."""
    if k.shape[0] == 0:
        return
    tokens = torch.arange(k.shape[0], device=k.device)
    sequence = torch.searchsorted(starts.to(tokens.dtype), tokens, right=True) - 1
    position = lengths_before[sequence] + tokens - starts[sequence]
    page = page_table[sequence, position // k_pages.shape[1]].long()
    slot = (position % k_pages.shape[1]).long()
    _write(k, k_pages, k_scale, page, slot)
    _write(v, v_pages, v_scale, page, slot)


def _write(x: Tensor, pages: Tensor, scale: Tensor | None, page: Tensor, slot: Tensor) -> None:
    if scale is not None:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        step = wide.abs().amax(-1) / _LARGEST.get(pages.dtype, 1.0)
        scale[page, slot] = step.to(scale.dtype)
        x = wide / torch.where(step > 0, step, 1.0)[..., None]
    if pages.dtype == torch.int8:
        x = x.round().clamp(-127, 127)
    if pages.itemsize == 1:  # torch indexes few types of float8
        pages.view(torch.uint8)[page, slot] = x.to(pages.dtype).view(torch.uint8)
    else:
        pages[page, slot] = x.to(pages.dtype)
