"""Layers for Hugging Face's ``kernels``: what its ``kernelize`` puts in place of the forwards of transformers' modules.

``kernels`` asks of a layer that it has no constructor, no other members, and the forward's signature of what it replaces. Its
forward is bound to the module of transformers, whose class is ``type(self)``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from opkit.nn.recognized import norm, zero_centered_norm


class RMSNorm(nn.Module):
    """``RMSNorm`` of transformers."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise ``hidden_states``, ``(*batch, d)``."""
        return norm(self, hidden_states)


class RMSNormZeroCentered(nn.Module):
    """``RMSNormZeroCentered`` of transformers, whose scale is ``1 + weight``."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise ``hidden_states``, ``(*batch, d)``."""
        return zero_centered_norm(self, hidden_states)


@dataclass(frozen=True)
class InstalledLayer:
    """What ``kernels`` calls a repository: it returns a layer of this package, and nothing is downloaded."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        """Return the layer."""
        return self.layer


def register_kernels(device: str = "cpu") -> None:
    """Offer opkit's layers to ``kernels.kernelize``, and so to transformers' ``from_pretrained(..., use_kernels=True)``.

    They are RMS norms in inference, as one call of ``torch.nn.functional.rms_norm``, under the names ``RMSNorm`` and
    ``RMSNormZeroCentered``. Attention is registered by :func:`opkit.register_transformers`. For "cuda" they take the place of the
    layers that transformers names.

    Args:
        device: a type of device of ``kernels``, such as "cpu" or "cuda".

    Raises:
        ImportError: ``kernels`` is not installed.
    """
    kernels: Any = importlib.import_module("kernels")
    layers: dict[str, Any] = {layer.__name__: InstalledLayer(layer) for layer in (RMSNorm, RMSNormZeroCentered)}
    kernels.register_kernel_mapping({name: {device: {kernels.Mode.INFERENCE: layer}} for name, layer in layers.items()})
