"""Parts of a graph that are joined: one forward and one backward, with the values and gradients of the graph as a whole."""

from __future__ import annotations

import copy
import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from warm_calls import cold_and_warm, trained

from opkit import errors
from opkit.compiler import backend, diagnostics
from opkit.compiler.capture import repeats

D, LAYERS = 16, 4
R = torch.randn


class Block(nn.Module):
    def __init__(self, dropout=0.0, norm=nn.RMSNorm):
        super().__init__()
        self.norm, self.qkv, self.out = norm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(1, len(x), 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(len(x), D)
        return x + F.dropout(F.silu(self.out(y)), self.dropout)


class Model(nn.Module):
    def __init__(self, of=None, make=Block):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.first, self.last, self.of = nn.Linear(D, D), nn.Linear(D, D), of

    def forward(self, x, *others):
        if self.of is not None:
            return self.of(self, self.first(x), *others)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def an_input_of_all(model, x, y):
    """Parts and the caller use one value, whose gradients are added up; it is a result too."""
    for layer in model.layers:
        x = layer(x) + y
    return model.last(x), y, x


def states(model, x):
    """Results that get a gradient, that get none, and that are no floats."""
    found = []
    for layer in model.layers:
        x = layer(x)
        found += [x, x.detach() * 2, x > 0]
    return model.last(x), *found


def checkpoints(model, x):
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return model.last(x)


def views(model, x):
    """What passes from part to part is a view of what was computed."""
    for layer in model.layers:
        x = layer(x).view(2, -1, D).transpose(0, 1).reshape(-1, D) * 2
    return model.last(x).view(-1)


def unused(model, x):
    """Nothing differentiable uses one result of the last block."""
    y = x.sin()
    for layer in model.layers:
        x, y = layer(x + y), x.tanh() * y
    return model.last(x), y.detach() * 2


def partly_frozen(*names):
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(each in name for each in names))
    return model


def compiled(model, **options):
    return torch.compile(model, backend="opkit", options={"strict": True, "repeated_blocks": True, **options})


def functions(*results):
    """The number of compiled functions in the graph of autograd's."""
    seen, waiting = set(), [each.grad_fn for each in results]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return sum("Compiled" in type(node).__name__ for node in seen)


def steps(model, *inputs, whole=False):
    """Results, gradients and buffers after two steps, and the number of functions that the second step called."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    function = compiled(model, repeated_blocks=not whole)
    given = [x.clone().requires_grad_() for x in inputs]
    for number in range(2):
        torch.manual_seed(number)
        returned = function(*given)
        results = returned if isinstance(returned, tuple) else (returned,)
        count = functions(*results)
        sum(y.square().sum() for y in results if y.requires_grad).backward()
    return [*results, *(p.grad for p in (*model.parameters(), *given)), *model.buffers()], count


CASES = {
    "layers": Model,
    "an input of all": lambda: Model(an_input_of_all),
    "checkpoints with dropout": lambda: Model(checkpoints, lambda: Block(0.5)),
}
FURTHER = {
    "states": lambda: Model(states),
    "views": lambda: Model(views),
    "a result that nothing differentiates": lambda: Model(unused),
    "dropout": lambda: Model(make=lambda: Block(0.5)),
    "running statistics": lambda: Model(make=lambda: Block(norm=nn.BatchNorm1d)),
    "some parameters": lambda: partly_frozen("qkv", "first"),
    "the last layer": lambda: partly_frozen("first", "layers"),
    "inputs only": lambda: partly_frozen(""),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in FURTHER)])
def test_one_function_has_the_gradients_of_the_whole(name):
    torch.manual_seed(0)
    model, inputs = {**CASES, **FURTHER}[name](), [R(8, D), *([R(8, D)] if "input of all" in name else [])]
    found, count = steps(model, *inputs)
    expected, _ = steps(model, *inputs, whole=True)
    assert count == 1
    tolerance = 1e-5 if name == "states" else 0  # a sum of gradients and its use are one kernel of the whole graph
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_second_process_finds_all_parts(tmp_path, settings):
    settings(cache_dir=tmp_path)
    torch.manual_seed(0)
    cold, warm = cold_and_warm(trained(Model(), R(8, D)))
    torch.testing.assert_close(warm, cold, rtol=0, atol=0)


def test_first_calls_in_several_threads():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(), R(8, D)
    expected, fast = model(x), compiled(model)
    with torch.no_grad():
        fast(x)  # Dynamo compiles in one thread at a time
    results = [None] * 3

    def work(number):
        results[number] = fast(x)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each in results:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-4)


def test_parts_that_are_not_joined_say_so_and_run(caplog):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(), R(8, D)
    fast = torch.compile(model, backend="opkit", dynamic=True, options={"strict": True})
    with caplog.at_level("INFO", "opkit.compiler"):
        found = fast(x)
    assert "called one by one: its sizes may change" in caplog.text
    assert functions(found) == LAYERS + 2
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [5, 9])
def test_graphs_for_gpus_are_whole_where_parts_are_few_or_cannot_be_joined(blocks, caplog, monkeypatch):
    monkeypatch.setattr(backend, "_on_cpu", lambda inputs: False)
    monkeypatch.setattr(repeats, "MIN_BLOCKS_ON_GPUS", 7)
    torch._dynamo.reset()
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), *[nn.Tanh()] * 8) for _ in range(blocks)])
    graphs, x = [], R(3, 4)
    token = backend.observer.set(graphs.append)
    with caplog.at_level(logging.INFO, diagnostics.log.name):
        torch.testing.assert_close(torch.compile(layers, backend="opkit", dynamic=True)(x), layers(x))
    backend.observer.reset(token)
    assert graphs[-1].count == 1
    assert ("is compiled as a whole" in caplog.text) == (blocks == 9)


def test_parts_run_in_eager_mode_without_a_compiler(settings, tmp_path):
    torch._dynamo.reset()
    settings(cc="/no/compiler", cache_dir=tmp_path)
    diagnostics.warn_no_compiler.cache_clear()
    torch.manual_seed(0)
    model, x = Model(), R(8, D)
    fast = torch.compile(model, backend="opkit")
    with pytest.warns(errors.NoCompilerWarning, match="/no/compiler"):
        found = fast(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
    found.sum().backward()
