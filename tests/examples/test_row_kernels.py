"""examples/kernels: norms, softmax and dropout. Numbers in the interpreter and on a GPU, code for four architectures."""

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import row_kernels as k

from opkit.kernels.triton import binaries, compiling
from opkit.kernels.tuning import configs
from opkit.op.examples import calls as example_calls
from opkit.op.triton import building

SHAPES = [(1, 1), (3, 5), (2, 3, 64), (7, 1000), (0, 8), (5, 0), (2, 0, 3)]
LONG = [(2, 16400), (1, 40000)]
DTYPE_IDS = [str(dtype).removeprefix("torch.") for dtype in k.DTYPES]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


# ---- numbers, in the interpreter -------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", k.DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", k.CASES)
def test_numbers(interpreted, name, dtype):
    case = k.CASES[name]
    for shape in SHAPES:
        arguments = case.arguments(shape, dtype)
        for result, expected in zip(k.tensors(interpreted(case.op, *arguments)), k.exact(case, arguments), strict=True):
            k.check(result, expected, bits=2, scale=case.scale)


@pytest.mark.sweep(keep=["softmax"])
@pytest.mark.parametrize("name", k.CASES)
def test_rows_longer_than_a_step(interpreted, name):
    case = k.CASES[name]
    arguments = case.arguments((3, 4100), torch.float32)
    for result, expected in zip(k.tensors(interpreted(case.op, *arguments)), k.exact(case, arguments), strict=True):
        k.check(result, expected, bits=2, scale=case.scale)


@pytest.mark.emulated
@pytest.mark.sweep
@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("name", ["softmax", "softmax_backward"])
def test_long_rows(interpreted, name, shape):
    case = k.CASES[name]
    arguments = case.arguments(shape, torch.float32)
    k.check(interpreted(case.op, *arguments), *k.exact(case, arguments), bits=4)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", k.DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", [name for name, case in k.CASES.items() if case.gradient])
def test_gradients(interpreted, name, dtype):
    case = k.CASES[name]
    for shape in ((5, 96), (2, 10, 33)):
        arguments = case.arguments(shape, dtype)
        cotangents = [k.normal(*shape, dtype=dtype) for _ in k.exact(case, arguments)]
        _, gradients = interpreted.differentiate(case.op, cotangents, *k.leaves(arguments, torch.clone))
        for gradient, expected in zip(gradients, k.exact_gradients(case, arguments, cotangents), strict=True):
            k.check(gradient, expected, bits=4, scale=case.scale)


@pytest.mark.parametrize("kernel", ["_softmax", "_softmax_long"])
def test_softmax_of_infinities(interpreted, kernel):
    x = torch.randn(4, 20000)
    x[0], x[1, :19999], x[2, 100:] = -torch.inf, -torch.inf, -torch.inf
    result = interpreted(k.softmax.softmax, x, kernel=kernel)
    torch.testing.assert_close(result, x.softmax(-1), equal_nan=True)


def test_layer_norm_of_numbers_far_from_zero(interpreted):
    x, grad, weight = 1000 + torch.randn(4, 512), torch.randn(4, 512), torch.randn(512)
    x[1, 0] = 3000  # the first element is what rows are shifted by
    arguments = (grad, x, weight, 1e-5, 2)
    case = k.CASES["layer_norm_backward"]
    for result, expected in zip(interpreted(case.op, *arguments), k.exact(case, arguments), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "softmax"])
def test_rows_that_lie_apart(interpreted, name):
    case = k.CASES[name]
    arguments = [a[..., 16:80] if isinstance(a, torch.Tensor) else a for a in case.arguments((6, 100), torch.float32)]
    for result, expected in zip(k.tensors(interpreted(case.op, *arguments)), k.exact(case, arguments), strict=True):
        k.check(result, expected, bits=2, scale=case.scale)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def test_philox_is_the_published_one():
    words = [int(word) for word in k.dropout.philox(torch.zeros(1, dtype=torch.int64), 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # the known answer of Random123's kat_vectors


@pytest.mark.emulated
@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", [0, 42, -1, 2**40 + 1, -(2**63)])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_is_the_references(interpreted, p, seed):
    for x in (
        torch.randn(3, 1001),
        torch.randn(9000),
        torch.randn(1).half(),
        torch.randn(40, 30).t(),
        torch.ones(0, 4),
    ):
        assert torch.equal(interpreted(k.dropout.dropout, x, p, seed), k.dropout.dropout.reference(x, p, seed))


def test_dropout_in_bfloat16(interpreted):
    x = torch.randn(100, 100).bfloat16()
    result, expected = interpreted(k.dropout.dropout, x, 0.3, 7), k.dropout.dropout.reference(x, 0.3, 7)
    assert torch.equal(result == 0, expected == 0)
    k.check(result, expected.double())


def test_dropout_drops_a_share_of_each_part():
    dropped = (k.dropout.dropout(torch.ones(64, 4096), 0.2, 3) == 0).double()
    assert (dropped.mean(0) - 0.2).abs().max() < 0.3  # 64 draws each: six standard deviations
    assert (dropped.mean(1) - 0.2).abs().max() < 0.04
    assert abs(dropped.mean().item() - 0.2) < 0.005


def test_the_gradient_of_dropout_is_dropped_alike(interpreted):
    x = torch.ones(50, 70, requires_grad=True)
    result, (gradient,) = interpreted.differentiate(k.dropout.dropout, [torch.ones(50, 70)], x, 0.5, 11)
    assert torch.equal(result, gradient)


# ---- partial sums ----------------------------------------------------------------------------------------------------


@pytest.mark.emulated
@pytest.mark.parametrize("shape", [(1, 1), (2, 300, 70), (0, 5), (3, 0), (2, 3, 129, 33)], ids=str)
def test_column_sums(interpreted, shape):
    partial = torch.randn(shape)
    k.check(interpreted(k.rows.column_sums, partial, torch.float32), partial.double().sum(-2), bits=4)


def test_every_row_length_has_configs():
    for d in (1, 64, 1000, 1024, 4096, 8192, 16384):
        assert 1 <= len(k.rows.fitting(k.rows.TILES, d, 1024, 4096)) <= 6, d
        assert 1 <= len(k.rows.fitting(k.rows.PERSISTENT, d, 4096, 8192)) <= 6, d


# ---- code for architectures that are not there -----------------------------------------------------------------------


def first_choices(op: Any, target: str) -> list[tuple[str, Any]]:
    """Each kernel of an operator, compiled with the first config that each of its examples leaves."""
    found = []
    for kernel in op._operator.kernels.kernels:
        bound = getattr(kernel.function, "bound", None)
        for call in example_calls.from_examples(op._operator, bound.kernel.examples) if bound else ():
            d = next(iter(call.arguments.values())).sizes[-1]
            left = configs.prune(bound.kernel.configs, bound.kernel.prune, {"d": d}) or [None]
            request = building.request_for(building.values_of(op._operator, bound, call), left[0], target)
            found.append((f"{kernel.name} {call} {left[0]}", binaries.resources_of(compiling.build(request))))
    return found


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", [*k.CASES, "dropout", "column_sums"])
def test_compiles_without_spills(name, target):
    others = {"dropout": k.dropout.dropout, "column_sums": k.rows.column_sums}
    found = first_choices(others.get(name) or k.CASES[name].op, target)
    assert found
    assert not [(what, each) for what, each in found if each.spills]


# ---- as scripts, and on a GPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", k.MODULES, ids=lambda module: module.__name__)
def test_the_example_runs(module):
    module.main()


ON_GPU = [(4096, 1024), (1000, 5000), (300, 16384), (513, 8192), (8, 40000), (1, 1), (0, 64), (3, 7, 129)]


@pytest.mark.sweep
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", k.DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", k.CASES)
def test_numbers_on_a_gpu(name, dtype):
    case = k.CASES[name]
    for shape in ON_GPU:
        arguments = [a.cuda() if isinstance(a, torch.Tensor) else a for a in case.arguments(shape, dtype)]
        assert shape[-1] > 16384 or case.op.select(*arguments).kernel != "reference"
        for result, expected in zip(k.tensors(case.op(*arguments)), k.exact(case, tuple(arguments)), strict=True):
            k.check(result, expected, bits=4, scale=case.scale)


@pytest.mark.sweep
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", k.DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", [name for name, case in k.CASES.items() if case.gradient])
def test_gradients_on_a_gpu(name, dtype):
    case = k.CASES[name]
    arguments = case.arguments((2000, 4096), dtype)
    cotangents = [k.normal(2000, 4096, dtype=dtype).cuda() for _ in k.exact(case, arguments)]
    ours = k.leaves(arguments, torch.Tensor.cuda)
    wanted = [a for a in ours if isinstance(a, torch.Tensor)]
    gradients, again = (torch.autograd.grad(k.tensors(case.op(*ours)), wanted, cotangents) for _ in range(2))
    assert all(itertools.starmap(torch.equal, zip(gradients, again, strict=True)))
    expected = k.exact_gradients(case, ours, cotangents)
    for gradient, exact in zip(gradients, expected, strict=True):
        k.check(gradient, exact, bits=4, scale=case.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", k.DTYPES, ids=DTYPE_IDS)
def test_dropout_on_a_gpu(dtype):
    for shape, p, seed in (((1000, 1001), 0.1, 42), ((5,), 0.5, -1), ((64, 4096), 0.9, 2**40 + 1)):
        x = torch.randn(shape, dtype=dtype, device="cuda")
        assert torch.equal(k.dropout.dropout(x, p, seed), k.dropout.dropout.reference(x, p, seed))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    x = torch.randn(70000, 32768, device="cuda", dtype=torch.bfloat16)
    result = k.softmax.softmax(x)
    for part in (slice(0, 2), slice(65535, 65537), slice(-2, None)):
        k.check(result[part], x[part].double().softmax(-1))
