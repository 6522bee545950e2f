"""``opkit.fit``: policies within a budget."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

import opkit
from opkit.layers.fitting import LayerCost, _choose
from opkit.layers.policies import policy_of

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
    opkit.checkpoint_layers(model, "recompute_cheap")
    with pytest.raises(
        opkit.errors.ArgumentError, match=r"no policies fit into 100 bytes; the least is .* KiB.\nlayers"
    ):
        opkit.fit(model, 100, X)
    assert all("forward" in vars(layer) for layer in model.layers)  # their policies are as before
    with pytest.raises(opkit.errors.ArgumentError, match="Linear repeats no layer"):
        opkit.fit(nn.Linear(2, 2), 100, torch.ones(2, 2))
    model.layers.extend([Layer()])
    model.forward = lambda x: model.layers[0](x)
    with pytest.raises(opkit.errors.ArgumentError, match=r"does not call its layer layers.1 with these arguments"):
        opkit.fit(model, 100, X)
    with pytest.raises(opkit.errors.ArgumentError, match="there are no policies to choose from"):
        opkit.fit(Model(), 100, X, policies=[])


def test_every_call_of_a_layer_counts(model):
    once = opkit.fit(model, 1 << 30, X).costs[0].kept
    forward = model.forward
    model.forward = lambda x: forward(forward(x))
    assert {cost.kept for cost in opkit.fit(model, 1 << 30, X).costs} == {2 * once}


def test_frozen_layers_are_a_kind_of_their_own(model):
    model.layers[0].requires_grad_(False)
    frozen, other, *_ = opkit.fit(model, 1 << 30, X, policies=["save_all"]).costs
    assert 0 < frozen.kept < other.kept
    embeddings = nn.Sequential(Places(), Places()).requires_grad_(False)
    assert opkit.fit(embeddings, 0, torch.arange(4)).nbytes == 0


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, places):
        return self.table(places).argmax(-1)


class Doubles(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2))


def test_layers_that_write_to_their_input():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Doubles(WIDTH, WIDTH), Doubles(WIDTH, WIDTH)), X.clone()
    assert opkit.fit(model, 1 << 30, x, policies=["save_all"]).nbytes > 0
    torch.testing.assert_close(x, X)


@pytest.mark.exhaustive
def test_the_choice_takes_little_more_than_the_least_time():
    numbers = random.Random(0)
    policies = [policy_of(each) for each in ("save_all", "recompute_cheap", opkit.keep("a"), "recompute_all")]
    slower = 0
    for _ in range(500):
        kinds = [
            [
                LayerCost(each, 100 if n == 0 else numbers.randint(1, 99), 0, n and numbers.random())
                for n, each in enumerate(policies)
            ]
            for _ in range(2)
        ]
        layers = {f"{n}": numbers.choice(kinds) for n in range(numbers.randint(1, 5))}
        budget = numbers.randint(50, 100 * len(layers))
        possible = [
            sum(cost.seconds for cost in costs)
            for costs in itertools.product(*layers.values())
            if sum(cost.kept for cost in costs) + (100 if any(cost.seconds for cost in costs) else 0) <= budget
        ]
        if not possible:
            with pytest.raises(opkit.errors.ArgumentError, match="no policies fit"):
                _choose(layers, 100, budget)
            continue
        found = _choose(layers, 100, budget)
        assert found.nbytes <= budget
        least, seconds = min(possible), sum(cost.seconds for cost in found.costs)
        assert seconds < least + max(cost.seconds for costs in kinds for cost in costs)
        slower += seconds > least + 1e-9
    assert slower < 50
