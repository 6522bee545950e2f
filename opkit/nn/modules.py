"""Modules over the operators of :mod:`opkit.nn.functional`: their parameters, initialised, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opkit.nn import functional


class RMSNorm(nn.Module):
    """:func:`opkit.nn.rms_norm` with its weight, which begins at one.

    >>> RMSNorm(4)(torch.full((2, 4), 3.0))[0]
    tensor([1.0000, 1.0000, 1.0000, 1.0000], grad_fn=<SelectBackward0>)
    """

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``, ``(*batch, d)``."""
        return functional.rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """The feed-forward layer ``down(swiglu(gate(x), up(x)))``, without biases.

    >>> SwiGLU(d=8, hidden=16)(torch.zeros(3, 8)).shape
    torch.Size([3, 8])
    """

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d, hidden, bias=False)
        self.up = nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``x``, ``(*batch, d)``."""
        return self.down(functional.swiglu(self.gate(x), self.up(x)))
