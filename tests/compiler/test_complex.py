"""Complex models from end to end: what eager gives, in training and inference, with kernels of the compiler's own."""

import copy
from typing import Any

import pytest
import torch

import opkit
from opkit.compiler.backend import opkit_backend
from tests.compiler.lower.test_rules_complex import rotary

pytestmark = pytest.mark.usefixtures("fresh")
TIGHT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def r(*shape, dtype=torch.complex128):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)), dtype=dtype)


def compiled(function, **more):
    return torch.compile(function, backend=opkit_backend, options={"strict": True}, **more)


def check(function, *inputs, times=2, **tolerances):
    """The compiled function gives what the eager one does: values, and what is written to inputs."""
    fast = compiled(function)
    for _ in range(times):
        mine, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
        torch.testing.assert_close(fast(*mine), function(*theirs), equal_nan=True, **(tolerances or TIGHT))
        torch.testing.assert_close(mine, theirs, equal_nan=True, **(tolerances or TIGHT))
    return fast


def kernels(function, *inputs):
    """How many kernels and calls each graph has."""
    return [(graph.launches, len(graph.calls)) for graph in opkit.explain(function, *inputs).graphs]


def trained(function, *inputs, **tolerances):
    """Gradients of a real loss with regard to all inputs, beside eager's."""
    found = []
    for called in (compiled(function), function):
        given = [each.detach().clone().requires_grad_() for each in inputs]
        result = called(*given)
        loss = (result.abs() if result.is_complex() else result).pow(2).sum()
        found.append((result.detach(), torch.autograd.grad(loss, given)))
    torch.testing.assert_close(*found, **(tolerances or {"rtol": 1e-10, "atol": 1e-10}))


def test_an_operator_with_a_rule_for_complex_numbers_alone_is_called_with_real_ones():
    check(lambda x: torch.ops.aten.conj_physical(x) + torch.ops.aten.angle(x), torch.randn(5))


# ---- values ----------------------------------------------------------------------------------------------------------


def chain(z, w):
    return ((z * w + z).conj() / (w + 3)).exp() * 2 - 1j


LAYOUTS = {
    "broadcast": (r(5, 1), r(7)),
    "strided": (r(5, 14)[:, ::2], r(10, 7)[::2]),
    "both conjugated": (r(5, 7).conj(), r(7, 5).conj().t()),
    "of no dimensions": (r(), r()),
    "empty": (r(0, 7), r(7)),
    "negated": (r(5, 7).conj().imag, r(5, 7)),
    "single precision": (r(5, 7, dtype=torch.complex64), r(7, dtype=torch.complex64)),
    "plain": (r(5, 7), r(5, 7)),
    "transposed": (r(7, 5).t(), r(5, 7)),
    "offset": (r(6, 8)[1:, 1:], r(5, 7)),
    "expanded": (r(1, 7).expand(5, 7), r(5, 7)),
    "conjugated": (r(5, 7).conj(), r(5, 7)),
    "real and complex": (r(5, 7).real.clone(), r(5, 7)),
    "long": (r(3001), r(3001)),
}


@pytest.mark.sweep(keep=["strided", "both conjugated", "single precision"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    z, w = LAYOUTS[layout]
    tolerances = {"rtol": 1e-4, "atol": 1e-5} if z.dtype == torch.complex64 else TIGHT
    fast = compiled(chain)
    for _ in range(2):
        torch.testing.assert_close(fast(z, w), chain(z, w), **tolerances)


@pytest.mark.sweep(keep=["broadcast", "both conjugated"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_layouts(layout):
    z, w = LAYOUTS[layout]
    loose = {"rtol": 1e-3, "atol": 1e-3} if z.dtype == torch.complex64 else {"rtol": 1e-9, "atol": 1e-9}
    trained(lambda z, w: (z * w.conj() + z).sin() / (w * w + 4), z, w, **loose)


def test_a_conjugated_input_after_a_plain_one():
    """Whether a tensor is conjugated when it is read is a matter of the tensor, not of the graph."""
    fast, z = compiled(lambda z: torch.view_as_real(z * 2j).sum(-1)), r(5)
    for given in (z, z.conj(), z, z.conj().conj()):
        torch.testing.assert_close(fast(given), torch.view_as_real(given * 2j).sum(-1))


def test_results_that_are_conjugated_or_parts_of_an_input():
    check(lambda z: (z.conj(), z.real, z.imag, z[1:], torch.view_as_real(z)), r(5))
    check(lambda x: (torch.view_as_complex(x), x + 1), r(5).real.reshape(5, 1).repeat(1, 2))


def test_results_that_share_memory_with_an_input():
    z = r(5)
    found = compiled(lambda z: (z.real, torch.view_as_real(z), z * 2))(z)
    found[0].add_(1)
    torch.testing.assert_close(z.real, found[0])
    torch.testing.assert_close(torch.view_as_real(z), found[1])


def test_results_that_share_memory_with_each_other():
    def function(z):
        y = z * 2
        return y, y.real, torch.view_as_real(y)

    y, real, both = compiled(function)(r(5))
    real.zero_()
    assert (both[:, 0] == 0).all()
    assert (y.real == 0).all()


def test_views_as_other_types_keep_the_results_apart():
    check(lambda x: torch.view_as_complex(x * 2).abs() + (x * 2).sum(-1), r(5, 2).real.clone())


WRITES = {
    "mul_": lambda z, w: z.mul_(w),
    "real": lambda z, w: z.real.add_(w.imag),
    "imag": lambda z, w: z.imag.mul_(2),
    "copy_": lambda z, w: z.copy_(w.conj()),
    "its transpose": lambda z, w: z.copy_(z.t().clone()),
    "a real one": lambda z, w: z.copy_(w.real),
    "a slice": lambda z, w: z[1:, ::2].add_(w[1:, ::2]),
    "exchanged": lambda z, w: z.copy_(torch.complex(z.imag, z.real)),
    "fill_": lambda z, w: z.fill_(1 + 2j),
    "zero_": lambda z, w: z[0].zero_(),
    "its reals": lambda z, w: torch.view_as_real(z).mul_(3),
}


@pytest.mark.sweep(keep=["real", "copy_", "its transpose", "a slice", "its reals"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_inputs(name):
    def function(z, w):
        before = z * w
        WRITES[name](z, w)
        return before + z, z.abs()

    check(function, r(5, 5), r(5, 5) + 1)


def test_writes_to_a_conjugated_input_are_as_in_eager():
    z, w = r(5), r(5)
    found, expected = z.clone(), z.clone()
    torch.compile(lambda z, w: z.mul_(w) + 1, backend=opkit_backend)(found.conj(), w)
    expected.conj().mul_(w)
    torch.testing.assert_close(found, expected)


def test_constants_of_a_graph():
    turn = torch.tensor([1j, -1, 2 + 1j])
    check(lambda z: z * turn.to(z.dtype) + torch.tensor(2j), r(4, 3), rtol=1e-6, atol=1e-6)


# ---- sizes that change -----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_dynamic_sizes():
    fast = compiled(chain, dynamic=True)
    for rows in (4, 5, 9, 1, 0):
        z, w = r(rows, 6), r(6)
        torch.testing.assert_close(fast(z, w), chain(z, w), **TIGHT)


@pytest.mark.exhaustive
def test_dynamic_rotary():
    fast = compiled(rotary, dynamic=True)
    for length, width in ((4, 8), (5, 8), (7, 12)):
        x, turns = r(2, length, 3, width).real.float(), r(length, width // 2, dtype=torch.complex64)
        torch.testing.assert_close(fast(x, turns), rotary(x, turns), rtol=1e-5, atol=1e-5)


def test_dynamic_training():
    def function(z, w):
        return (z * w).mean(0) + (z.abs() * w).sum(0)

    fast = compiled(function, dynamic=True)
    for rows in (3, 4, 8):
        found = []
        for called in (fast, function):
            z, w = r(rows, 5).requires_grad_(), r(rows, 5).requires_grad_()
            found.append(torch.autograd.grad(called(z, w).abs().sum(), (z, w)))
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


# ---- models ----------------------------------------------------------------------------------------------------------


class Spectral(torch.nn.Module):
    """A global filter (Rao and others, 2021): products in the frequency domain."""

    def __init__(self, length, width):
        super().__init__()
        self.weight = torch.nn.Parameter(r(length // 2 + 1, width) * 0.1)

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.weight, n=x.shape[1], dim=1).relu() + x


def test_a_spectral_layer():
    layer, x = Spectral(16, 6).double(), r(2, 16, 6).real.clone()
    fast = compiled(copy.deepcopy(layer))
    for module in (layer, fast):
        module(x).square().sum().backward()
    torch.testing.assert_close(fast(x), layer(x), **TIGHT)
    torch.testing.assert_close(fast.weight.grad, layer.weight.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.exhaustive
def test_training_with_an_optimiser():
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(r(5, dtype=torch.complex64)) for _ in range(2)]
    z = r(7, 5, dtype=torch.complex64)

    def loss(w):
        return ((z * w).exp().abs() + (w.conj() * z).imag).square().mean()

    for w, called in zip(weights, (loss, compiled(loss)), strict=True):
        adam = torch.optim.Adam([w], lr=0.05)
        for _ in range(5):
            adam.zero_grad()
            called(w).backward()
            adam.step()
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)])
def test_rotary(dtype):
    x, turns = r(2, 5, 3, 16).real.to(dtype), torch.polar(torch.ones(5, 8), r(5, 8).real.float())
    check(
        rotary, x, turns, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )


@pytest.mark.exhaustive
def test_gradcheck():
    z, w = r(3).requires_grad_(), r(3).requires_grad_()
    fast = compiled(lambda z, w: torch.view_as_real((z * w).tanh() + z.conj() / (w.abs() + 1)))
    assert torch.autograd.gradcheck(fast, (z, w))


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_how_many_kernels():
    z, w, turns = r(5, 7), r(7), torch.polar(torch.ones(3, 4), r(3, 4).real.float())
    with torch.no_grad():
        assert kernels(chain, z, w) == [(1, 0)]
        assert kernels(rotary, r(2, 3, 4, 8).real.float(), turns) == [(1, 0)]
        assert kernels(rotary, r(2, 3, 4, 8).real.bfloat16(), turns) == [(1, 0)]
        assert kernels(lambda x: torch.log(torch.fft.rfft(x).abs() + 1), r(4, 8).real.clone()) == [(1, 1)]


def test_how_many_kernels_training_has():
    z, w = r(5, 7).requires_grad_(), r(5, 7).requires_grad_()
    assert kernels(lambda z, w: ((z * w).exp() + w.conj()).abs(), z, w) == [(1, 0), (1, 0)]
    x = r(2, 3, 4, 8).real.float().requires_grad_()
    turns = torch.polar(torch.ones(3, 4), torch.ones(3, 4))
    assert kernels(rotary, x, turns) == [(1, 0), (1, 0)]


def test_explained_forms_have_both_parts():
    with torch.no_grad():
        (graph,) = opkit.explain(chain, r(5, 7), r(7)).graphs
    assert ".re[a0, a1] = " in graph.program
    assert ".im[a0, a1] = " in graph.program
    assert not graph.calls


def test_a_forward_keeps_no_conjugates():
    z, w = r(5, 7).requires_grad_(), r(5, 7).requires_grad_()
    forward, backward = opkit.explain(lambda z, w: z * w * w, z, w).graphs
    assert "_conj" not in forward.captured
    assert "_conj" in backward.captured
    trained(lambda z, w: z * w * w, z, w)
