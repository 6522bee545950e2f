"""Reductions, softmax and normalisation, lowered and interpreted, against eager."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from opkit.compiler.ir.index import index
from opkit.compiler.lower.graph_to_program import lower
from tests.compiler.graphs import check, gradients, graph_of, run_graph, same

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16)

_SUMS = {
    "sum": lambda x: x.sum(),
    "sum of a dimension": lambda x: x.sum(1),
    "sum kept": lambda x: x.sum((0, -1), keepdim=True),
    "sum as another type": lambda x: x.sum(0, dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "mean kept": lambda x: x.mean(-1, keepdim=True),
    "prod": lambda x: x.prod(),
    "prod of a dimension": lambda x: x.prod(1, keepdim=True),
    "amax": lambda x: x.amax((0, 2)),
    "amin": lambda x: x.amin(-1, keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max and place": lambda x: tuple(x.max(1)),
    "min and place": lambda x: tuple(x.min(2, keepdim=True)),
    "argmax": lambda x: x.argmax(),
    "argmax kept": lambda x: x.argmax(keepdim=True),
    "argmin": lambda x: x.argmin(1, keepdim=True),
    "any": lambda x: x.any(),
    "all": lambda x: x.all(1),
    "var": lambda x: x.var(),
    "var uncorrected": lambda x: x.var(1, correction=0),
    "std": lambda x: x.std((0, 2), keepdim=True),
    "var_mean": lambda x: tuple(torch.var_mean(x, 1)),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(-1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp((0, 2)),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, (1,)),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf"), (0, 1), True),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, (2,)),
    "of a transpose": lambda x: x.transpose(0, 2).sum(1),
}
_INTS = ("sum", "sum of a dimension", "prod", "amax", "max and place", "argmin", "any", "all", "cumsum")
_BOOLS = ("sum", "amax", "max and place", "any", "all", "cumsum")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", _SUMS)
def test_floats(name, dtype):
    check(_SUMS[name], torch.randn(3, 4, 5).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_integers(subtests, dtype):
    x = torch.randint(0, 9, (3, 4, 5), dtype=dtype)
    for name in _INTS:
        with subtests.test(name):
            check(_SUMS[name], x, exact=True)


def test_bools(subtests):
    x = torch.randn(3, 4, 5) > 1
    for name in _BOOLS:
        with subtests.test(name):
            check(_SUMS[name], x, exact=True)


def test_nothing(subtests):
    names = ["sum", "sum of a dimension", "mean", "prod", "any", "all", "softmax", "cumsum"]
    for name in names:
        with subtests.test(name):
            check(_SUMS[name], torch.randn(3, 0, 5))


def test_one_number(subtests):
    functions = {
        **{name: _SUMS[name] for name in ("sum", "mean", "prod", "argmax", "any", "max")},
        "amax": lambda x: x.amax(),
        "softmax": lambda x: x.softmax(0),
        "log_softmax": lambda x: x.log_softmax(-1),
    }
    for name in functions:
        with subtests.test(name):
            check(functions[name], torch.tensor(1.5))


def test_not_finite(subtests):
    x = torch.randn(3, 4, 5)
    x[0, 1, 2], x[1, 2, 3], x[2, 3, 4] = float("nan"), float("inf"), -float("inf")
    names = ["sum", "mean", "amax", "max and place", "argmax", "argmin", "softmax", "logsumexp", "any"]
    for name in names:
        with subtests.test(name):
            check(_SUMS[name], x)


def test_a_row_of_infinities():
    x = torch.full((2, 3), -float("inf"))
    check(lambda x: (x.softmax(1), x.logsumexp(1), aten._safe_softmax(x, 1)), x)


def test_a_row_of_nan_has_its_first_as_greatest():
    x = torch.tensor([[1.0, float("nan"), 3.0, float("nan")]])
    check(lambda x: (x.argmax(1), x.argmin(1), *x.max(1)), x, exact=True)


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "mean", "var", "std", "amax"])
def test_gradients_of_reductions(name, dtype):
    check(gradients(_SUMS[name]), torch.randn(3, 4, 5).to(dtype))


_NORMS = {
    "layer": lambda x, w, b: F.layer_norm(x, (4,), w, b),
    "layer over two": lambda x, w, b: F.layer_norm(x.unsqueeze(-1), (4, 1), w.unsqueeze(-1), b.unsqueeze(-1)),
    "group": lambda x, w, b: F.group_norm(x.transpose(1, 2), 2, w, b),
    "batch": lambda x, w, b: F.batch_norm(x.transpose(1, 2), None, None, w, b, True),
    "root mean square": lambda x, w, b: F.rms_norm(x, (4,), w) + b,
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", _NORMS)
def test_norms_and_their_gradients(name, dtype):
    x, w, b = torch.randn(3, 5, 4), torch.randn(4), torch.randn(4)
    wide = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    check(gradients(_NORMS[name]), x.to(dtype), w.to(dtype), b.to(dtype), **wide)


def test_norms_without_weights():
    check(gradients(lambda x: F.layer_norm(x, (4,))), torch.randn(3, 4))
    check(gradients(lambda x: F.group_norm(x, 2)), torch.randn(3, 4, 2, 2))


def test_batch_norm_with_running_statistics():
    args = torch.randn(3, 4, 2, 2), torch.randn(4), torch.randn(4), torch.randn(4), torch.rand(4) + 0.5
    check(lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 1e-5), *args)
    check(lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5), *args)
    check(lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, False, 0.1, 1e-5)[0], *args)


def test_batch_norm_backward_in_evaluation():
    args = torch.randn(3, 4, 2), torch.randn(3, 4, 2), torch.randn(4), torch.randn(4), torch.rand(4) + 0.5
    check(
        lambda g, x, w, m, v: aten.native_batch_norm_backward(
            g, x, w, m, v, None, None, False, 1e-5, [True, True, True]
        ),
        *args,
    )


def test_reductions_over_no_dimensions():
    x = torch.randn(2, 3)
    check(lambda x: (x.sum(), x.argmax(), x.amax(()), x.cumsum(0)), torch.tensor(2.5))
    check(gradients(lambda x, w, c: F.layer_norm(x, (2, 3), w, c)), x, x + 1, x + 2)


def test_a_number_that_the_graph_has_as_a_known_size():
    x = torch.randn(3, 4)
    graph, constants = graph_of(lambda x: torch.linalg.vector_norm(x, 0), x)
    sized = [dataclasses.replace(n, args=(n.args[0], index(0))) if n.target != "input" else n for n in graph.nodes]
    graph = dataclasses.replace(graph, nodes=tuple(sized))
    same(run_graph(graph, lower(graph), constants, [x])[0], torch.tensor(12.0))
