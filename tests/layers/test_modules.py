"""``opkit.compile_layers``: the layers that a model repeats are captured and compiled once."""

from __future__ import annotations

import copy
import pickle

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


# ---- scan_layers and checkpoint_layers -------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with a buffer that changes, dropout, and an argument that all layers share."""

    def __init__(self, width=2 * D, dropout=0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(D, width), nn.Linear(width, D), nn.Dropout(dropout)
        # Inductor of torch 2.13 loses what is added to a double without dimensions, which a float would become.
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, mask, scale=1.0):
        self.calls.add_(1)
        return x + scale * self.dropout(self.down(opkit.checkpoint_name(self.up(x * mask), "up").sin()))


class Stack(nn.Module):
    def __init__(self, policy="save_all", **options):
        super().__init__()
        self.policy, self.layers = policy, nn.ModuleList(Block(**options) for _ in range(6))

    def forward(self, x, mask):
        return opkit.scan_layers(self.layers, x, mask, policy=self.policy, scale=0.5)


def loop(model, x, mask):
    for layer in model.layers:
        x = layer(x, mask, scale=0.5)
    return x


def results(function, model, *given):
    torch.manual_seed(1)
    result = function(*given)
    return result, torch.autograd.grad(result.square().sum(), [given[0], *model.parameters()])


@pytest.mark.parametrize(
    "policy", ["save_all", "recompute_all", opkit.keep("up"), ["recompute_all"] * 3 + ["save_all"] * 3]
)
@pytest.mark.parametrize("backend", [None, "opkit", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_scan_layers(policy, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(policy, dropout=0.0 if backend else 0.5).double()
    x, mask = torch.randn(3, D, dtype=torch.float64, requires_grad=True), torch.randn(D, dtype=torch.float64)
    expected = results(lambda *given: loop(model, *given), model, x, mask)
    hooked, graphs = [], []
    if policy == "save_all":
        model.layers[2].register_forward_hook(lambda *_: hooked.append(2))
    token = observer.set(graphs.append)
    options = {"strict": True} if backend == "opkit" else None
    function = torch.compile(model, backend=backend, fullgraph=True, options=options) if backend else model
    found = results(function, model, x, mask)
    observer.reset(token)
    torch.testing.assert_close(found, expected, **({} if backend else {"rtol": 0, "atol": 0}))
    assert {layer.calls.item() for layer in model.layers} == {2}
    assert policy != "save_all" or set(hooked) == {2}
    assert backend != "opkit" or isinstance(policy, list) or [each.count for each in graphs] == [6, 6]


def test_scan_layers_draws_for_each_layer():
    torch._dynamo.reset()
    ones = nn.ModuleList(nn.Sequential(nn.Dropout(0.5), nn.Linear(D, D)) for _ in range(8))
    for layer in ones:
        nn.init.eye_(layer[1].weight)
        nn.init.ones_(layer[1].bias)
    x = torch.zeros(64, D, requires_grad=True)

    @torch.compile(backend="opkit", options={"strict": True})
    def run(x):
        return opkit.scan_layers(ones, x, policy="recompute_all")

    result = run(x)
    (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
    assert len(result.unique()) == 8  # one mask for all layers would give 1 and 255 only
    assert set(gradient.unique().tolist()) <= {0.0, 2.0**8}


def test_scan_layers_under_vmap_and_autocast():
    has_rule = torch.__version__ >= "2.14"  # torch's checkpoint under vmap
    model, mask = Stack("recompute_cheap" if has_rule else "save_all"), torch.ones(D)
    x = torch.randn(2, 3, D)
    function = lambda x: model(x, mask)  # noqa: E731
    torch.testing.assert_close(torch.vmap(function)(x), torch.stack([function(row) for row in x]))
    with torch.autocast("cpu", torch.bfloat16):
        given = x[0].clone().requires_grad_(), mask
        torch.testing.assert_close(
            results(model, model, *given), results(lambda *given: loop(model, *given), model, *given)
        )


def test_bad_layers():
    x, mask = torch.ones(2, D), torch.ones(D)
    cases = [
        (
            [Block(), Block(), Block(D)],
            r"layers\[2\].up.weight is float32\[8, 8\], but layers\[0\].up.weight is float32\[16, 8\]",
        ),
        ([Block(), nn.Linear(D, D)], r"layers\[1\] is a Linear, but layers\[0\] is a Block"),
        (
            [nn.Linear(D, D), nn.Linear(D, D, bias=False)],
            r"layers\[1\].bias is missing, but layers\[0\].bias is float32\[8\]",
        ),
    ]
    for layers, message in cases:
        with pytest.raises(opkit.errors.ArgumentError, match=message):
            opkit.scan_layers(layers, x, mask)
        if torch.__version__ < "2.14":
            continue
        with pytest.raises(Exception, match=message):  # Dynamo wraps the error
            torch.compile(opkit.scan_layers, backend="aot_eager")(nn.ModuleList(layers), x, mask)
    with pytest.raises(
        opkit.errors.OutputError, match=r"layers\[0\] got x as float32\[2, 8\] and returned float32\[2, 3\]"
    ):
        opkit.scan_layers([nn.Linear(D, 3)], x)
    with pytest.raises(opkit.errors.OutputError, match=r"layers\[0\] returned a tuple of 2, but got a Tensor"):
        opkit.scan_layers([nn.LSTM(D, D)], x)
    with pytest.raises(opkit.errors.ArgumentError, match="got 1 policies for 2 layers"):
        opkit.scan_layers([Block(), Block()], x, mask, policy=["save_all"])
    assert opkit.scan_layers(nn.ModuleList(), x) is x


def test_checkpoint_layers():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, D)
    names, result = list(model.state_dict()), model(x)
    expected = torch.autograd.grad(result.sum(), list(model.parameters()))
    assert opkit.checkpoint_layers(model, "recompute_cheap") == [f"body.encoder.{n}" for n in range(12)]
    other = copy.deepcopy(model)
    opkit.compile_layers(other, options={"strict": True})
    for each in (model, other, pickle.loads(pickle.dumps(model))):
        found = each(x)
        torch.testing.assert_close(found, result)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), list(each.parameters())), expected)
    assert list(model.state_dict()) == names
    opkit.checkpoint_layers(model, "save_all")
    assert not any("forward" in vars(module) for module in model.modules())


def test_checkpoint_layers_leaves_the_forward_of_an_instance():
    """As libraries put it there, for hooks of their own."""
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)), torch.randn(5, D)
    forward = model[0].forward
    model[0].forward = lambda x: 2 * forward(x)
    expected = model(x)
    for policy in ("recompute_all", "recompute_cheap", "save_all"):
        opkit.checkpoint_layers(model, policy)
        torch.testing.assert_close(model(x), expected)
    with pytest.raises(opkit.errors.ArgumentError, match="there is no policy None"):
        opkit.checkpoint_layers(model, None)
