"""Backward rules and views on ``opkit.custom_op``, held against ``torch.library.custom_op``.

Bodies leave torch (numpy) wherever torch reports a missing rule, because opkit derives it from a body that stays.
"""

from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

registered_by = pytest.mark.parametrize("by", ["method", "object", "name", "overload"])
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def spelled(op: Any, by: str) -> Any:
    return {"object": op, "name": op._qualname, "overload": op._opoverload}[by]


# ---- autograd ------------------------------------------------------------------------------------------------------


@registered_by
def test_backwards(sine: Any, by: str) -> None:
    calls: list[str] = []

    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x)

    def backward(ctx, grad):
        calls.append("backward")
        (x,) = ctx.saved_tensors
        return grad * x.cos()

    if by == "method":
        sine.register_autograd(backward, setup_context=setup_context)
    else:
        torch.library.register_autograd(spelled(sine, by), backward, setup_context=setup_context)
    x = torch.randn(3, requires_grad=True)
    y = sine(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert calls == ["backward"]
    assert torch.equal(grad, x.cos())


def test_a_missing_backward_is_an_error_when_asked_for(sine: Any) -> None:
    y = sine(torch.randn(3, requires_grad=True))
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="no autograd formula"):
        y.sum().backward()


def test_setup_context_runs_only_where_a_gradient_is_needed(shifted: Any) -> None:
    calls: list[str] = []

    def backward(ctx, grad):
        raise AssertionError("no gradient is asked for")

    shifted.register_autograd(backward, setup_context=lambda ctx, inputs, output: calls.append("setup"))
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        shifted(x, 2.0)
    shifted(x.detach(), 2.0)
    assert calls == []
    shifted.register_kernel("cpu")(lambda x, y: torch.from_numpy(x.detach().numpy() + y))
    shifted(x, 2.0)
    assert calls == ["setup"]


def test_a_backward_replaces_an_earlier_one(sine: Any) -> None:
    sine.register_autograd(lambda ctx, grad: grad * 2)
    sine.register_autograd(lambda ctx, grad: grad * 3)
    x = torch.randn(3, requires_grad=True)
    sine(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


def test_a_backward_that_returns_too_few_gradients(sine: Any) -> None:
    sine.register_autograd(lambda ctx, grad: ())
    with pytest.raises(RuntimeError, match=r"incorrect number of gradients \(expected .*got "):
        sine(torch.randn(3, requires_grad=True)).sum().backward()


def defaulted(custom_op: Any, name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Optional[Tensor] = None, scale: float = 2.0, enabled: bool = False) -> Tensor:  # noqa: UP045
        return x.sin()

    return op


def test_setup_context_is_given_the_defaults(custom_op: Any, name: str) -> None:
    op = defaulted(custom_op, name)
    seen: list[Any] = []

    def setup_context(ctx, inputs, output):
        seen.append(inputs[1:])
        ctx.save_for_backward(inputs[0])

    def backward(ctx, grad):
        seen.append(ctx.needs_input_grad)
        return grad * ctx.saved_tensors[0].cos()

    op.register_autograd(backward, setup_context=setup_context)
    x = torch.randn(3, requires_grad=True)
    op(x).sum().backward()
    assert seen == [(None, 2.0, False), (True,)]
    assert torch.equal(x.grad, x.cos())


def test_keyword_only_arguments_in_setup_context(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(w: Tensor, x: int = 2, *, y: int = 3, z: float) -> Tensor:
        return w * x * y * z

    seen: list[Any] = []

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        seen.append((inputs[1:], keyword_only_inputs))
        ctx.factor = inputs[1] * keyword_only_inputs["y"] * keyword_only_inputs["z"]

    op.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=setup_context)
    for call in (op, op._opoverload):
        w = torch.ones(3, requires_grad=True)
        call(w, z=1.5).sum().backward()
        assert torch.equal(w.grad, torch.full((3,), 9.0))
    assert seen == [((2,), {"y": 3, "z": 1.5})] * 2


@pytest.mark.parametrize("scale", [2.0, 3.0])
def test_a_list_of_tensors_with_a_default_beside_it(custom_op: Any, name: str, scale: float) -> None:
    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor], scale: float = 2.0) -> Tensor:
        return (xs[0].sin() + xs[1].sin()) * scale

    def setup_context(ctx, inputs, output):
        xs, ctx.scale = inputs
        ctx.save_for_backward(*xs)

    def backward(ctx, grad):
        assert ctx.needs_input_grad[0] == [True, True]
        grads = [grad * x.cos() * ctx.scale for x in ctx.saved_tensors]
        return (grads, *[None] * (len(ctx.needs_input_grad) - 1))

    op.register_autograd(backward, setup_context=setup_context)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    op([x, y], scale).sum().backward()
    assert torch.allclose(x.grad, x.cos() * scale)
    assert torch.allclose(y.grad, y.cos() * scale)


def test_a_list_of_results(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, scale: float = 2.0) -> list[Tensor]:
        return [x.sin() * scale, x.cos() * scale]

    def setup_context(ctx, inputs, output):
        x, ctx.scale = inputs
        assert isinstance(output, list)
        ctx.save_for_backward(x)

    def backward(ctx, grads):
        (x,) = ctx.saved_tensors
        grad = (grads[0] * x.cos() - grads[1] * x.sin()) * ctx.scale
        return (grad, *[None] * (len(ctx.needs_input_grad) - 1))

    op.register_autograd(backward, setup_context=setup_context)
    for args in ((), (3.0,)):
        x = torch.randn(3, requires_grad=True)
        first, second = op(x, *args)
        (first + second).sum().backward()
        assert torch.allclose(x.grad, (x.cos() - x.sin()) * (args[0] if args else 2.0))


def test_results_that_carry_no_gradient(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = np.sort(x.detach().numpy()), np.argsort(x.detach().numpy())
        return torch.from_numpy(values), torch.from_numpy(order)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    def backward(ctx, grad, _):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(0, order, grad)

    op.register_autograd(backward, setup_context=setup_context)
    x = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
    values, order = op(x)
    assert values.requires_grad
    assert not order.requires_grad
    (values * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([3.0, 1.0, 2.0]))


def test_a_backward_for_an_operator_that_writes(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"x"})
    def op(x: Tensor) -> Tensor:
        x.sin_()
        return x.clone()

    for register in (op.register_autograd, lambda f: torch.library.register_autograd(name, f)):
        with pytest.raises(RuntimeError, match="non-functional"):
            register(lambda ctx, grad: grad)


def test_second_derivatives_by_a_differentiable_backward(sine: Any) -> None:
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    sine.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].cos(), setup_context=setup_context)
    x = torch.randn(3, requires_grad=True, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(sine, x)


# ---- views ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "value"), [("SymInt", 2), ("SymInt[]", (2,))])
def test_views_by_symbolic_sizes_are_refused(custom_op: Any, name: str, kind: str, value: Any) -> None:
    @custom_op(name, mutates_args=(), schema=f"(Tensor(a) t, {kind} index) -> Tensor(a)")
    def op(t, index):
        return t.view_as(t)

    op.register_autograd(lambda *_: None, setup_context=lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=r"Custom ops that are views do not support SymInt\."):
        op._opoverload(torch.rand(2), value)


def test_a_view(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    def op(x):
        return x.view(-1)

    op.register_autograd(lambda ctx, grad: grad.view(ctx.shape), setup_context=_keep_shape)
    x = torch.randn(2, 3, requires_grad=True)
    base = x * 1
    view = op(base)
    assert view._is_view()
    assert view._base is base
    view.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))
    assert op(torch.zeros(2, 3))._is_view()


def _keep_shape(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape = inputs[0].shape
    ctx._is_pure_view = True


def test_views_of_a_subclass(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=(), schema="(Tensor(a) pair, int index) -> Tensor(a)")
    def part(pair, index):
        raise RuntimeError("the subclass answers")

    class Pair(TwoTensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs):
            if func is part._opoverload:
                found = args[0].b if args[1] else args[0].a
                return found.view_as(found)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def backward(ctx, grad):
        grad = grad.clone()
        parts = (torch.zeros_like(grad), grad) if ctx.index else (grad, torch.zeros_like(grad))
        return Pair(*parts), None

    def setup_context(ctx, inputs, output):
        ctx._is_pure_view = True
        ctx.index = inputs[1]

    part.register_autograd(backward, setup_context=setup_context)
    for call in (part, part._opoverload):
        pair = Pair(torch.rand(3), torch.rand(3), requires_grad=True)
        view = call(pair, 0)
        view.sum().backward()
        assert torch.equal(view, pair.a)
        assert view._is_view()
        assert view._base is pair
        assert torch.equal(pair.grad.a, torch.ones(3))
        leaf = Pair(torch.rand(3), torch.rand(3), requires_grad=True)
        inner = leaf.clone()
        view = call(inner, 0)
        view *= 2
        assert torch.equal(inner.a, view)
        inner.sum().backward()
        assert torch.equal(leaf.grad.a, torch.full((3,), 2.0))
        assert torch.equal(leaf.grad.b, torch.ones(3))
