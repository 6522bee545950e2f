"""The kernel of ``opkit::attention_float8`` on GPUs: the portable forward, on float8 or on its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit.attn.calls import Float8Call, dtypes_and_shapes, predicate
from opkit.attn.gpu import tuned
from opkit.attn.gpu.limits import LARGEST_HEAD, LARGEST_VALUES, sizes_fit
from opkit.attn.masks.memory_safety import sinks_fit
from opkit.errors import KernelError
from opkit.op.operator import CustomOp

NAME = "triton"
_SMALL = 16  #: channels; products of float8 take more at once
_BYTES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention_float8`` its kernel."""
    from opkit.attn.gpu.kernels import device

    op.register_kernel(device(), forward, when=predicate(Float8Call, takes), name=NAME, trusted=True)


def takes(call: Float8Call) -> bool:
    """Whether :func:`forward` takes a call: what the portable forward takes, in float8_e4m3fn or float8_e5m2."""
    sizes = call.q.shape[0], call.k.shape[1]
    descaled = len(call.descales) == 3 and all(x.shape == sizes and x.dtype == torch.float32 for x in call.descales)
    return call.q.dtype in _BYTES and descaled and sizes_fit(call.plain) and sinks_fit(call.sinks, call.q)


@tuned.float8
def forward(*given: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator's result and log-sum-exp, of its own arguments.

    Products of queries and keys are those of the tensor cores for float8 where these have some (NVIDIA's from compute
    capability 8.9 on, of heads of more than 16), and of float16 elsewhere. On Hopper the former keep 14 bits of a sum.
    Probabilities are rounded to float16 before they meet the values, which float16 holds exactly.

    Raises:
        KernelError: it does not take the call.
    """
    call = Float8Call(*given)
    if not takes(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention_float8: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}. "
            f"It takes float8_e4m3fn and float8_e5m2, heads of at most {LARGEST_HEAD} (of values {LARGEST_VALUES}), and tensors "
            "as opkit.attention makes them. Leave the choice to opkit, or force kernel='reference'."
        )
    from opkit.attn.gpu.portable import forward as portable

    native = multiplies_float8(call.q.device) and call.q.shape[3] > _SMALL
    inner = portable.forward(call.plain, fp8="native" if native else _BYTES[call.q.dtype])

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        call = Float8Call(*given)
        plain = call.plain
        if not native:
            plain = plain._replace(q=_bytes(call.q), k=_bytes(call.k), v=_bytes(call.v))
        return inner(*plain, by=[each.contiguous() for each in call.descales])

    return run


def multiplies_float8(device: torch.device) -> bool:
    """Whether the tensor cores of a GPU multiply these kinds of float8; of no GPU, those of an H200."""
    if device.type != "cuda":
        return device.type == "meta"
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous().view(torch.uint8)
