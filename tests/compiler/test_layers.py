"""``opkit.compile_layers``: the layers that a model repeats are captured and compiled once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import opkit
from opkit.compiler.backend import observer

D = 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x):
        return x + sum(expert(self.linear(self.norm(x)).sin()) for expert in self.experts)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.body = nn.ModuleDict(
            {"encoder": nn.ModuleList(Layer() for _ in range(12)), "head": nn.Sequential(nn.Linear(D, 3))}
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.body["encoder"]:
            x = layer(x)
        return self.body["head"](x)


def test_one_layer_is_compiled():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x, graphs = Model(), torch.randn(5, D), []
    names, result = list(model.state_dict()), model(x)
    expected = torch.autograd.grad(result.sum(), list(model.parameters()))
    assert opkit.compile_layers(model, options={"strict": True}) == [f"body.encoder.{n}" for n in range(12)]
    token = observer.set(graphs.append)
    found = model(x)
    gradients = torch.autograd.grad(found.sum(), list(model.parameters()))
    observer.reset(token)
    torch.testing.assert_close(found, result)
    torch.testing.assert_close(gradients, expected)
    assert [each.name.split()[0] for each in graphs] == ["forward", "backward"]
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())])
def test_a_model_without_repeated_layers_is_refused(model):
    with pytest.raises(opkit.errors.ArgumentError, match=f"{type(model).__name__} repeats no layer"):
        opkit.compile_layers(model)
