"""``opkit.fit``: policies within a budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opkit

WIDTH, ROWS = 16, 32
ROW = ROWS * WIDTH * 4  # bytes of a layer's input


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, scale=1.0):
        hidden = opkit.checkpoint_name(self.up(x), "hidden")
        return x + scale * self.norm(self.down(hidden.sin()))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


X = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


def test_all_is_saved_where_it_fits(model):
    names = dict(model.state_dict())
    before = {name: value.clone() for name, value in names.items()}
    found = opkit.fit(model, 1 << 30, X)
    assert {str(each) for each in found.policies} == {"save_all"}
    assert found.layers == tuple(f"layers.{n}" for n in range(6))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)  # running statistics, too
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in vars(model.layers[0])


def test_the_first_layers_keep_less(model):
    saved = opkit.fit(model, 1 << 30, X, policies=["save_all"]).costs[0].kept
    expected = model(X)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    found = opkit.fit(model, 3 * ROW + 4 * saved, X, policies=["save_all", "recompute_all"])
    kinds = [str(each) for each in found.policies]
    assert kinds == ["recompute_all"] * 3 + ["save_all"] * 3  # and one more layer while the backward computes it again
    assert found.costs[0].kept == ROW  # its result
    assert found.nbytes <= found.budget
    result = model(X)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), list(model.parameters())), gradients)
    table = str(found).splitlines()
    assert table[0].split() == ["layers", "policy", "kept", "moved", "computed", "again"]
    assert table[1].split()[:4] == ["layers.0", "to", "layers.2", "recompute_all"]
    assert table[-2].startswith("6 layers")


def test_names_are_candidates(model):
    found = opkit.fit(model, 1 << 30, X)
    hidden = 4 * ROW
    kept = opkit.fit(model, 1 << 30, X, policies=[opkit.keep("hidden")])
    assert {cost.kept for cost in kept.costs} == {ROW + hidden}
    assert found.costs[0].kept > ROW + hidden


def test_what_does_not_fit(model):
    with pytest.raises(
        opkit.errors.ArgumentError, match=r"no policies fit into 100 bytes; the least is .* KiB.\nlayers"
    ):
        opkit.fit(model, 100, X)
    with pytest.raises(opkit.errors.ArgumentError, match="Linear repeats no layer"):
        opkit.fit(nn.Linear(2, 2), 100, torch.ones(2, 2))
    model.layers.extend([Layer()])
    model.forward = lambda x: model.layers[0](x)
    with pytest.raises(opkit.errors.ArgumentError, match=r"does not call its layer layers.1 with these arguments"):
        opkit.fit(model, 100, X)
