"""Attention with tiles by number among the candidates for an A100, for the interpreter's process: there it runs on the CPU."""

import os

import torch
from torch import Tensor

import opkit
from opkit.attn import gradients, reference
from opkit.attn.calls import AttentionCall, GradientCall
from opkit.attn.gpu import arguments, blocks
from opkit.attn.gpu.search import Tiles
from opkit.attn.masks.program import BAND

SHARED = 166912  # bytes that a block may have on an A100
MASK, SCALE = [BAND, -(2**62), 0], 0.25


def candidates_of(kernel: blocks.TiledKernel, d: int, dtype: torch.dtype) -> tuple[blocks.BlockSizes, ...]:
    """What is tried for heads of ``d``."""
    return blocks.candidates(kernel, d, d, dtype.itemsize, SHARED, 0)


def call_of(q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
    """A causal call."""
    return AttentionCall(q, k, v, [], [], None, None, MASK, [], SCALE, 0.0, 0.0, False)


def gradient_call_of(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> GradientCall:
    """The gradients of a causal call."""
    return GradientCall(gradient, None, q, k, v, out, lse, [], [], MASK, [], SCALE, 0.0, False)


@opkit.custom_op("candidate_tests::forward", mutates_args=(), inline=False)
def forward(q: Tensor, k: Tensor, v: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Causal attention."""
    return reference.attention(*call_of(q, k, v))


@opkit.custom_op("candidate_tests::backward", mutates_args=(), inline=False)
def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of causal attention, and delta."""
    return gradients.attention_backward(*gradient_call_of(gradient, q, k, v, out, lse))


def _numbered(number: int):
    def tiles_of(kernel, call, shape, cut=None):
        found = candidates_of(kernel, call.q.shape[3], torch.float16)
        return Tiles(None, lambda _: found[number % len(found)])

    return tiles_of


def _forward(q: Tensor, k: Tensor, v: Tensor, number: int) -> tuple[Tensor, Tensor]:
    from opkit.attn.gpu.portable.forward import prepare_forward as portable

    arguments.tiles_of = _numbered(number)
    call = call_of(q, k, v)
    return portable(call)(*call)


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from opkit.attn.gpu.portable.backward import prepare_backward as portable

    arguments.tiles_of = _numbered(number)
    call = gradient_call_of(gradient, q, k, v, out, lse)
    return portable(call)(*call)


if os.environ.get("TRITON_INTERPRET") == "1":
    forward.register_kernel("cpu", _forward, name="interpreted")
    backward.register_kernel("cpu", _backward, name="interpreted")
