"""The forward kernels for processors (``cpp_ext/attention``): what they take, and a call of them."""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_BIAS_NAMES = {**NAMES, torch.float64: "float64"}


def forward(
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
    heads_inside: bool,
) -> tuple[Tensor, Tensor]:
    """The operator's result and log-sum-exp, of its own arguments; :func:`obstacle` says what is not taken.

    The numbers do not depend on how many threads there are.
    """
    from opkit import _core

    (batch, heads, queries, head), (_, kv_heads, keys, columns) = q.shape, v.shape
    q, k, v = (_by_rows(each) for each in (q, k, v))
    out = _empty(q, columns, heads_inside)
    lse = torch.empty((batch, heads, queries))
    if keys == 0:
        return out.zero_(), _of_sinks(lse, sinks)
    kept = [each.contiguous() for each in (sinks,) if each is not None]
    _core.attention_forward(
        None, NAMES[q.dtype], (batch, heads, kv_heads, queries, keys, head, columns),
        q.data_ptr(), q.stride()[:3], k.data_ptr(), k.stride()[:3], v.data_ptr(), v.stride()[:3],
        out.data_ptr(), out.stride()[:3], lse.data_ptr(),
        mask, [(each.data_ptr(), _strides(each)) for each in mask_tensors],
        bias, [(each.data_ptr(), _strides(each), _BIAS_NAMES[each.dtype]) for each in bias_tensors],
        kept[0].data_ptr() if kept else 0, scale, softcap,
    )  # fmt: skip
    return out, lse


def obstacle(q: Tensor, bias_tensors: list[Tensor], sinks: Tensor | None, dropout_p: float) -> str:
    """Why the kernels do not take a call, or nothing."""
    if q.dtype not in NAMES:
        return f"the kernels are for float32, bfloat16 and float16, q has {q.dtype}"
    if dropout_p > 0:
        return "the kernels have no dropout"
    if any(each.dtype not in _BIAS_NAMES for each in bias_tensors):
        return "the kernels take biases of floats"
    return (
        "" if sinks is None or sinks.dtype == torch.float32 else f"the kernels take sinks in float32, not {sinks.dtype}"
    )


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _strides(x: Tensor) -> list[int]:
    """What is one element long is that for every index."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def _empty(q: Tensor, columns: int, heads_inside: bool) -> Tensor:
    batch, heads, queries, _ = q.shape
    if heads_inside:
        return q.new_empty((batch, queries, heads, columns)).transpose(1, 2)
    return q.new_empty((batch, heads, queries, columns))


def _of_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    return lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[:, None].expand_as(lse))
