"""Operators under torch.compile: registrations, redefinitions and choices of kernels after a compile."""

from __future__ import annotations

import pytest
import torch

import opkit

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True])
def test_a_kernel_registered_later_takes_effect(name, train, norm, spelled):
    op = opkit.custom_op(name, norm.reference)
    compiled = torch.compile(spelled(op), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(4, 16, requires_grad=train), torch.randn(16)
    torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight))
    calls = []

    @op.register_kernel("cpu")
    def counted(x, weight, eps=1e-6):
        calls.append(1)
        return norm.reference(x, weight, eps) * 100

    torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight) * 100)
    torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight) * 100)
    assert len(calls) == 2
    op.register_kernel("cpu", lambda x, weight, eps=1e-6: norm.reference(x, weight, eps) * 1000)
    torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight) * 1000)


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", [False, True])
def test_a_backward_registered_later_takes_effect(name, kernel, norm, with_kernel, spelled):
    op = with_kernel(name)[0] if kernel else opkit.custom_op(name, norm.reference)
    compiled = torch.compile(spelled(op), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)
    compiled(x, weight).sum().backward()
    x.grad = None
    op.register_autograd(lambda ctx, grad: (grad * 5, None, None))
    compiled(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 5))


@pytest.mark.sweep(1)
def test_a_fake_registered_later_takes_effect(name, spelled):
    op = opkit.custom_op(name, lambda x: x.clone(), schema="(Tensor x) -> Tensor", opaque=True)
    op.register_fake(torch.empty_like)
    shapes = []
    call = spelled(op)

    def model(x):
        output = call(x)
        return output.reshape(-1), output.shape[0]

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2, 3))[1] == 2
    op.register_kernel("cpu", lambda x: x.repeat(2, 1))
    op.register_fake(lambda x: shapes.append(x.shape) or x.new_empty(x.shape[0] * 2, x.shape[1]))
    result, rows = compiled(torch.ones(2, 3))
    assert shapes
    assert (result.shape, rows) == ((12,), 4)


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", [False, True])
def test_a_redefinition_takes_effect(name, spelling, kernel):
    def define(factor):
        op = opkit.custom_op(name, lambda x: x * factor, schema="(Tensor x) -> Tensor")
        if kernel:
            op.register_kernel("cpu", lambda x: x * factor)
        return op

    cell = [define(2)]
    namespace, opname = name.split("::")
    if spelling == "object":
        compiled = torch.compile(lambda x: cell[0](x), backend="aot_eager", fullgraph=True)
    else:
        compiled = torch.compile(
            lambda x: getattr(getattr(torch.ops, namespace), opname)(x), backend="aot_eager", fullgraph=True
        )
    x = torch.ones(3)
    torch.testing.assert_close(compiled(x), x * 2)
    with pytest.warns(opkit.errors.RedefinitionWarning):
        cell[0] = define(3)
    torch.testing.assert_close(compiled(x), x * 3)


@pytest.mark.sweep(1)
def test_a_kernel_disabled_for_a_while(name, with_kernel, spelled):
    op, calls = with_kernel(name)
    compiled = torch.compile(spelled(op), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(4, 16), torch.randn(16)
    compiled(x, weight)
    with op.set_kernel_enabled("cpu", False):
        compiled(x, weight)
    assert len(calls) == 1
    compiled(x, weight)
    assert len(calls) == 2


def test_a_forced_kernel_reaches_compiled_calls(name, norm, with_kernel):
    op, calls = with_kernel(name)
    compiled = torch.compile(lambda x, w: op(x, w), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(4, 16), torch.randn(16)
    compiled(x, weight)
    with opkit.use_kernel(op, "reference"):
        torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight))
    assert len(calls) == 1
