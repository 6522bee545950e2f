"""``torch.compile(backend="opkit")`` compared with Inductor and eager mode, on parts of models."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opkit.bench.topics import Case, Setting, Ways


class _Softmax(nn.Module):
    """The softmax of biased and scaled logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax((x + self.bias) * 0.125, -1)


class _Block(nn.Module):
    """A block of a transformer: norms, attention, gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.norm, self.mlp_norm = width // 64, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (each.transpose(-2, -3) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class _Convolutions(nn.Module):
    """A residual block of convolutions and batch norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


_MODELS: dict[str, tuple[Callable[[int], nn.Module], int, tuple[int, ...], tuple[int, ...]]] = {
    "softmax": (_Softmax, 1024, (2048, 1024), (64, 1024)),
    "MLP with norm": (
        lambda n: nn.Sequential(nn.Linear(n, n), nn.GELU(), nn.LayerNorm(n)),
        512,
        (1024, 512),
        (32, 512),
    ),
    "transformer block": (_Block, 512, (2, 256, 512), (2, 16, 512)),
    "convolutions": (_Convolutions, 64, (4, 64, 56, 56), (1, 64, 8, 8)),
}  # the module, its width, the shape of its input, and the one of --quick
_BACKENDS = {"opkit": "opkit", "Inductor": "inductor"}


def cases(setting: Setting) -> Iterator[Case]:
    """Yield inference and training of each module."""
    for name in _MODELS:
        for training in (False, True):
            title = f"{name}, {'training' if training else 'inference'}"
            yield Case(title, functools.partial(_ways, setting, name, training))


def _ways(setting: Setting, name: str, training: bool) -> Ways:
    torch.compiler.reset()
    make, width, large, small = _MODELS[name]
    module = make(width).to(setting.device).train(training)
    x = torch.randn(small if setting.quick else large, device=setting.device)
    modules: dict[str, Callable[..., Any]] = {
        way: torch.compile(copy.deepcopy(module), backend=backend) for way, backend in _BACKENDS.items()
    }
    modules["eager mode"] = module
    return {way: functools.partial(_step, each, x, training) for way, each in modules.items()}


def _step(module: Callable[[Tensor], Tensor], x: Tensor, training: bool) -> None:
    with torch.set_grad_enabled(training):
        result = module(x)
    if training:
        result.square().mean().backward()
