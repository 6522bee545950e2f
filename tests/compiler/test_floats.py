"""Python floats that change from call to call: one compiled graph serves them, where torch itself puts no guard on them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import opkit

VALUES = (0.5, 0.7, 0.9, 1.3)
W = torch.arange(25.0).reshape(5, 5) / 25


@opkit.custom_op("compiler_floats::scaled", mutates_args=())
def scaled(x: torch.Tensor, s: torch.types.Number) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * s)


@scaled.register_fake
def _(x, s):
    return torch.empty_like(x)


def graphs(function, shapes=((4, 5),), values=VALUES, gradient=True, **how):
    """Compare a compiled function with eager mode for some floats, and return how often it was compiled."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, backend="opkit", options={"strict": True}, **how)
    for k, value in enumerate(values):
        x = (torch.rand(*shapes[k % len(shapes)]) + 0.1).requires_grad_(gradient)
        found, expected = compiled(x, value), function(x, value)
        torch.testing.assert_close(found, expected)
        if gradient:
            pairs = [torch.autograd.grad(each.sum(), x) for each in (found, expected)]
            torch.testing.assert_close(*pairs)
    return counters["stats"]["unique_graphs"]


FUNCTIONS = {
    "arithmetic": lambda x, s: (1 - s) * x * s**2 / (1 + s) - abs(-s) + max(s, 0.6) * math.sqrt(s),
    "activations": lambda x, s: F.leaky_relu(x, s) + x.clamp(s / 2, s) + F.threshold(x, s, s * 2),
    "keywords": lambda x, s: torch.addcmul(x, x, torch._foreach_add([x, x], [x, x], alpha=s)[1], value=s),
    "new tensors": lambda x, s: torch.where(x > s, torch.full((5,), s), s) * (x * s).sum() / s,
    "calls of torch": lambda x, s: torch.renorm(torch.addmm(x, x, W, beta=s, alpha=s / 2), 2, 0, s * x.shape[0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_graphs_serve_all_floats(name):
    assert graphs(FUNCTIONS[name]) == 2  # Dynamo takes the first value for a constant


@pytest.mark.parametrize("name", ["arithmetic", "calls of torch"])
def test_one_graph_serves_all_floats_and_sizes(name):
    assert graphs(FUNCTIONS[name], ((4, 5), (6, 5), (7, 5)), dynamic=True) == 1


def test_a_custom_operator_takes_floats():
    assert graphs(lambda x, s: scaled(x, s * 2) + s, gradient=False) == 2


def test_a_comparison_is_a_guard():
    assert graphs(lambda x, s: x * s if s > 0.8 else x - s, dynamic=True) == 2


def test_a_float_is_a_result():
    assert graphs(lambda x, s: (x * s, s * 2), gradient=False) == 2


@pytest.mark.parametrize("name", ["floor", "number of elements"])
def test_other_arithmetic_makes_a_float_a_constant(name):
    functions = {
        "floor": lambda x, s: x * (s // 0.3),
        "number of elements": lambda x, s: x + torch.ones(int(s * 10)).sum(),
    }
    assert graphs(functions[name], values=(0.5, 0.7, 0.9)) == 3


def test_floats_of_the_size():
    assert graphs(lambda x, _: x.var(0, correction=1) + x.std(0), ((4, 5), (6, 5), (7, 3)), dynamic=True) == 1
