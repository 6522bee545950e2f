"""The forward kernels for processors (``cpp_ext/attention``): what they take, and a call of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from opkit.attn import gradients, paged_cpu, program
from opkit.attn.memory_safety import bias_fits, mask_fits, shapes_fit
from opkit.op.operator import CustomOp

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
FEW = 16  #: rows of a head of keys
MANY = 256  #: keys; with fewer it is the call that takes time
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
    """The operator's result and log-sum-exp, of its own arguments; :func:`takes` says of which.

    The numbers do not depend on how many threads there are.
    """
    from opkit import _core

    q, k, v = (_by_rows(each) for each in (q, k, v))
    out, lse = _empty(q, v.shape[-1], heads_inside), torch.empty(q.shape[:3], dtype=torch.float32)
    if k.shape[2] == 0:
        return out.zero_(), _of_sinks(lse, sinks)
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    of_sinks = 0 if sinks is None else sinks.data_ptr()
    programs = (mask, _truths(mask_tensors), bias, _added(bias_tensors))
    _core.attention_forward(
        None, NAMES[q.dtype], _sizes(q, v), _place(q), _place(k), _place(v), _place(out), lse.data_ptr(), *programs, of_sinks,
        scale, softcap,
    )  # fmt: skip
    return out, lse


def backward(
    gradient: Tensor,
    of_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    mask: list[int],
    bias: list[int],
    scale: float,
    softcap: float,
    heads_inside: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, and delta: of each row the sum of result * gradient, less the gradient of its lse.

    Args:
        gradient, of_lse: those of the result and of the log-sum-exp, which may be None.
        out, lse: what :func:`forward` gave; the rest are its arguments.
    """
    from opkit import _core

    q, k, v, out, gradient = (_by_rows(each) for each in (q, k, v, out, gradient))
    of_q, of_k, of_v = (_empty(each, each.shape[-1], heads_inside) for each in (q, k, v))
    lse, delta = lse.contiguous(), torch.zeros(q.shape[:3], dtype=torch.float32)
    of_lse = None if of_lse is None else of_lse.contiguous()
    if 0 in (q.numel(), k.numel(), v.numel()):
        return of_q.zero_(), of_k.zero_(), of_v.zero_(), delta
    programs = (mask, _truths(mask_tensors), bias, _added(bias_tensors))
    _core.attention_backward(
        None, NAMES[q.dtype], _sizes(q, v), _place(q), _place(k), _place(v), _place(out), _place(gradient), lse.data_ptr(),
        0 if of_lse is None else of_lse.data_ptr(), _place(of_q), _place(of_k), _place(of_v), delta.data_ptr(), *programs,
        scale, softcap,
    )  # fmt: skip
    return of_q, of_k, of_v, delta


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` and ``opkit::attention_backward`` their kernels for processors."""
    op.register_kernel("cpu", forward, when=takes, name="tiles")
    op.register_kernel("cpu", decode, when=takes_few, name="decode", priority=1)
    gradients.backward_operator().register_kernel("cpu", backward, when=takes_gradients, name="tiles")


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    sinks: Tensor | None,
    mask: list[int],
    bias: list[int],
    dropout_p: float,
) -> bool:
    """Whether :func:`forward` takes a call: float32 or narrower, no dropout, and all that it names is there."""
    return dropout_p == 0 and _sinks_fit(sinks, q) and _all_there(q, k, v, mask_tensors, bias_tensors, mask, bias)


def takes_gradients(
    gradient: Tensor,
    of_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    mask: list[int],
    bias: list[int],
) -> bool:
    """Whether :func:`backward` takes a call."""
    if not _all_there(q, k, v, mask_tensors, bias_tensors, mask, bias):
        return False
    results = all(each.shape == (*q.shape[:3], v.shape[3]) and each.dtype == q.dtype for each in (out, gradient))
    sums = [lse] if of_lse is None else [lse, of_lse]
    return results and all(each.shape == q.shape[:3] and each.dtype == torch.float32 for each in sums)


def _all_there(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    mask: list[int],
    bias: list[int],
) -> bool:
    if q.dtype not in NAMES or not shapes_fit(q, k, v) or not available():
        return False
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    added = all(each.dtype in _BIAS_NAMES for each in bias_tensors) and bias_fits(bias, bias_tensors, sizes)
    return added and mask_fits(mask, mask_tensors, sizes)


def takes_few(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: list[int], bias: list[int], dropout_p: float
) -> bool:
    """Whether :func:`decode` takes a call: so few rows to a head of keys that reading these is what takes time."""
    if not shapes_fit(q, k, v) or not _sinks_fit(sinks, q) or k.shape[2] < MANY:
        return False
    banded = not mask or (len(mask) == 3 and mask[0] == program.BAND)
    few = q.shape[2] * q.shape[1] // k.shape[1] <= FEW
    return few and banded and not bias and dropout_p == 0 and paged_cpu.takes(q, k, v)


def _sinks_fit(sinks: Tensor | None, q: Tensor) -> bool:
    return sinks is None or tuple(sinks.shape) == (q.shape[1],)


def decode(
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
    """Few queries: keys and values are read as they lie, once for all heads that share them."""
    lower, upper = mask[1:] or (-program.UNLIMITED, program.UNLIMITED)
    out, lse = paged_cpu.decode(q, k, v, lower, upper, scale, softcap, sinks)
    return (out.transpose(1, 2).contiguous().transpose(1, 2) if heads_inside else out), lse


@functools.cache
def available() -> bool:
    """Whether opkit's compiled core is there."""
    try:
        import opkit._core
    except ImportError:  # opkit runs from a source tree that was not installed
        return False
    return hasattr(opkit._core, "attention_forward")


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _place(x: Tensor) -> tuple[int, tuple[int, ...]]:
    return x.data_ptr(), x.stride()[:3]


def _sizes(q: Tensor, v: Tensor) -> tuple[int, ...]:
    (batch, heads, queries, head), (_, kv_heads, keys, columns) = q.shape, v.shape
    return batch, heads, kv_heads, queries, keys, head, columns


def _truths(tensors: list[Tensor]) -> list[tuple[int, list[int]]]:
    return [(each.data_ptr(), _strides(each)) for each in tensors]


def _added(tensors: list[Tensor]) -> list[tuple[int, list[int], str]]:
    return [(each.data_ptr(), _strides(each), _BIAS_NAMES[each.dtype]) for each in tensors]


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
