"""Operators under torch.compile: side effects, factories, opaque bodies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import opkit

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_side_effects_are_kept_in_order(name, backend):
    log = []

    @opkit.custom_op(name, mutates_args=(), opaque=True)
    def record(x: Tensor, label: str) -> None:
        log.append((label, float(x.sum())))

    record.register_fake(lambda x, label: None)

    def model(x):
        y = x + 1
        record(y, "first")
        record(x, "second")
        z = y * 2
        record(z, "third")
        return z

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        compiled(torch.zeros(2))
    assert log == [("first", 2.0), ("second", 0.0), ("third", 4.0)] * 2


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_side_effects_whose_inputs_lead_nowhere(name, backend):
    log = []

    @opkit.custom_op(name, mutates_args=(), opaque=True)
    def record(x: Tensor) -> None:
        log.append(float(x.sum()))

    record.register_fake(lambda x: None)

    def model(x):
        record(x * 3)
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    assert log == [6.0]
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("kernel", [False, True])
def test_factories(name, kernel):
    @opkit.custom_op(name, mutates_args=())
    def ramp(n: int, device: torch.device) -> Tensor:
        return torch.arange(n, device=device, dtype=torch.float32) * 2

    if kernel:
        ramp.register_kernel("cpu", lambda n, device: torch.from_numpy(np.arange(n, dtype=np.float32) * 2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: x + ramp(x.shape[0], x.device), backend=counter, fullgraph=True)
    for n in (3, 5, 7, 9):
        torch.testing.assert_close(compiled(torch.ones(n)), torch.arange(n) * 2.0 + 1)
    assert counter.frame_count <= 3
    torch.testing.assert_close(
        torch.compile(lambda: ramp(3, torch.device("cpu")), backend="aot_eager", fullgraph=True)(),
        torch.arange(3) * 2.0,
    )


def test_a_factory_without_any_argument(name):
    @opkit.custom_op(name, mutates_args=())
    def identity() -> Tensor:
        return torch.eye(2)

    torch.testing.assert_close(
        torch.compile(lambda x: x @ identity(), backend="aot_eager", fullgraph=True)(torch.ones(2, 2)), torch.ones(2, 2)
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_opaque_operators_are_units(name, backend, spelled):
    calls = []

    @opkit.custom_op(name, mutates_args=())
    def numpy_sin(x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return torch.from_numpy(np.sin(x.detach().numpy()))

    numpy_sin.register_fake(torch.empty_like)
    numpy_sin.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    call = spelled(numpy_sin)
    compiled = torch.compile(lambda x: call(x + 1) * 2, backend=backend, fullgraph=True)
    x = torch.randn(4, requires_grad=True)
    output = compiled(x)
    assert calls.count((4,)) >= 1
    before = len(calls)
    compiled(x)
    assert len(calls) == before + 1
    torch.testing.assert_close(output, torch.sin(x + 1) * 2)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], torch.cos(x + 1) * 2)


def test_an_opaque_operator_without_a_fake_names_the_line(name):
    op = opkit.custom_op(name, lambda x: torch.from_numpy(np.sin(x.numpy())), schema="(Tensor x) -> Tensor")
    with pytest.raises(Exception, match="register_fake") as caught:
        torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert "no fake impl" in str(caught.value)


def test_an_opaque_operator_with_a_reference(name, recorder):
    op = opkit.custom_op(
        name, lambda x: torch.from_numpy(np.sin(x.numpy())), schema="(Tensor x) -> Tensor", reference=torch_sin
    )
    x = torch.randn(3, requires_grad=True)
    output = torch.compile(lambda x: op(x), backend=recorder.backend, fullgraph=True)(x)
    output.sum().backward()
    torch.testing.assert_close(output, x.sin())
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert recorder.calls(op) == 1


def torch_sin(x):
    return torch.sin(x)
