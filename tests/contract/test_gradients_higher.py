"""gradients: finite differences, second order and forward mode, on planted defects and right operators."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import opkit
from opkit.testing import tensor

X = (tensor("n"),)


def autograd_op(forward, backward, save=None):
    """A plain callable around an ``autograd.Function``; ``save(ctx, inputs, output)`` saves the inputs by default."""

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = forward(*inputs)
            save(ctx, inputs, output) if save else ctx.save_for_backward(*inputs)
            return output

    Op.backward = staticmethod(backward)
    return lambda *inputs: Op.apply(*inputs)


def right_mul(ctx, g):
    x, y = ctx.saved_tensors
    return g * y, g * x


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "op",
    [
        autograd_op(torch.sin, lambda ctx, g: g * ctx.saved_tensors[0].sin()),
        autograd_op(lambda x: F.gelu(x), lambda ctx, g: g * torch.sigmoid(1.702 * ctx.saved_tensors[0])),
        lambda x: x * x.detach(),
        autograd_op(lambda x: x.exp() / 2, lambda ctx, g: g * ctx.saved_tensors[0].exp()),
    ],
)
def test_gradients_of_another_formula(fails, op):
    failure = fails("gradients.finite", op, args=X)
    assert failure.args[0].shape == (1,)


def test_one_of_two_gradients_is_lost(fails):
    fails("gradients.finite", lambda x, y: x * y.detach(), args=(tensor("n"), tensor("n")))


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "op", [torch.relu, torch.floor, lambda x: x.max(-1), torch.sqrt, torch.abs, torch.round, F.gelu]
)
def test_kinks_and_steps_are_no_failures(holds, op):
    holds("gradients.finite", op, args=X)


def test_a_straight_through_estimate_is_no_failure(holds):
    passed = holds("gradients.finite", lambda x: x + (x.round() - x).detach(), args=X)
    assert passed.remarks


def test_a_gradient_that_the_reference_has_too_is_meant(holds):
    reverse = autograd_op(lambda x: x * 1, lambda ctx, g: -g)
    holds("gradients.finite", reverse, args=X, reference=lambda x: reverse(x))


def saved_intermediate(ctx, inputs, output):
    ctx.save_for_backward(inputs[0].cos())


@pytest.mark.sweep
@pytest.mark.parametrize(
    "op",
    [
        autograd_op(torch.sin, lambda ctx, g: g * ctx.saved_tensors[0], saved_intermediate),
        autograd_op(torch.sin, lambda ctx, g: g * ctx.saved_tensors[0].detach().cos()),
    ],
)
@pytest.mark.parametrize("reference", [torch.sin, None])
def test_second_derivatives_that_lose_terms(fails, op, reference):
    failure = fails("gradients.second", op, args=X, reference=reference)
    assert failure.args[0].shape == (1,)


class WrongTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, x):
        ctx.save_for_backward(g, x)
        return g * x.cos()

    @staticmethod
    def backward(ctx, h):
        g, x = ctx.saved_tensors
        return h * x.cos(), h * g * x.sin()  # the sign


@pytest.mark.parametrize("reference", [torch.sin, None])
def test_a_wrong_second_derivative(fails, reference):
    op = autograd_op(torch.sin, lambda ctx, g: WrongTwice.apply(g, ctx.saved_tensors[0]))
    fails("gradients.second", op, args=X, reference=reference)


@pytest.mark.sweep
@pytest.mark.parametrize("op", [torch.sin, F.gelu, lambda x: F.softmax(x, -1), lambda x: x * 2, torch.relu, torch.exp])
@pytest.mark.parametrize("referred", [True, False])
def test_right_second_derivatives(holds, op, referred):
    holds("gradients.second", op, args=X, reference=op if referred else None)


def test_first_order_only_is_no_failure(asked):
    @torch.autograd.function.once_differentiable
    def once(ctx, g):
        return g * ctx.saved_tensors[0].cos()

    def by_numpy(ctx, g):
        return torch.from_numpy(g.detach().numpy() * np.cos(ctx.saved_tensors[0].detach().numpy()))

    for backward in (once, by_numpy):
        report = asked("gradients.second", autograd_op(torch.sin, backward), args=X, reference=torch.sin)
        assert report.ok, str(report)
        assert report.skipped or report.passed[0].remarks


def with_jvp(jvp):
    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            ctx.save_for_forward(x, y)
            return x * y

    Op.backward = staticmethod(right_mul)
    Op.jvp = staticmethod(jvp)
    return lambda x, y: Op.apply(x, y)


def right_jvp(ctx, s, t):
    x, y = ctx.saved_tensors
    return (0 if s is None else s * y) + (0 if t is None else t * x)


def only_first(ctx, s, t):
    _, y = ctx.saved_tensors
    return torch.zeros_like(y) if s is None else s * y


def wrong_sign(ctx, s, t):
    return -right_jvp(ctx, s, t)


@pytest.mark.parametrize("jvp", [only_first, wrong_sign])
def test_a_wrong_forward_mode(fails, jvp):
    failure = fails("gradients.forward", with_jvp(jvp), args=(tensor("n"), tensor("n")))
    assert failure.args[0].shape == (1,)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("op", [with_jvp(right_jvp), torch.atan2, torch.mul])
def test_a_right_forward_mode(holds, op):
    holds("gradients.forward", op, args=(tensor("n"), tensor("n")))


def test_a_mean_over_nothing_has_no_forward_mode_to_compare(holds):
    for name in ("gradients.forward", "transforms.functional"):
        holds(name, lambda x, y: F.huber_loss(x, y), args=(tensor("n"), tensor("n")), max_examples=20)


def test_no_forward_mode_is_no_failure(asked):
    report = asked("gradients.forward", autograd_op(torch.mul, right_mul), args=(tensor("n"), tensor("n")))
    assert report.ok
    assert "forward mode" in report.skipped[0].reason


def test_opkit_operators_hold():
    @opkit.custom_op("gradients_test::scaled")
    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * w

    @scaled.register_kernel("cpu", name="kernel")
    def _(x, w):
        return torch.sin(x) * w

    both = (tensor("n", (torch.float64,)), tensor("n", (torch.float64,)))
    report = opkit.check(scaled, args=both, properties=["gradients"], database=False, max_examples=8)
    assert report.ok, str(report)
    assert len(report.passed) >= 10, str(report)
