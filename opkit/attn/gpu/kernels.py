"""Register the GPU kernels of ``opkit::attention``, and call the portable ones. Triton is imported at the first call."""

from __future__ import annotations

from typing import Any

import torch

from opkit.attn import gradients
from opkit.attn.calls import AttentionCall, BiasCall, GradientCall, dtypes_and_shapes, predicate
from opkit.attn.gpu import arguments
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.hopper import backward as hopper_backward
from opkit.attn.gpu.hopper import backward_cuda, decode_cuda, forward_cuda, packed, relative
from opkit.attn.gpu.hopper import mla as mla
from opkit.attn.gpu.limits import LARGEST_HEAD, LARGEST_VALUES, device, fits, takes
from opkit.attn.gpu.portable import backward as portable_backward
from opkit.attn.gpu.portable import forward as portable_forward
from opkit.attn.gpu.portable import invariant
from opkit.attn.masks.program import results_fit, sinks_fit
from opkit.errors import KernelError
from opkit.op import torch_private as private
from opkit.op.dispatch.selection import Refused
from opkit.op.operator import CustomOp

NAME = "triton"
_HOPPER = 1  # of a kernel's priority: above the portable ones


def register(op: CustomOp[Any, Any]) -> None:
    """Register the GPU kernels of ``opkit::attention`` and of the operators of its gradients.

    Calls with few queries go to the decoding kernel; on Hopper, those of latent attention to a kernel of their own, and those
    with many rows together to the Hopper kernel. Other calls, and gradients, go to the Hopper kernels where these take them, else
    to the portable one. Kernels in CUDA C++ need a compiler.
    """
    op.register_kernel(device(), forward, when=predicate(AttentionCall, takes), name=NAME, trusted=True)
    decoding.register(op)
    decode_cuda.register(op)
    mla.register(op)
    packed.register(op)
    invariant.register(op)
    forward_cuda.register(op)
    relative.register(op)
    of_gradients = gradients.backward_operator()
    when = predicate(GradientCall, takes_gradients)
    of_gradients.register_kernel(device(), backward, when=when, name=NAME, trusted=True)
    when = predicate(GradientCall, hopper_backward.takes)
    of_gradients.register_kernel(
        "cuda", hopper_backward.backward, when=when, name="hopper", priority=_HOPPER, trusted=True
    )
    backward_cuda.register(of_gradients)
    when = predicate(BiasCall, takes_bias_gradients)
    gradients.bias_backward_operator().register_kernel(device(), bias_backward, when=when, name=NAME, trusted=True)


def takes_gradients(call: GradientCall) -> bool:
    """Return whether :func:`backward` takes a call."""
    return fits(call) and sinks_fit(call.sinks, call.q) and results_fit(call)


def takes_bias_gradients(call: BiasCall) -> bool | Refused:
    """Return whether :func:`bias_backward` takes a call: the checks of gradients, with delta in place of a log-sum-exp.

    Deterministic algorithms refuse gradients of tensors that functions read at coordinates for which there is no order.
    """
    if not all(0 <= number < len(call.bias_tensors) for number in call.wanted):
        return False
    as_gradients = GradientCall(
        call.gradient, call.delta, call.q, call.k, call.v, call.gradient, call.lse, call.mask_tensors, call.bias_tensors,
        call.mask, call.bias, call.scale, call.softcap, False, None, 0.0, call.sinks,
    )  # fmt: skip
    if torch.are_deterministic_algorithms_enabled() and portable_backward.adds_in_no_order(call):
        return Refused(
            "algorithms are deterministic, and a function reads a tensor at coordinates for which there is no order"
        )
    return takes_gradients(as_gradients)


@arguments.tuned_forward
def forward(*arguments: Any) -> Any:
    """Compute the operator's result and log-sum-exp.

    Raises:
        KernelError: it does not take the call, or batch invariance is set, which another kernel provides.
    """
    call = AttentionCall(*arguments)
    _check_supported(takes(call), call)
    decoding.refuse_batch_invariance("opkit::attention", NAME)
    return portable_forward.prepare_forward(call)


@arguments.tuned_backward
def backward(*arguments: Any) -> Any:
    """Compute the gradients of q, k and v, and delta; the arguments are a :class:`~opkit.attn.calls.GradientCall`.

    Raises:
        KernelError: it does not take the call.
    """
    call = GradientCall(*arguments)
    _check_supported(takes_gradients(call), call)
    return portable_backward.prepare_backward(call)


@arguments.tuned_bias_backward
def bias_backward(*arguments: Any) -> Any:
    """Compute the gradients of some of the tensors of a bias; the arguments are a :class:`~opkit.attn.calls.BiasCall`.

    Raises:
        KernelError: it does not take the call.
    """
    call = BiasCall(*arguments)
    _check_supported(takes_bias_gradients(call), call)
    run = portable_backward.prepare_bias_backward(call)
    if not portable_backward.adds_in_no_order(call):
        return run
    # algorithms may become deterministic after the kernel was chosen
    return lambda *args: (gradients.attention_bias_backward if private.deterministic() else run)(*args)


def _check_supported(supported: bool | Refused, call: AttentionCall | GradientCall | BiasCall) -> None:
    """Raise for a call that a forced kernel does not support: nothing checked this before."""
    if not supported:
        shapes = dtypes_and_shapes((call.q, call.k, call.v))
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}. It "
            f"takes bfloat16, float16 and float32, heads of at most {LARGEST_HEAD} (of values {LARGEST_VALUES}), and tensors "
            "as opkit.attention makes them. Leave the choice to opkit, which opkit.attn.api.select explains, or force "
            "kernel='reference'."
        )
