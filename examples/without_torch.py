"""A perceptron, a small BERT and a convolutional network, saved, and run by opkit.runtime on NumPy arrays::

    python examples/without_torch.py

Exporting takes torch. The files run wherever the wheel opkit-runtime is installed (``pip wheel ./cpp_ext/model``).
"""

import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import opkit
import opkit.runtime


class Layer(nn.Module):
    """A layer of BERT's (Devlin et al., 2018)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, mask[:, None, None])
        x = self.attention_norm(x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, words: int = 1000, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(words, width), nn.Embedding(128, width), nn.LayerNorm(width)
        self.layers, self.head = nn.ModuleList(Layer(width, 4) for _ in range(layers)), nn.Linear(width, 2)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(words) + self.places(torch.arange(words.shape[1])))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x[:, 0])


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.second_norm(self.second(F.relu(self.first_norm(self.first(x))))))


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Return the models by name, with example arguments."""
    perceptron = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    convolutional = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(), Residual(32), nn.MaxPool2d(2), Residual(32),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    words, mask = torch.randint(1000, (2, 20)), torch.arange(20) < torch.tensor([[20], [13]])
    return {
        "perceptron": (perceptron.eval(), (torch.randn(8, 64),)),
        "bert": (Bert().eval(), (words, mask)),
        "convolutional": (convolutional.eval(), (torch.randn(2, 3, 64, 64),)),
    }


def main() -> None:
    """Export the models, and run them on NumPy arrays."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, args) in models().items():
            path = opkit.export(model, args, path=f"{folder}/{name}.opk")
            loaded = opkit.runtime.load(path)
            found = np.asarray(loaded(*(each.numpy() for each in args)))
            difference = np.abs(found - model(*args).detach().numpy()).max()
            print(f"{name}: {path.stat().st_size / 1e6:.1f} MB, the largest difference is {difference:.1e}")
            assert difference < 1e-4


if __name__ == "__main__":
    main()
