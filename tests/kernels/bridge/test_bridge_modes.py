"""Calls that need Python get it: derivatives, transforms, compilers, modes, subclasses, profilers."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode


def test_tangents_are_never_dropped(native, plus_one):
    x, tangent = torch.randn(4), torch.randn(4)
    with forward_ad.dual_level():
        for needs, grad_mode in ((False, True), (True, True), (False, False), (True, False)):
            dual = forward_ad.make_dual(x.clone().requires_grad_(needs), tangent)
            with torch.set_grad_enabled(grad_mode):
                y, calls = native.calls(lambda dual=dual: plus_one.call(dual))
            assert calls == 0
            torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, tangent)
        assert native.calls(lambda: plus_one.call(x))[1] == 1


def test_transforms(native, plus_one):
    x, call = torch.randn(3, 4), plus_one.call
    torch.testing.assert_close(torch.func.vmap(call)(x), x + 1)
    torch.testing.assert_close(torch.func.grad(lambda t: call(t).square().sum())(x), 2 * (x + 1))
    torch.testing.assert_close(torch.func.jacrev(call)(x[0]), torch.eye(4))
    torch.testing.assert_close(torch.func.jacfwd(call)(x[0]), torch.eye(4))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda t: call(t).square().sum()))(x), 2 * (x + 1))
    primal, tangent = torch.func.jvp(call, (x,), (x,))
    torch.testing.assert_close((primal, tangent), (x + 1, x))
    torch.testing.assert_close(torch.func.functionalize(call)(x), x + 1)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("needs", [False, True])
def test_compile(native, plus_one, backend, needs):
    torch._dynamo.reset()
    x = torch.randn(4, requires_grad=needs)
    compiled = torch.compile(lambda t: plus_one.call(t) * 2, backend=backend, fullgraph=True, dynamic=True)
    for t in (x, torch.randn(6, requires_grad=needs)):
        torch.testing.assert_close(compiled(t), (t + 1) * 2)
    if needs:
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((4,), 2.0))
    torch._dynamo.reset()


def test_fake_tensors_and_export(native, plus_one):
    with FakeTensorMode():
        y, calls = native.calls(lambda: plus_one.call(torch.empty(3, 5)))
    assert (tuple(y.shape), calls) == ((3, 5), 0)
    assert native.calls(lambda: plus_one.call(torch.empty(3, device="meta")))[1] == 0

    class Module(torch.nn.Module):
        def forward(self, x):
            return plus_one.call(x)

    program = torch.export.export(Module(), (torch.randn(3),))
    assert plus_one.call in [node.target for node in program.graph.nodes]
    y, calls = native.calls(lambda: program.module()(torch.ones(3)))
    assert (y.tolist(), calls) == ([2.0] * 3, 1)


def test_autocast_is_above(native, plus_one):
    x = torch.randn(4)
    with torch.autocast("cpu", torch.bfloat16):
        here = plus_one.call(x)
        plus_one.installed.enabled = False
        without = plus_one.call(x)
    assert here.dtype == without.dtype
    torch.testing.assert_close(here, without)

    plus_one.op.register_autocast("cpu", torch.float64)
    plus_one.installed.enabled = True
    with torch.autocast("cpu", torch.bfloat16):
        assert plus_one.call(x).dtype == torch.float64


def test_lazy_negation_and_other_layouts(native, plus_one):
    negative = torch.randn(4, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    torch.testing.assert_close(plus_one.call(negative), negative.resolve_neg() + 1)
    exclude = torch._C._ExcludeDispatchKeyGuard
    with exclude(torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)):  # the call's keys say nothing of it now
        assert native.calls(lambda: plus_one.call(negative))[1] == 0
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    torch.testing.assert_close(plus_one.call(conjugate), conjugate.resolve_conj() + 1)
    zero = torch._efficientzerotensor(4)
    assert plus_one.call(zero).tolist() == [1.0] * 4
    dense = torch.randn(3, 3)
    with pytest.raises(RuntimeError, match="sparse"):
        plus_one.call(dense.to_sparse())


def test_subclasses_and_modes_see_the_operator(native, plus_one):
    y, calls = native.calls(lambda: plus_one.call(TwoTensor(torch.ones(2), torch.zeros(2))))
    assert type(y) is TwoTensor
    assert (y.a.tolist(), y.b.tolist(), calls) == ([2.0] * 2, [1.0] * 2, 2)  # the inner calls are plain
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        plus_one.call(torch.ones(2))
    assert plus_one.call in seen


def test_the_profiler_sees_operator_and_kernel(native, plus_one):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        plus_one.op(torch.ones(4))
    names = [event.name for event in found.events()]
    assert names.count("bridge_test::plus_one") == 1
    assert "bridge_test::plus_one[python]" in names


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracing(native, plus_one):
    traced = torch.jit.trace(lambda x: plus_one.call(x) * 2, torch.ones(3))
    assert "bridge_test::plus_one" in str(traced.graph)
    y, calls = native.calls(lambda: traced(torch.zeros(3)))
    assert y.tolist() == [2.0] * 3
    assert calls == 1
