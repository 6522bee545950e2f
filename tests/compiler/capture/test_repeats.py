"""Blocks that a model repeats: compiled once, with eager's results and gradients."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import opkit
from opkit.compiler.backend import observer

D, LAYERS = 16, 4
R = torch.randn


class Block(nn.Module):
    def __init__(self, dropout=0.0, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.up, self.down = norm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.gain, self.dropout = nn.Parameter(torch.ones(D)), dropout

    def forward(self, x):
        y = self.norm(x) * self.gain
        y = self.down(F.gelu(self.up(y)).square() + 1)
        return x + F.dropout(y, self.dropout)


class Model(nn.Module):
    def __init__(self, *layers, forward=None):
        super().__init__()
        self.layers = nn.ModuleList(layers or [Block() for _ in range(LAYERS)])
        self.first, self.last, self.of = nn.Linear(D, D), nn.Linear(D, 3), forward
        self.scales = torch.ones(2, D).unbind()

    def forward(self, x):
        x = self.first(x)
        if self.of is not None:
            return self.of(self, x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def compiled(model, **options):
    return torch.compile(model, backend="opkit", options={"strict": True, **options})


def compare(model, *inputs, tolerance=1e-4):
    """Compare results, gradients and buffers with eager's, for each input in turn; return how often forwards are called."""
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    torch._dynamo.reset()
    other = copy.deepcopy(model)
    function, graphs = compiled(other), []
    token = observer.set(graphs.append)
    for x in inputs:
        expected, found = model(x), function(x)
        close(found, expected)
        for each in (expected, found):
            sum(y.square().sum() for y in (each if isinstance(each, tuple) else (each,))).backward()
    observer.reset(token)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        close(q.grad, p.grad, msg=lambda m, name=name: f"{name}: {m}")
    close(dict(other.named_buffers()), dict(model.named_buffers()))
    return [graph.count for graph in graphs if "forward" in graph.name]


def every_state(model, x):
    states = [x]
    for layer in model.layers:
        x = layer(x)
        states.append(x)
    return model.last(x), *states


def in_place(model, x):
    for layer in model.layers:
        y, x = layer(x), x.sin()
        x += y
    return model.last(x)


def in_place_across(model, x):
    total = torch.zeros_like(x)
    for layer in model.layers:
        x = layer(x)
        total.add_(x.sin())
    return model.last(total)


def with_checkpoints(model, x):
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return model.last(x)


def under_autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        for layer in model.layers:
            x = layer(x)
        return model.last(x).float()


def without_gradients(model, x):
    for layer in model.layers:
        with torch.no_grad():
            scale = layer.gain.mean()
        x = layer(x) * scale
    return model.last(x)


def constant(model, x):
    mask = torch.ones(D, D).tril()[3]
    for layer in model.layers:
        x = layer(x) + mask
    return model.last(x)


def tuples(model, x):
    """A tuple passes from layer to layer: the graph is cut where a tensor does."""
    parts = x.split(D // 4, 1)
    for layer in model.layers:
        x = layer(torch.cat([part * (n + 1) for n, part in enumerate(parts)], 1).tanh())
        parts = x.sin().chunk(4, 1)
    return model.last(torch.cat(parts, 1))


def sharing(model, x):
    for layer in model.layers:
        x = layer(x * model.scales[0]) + model.scales[1]
    return model.last(x)


def tied():
    layers = [Block() for _ in range(LAYERS)]
    layers[2].up = layers[1].up
    return Model(*layers)


CASES = {
    "all states are results": (lambda: Model(forward=every_state), [1, LAYERS, 1]),
    "in place in a block": (lambda: Model(forward=in_place), [1, LAYERS, 1]),
    "checkpoints": (lambda: Model(forward=with_checkpoints), [1, LAYERS, 1]),
    "running statistics": (lambda: Model(*[Block(norm=nn.BatchNorm1d) for _ in range(LAYERS)]), [1, LAYERS, 1]),
    "tuples": (lambda: Model(*[Block() for _ in range(LAYERS + 1)], forward=tuples), [1, LAYERS, 1]),
    "a weight of two blocks": (tied, [1, LAYERS, 1]),
}
FURTHER = {
    "inputs share memory": (lambda: Model(forward=sharing), [1, LAYERS, 1]),
    "gradients off within blocks": (lambda: Model(forward=without_gradients), [1, LAYERS, 1]),
    "a constant for all": (lambda: Model(forward=constant), [1, LAYERS, 1]),
    "one block is another": (lambda: Model(Block(norm=nn.RMSNorm), *[Block() for _ in range(LAYERS)]), [1, LAYERS, 1]),
    "autocast around blocks": (lambda: Model(forward=under_autocast), [1]),
    "in place across blocks": (lambda: Model(forward=in_place_across), [1]),
    "the same block": (lambda: Model(*[Block()] * LAYERS), [1]),
    "few blocks": (lambda: Model(*[Block() for _ in range(3)]), [1]),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in FURTHER)])
def test_results_and_gradients(name):
    torch.manual_seed(0)
    make, expected = {**CASES, **FURTHER}[name]
    assert compare(make(), R(8, D), tolerance=0.1 if "autocast" in name else 1e-4) == expected


@pytest.mark.exhaustive
def test_sizes_that_change():
    torch.manual_seed(0)
    compare(Model(), R(8, D), R(9, D), R(10, D))


def test_each_block_drops_other_elements():
    layers = [Block(dropout=0.5) for _ in range(LAYERS)]
    layers = [copy.deepcopy(layers[0]) for _ in layers]
    with torch.no_grad():
        first, *states = compiled(Model(*layers, forward=every_state))(torch.ones(8, D))
    del first
    dropped = [(y == x) for x, y in itertools.pairwise(states)]
    assert all(0 < each.double().mean() < 1 for each in dropped)
    assert all(not torch.equal(dropped[0], each) for each in dropped[1:])


def test_a_graph_that_is_not_cut_says_so(caplog):
    with caplog.at_level("INFO", "opkit.compiler"):
        compiled(lambda x: x + 1, repeated_blocks=True)(R(3))
    assert "No blocks are compiled once" in caplog.text


@pytest.mark.exhaustive
def test_inference_and_the_option():
    torch.manual_seed(0)
    model, x = Model(), R(8, D)
    with torch.no_grad():
        for wanted in (True, False, None):
            torch._dynamo.reset()
            torch.testing.assert_close(compiled(model, repeated_blocks=wanted)(x), model(x))


def test_the_report_has_the_block_once():
    text = str(opkit.explain(Model(), R(8, D)))
    assert f"({LAYERS} times)" in text
