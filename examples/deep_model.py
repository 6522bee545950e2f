"""Train a deep model in less memory: layers are compiled once, and a budget decides what they keep for their backward.

Run with ``python examples/deep_model.py``; see docs/layers.md.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opkit

WIDTH, DEPTH, TOKENS = 64, 12, 32


class Layer(nn.Module):
    """Attention and an MLP; the result of attention has a name, so that policies can keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attention = opkit.checkpoint_name(opkit.attention(q, k, v), "attention")
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    """A stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        return opkit.scan_layers(self.layers, x)


def main() -> None:
    """Compare the gradients with those of a model that keeps everything."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, TOKENS, WIDTH)
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    everything = opkit.fit(model, 1 << 40, x, policies=["save_all"])
    found = opkit.fit(model, everything.nbytes // 2, x)
    print(found)
    assert found.nbytes <= everything.nbytes // 2

    torch.compile(model, backend="opkit")(x).square().mean().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


if __name__ == "__main__":
    main()
