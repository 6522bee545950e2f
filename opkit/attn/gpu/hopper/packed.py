"""Few queries on Hopper, as the forward kernel's rows: all queries of the heads that share keys, which are read once for them.

Where a head of keys has more than 64 such rows, products take long enough that they must overlap the softmax, which the
kernel for few queries cannot do and the forward for Hopper does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from opkit.attn.calls import AttentionCall, predicate
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.decode.plan import device_of, splits_of
from opkit.attn.gpu.hopper import forward_cuda
from opkit.errors import KernelError
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

NAME = "packed"
FEWEST = 65  #: rows; fewer are one half of a tile
_PRIORITY = 3  # above the kernel for few queries
_STEP = 128  # keys


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel."""
    op.register_kernel(
        "cuda", forward, when=predicate(AttentionCall, takes), name=NAME, priority=_PRIORITY, trusted=True
    )


def takes(call: AttentionCall) -> bool:
    """Return whether a call is for :func:`forward`: one tile of rows to each head of keys, and enough of these for the GPU."""
    q, k = call[:2]
    if not fits(call) or not FEWEST <= _height(q, k) <= decoding.FEW or not forward_cuda.takes(_packed_call(call)):
        return False
    tiles, processors = q.shape[0] * k.shape[1], device_of(decoding.index_of(q)).processors
    return k.shape[2] >= decoding.MANY and splits_of(tiles, processors, -(-k.shape[2] // _STEP)) == 1


def fits(call: AttentionCall) -> bool:
    """Return whether the queries of heads that share keys lie evenly in memory, and see the same keys."""
    q, k = call[:2]
    if q.dim() != 4 or k.dim() != 4 or not k.shape[1] or q.shape[1] % k.shape[1] or 0 in q.shape:
        return False
    even = q.shape[2] == 1 or q.stride(1) == q.shape[2] * q.stride(2)
    return even and not call.out_is_bshd and not call.mask and not call.bias and call.sinks is None


def _packed_call(call: AttentionCall) -> AttentionCall:
    return call._replace(q=_packed(call.q, call.k))


def _height(q: Tensor, k: Tensor) -> int:
    return q.shape[2] * (q.shape[1] // k.shape[1])


def _packed(q: Tensor, k: Tensor) -> Tensor:
    """Queries as (batch, heads of keys, rows, channels)."""
    (batch, _, queries, channels), height = q.shape, _height(q, k)
    row = q.stride(1) if queries == 1 else q.stride(2)
    strides = q.stride(0), q.stride(1) * (q.shape[1] // k.shape[1]), row, q.stride(3)
    return q.as_strided((batch, k.shape[1], height, channels), strides)


@PreparedKernel
def forward(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp by :func:`opkit.attn.gpu.hopper.forward_cuda.forward`.

    It takes what that does, but for masks, biases and sinks, of queries whose heads follow one another in memory without a gap,
    into results that are laid out like that.

    Raises:
        KernelError: it does not take the call.
    """
    call = AttentionCall(*args)
    if not fits(call):
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q of {tuple(call.q.shape)} with strides {call.q.stride()}, "
            f"mask={call.mask}, out_is_bshd={call.out_is_bshd}: it takes queries whose heads follow one another, all of "
            "which see all keys. Leave the choice to opkit, or force kernel='reference'."
        )
    inner = forward_cuda.forward.prepare(*_packed_call(call))
    of_out, of_lse = (*call.q.shape[:3], call.v.shape[3]), call.q.shape[:3]

    def run(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = inner(_packed(q, k), k, *rest)
        return out.view(of_out), lse.view(of_lse)

    return run
