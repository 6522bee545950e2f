"""``opkit::attention_float8``: attention to queries, keys and values in float8, with factors by which they are multiplied."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn import arguments, reference
from opkit.attn.calls import Float8Call
from opkit.attn.gpu.hopper import forward_cuda
from opkit.attn.gpu.portable import forward
from opkit.attn.operator import attention_operator
from opkit.errors import ArgumentError, ArgumentTypeError, ShapeError
from opkit.op.definition import custom_op
from opkit.op.operator import CustomOp

DTYPES = arguments.FLOAT8
RESULT = torch.bfloat16  #: the dtype of results
Descales = Sequence[Tensor | float]


def attention_float8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: list[Tensor],
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    sinks: Tensor | None,
    mask: list[int],
    bias: list[int],
    scale: float,
    softcap: float,
    out_is_bshd: bool,
) -> tuple[Tensor, Tensor]:
    """Attention in float32 to ``q``, ``k`` and ``v`` times their descales; the result in bfloat16, and the log-sum-exp.

    Args:
        descales: three of float32, (batch, key heads): the factors of q, k and v.
        q: and all others: those of :func:`opkit.attn.reference.attention`.
    """
    out, lse = reference.attention(
        *_wide(q, k, v, descales),
        mask_tensors,
        bias_tensors,
        sinks,
        None,
        mask,
        bias,
        scale,
        softcap,
        0.0,
        out_is_bshd,
    )
    return out.to(RESULT), lse


def _wide(q: Tensor, k: Tensor, v: Tensor, descales: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v times their descales, in float32."""
    q_by, k_by, v_by = (each[:, :, None, None] for each in descales)
    shared = q.to(torch.float32).unflatten(1, (k.shape[1], -1)) * q_by.unsqueeze(2)
    return shared.flatten(1, 2), k.to(torch.float32) * k_by, v.to(torch.float32) * v_by


def in_float32(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute the operator on CPUs by ``opkit::attention`` in float32, with any kernel that it has."""
    call = Float8Call(*arguments)
    q, k, v = _wide(call.q, call.k, call.v, call.descales)
    out, lse = attention_operator()(*call.plain._replace(q=q, k=k, v=v))
    return out.to(RESULT), lse


@functools.cache
def attention_float8_operator() -> CustomOp[Any, tuple[Tensor, Tensor]]:
    """Return ``opkit::attention_float8``; the first call defines it and registers its kernels."""
    op = custom_op("opkit::attention_float8", mutates_args=())(attention_float8)
    op.register_kernel("cpu", in_float32, name="float32", trusted=True)
    forward.register_float8(op)
    forward_cuda.register_float8(op)
    return op


def float8_call(call: Sequence[Any], descales: Descales | None) -> Float8Call:
    """Return the operator's arguments from those of ``opkit::attention`` and the user's descales.

    Raises:
        ArgumentError: the call has dropout, records a gradient, or is not in float8.
        ArgumentTypeError, ShapeError: the descales are not three numbers or tensors that broadcast to (batch, key heads).
    """
    q, k, v, mask_tensors, bias_tensors, sinks, seed, mask, bias, scale, softcap, _, out_is_bshd = call
    if q.dtype not in DTYPES:
        raise ArgumentError(
            f"opkit.attention: descales= is for float8, and q has dtype {q.dtype}. Leave it out, and multiply q, k and v."
        )
    if seed is not None:
        raise ArgumentError(
            f"opkit.attention: there is no dropout in {q.dtype}. Leave dropout_p out, or convert q, k and v."
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *bias_tensors) if isinstance(x, Tensor)):
        raise ArgumentError(
            f"opkit.attention: there are no gradients in {q.dtype}. Call it under torch.no_grad(), or convert q, k and v."
        )
    factors = _descales(descales, (q.shape[0], k.shape[1]), q.device)
    return Float8Call(
        q, k, v, factors, mask_tensors, bias_tensors, sinks, mask, bias, scale, softcap, out_is_bshd
    )  # fmt: skip


def _descales(descales: Descales | None, sizes: tuple[int, int], device: torch.device) -> list[Tensor]:
    if descales is None:
        return [torch.ones(sizes, dtype=torch.float32, device=device)] * 3
    if not isinstance(descales, (list, tuple)) or len(descales) != 3:
        raise ArgumentTypeError(f"opkit.attention: descales must be three, of q, k and v, got {descales!r}.")
    return [_descale(name, each, sizes, device) for name, each in zip("qkv", descales, strict=True)]


def _descale(name: str, descale: Tensor | float, sizes: tuple[int, int], device: torch.device) -> Tensor:
    if isinstance(descale, (int, float)):
        return torch.full(sizes, float(descale), dtype=torch.float32, device=device)
    if not isinstance(descale, Tensor):
        raise ArgumentTypeError(
            f"opkit.attention: the descale of {name} must be a number or a tensor, got {descale!r}."
        )
    if descale.device != device:
        raise ArgumentError(
            f"opkit.attention: the descale of {name} is on {descale.device}, q is on {device}. Move it there."
        )
    try:
        return descale.to(torch.float32).expand(sizes)
    except RuntimeError:
        raise ShapeError(
            f"opkit.attention: the descale of {name} of shape {tuple(descale.shape)} does not broadcast to (batch, key heads), "
            f"{sizes}."
        ) from None
