"""Operators in modules: copies, saved files, graphs of make_fx and torch.fx, hooks."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch


class Block(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.op(x, self.weight)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_modules_hold_the_same_operator(how, op):
    block, x = Block(op), torch.randn(3, 8)
    other = COPIES[how](block)
    assert other.op is op
    torch.testing.assert_close(other(x), block(x))
    assert (other.weight is block.weight) == (how == "copy")


def test_modules_are_saved_whole(op):
    block, file = Block(op), io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert other.op is op


def test_traced_by_make_fx_and_fx(norm, op, inputs):
    from torch.fx.experimental.proxy_tensor import make_fx

    x, weight = inputs(False)
    graph = make_fx(lambda x, w: op(x, w) + 1)(x, weight)
    assert op._opoverload in [node.target for node in graph.graph.nodes]
    torch.testing.assert_close(graph(x, weight), norm.reference(x, weight) + 1)
    symbolic = torch.fx.symbolic_trace(Block(op))
    torch.testing.assert_close(symbolic(x), norm.reference(x, torch.ones(8)))


def test_parametrised_and_functional_modules(norm, op):
    block, x = Block(op), torch.randn(3, 8)
    doubled = torch.func.functional_call(block, {"weight": torch.full((8,), 2.0)}, (x,))
    torch.testing.assert_close(doubled, norm.reference(x, torch.full((8,), 2.0)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_and_gradient_hooks(op, inputs):
    x, weight = inputs()
    seen = []
    x.register_hook(lambda grad: seen.append(grad.shape))
    with torch.autograd.detect_anomaly(check_nan=True):
        op(x, weight).sum().backward()
    assert seen == [x.shape]
