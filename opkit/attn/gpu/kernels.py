"""The kernels of ``opkit::attention`` for GPUs: which calls they take, and their registration. Triton is imported by a call."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from opkit import config
from opkit.attn import gradients
from opkit.attn.calls import BiasCall, Call, GradientCall
from opkit.attn.gpu import tuned
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.hopper import backward as hopper_backward
from opkit.attn.gpu.hopper import forward as hopper
from opkit.attn.gpu.hopper import packed
from opkit.attn.gpu.limits import LARGEST_HEAD, LARGEST_VALUES, takes
from opkit.attn.gpu.mla import decode as mla
from opkit.attn.gpu.portable import invariant
from opkit.errors import KernelError
from opkit.op.operator import CustomOp

NAME = "triton"
_HOPPER = 1  # of a kernel's priority: above the portable ones
_FORCED = -1  # it runs where it is asked for by name


def device() -> str:
    """The device that the kernels are for: in a process in which Triton interprets, the processor."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` and the operators of its gradients their kernels for GPUs.

    Few queries are decoded, on Hopper those of latent attention by a kernel of their own, and those that are many rows together
    by the kernel for Hopper; other calls are for that where it takes them, or for the portable one. The backward for Hopper runs
    where it is asked for by name, until ``tests/attn/gpu/test_hopper_backward.py`` has passed on such a GPU.
    """
    op.register_kernel(device(), forward, when=takes, name=NAME)
    decoding.register(op)
    mla.register(op)
    packed.register(op)
    invariant.register(op)
    op.register_kernel("cuda", hopper.forward, when=hopper.takes, name="hopper", priority=_HOPPER)
    of_gradients = gradients.backward_operator()
    of_gradients.register_kernel(device(), backward, when=takes_gradients, name=NAME)
    of_gradients.register_kernel(
        "cuda", hopper_backward.backward, when=hopper_backward.takes, name="hopper", priority=_FORCED
    )
    gradients.bias_backward_operator().register_kernel(device(), bias_backward, when=takes_bias_gradients, name=NAME)


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
    if not takes(q, k, v, mask_tensors, bias_tensors, None, mask, bias):
        return False
    results = all(each.shape == (*q.shape[:3], v.shape[3]) and each.dtype == q.dtype for each in (out, gradient))
    sums = [lse] if of_lse is None else [lse, of_lse]
    return results and all(each.shape == q.shape[:3] and each.dtype == torch.float32 for each in sums)


def takes_bias_gradients(
    gradient: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    mask_tensors: list[Tensor],
    bias_tensors: list[Tensor],
    mask: list[int],
    bias: list[int],
    wanted: list[int],
) -> bool:
    """Whether :func:`bias_backward` takes a call."""
    if not all(0 <= number < len(bias_tensors) for number in wanted):
        return False
    return takes_gradients(
        gradient, delta, q, k, v, gradient, lse, mask_tensors, bias_tensors, mask, bias
    )  # the result is as the gradient, and delta as the gradient of the log-sum-exp


@tuned.forward
def forward(*given: Any) -> Any:
    """The operator's result and log-sum-exp, of its own arguments.

    Raises:
        KernelError: it does not take the call, or batch invariance is asked for, which another kernel has.
    """
    call = Call(*given)
    _see_to(takes(*call[:6], call.mask, call.bias), call)
    _refuse_batch_invariance()
    from opkit.attn.gpu.portable import forward as portable

    return portable.forward(call)


@tuned.backward
def backward(*given: Any) -> Any:
    """The gradients of q, k and v, and delta; its arguments are a :class:`~opkit.attn.calls.GradientCall`.

    Raises:
        KernelError: it does not take the call.
    """
    call = GradientCall(*given)
    _see_to(takes_gradients(*call[:11]), call)
    from opkit.attn.gpu.portable import backward as portable_backward

    return portable_backward.backward(call)


@tuned.of_biases
def bias_backward(*given: Any) -> Any:
    """The gradients of some of the tensors of a bias; its arguments are a :class:`~opkit.attn.calls.BiasCall`.

    Raises:
        KernelError: it does not take the call.
    """
    call = BiasCall(*given)
    _see_to(takes_bias_gradients(*call[:10], call.wanted), call)
    from opkit.attn.gpu.portable import bias as portable_bias

    return portable_bias.backward(call)


def _refuse_batch_invariance() -> None:
    if config.get().batch_invariant:
        raise KernelError(
            f"opkit::attention: OPKIT_BATCH_INVARIANT is set, and kernel {NAME!r} was forced, whose results may depend on what "
            "is computed beside them. Leave the choice to opkit, or force kernel='batch_invariant' or 'reference'."
        )


def _see_to(fits: bool, call: Call | GradientCall | BiasCall) -> None:
    """A kernel that is forced is not asked whether it takes the call."""
    if not fits:
        shapes = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in (call.q, call.k, call.v))
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}. It "
            f"takes bfloat16, float16 and float32, heads of at most {LARGEST_HEAD} (of values {LARGEST_VALUES}), and tensors "
            "as opkit.attention makes them. Leave the choice to opkit, which opkit.attn.api.select explains, or force "
            "kernel='reference'."
        )
