"""Backwards that the author registered: every transform and compiler goes by them, not by the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import opkit
from opkit.errors import RuleError

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(params=[False, True])
def reversal(request: pytest.FixtureRequest, name: str) -> Any:
    """The identity with a registered backward that reverses gradients, without and with a kernel."""
    op = opkit.custom_op(name, lambda x: x.clone(), schema="(Tensor x) -> Tensor")
    if request.param:
        op.register_kernel("cpu", lambda x: torch.from_numpy(x.detach().numpy().copy()))
    op.register_autograd(lambda ctx, grad: -grad)
    return op


def test_every_transform_goes_by_the_registered_backward(reversal: Any) -> None:
    func, x, eye = torch.func, torch.randn(3), torch.eye(3)

    def loss(x: Tensor) -> Tensor:
        return reversal(x).square().sum()

    for jacobian in (func.jacrev, func.jacfwd):
        torch.testing.assert_close(jacobian(reversal)(x), -eye)
        for outer in (func.jacrev, func.jacfwd):
            torch.testing.assert_close(outer(jacobian(loss))(x), 2 * eye)
    torch.testing.assert_close(func.grad(lambda x: func.vmap(reversal)(x).sum())(x), -torch.ones(3))
    torch.testing.assert_close(func.vmap(func.grad(lambda x: reversal(x).sum()))(x), -torch.ones(3))
    with forward_ad.dual_level():
        dual = reversal(forward_ad.make_dual(x, x))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, -x)
        assert not dual.requires_grad
        dual = reversal(forward_ad.make_dual(x.clone().requires_grad_(), x))
        assert dual.requires_grad


def test_every_transform_within_a_compiled_program_goes_by_the_registered_backward(reversal: Any) -> None:
    def transformed(x: Tensor) -> Any:
        func = torch.func
        return (
            func.grad(lambda x: reversal(x).square().sum())(x),
            func.jvp(reversal, (x,), (x,)),
            func.jacrev(func.grad(lambda x: reversal(x).square().sum()))(x),
            func.grad(lambda x: func.vmap(reversal)(x).sum())(x),
        )

    x = torch.randn(3)
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), transformed(x))


def test_several_results_and_numbers_in_forward_mode_by_the_registered_backward() -> None:
    def both(x: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin() * scale, x * x, x > 0

    op = opkit.custom_op("registered::forward_both", both, mutates_args=())

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    def backward(ctx: Any, first: Tensor, second: Tensor, _: Any) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return first * x.cos() * ctx.scale + 2 * second * x, None

    op.register_autograd(backward, setup_context=setup)
    x, tangent = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    for function in (lambda f: lambda x: f(x, 3.0)[0] + f(x, 3.0)[1], lambda f: lambda x: f(x, 3.0)[1] * f(x, 3.0)[2]):
        torch.testing.assert_close(
            torch.func.jvp(function(op), (x,), (tangent,)), torch.func.jvp(function(both), (x,), (tangent,))
        )


def test_forward_mode_needs_a_registered_backward_that_can_be_differentiated() -> None:
    op = opkit.custom_op("registered::forward_cut", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    op.register_autograd(lambda ctx, grad: torch.from_numpy(grad.detach().numpy() * 2))
    with forward_ad.dual_level(), pytest.raises(RuleError, match="leaves torch or detaches"):
        op(forward_ad.make_dual(torch.ones(3), torch.ones(3)))


def test_forward_mode_is_refused_by_a_backward_that_can_be_differentiated_once() -> None:
    op = opkit.custom_op("registered::forward_once", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    op.register_autograd(torch.autograd.function.once_differentiable(lambda ctx, grad: grad * 2))
    x = torch.ones(3)
    with forward_ad.dual_level(), pytest.raises(RuleError, match="marked with once_differentiable"):
        op(forward_ad.make_dual(x, x))
    with pytest.raises(RuleError, match="marked with once_differentiable"):
        torch.func.jvp(op, (x,), (x,))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch asks it of every tensor that it makes a fake of
@pytest.mark.parametrize("registered", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_compiled_autograd(registered: bool) -> None:
    def product(xs: list[Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
        return xs[0].sin() * y, xs[1] * y

    op = opkit.custom_op(f"registered::compiled_autograd_{registered}", product, mutates_args=())
    op.register_kernel("cpu", product)
    if registered:

        def setup(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs[0], inputs[1])

        def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[list[Tensor], Tensor]:
            a, b, y = ctx.saved_tensors
            return [first * a.cos() * y, second * y], first * a.sin() + second * b

        op.register_autograd(backward, setup_context=setup)
    a, b, y = (torch.randn(3, requires_grad=True) for _ in range(3))

    def gradients() -> list[Tensor | None]:
        a.grad = b.grad = y.grad = None
        loss = sum(result.sum() for result in op([a, b], y))
        if registered:  # twice
            loss = sum(g.square().sum() for g in torch.autograd.grad(loss, (a, b, y), create_graph=True))
        loss.backward()
        return [a.grad, b.grad, y.grad]

    expected = gradients()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        torch.testing.assert_close(gradients(), expected)
