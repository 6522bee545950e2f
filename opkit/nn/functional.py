"""The operators of a transformer. Each is one function, from which schema, fake, backward, vmap and the rest are derived.

Sums, exponentials and angles are computed in :func:`_wide`'s dtype, so a bfloat16 model loses nothing to them and a
float64 one is not demoted.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Integer
from torch import Tensor

from opkit.attn.compat.flex import flex_attention as flex_attention
from opkit.attn.compat.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
from opkit.errors import ShapeError
from opkit.op.definition import custom_op


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@custom_op("opkit::rms_norm", mutates_args=())
def rms_norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    """Divide ``x`` by its root mean square over the last dimension, then scale it by ``weight``.

    Args:
        x: ``(*batch, d)``, any floating dtype.
        weight: ``(d,)``, any floating dtype.
        eps: added to the mean square, so that a row of zeros stays zero.

    Returns:
        ``(*batch, d)`` in the dtype of ``x``; computed in float32, or float64 for float64 ``x``.

    Raises:
        ShapeError: ``weight`` has another size than the rows of ``x``.
        DtypeError: an argument is not floating.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), eps=0.0)
    tensor([0.8485, 1.1314])

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
    """
    wide = _wide(x)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


@custom_op("opkit::rotary_embedding", mutates_args=())
def rotary_embedding(
    x: Float[Tensor, "*batch length d"], positions: Integer[Tensor, "length"], base: float = 10000.0
) -> Float[Tensor, "*batch length d"]:
    """Rotate features ``i`` and ``i + d/2`` of ``x`` by ``position * base ** (-2i/d)`` radians.

    The product of a rotated query and a rotated key then depends on their positions only through the difference.

    Args:
        x: ``(*batch, length, d)`` queries or keys, any floating dtype; ``d`` is even.
        positions: ``(length,)``, any integer dtype.
        base: the longest wavelength is just under ``2 * pi * base`` positions.

    Returns:
        ``(*batch, length, d)`` in the dtype of ``x``; computed in float32, or float64 for float64 ``x``.

    Raises:
        ShapeError: ``d`` is odd, or ``positions`` has another length than ``x``.
        DtypeError: ``x`` is not floating, or ``positions`` are not integers.

    >>> rotary_embedding(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    https://arxiv.org/abs/2104.09864, with the halves of a feature paired, as in GPT-NeoX, and not its neighbours.
    """
    d = x.shape[-1]
    if d % 2:
        raise ShapeError(f"opkit::rotary_embedding: x of shape {tuple(x.shape)} has {d} features. Give an even number.")
    wide = _wide(x)
    exponents = torch.arange(0, d, 2, dtype=wide.dtype, device=x.device) / d
    angles = torch.outer(positions.to(wide.dtype), base**-exponents)
    cos, sin = angles.cos(), angles.sin()
    left, right = wide.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


@custom_op("opkit::swiglu", mutates_args=())
def swiglu(gate: Float[Tensor, "*batch d"], up: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Gate ``up`` by ``silu(gate)``, between the two matrix products of a feed-forward layer.

    Args:
        gate: ``(*batch, d)``, any floating dtype.
        up: ``(*batch, d)``, any floating dtype.

    Returns:
        ``(*batch, d)`` in the dtype that torch promotes these to.

    Raises:
        ShapeError: the shapes differ.
        DtypeError: an argument is not floating.

    >>> swiglu(torch.tensor([0.0, 1.0, -1.0]), torch.tensor([5.0, 2.0, 2.0]))
    tensor([ 0.0000,  1.4621, -0.5379])

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202.
    """
    return F.silu(gate) * up


@custom_op("opkit::cross_entropy", mutates_args=())
def cross_entropy(
    logits: Float[Tensor, "*batch classes"], targets: Integer[Tensor, "*batch"], ignore_index: int = -100
) -> Float[Tensor, ""]:
    """Return the mean over tokens of the negative log-likelihood of ``targets`` under ``softmax(logits)``.

    Args:
        logits: ``(*batch, classes)``, any floating dtype.
        targets: ``(*batch,)``, any integer dtype, each in ``[0, classes)`` or equal to ``ignore_index``.
        ignore_index: a target that counts neither in the sum nor in the number of tokens.

    Returns:
        A scalar in float32, or float64 for float64 ``logits``; NaN where no token is left, as in torch.

    Raises:
        ShapeError: ``targets`` does not have the shape of ``logits`` without its last dimension.
        DtypeError: ``logits`` are not floating, or ``targets`` are not integers.
        RuntimeError: a target is no class, and the tensors are on the CPU.

    >>> cross_entropy(torch.zeros(3, 256), torch.tensor([7, 8, -100]))
    tensor(5.5452)

    Source: Blanchard, Higham and Higham, "Accurately computing the log-sum-exp and softmax functions", 2021,
    https://doi.org/10.1093/imanum/draa038. The maximum is subtracted from the logit before the logarithm of the sum
    is, which preserves the digits that ``logsumexp(logits) - logits[target]`` loses where logits are large.
    """
    counted = targets != ignore_index
    index = torch.where(counted, targets, 0).long().unsqueeze(-1)
    losses = -_wide(logits).log_softmax(-1).gather(-1, index).squeeze(-1)
    return torch.where(counted, losses, 0.0).sum() / counted.sum()
