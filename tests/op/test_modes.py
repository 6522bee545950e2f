"""Operators among tensor subclasses and dispatch modes, and what torch's profiler shows of them."""

from __future__ import annotations

import functools
from typing import ClassVar

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import opkit


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True])
def test_wrapper_subclasses(train, norm, kind, op, spelled, calls):
    call = spelled(op)
    a, b, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    x = TwoTensor(a.clone(), b.clone()).requires_grad_(train)
    output = call(x, TwoTensor(weight, weight))
    assert type(output) is TwoTensor
    torch.testing.assert_close(output.a, norm.reference(a, weight))
    torch.testing.assert_close(output.b, norm.reference(b, weight))
    assert len(calls) == 2 * (kind == "kernel")
    if train:
        output.sum().backward()
        leaf = b.requires_grad_()
        torch.testing.assert_close(x.grad.b, torch.autograd.grad(norm.reference(leaf, weight).sum(), leaf)[0])


class Logged(torch.Tensor):
    """A subclass that notes the operators that reach it."""

    seen: ClassVar[list] = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


@pytest.mark.sweep
def test_a_subclass_sees_the_operator(norm, op, spelled, inputs):
    Logged.seen.clear()
    x, weight = inputs(False)
    torch.testing.assert_close(spelled(op)(Logged(x), weight), norm.reference(x, weight))
    assert Logged.seen == [op._opoverload]


def test_subclasses_under_compile(norm, op):
    torch._dynamo.reset()
    a, b, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    compiled = torch.compile(lambda x, w: op(x, w) + 1, backend="aot_eager", fullgraph=True)
    output = compiled(TwoTensor(a, b), TwoTensor(weight, weight))
    torch.testing.assert_close(output.b, norm.reference(b, weight) + 1)


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True])
def test_modes_see_the_operator(train, norm, op, spelled, inputs):
    call, (x, weight) = spelled(op), inputs(train)
    call(x, weight)
    with Recording() as mode:
        output = call(x, weight)
    assert mode.seen == [op._opoverload]
    torch.testing.assert_close(output, norm.reference(x, weight))
    if train:
        torch.testing.assert_close(
            torch.autograd.grad(output.sum(), (x, weight)),
            torch.autograd.grad(norm.reference(x, weight).sum(), (x, weight)),
        )


def test_function_modes_see_the_operator(op, inputs):
    class Functions(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    x, weight = inputs(False)
    with Functions() as mode:
        op(x, weight)
    assert op._opoverload in mode.seen


def test_registered_for_a_subclass(kind):
    op = opkit.custom_op(f"tmodes::dispatched_{kind}", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    if kind == "kernel":
        op.register_kernel("cpu", lambda x: x * 2)

    @op.register_torch_dispatch(TwoTensor)
    def _(cls, func, types, args=(), kwargs=None):
        return TwoTensor(args[0].a * 10, args[0].b * 10)

    found = op(TwoTensor(torch.ones(2), torch.ones(2)))
    torch.testing.assert_close(found.a, torch.full((2,), 10.0))
    opkit.remove(op.name)


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True])
def test_modes_see_an_operator_that_was_called_often(train, kind, op, spelled, inputs, calls):
    from torch.fx.experimental.proxy_tensor import make_fx

    call, (x, weight) = spelled(op), inputs(train)
    for _ in range(300):
        call(x, weight)
    with Recording() as mode:
        call(x, weight)
    assert mode.seen == [op._opoverload]
    graph = make_fx(lambda x, w: call(x, w))(x, weight)
    assert op._opoverload in [node.target for node in graph.graph.nodes]
    contexts = functools.partial(create_selective_checkpoint_contexts, [op._opoverload])
    calls.clear()
    checkpoint(lambda x, w: call(x.sin(), w), x, weight, use_reentrant=False, context_fn=contexts)
    assert len(calls) == (kind == "kernel")
    assert type(call(TwoTensor(x, x), weight)) is TwoTensor


@pytest.mark.parametrize("native", [False, True])
def test_a_kernel_may_be_called_first_in_inference_mode(name, native):
    @opkit.custom_op(name, mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    source = (
        "void twice(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i]; }"
    )
    doubled.register_kernel("cpu", opkit.c_kernel(source) if native else lambda x: x * 2)
    with torch.inference_mode():
        for x in (torch.ones(3), torch.ones(2, 3).t()):
            assert (doubled(x) == 2).all()
            assert doubled(x).is_inference()


def test_a_kernel_gets_the_arguments_that_the_dispatcher_leaves_out(name):
    @opkit.custom_op(name, mutates_args=())
    def scaled(x: torch.Tensor, by: float = 2.0, *, plus: float = 1.0) -> torch.Tensor:
        return x * by + plus

    scaled.register_kernel("cpu", lambda x, by, *, plus: x * by + plus)
    with torch.inference_mode():
        assert (scaled._opoverload(torch.ones(3)) == 3).all()
        assert (scaled._opoverload(torch.ones(3), 2.0, plus=0.0) == 2).all()


def profiled(function):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        function()
    return [event.name for event in found.events()]


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("seen_before", [False, True])
def test_the_profiler_shows_operator_and_kernel(train, seen_before, kind, op, spelled, inputs):
    call, (x, weight) = spelled(op), inputs(train)
    if seen_before:
        call(x, weight)
    names = profiled(lambda: call(x, weight))
    name = op.name
    assert names.count(name) == 1
    chosen = "numpy_norm" if kind == "kernel" else "reference"
    assert any(shown.startswith(name) and chosen in shown for shown in names), names


def test_the_profiler_shows_the_kernel_of_compiled_code(norm_kernel, spelled, inputs):
    call, (x, weight) = spelled(norm_kernel), inputs(False)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: call(x, weight) + 1, backend="aot_eager", fullgraph=True)
    compiled(x)
    names = profiled(lambda: compiled(x))
    assert any("tnorm::norm_kernel" in name and "numpy_norm" in name for name in names), names


def test_the_profiler_shows_the_backward(norm_kernel, inputs):
    x, weight = inputs()
    output = norm_kernel(x, weight).sum()
    names = profiled(lambda: output.backward())
    assert any("tnorm_norm_kernel" in name for name in names), names
