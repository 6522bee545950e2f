"""Operators under torch.compile: random numbers."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import opkit

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("kernel", [False, True])
def test_the_global_generator(name, kernel):
    @opkit.custom_op(name)
    def op(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + torch.rand_like(x)

    assert torch.Tag.nondeterministic_seeded in op._opoverload.tags
    if kernel:
        op.register_kernel("cpu", lambda x: x + torch.rand_like(x))
    compiled = torch.compile(lambda x: op(x) * 2, backend="aot_eager", fullgraph=True)
    x = torch.zeros(8)
    results = []
    for function in (lambda x: op(x) * 2, compiled, compiled):
        torch.manual_seed(3)
        results.append(function(x))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[1], results[2])
    assert not torch.equal(compiled(x), compiled(x))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kernel", [True, False])
def test_two_random_calls_are_not_made_one(name, kernel):
    op = opkit.custom_op(
        name, lambda x: torch.rand_like(x), schema="(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded
    )
    if kernel:
        op.register_kernel("cpu", lambda x: torch.rand_like(x))
    compiled = torch.compile(lambda x: (op(x), op(x)), fullgraph=True)
    first, second = compiled(torch.zeros(8))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_generator_argument(name, kernel):
    @opkit.custom_op(name, mutates_args=())
    def op(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return x + torch.rand(x.shape, generator=generator, dtype=x.dtype)

    assert torch.Tag.nondeterministic_seeded in op._opoverload.tags
    if kernel:
        op.register_kernel("cpu", lambda x, generator=None: x + torch.rand(x.shape, generator=generator, dtype=x.dtype))
    x = torch.zeros(6)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(op(x, torch.Generator().manual_seed(5)), expected)
    generator = torch.Generator().manual_seed(5)
    compiled = torch.compile(lambda x: op(x, generator) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected * 2)
    generator.manual_seed(5)
    torch.testing.assert_close(compiled(x), expected * 2)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_seed_argument(name, kernel):
    def draw(x: Tensor, seed: int) -> Tensor:
        index = torch.arange(x.numel(), device=x.device).reshape(x.shape) + seed
        return x + torch.frac(torch.sin(index.to(torch.float64) * 12.9898) * 43758.5453).to(x.dtype)

    op = opkit.custom_op(name, draw)
    if kernel:
        op.register_kernel("cpu", draw)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, seed: op(x, seed), backend=counter, fullgraph=True)
    x = torch.zeros(6)
    for seed in (3, 4, 5, 6):
        torch.testing.assert_close(compiled(x, seed), draw(x, seed))
    assert counter.frame_count <= 3


@pytest.mark.sweep
@pytest.mark.parametrize("spelling", ["op", "torch.ops"])
@pytest.mark.parametrize(
    ("backend", "rates"),
    [
        ("aot_eager", (0.0, 0.5, 0.25)),
        ("inductor", (0.5,)),
        pytest.param("inductor", (0.0, 0.5, 0.25), marks=pytest.mark.exhaustive),
    ],
)
def test_training_without_a_kernel(name, spelling, backend, rates):
    def drop(x: Float[Tensor, "n"], p: float = 0.5) -> Float[Tensor, "n"]:
        return x * (torch.rand_like(x) >= p) if p > 0 else x.clone()

    op = opkit.custom_op(name, drop)
    call = op if spelling == "op" else op._opoverload
    compiled = torch.compile(lambda x, p: call(x, p) * 2, backend=backend, fullgraph=True)
    x = torch.ones(64, requires_grad=True)
    for p in rates:
        for function in (lambda x, p: call(x, p) * 2, compiled):
            y = function(x, p)
            (grad,) = torch.autograd.grad(y.sum(), x)
            torch.testing.assert_close(grad, (y != 0) * 2.0)
            assert (0 < int((y == 0).sum()) < 64) == (p > 0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_with_the_same_numbers(name, use_reentrant):
    def drop(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * (torch.rand_like(x) > 0.5)

    op = opkit.custom_op(name, drop)
    x = torch.ones(64, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: op(x).sin(), x, use_reentrant=use_reentrant)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(y != 0, torch.ones(()).cos(), 0.0))


def test_training_under_a_dispatch_mode(name):
    from torch.utils.flop_counter import FlopCounterMode

    def drop(x: Float[Tensor, "n"], p: float = 0.5) -> Float[Tensor, "n"]:
        return x * (torch.rand_like(x) >= p) if p > 0 else x.clone()

    op = opkit.custom_op(name, drop)
    x = torch.ones(64, requires_grad=True)
    for p in (0.0, 0.5):
        with FlopCounterMode(display=False):
            y = op(x, p)
            (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(grad, (y != 0).float())
