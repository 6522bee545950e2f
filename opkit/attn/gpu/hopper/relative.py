"""Relative positions on Hopper: as channels of queries and keys, whose products add the bias.

``rel_h[.., j // kw] + rel_w[.., j % kw]`` is the product of a query's numbers with those of a key, which are one at its row and
its column, and else zero. Tensor cores add it to the logits: no thread reads numbers of rows and columns for each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit.attn.calls import AttentionCall, dtypes_and_shapes, predicate
from opkit.attn.gpu.hopper import calls, forward_cuda
from opkit.attn.masks import program
from opkit.attn.masks.program import bias_fits, shapes_fit
from opkit.errors import KernelError
from opkit.kernels.triton.named import Named
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel

NAME = "relative"
_PRIORITY = 1  # above the portable kernel
_ROWS = 16  # of a program
_MOST = {torch.float16: 2.0**10, torch.bfloat16: 2.0**100}  # so that products with finite numbers are finite
_WITH_POSITIONS = Named("opkit.attn.gpu.device.positions", "with_positions")


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel."""
    op.register_kernel(
        "cuda", forward, when=predicate(AttentionCall, takes), name=NAME, priority=_PRIORITY, trusted=True
    )


def takes(call: AttentionCall) -> bool:
    """Return whether a call is for :func:`forward`: it fits, on sm_90 with a CUDA compiler."""
    return fits(call) and forward_cuda.takes(_without_bias(call, *_like_extended(call)))


def fits(call: AttentionCall) -> bool:
    """Return whether the one bias is relative positions in q's dtype, which has the inverse of the scale, and there is room."""
    if call.bias[:1] != [program.BIAS_REL] or len(call.bias) != 4 or call.softcap or call.q.dtype not in calls.DTYPES:
        return False
    if not shapes_fit(call.q, call.k, call.v) or 0 in call.q.shape or not bias_fits(call):
        return False
    same = all(each.dtype == call.q.dtype for each in _parts(call))
    return same and _has_inverse(call.scale, call.q.dtype) and _channels(call) <= calls.HEADS[-1]


@PreparedKernel
def forward(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp by :func:`opkit.attn.gpu.hopper.forward_cuda.forward`.

    It takes what that does with one ``RelativePosition``, of tensors in q's dtype, and no soft cap, if the channels of a head and
    the rows and columns of the keys are at most 256 together, and q's dtype has the inverse of the scale.

    Raises:
        KernelError: it does not take the call.
    """
    call = AttentionCall(*args)
    if not fits(call):
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {dtypes_and_shapes(call[:3])}, bias={call.bias} of "
            f"{dtypes_and_shapes(call.bias_tensors)}, scale={call.scale}: it takes RelativePosition in the dtype of q, which has "
            f"the inverse of the scale, of at most {calls.HEADS[-1]} channels, rows and columns together. Leave the choice to "
            "opkit, or force kernel='reference'."
        )
    inner = forward_cuda.forward.prepare(*_without_bias(call, *_like_extended(call)))

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        call = AttentionCall(*args)
        return inner(*_without_bias(call, *extended(call)))

    return run


def extended(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return queries and keys of a call that fits with channels of positions: their products with the scale are its logits."""
    rows, columns = _parts(call)
    sizes, found = (call.q.shape[3], rows.shape[3], columns.shape[3], _channels(call)), _like_extended(call)
    for keys, x, out in zip((False, True), call[:2], found, strict=True):
        _kernel(*sizes, keys)(
            x=x, rel_h=rows, rel_w=columns, out=out, heads=x.shape[1], length=x.shape[2], one=1 / call.scale,
            blocks=-(-x.shape[2] // _ROWS), programs=x.shape[0] * x.shape[1],
        )  # fmt: skip
    return found


@functools.cache
def _kernel(head: int, high: int, wide: int, channels: int, keys: bool) -> TritonKernel:
    return triton_kernel(
        _WITH_POSITIONS, grid=lambda blocks, programs: (blocks, programs), num_warps=4, HEAD=head, HIGH=high, WIDE=wide,
        CHANNELS=channels, KEYS=keys, ROWS=_ROWS, SOME=1 << (channels - 1).bit_length(),
    )  # fmt: skip


def _parts(call: AttentionCall) -> list[Tensor]:
    return [call.bias_tensors[number] for number in call.bias[1:3]]


def _channels(call: AttentionCall) -> int:
    """Return the channels of a head with those of rows and columns, a multiple of 8, as TMA wants."""
    return -(-(call.q.shape[3] + sum(part.shape[3] for part in _parts(call))) // 8) * 8


def _has_inverse(scale: float, dtype: torch.dtype) -> bool:
    inverse = 1 / scale if scale > 0 else 0.0
    exact = 0 < inverse <= _MOST[dtype] and torch.tensor(inverse, dtype=dtype).item() == inverse
    return exact and inverse * scale == 1


def _like_extended(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return new queries and keys with the channels of positions."""
    q, k = (x.new_empty((*x.shape[:3], _channels(call))) for x in call[:2])
    return q, k


def _without_bias(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    return call._replace(q=q, k=k, bias=[], bias_tensors=[])
