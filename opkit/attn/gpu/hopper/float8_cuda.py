"""Attention to float8 on Hopper: the forward in CUDA C++ (``cuda/forward.cu``), with what is given in 8 bits.

Tensor cores multiply these at twice the rate of numbers of 16 bits. Values become float16 first, which holds them exactly, and
probabilities are rounded to that, as in the portable kernel: in 8 bits each would be off by up to 6 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit.attn.calls import Float8Call, dtypes_and_shapes, predicate
from opkit.attn.gpu.hopper import forward as gluon
from opkit.attn.gpu.hopper import forward_cuda, library
from opkit.attn.gpu.portable import float8 as portable
from opkit.errors import KernelError
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

NAME = "hopper_cuda"
_PRIORITY = 1  # above the portable kernel
_MOST = 65535  #: blocks of threads by a dimension, which are heads of keys and batches


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention_float8`` the kernel."""
    op.register_kernel("cuda", forward, when=predicate(Float8Call, takes), name=NAME, priority=_PRIORITY, trusted=True)


def takes(call: Float8Call) -> bool:
    """Whether a call is for :func:`forward`: long, on compute capability 9.0 beside an nvcc."""
    if not fits(call) or not forward_cuda.long(call.plain) or not gluon.applies(call.plain):
        return False
    return library.there(forward_cuda.library_of(call.plain), call.q.dtype)


def fits(call: Float8Call) -> bool:
    """Whether :func:`forward` can compute a call."""
    blocks = max(call.k.shape[:2]) <= _MOST
    return blocks and portable.takes(call) and forward_cuda.plain(call.plain)


@PreparedKernel
def forward(*given: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator's result and log-sum-exp, of its own arguments.

    It takes float8_e4m3fn and float8_e5m2, and else what :func:`opkit.attn.gpu.hopper.forward_cuda.forward` takes; what that
    says of what is hidden, of infinities and of strides holds here too. Tensor cores keep 14 bits of a sum of products of
    float8, so that logits may be off by some 1e-3 of their size. Descales may be any numbers.

    Raises:
        KernelError: it does not take the call.
        ToolchainError: there is no nvcc. One that refuses the source is warned of, and the portable kernel is called.
    """
    call = Float8Call(*given)
    if not fits(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention_float8: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, softcap={call.softcap}: it takes heads of {(*forward_cuda.GROUPS,)}, under a band, segments "
            "or no mask. Leave the choice to opkit, or force kernel='triton'."
        )
    plain = call.plain
    launch = library.launcher_or_none(forward_cuda.library_of(plain), call.q.dtype)
    if launch is None:
        return portable.forward.prepare(*call)
    inner = forward_cuda.launching(launch, plain, torch.empty_like(call.q, dtype=torch.bfloat16))

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        call = Float8Call(*given)
        return inner(*call.plain, by=[each.contiguous() for each in call.descales])

    return run
