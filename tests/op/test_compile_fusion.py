"""Operators under torch.compile: fused where there is no kernel, called as units where there is one."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code

import opkit

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# ---- fusion ---------------------------------------------------------------------------------------------------------


def generated_kernels(function, x, weight, train=False):
    """How many kernels Inductor generates, and the code."""
    torch._dynamo.reset()
    metrics.reset()
    compiled = torch.compile(function, fullgraph=True)

    def run():
        output = compiled(x, weight)
        return torch.autograd.grad(output.sum(), (x, weight)) if train else output

    result, code = run_and_get_code(run)
    return result, metrics.generated_kernel_count, "\n".join(code)


CONTEXTS = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("context", CONTEXTS)
def test_fuses_as_the_plain_reference_does(context, norm, spelled, among_neighbours):
    x, weight = torch.randn(4, 16), torch.randn(16)
    with CONTEXTS[context]():
        expected, plain, _ = generated_kernels(among_neighbours(norm.reference), x, weight)
        result, fused, code = generated_kernels(among_neighbours(spelled(norm)), x, weight)
    assert fused == plain > 0
    assert "tnorm" not in code
    torch.testing.assert_close(result, expected)


@pytest.mark.sweep(1)
def test_fuses_in_training(norm, spelled, among_neighbours):
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    expected, plain, _ = generated_kernels(among_neighbours(norm.reference), x, weight, train=True)
    result, fused, code = generated_kernels(among_neighbours(spelled(norm)), x, weight, train=True)
    assert fused == plain > 0
    assert "tnorm" not in code
    torch.testing.assert_close(result, expected)


def test_a_given_backward_fuses_too(name, recorder):
    op = opkit.custom_op(name, lambda x: x.sin(), schema="(Tensor x) -> Tensor")
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0] * 10,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x = torch.randn(5, requires_grad=True)
    torch.compile(lambda x: op(x + 1) * 2, backend=recorder.backend, fullgraph=True)(x).sum().backward()
    torch.testing.assert_close(x.grad, 20 * (x.detach() + 1))
    assert recorder.calls(op) == 0


# ---- as a unit ------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_operator_with_a_kernel_is_called_as_a_unit(name, backend, norm, with_kernel, spelled, among_neighbours):
    op, calls = with_kernel(name)
    x, weight = torch.randn(4, 16), torch.randn(16)
    compiled = torch.compile(among_neighbours(spelled(op)), backend=backend, fullgraph=True)
    expected = among_neighbours(norm.reference)(x, weight)
    torch.testing.assert_close(compiled(x, weight), expected)
    assert calls == [(4, 16)]
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x, weight), expected)
    assert calls == [(4, 16)] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_the_kernel_computes_the_training_forward(name, backend, norm, with_kernel, spelled, among_neighbours):
    op, calls = with_kernel(name)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    compiled = torch.compile(among_neighbours(spelled(op)), backend=backend, fullgraph=True)
    output = compiled(x, weight)
    assert calls == [(4, 16)]
    found = torch.autograd.grad(output.square().sum(), (x, weight))
    assert calls == [(4, 16)]
    expected = torch.autograd.grad(among_neighbours(norm.reference)(x, weight).square().sum(), (x, weight))
    torch.testing.assert_close(found, expected)


def test_a_given_backward_is_used_with_a_kernel(name, with_kernel):
    op, calls = with_kernel(name)
    op.register_autograd(lambda ctx, grad: (grad * 7, None, None))
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)
    torch.compile(lambda x: op(x, weight), backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert calls == [(4, 16)]
    torch.testing.assert_close(x.grad, torch.full_like(x, 7))


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("inline", "kernel", "units"), [(True, True, 0), (False, False, 1), (None, True, 1), (None, False, 0)]
)
def test_inline_decides(name, inline, kernel, units, train, norm, with_kernel, recorder):
    if kernel:
        op, _ = with_kernel(name, inline=inline)
    else:
        op = opkit.custom_op(name, norm.reference, inline=inline)
    x, weight = torch.randn(4, 16, requires_grad=train), torch.randn(16)
    output = torch.compile(lambda x: op(x, weight).cos(), backend=recorder.backend, fullgraph=True)(x)
    assert recorder.calls(op) == units
    expected = norm.reference(x, weight).cos()
    torch.testing.assert_close(output, expected)
    if train:
        torch.testing.assert_close(torch.autograd.grad(output.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_a_kernel_for_another_device_does_not_stop_fusion(name, norm, recorder):
    op = opkit.custom_op(name, norm.reference)
    op.register_kernel("cuda", lambda x, weight, eps=1e-6: 1 / 0)
    torch.compile(lambda x, w: op(x, w), backend=recorder.backend, fullgraph=True)(torch.randn(2, 3), torch.randn(3))
    assert recorder.calls(op) == 0


def test_a_refused_kernel_leaves_the_reference_to_run(name, norm):
    op = opkit.custom_op(name, norm.reference)
    op.register_kernel(
        "cpu", lambda x, weight, eps=1e-6: norm.reference(x, weight, eps) * 100, when=lambda x: x.shape[0] > 4
    )
    compiled = torch.compile(lambda x, w: op(x, w), backend="aot_eager", fullgraph=True)
    weight = torch.randn(3)
    for rows, factor in ((2, 1), (5, 100), (3, 1), (8, 100)):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight) * factor)


@pytest.mark.parametrize("train", [False, True])
def test_a_kernel_is_not_traced_after_a_graph_break(name, train, norm):
    op = opkit.custom_op(name, norm.reference)
    traced = []

    @op.register_kernel("cpu")
    def watching(x, weight, eps=1e-6):
        traced.append(torch.compiler.is_dynamo_compiling())
        return norm.reference(x, weight, eps)

    def model(x, weight):
        torch._dynamo.graph_break()
        return op(x, weight)

    x, weight = torch.randn(4, 16, requires_grad=train), torch.randn(16)
    output = torch.compile(model, backend="aot_eager")(x, weight)
    torch.testing.assert_close(output, norm.reference(x, weight))
    assert traced == [False]


def test_a_backward_within_a_compiled_step(name, norm, with_kernel):
    op, calls = with_kernel(name)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)

    def step():
        op(x, weight).sum().backward()

    torch.compile(step, backend="aot_eager")()
    assert calls == [(4, 16)]
    torch.testing.assert_close(x.grad, torch.autograd.grad(norm.reference(x, weight).sum(), x)[0])


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kernel", [False, True])
def test_a_reference_that_captures_a_tensor(name, kernel, backend):
    table = torch.tensor([1.0, 2.0, 3.0])
    op = opkit.custom_op(name, lambda x: (x * table).sin(), schema="(Tensor x) -> Tensor")
    if kernel:
        op.register_kernel("cpu", lambda x: (x * table).sin())
    x = torch.randn(2, 3, requires_grad=True)
    output = torch.compile(lambda x: op(x) + 1, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(output, (x * table).sin() + 1)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], (x * table).cos() * table)


def test_compiling_warns_of_nothing(name, with_kernel):
    op, _ = with_kernel(name)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
        torch.compile(lambda x: op(x, weight), backend="aot_eager", fullgraph=True)(x).sum().backward()
