"""The logits of queries and keys with channels of positions, as an operator for the process in which Triton runs on the CPU."""

from torch import Tensor

import opkit
from opkit.attn.calls import AttentionCall
from opkit.attn.gpu.hopper import relative
from opkit.attn.masks import program


def call_of(q: Tensor, k: Tensor, rel_h: Tensor, rel_w: Tensor, scale: float) -> AttentionCall:
    """A call without a mask whose bias is relative positions."""
    bias = [program.BIAS_REL, 0, 1, rel_w.shape[3]]
    return AttentionCall(q, k, k, [], [rel_h, rel_w], None, None, [], bias, scale, 0.0, 0.0, False)


@opkit.custom_op("relative_tests::logits", mutates_args=(), inline=False)
def logits(q: Tensor, k: Tensor, rel_h: Tensor, rel_w: Tensor, scale: float) -> Tensor:
    """In float64."""
    bias = (rel_h.double()[..., None] + rel_w.double()[..., None, :]).flatten(3)
    return q.double() @ k.double().mT.repeat_interleave(q.shape[1] // k.shape[1], 1) * scale + bias


@logits.register_kernel("cpu", name="extended")
def _(q: Tensor, k: Tensor, rel_h: Tensor, rel_w: Tensor, scale: float) -> Tensor:
    longer, keys = relative.extended(call_of(q, k, rel_h, rel_w, scale))
    return longer.double() @ keys.double().mT.repeat_interleave(q.shape[1] // k.shape[1], 1) * scale
