"""``opkit.checkpoint``, its policies and names: the same gradients, and what the backward computes again."""

from __future__ import annotations

import collections
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import opkit

POLICIES = {
    "save_all": "save_all",
    "recompute_all": "recompute_all",
    "recompute_cheap": "recompute_cheap",
    "keep": opkit.keep("scores"),
    "keep the second": opkit.keep("largest"),
    "keep unknown": opkit.keep("nothing of this name"),
    "offload": opkit.offload(),
    "offload named": opkit.offload(opkit.keep("scores", "largest")),
}


class Count(TorchDispatchMode):
    """Counts the calls of operators."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[getattr(function, "_opname", "")] += 1
        return function(*args, **(kwargs or {}))


def layer(x, first, second):
    scores = opkit.checkpoint_name(x @ first, "scores")
    scores = F.dropout(scores.sin(), 0.5)
    largest, _ = scores.topk(3)
    largest = opkit.checkpoint_name(largest, "largest")
    return F.dropout((largest @ second).cos(), 0.25)


def tensors(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients(function, given):
    """The result and the gradients, and the operators that the backward ran."""
    torch.manual_seed(1)
    with Count() as count:
        result = function(*given)
        weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)
        count.calls.clear()
        found = torch.autograd.grad(result, given, weights)
    return (result, *found), count.calls


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_the_same_to_the_bit(name):
    given = tensors((5, 4), (4, 4), (3, 2))
    expected, plain = gradients(layer, given)
    found, calls = gradients(opkit.checkpoint(layer, POLICIES[name]), given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    again = {op: calls[op] - plain[op] for op in ("mm", "topk", "sin", "bernoulli_")}
    assert (
        again
        == {
            "save_all": {"mm": 0, "topk": 0, "sin": 0, "bernoulli_": 0},
            "recompute_all": {"mm": 2, "topk": 1, "sin": 1, "bernoulli_": 2},
            "recompute_cheap": {"mm": 0, "topk": 1, "sin": 1, "bernoulli_": 2},
            "keep": {"mm": 1, "topk": 1, "sin": 1, "bernoulli_": 2},
            "keep the second": {"mm": 2, "topk": 0, "sin": 1, "bernoulli_": 2},
            "keep unknown": {"mm": 2, "topk": 1, "sin": 1, "bernoulli_": 2},
            "offload": {"mm": 0, "topk": 0, "sin": 0, "bernoulli_": 0},
            "offload named": {"mm": 1, "topk": 0, "sin": 1, "bernoulli_": 2},
        }[name]
    )


@pytest.mark.parametrize("name", ["recompute_all", "recompute_cheap", "keep"])
def test_gradients_of_gradients(name):
    given = tensors((3, 4), (4, 4), (3, 2))

    def second_order(function):
        torch.manual_seed(1)
        first = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), given)

    torch.testing.assert_close(
        second_order(opkit.checkpoint(layer, POLICIES[name])), second_order(layer), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", ["recompute_all", "recompute_cheap", "keep", "keep the second"])
@pytest.mark.parametrize("backend", ["opkit", "aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiled(name, backend):
    given = tensors((5, 4), (4, 4), (3, 2))
    torch._dynamo.reset()

    def plain(x, first, second):
        largest, _ = opkit.checkpoint_name(x @ first, "scores").sin().topk(3)
        return (opkit.checkpoint_name(largest, "largest") @ second).cos()

    expected, calls = gradients(plain, given)
    function = torch.compile(opkit.checkpoint(plain, POLICIES[name]), backend=backend, fullgraph=True)
    torch.testing.assert_close(gradients(function, given)[0], expected)
    if backend == "aot_eager":
        again = gradients(function, given)[1]
        assert {op: again[op] - calls[op] for op in ("mm", "topk", "clone")} == {
            "recompute_all": {"mm": 2, "topk": 1, "clone": 0},
            "recompute_cheap": {"mm": 0, "topk": 1, "clone": 0},
            "keep": {"mm": 1, "topk": 1, "clone": 0},
            "keep the second": {"mm": 2, "topk": 0, "clone": 0},
        }[name]


def test_the_first_names_of_results_keep_the_others():
    """A result of an operator gets a name after others, and through a view; the backward needs another result."""

    def normalised(x, weight):
        y, mean, _ = torch.native_layer_norm(x @ weight, (4,), None, None, 1e-5)
        opkit.checkpoint_name(mean, "another")
        return opkit.checkpoint_name(y.view(-1), "y").view_as(x).sin()

    given = tensors((3, 4), (4, 4))
    expected, plain = gradients(normalised, given)
    found, calls = gradients(opkit.checkpoint(normalised, opkit.keep("y")), given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert calls["native_layer_norm"] == plain["native_layer_norm"] == 0
    assert calls["mm"] == plain["mm"] + 1  # for the input of the norm


def test_values_that_are_written_to():
    def writes(x, weight):
        y = opkit.checkpoint_name(x @ weight, "y")
        return y.mul_(2).sin()

    given = tensors((3, 4), (4, 4))
    expected = gradients(writes, given)[0]
    for policy in ("recompute_cheap", opkit.keep("y")):  # in the layer: it is computed again
        torch.testing.assert_close(gradients(opkit.checkpoint(writes, policy), given)[0], expected, rtol=0, atol=0)

    def product(x, weight):
        y = opkit.checkpoint_name(x.sin() @ weight, "y")
        return y.view(3, 4), y.sin()

    for policy in (opkit.keep("y"), opkit.offload(opkit.keep("y"))):
        result, other = opkit.checkpoint(product, policy)(*given)
        result.mul_(2)
        with pytest.raises(opkit.errors.CheckpointError, match=r"shape \(3, 4\) was kept .* written to since"):
            other.sum().backward()


def writes_to_another_result(x, weight):
    largest, places = (x @ weight).topk(3)
    largest.mul_(2)
    opkit.checkpoint_name(places, "y")
    return largest.sin()


def names_a_view_without_history(x, weight):
    y = x @ weight
    opkit.checkpoint_name(y.t().detach(), "y")
    return y.sin()


def reuses_memory(x, weight):
    y = x @ weight
    result = y.sin()
    del y
    return result * opkit.checkpoint_name(torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 4, dtype=torch.float64), "y")


def returns_a_list(x, weight):
    (y,) = torch._foreach_mul([x @ weight], 2.0)
    return opkit.checkpoint_name(y, "y").sin()


def is_sparse(x, weight):
    return torch.sparse.mm(opkit.checkpoint_name(x.relu().to_sparse(), "y"), weight).sin()


def maps(x, weight):
    return torch.vmap(lambda row: opkit.checkpoint_name(row.sin() @ weight, "y").cos())(x)


@pytest.mark.parametrize("policy", ["recompute_cheap", opkit.keep("y")], ids=str)
@pytest.mark.parametrize(
    "function",
    [writes_to_another_result, names_a_view_without_history, reuses_memory, returns_a_list, is_sparse, maps],
)
def test_which_call_made_a_value(function, policy):
    given = tensors((4, 4), (4, 4))
    expected, _ = gradients(function, given)
    torch.testing.assert_close(gradients(opkit.checkpoint(function, policy), given)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["opkit", "aot_eager"])
def test_named_values_are_the_values_in_compiled_code_too(backend):
    torch._dynamo.reset()

    def writes(x, weight):
        y = opkit.checkpoint_name(x.sin() @ weight, "y")
        y.mul_(2)
        opkit.checkpoint_name(y.detach().t(), "y")
        return y.sin()

    def tangent(x, weight):
        return torch.func.jvp(lambda x: opkit.checkpoint_name(x @ weight, "y").sin(), (x,), (x,))[1]

    given = tensors((5, 4), (4, 4))
    for function in (opkit.checkpoint(writes, opkit.keep("y")), writes, tangent):
        expected, plain = gradients(function, given)
        found, calls = gradients(torch.compile(function, backend=backend, dynamic=True), given)
        torch.testing.assert_close(found, expected)
        assert calls["clone"] <= plain["clone"]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch 2.11's own
@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_sizes_that_change(strict):
    class Named(nn.Linear):
        def forward(self, x):
            run = opkit.checkpoint(
                lambda x: opkit.checkpoint_name(super(Named, self).forward(x), "y").sin(), opkit.keep("y")
            )
            return run(x)

    model, x = Named(4, 4), torch.randn(3, 4)
    program = torch.export.export(
        model, (x[:2],), dynamic_shapes={"x": {0: torch.export.Dim("rows")}}, strict=strict
    ).run_decompositions()
    torch.testing.assert_close(program.module()(x), model(x))
    assert "checkpoint_name" not in program.graph_module.code


def test_autocast_casts_a_parameter_again():
    """It has cached the weight before the region, but not before the region is computed again."""
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def region(x):
        y = opkit.checkpoint_name((x.sin() @ weight).float().cos().bfloat16(), "y")
        return (y @ weight).float()

    def run(function):
        with torch.autocast("cpu", torch.bfloat16):
            x @ weight
            return torch.autograd.grad(function(x).sum(), (x, weight))

    torch.testing.assert_close(run(opkit.checkpoint(region, opkit.keep("y"))), run(region), rtol=0.02, atol=0.02)
    assert torch.is_autocast_cache_enabled()


def test_tables_of_the_first_call():
    """A product that only the first call computes is not the one that the backward needs."""
    table = []

    def rotates(x, weight):
        table[:] = table or [torch.ones(4, 4, dtype=x.dtype) @ torch.ones(4, 4, dtype=x.dtype)]
        return ((x @ weight) * table[0]).sin()

    given = tensors((4, 4), (4, 4))
    expected, _ = gradients(rotates, given)
    table.clear()
    torch.testing.assert_close(gradients(opkit.checkpoint(rotates, "recompute_cheap"), given)[0], expected)


@torch.library.custom_op("checkpoint_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """Return x with noise; nothing says that it draws."""
    return x + torch.rand_like(x)


noise.register_autograd(lambda context, gradient: gradient)


def test_random_numbers_after_a_kept_random_operator():
    def noisy(x, weight):
        x = opkit.checkpoint_name(F.dropout(x @ weight, 0.5), "noise")
        return F.dropout(x.sin(), 0.5)

    given = tensors((8, 8), (8, 8))
    for function in (noisy, lambda x, weight: F.dropout(noise(x @ weight).sin(), 0.5)):
        expected, _ = gradients(function, given)
        for policy in (opkit.keep("noise"), "recompute_cheap", "recompute_all"):
            found, _ = gradients(opkit.checkpoint(function, policy), given)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["recompute_all", "recompute_cheap"])
@pytest.mark.parametrize("compiled", [False, True])
def test_buffers_change_once(policy, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    other, x = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.float64)
    function = opkit.checkpoint(other if compiled else functools.partial(other.forward), policy)
    function = torch.compile(function, backend="opkit", options={"strict": True}) if compiled else function
    for _ in range(2):
        model(x).square().sum().backward()
        function(x).square().sum().backward()
    torch.testing.assert_close(dict(other.named_buffers()), dict(model.named_buffers()))
    torch.testing.assert_close([p.grad for p in other.parameters()], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("policy", ["recompute_all", opkit.keep("y")], ids=str)
def test_expanded_buffers(policy):
    layer = nn.Linear(4, 4)
    layer.register_buffer("mask", torch.ones(1, 1).expand(4, 4))
    opkit.checkpoint(layer, policy)(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad is not None


@opkit.custom_op("checkpoint_tests::scaled")
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x times a factor."""
    return x * factor


scaled.register_kernel(
    "cpu",
    opkit.c_kernel("""
        void scaled(const double* x, double factor, double* out, int64_t x_numel) {
            for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] * factor;
        }
    """),
    when=lambda x, factor: x.dtype == torch.float64,
)


@pytest.mark.parametrize("compiled", [False, True])
def test_operators_and_attention(compiled):
    torch._dynamo.reset()

    def attends(q, k, v):
        q = opkit.checkpoint_name(scaled(q.sin(), 0.5), "q")
        return opkit.checkpoint_name(opkit.attention(q, k, v), "attention").cos()

    given = tensors(*[(2, 2, 8, 16)] * 3)
    expected, _ = gradients(attends, given)
    for policy in [
        "recompute_cheap",
        opkit.keep("attention"),
        *([] if compiled else ["recompute_all", opkit.keep("q")]),
    ]:
        function = opkit.checkpoint(attends, policy)
        function = torch.compile(function, backend="opkit", options={"strict": True}) if compiled else function
        torch.testing.assert_close(gradients(function, given)[0], expected)
    _, kept = gradients(opkit.checkpoint(attends, opkit.keep("attention")), given)
    _, computed = gradients(opkit.checkpoint(attends, opkit.keep("q")), given)
    assert [(calls["scaled"], calls["attention"]) for calls in (kept, computed)] == [(1, 0), (0, 1)]


def test_offload_ends_graphs():
    torch._dynamo.reset()
    given = tensors((3, 4), (4, 4))
    function = opkit.checkpoint(lambda x, weight: (x @ weight).sin(), opkit.offload("recompute_all"))
    expected = gradients(lambda x, weight: (x @ weight).sin() + 1, given)[0]
    compiled = torch.compile(lambda x, weight: function(x, weight) + 1, backend="opkit", options={"strict": True})
    torch.testing.assert_close(gradients(compiled, given)[0], expected)
