"""Calls through the bridge: in C where nothing needs Python, and as without it everywhere else."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import opkit
from opkit import config
from opkit.errors import ArgumentTypeError, KernelError
from opkit.kernels import bridge
from opkit.op.torch_paths import torch_paths

HERE, INCLUDE = Path(__file__).parent, Path(bridge.__file__).parents[1] / "include"


class Native:
    """The C fixture, the bridge, and what is installed through it."""

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.library, self.path = library, path
        library.calls.restype = ctypes.c_int64
        self.bridge = bridge.Bridge(path, self.address("runtime"))

    def address(self, symbol: str) -> int:
        return ctypes.addressof(ctypes.c_char.in_dll(self.library, symbol))

    def install(self, op: Any, kernel: str, device: str = "cpu") -> bridge.Installed:
        name = op if isinstance(op, str) else op.name
        return self.bridge.install(name, "", device, self.address(f"{kernel}_kernel"))

    def calls(self, function: Callable[[], Any]) -> tuple[Any, int]:
        """What ``function`` returns, and how many calls ran in C meanwhile."""
        before = self.library.calls()
        return function(), self.library.calls() - before


@pytest.fixture(scope="session")
def native(tmp_path_factory) -> Native:
    folder, paths = tmp_path_factory.mktemp("bridge"), torch_paths()
    settings = config.Config(cache_dir=folder / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "get", lambda: settings)
        path = bridge.build(paths)
        assert bridge.status(paths).state == "built"
        assert bridge.load(paths, 0).torch_version in torch.__version__
    command = ["gcc", "-std=c11", "-O1", "-fPIC", "-shared", f"-I{INCLUDE}", str(HERE / "bridge_fixture.c")]
    command += ["-o", str(folder / "fixture.so"), f"-L{paths.library_dir}", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return Native(ctypes.CDLL(str(folder / "fixture.so")), path)


def define(name: str, function: Callable[..., Any], **options: Any) -> Any:
    op = opkit.custom_op(f"bridge_test::{name}", **({"mutates_args": ()} | options))(function)
    op.register_kernel("cpu", function, name="python")
    return op


@pytest.fixture
def plus_one(native) -> Iterator[Any]:
    def plus_one(x: Tensor) -> Tensor:
        return x + 1

    op = define("plus_one", plus_one)
    installed = native.install(op, "plus_one")
    yield types.SimpleNamespace(op=op, call=op._opoverload, installed=installed)
    installed.remove()
    opkit.remove(op.name)


@pytest.fixture
def add_one_(native) -> Iterator[Any]:
    def add_one(x: Tensor) -> None:
        x.add_(1)

    op = define("add_one", add_one, mutates_args=("x",))
    installed = native.install(op, "void")
    yield op._opoverload
    installed.remove()
    opkit.remove(op.name)


# ---- where it runs --------------------------------------------------------------------------------------------------


def test_plain_calls_run_in_c(native, plus_one):
    for x in (torch.randn(4), torch.randn(2, 3).t(), torch.randn(0), torch.randn(()), torch.nn.Parameter(torch.ones(2), False)):
        y, calls = native.calls(lambda x=x: plus_one.call(x))
        torch.testing.assert_close(y, x.detach() + 1)
        assert calls == 1
        assert not y.requires_grad
        _, calls = native.calls(lambda x=x: torch.ops.bridge_test.plus_one(x))
        assert calls == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_wanted(native, plus_one, mode):
    x = torch.randn(4, requires_grad=True)
    with mode():
        y, calls = native.calls(lambda: plus_one.call(x))
        again, more = native.calls(lambda: plus_one.call(y))
    assert (calls, more) == (1, 1)
    assert not y.requires_grad
    assert again.is_inference() == (mode is torch.inference_mode)


def test_gradients_go_through_python(native, plus_one):
    x = torch.randn(4, requires_grad=True)
    y = plus_one.call(x)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x.detach() + 1))
    leaf = torch.randn(3, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: plus_one.call(t.float()).double(), leaf.double().detach().requires_grad_(), eps=1e-2, atol=1e-2)  # fmt: skip


@pytest.mark.parametrize("needs", ["optional", "list"])
def test_any_tensor_can_need_a_gradient(native, needs):
    def plus_optional(x: Tensor, y: Tensor | None = None) -> Tensor:
        return x + 1 if y is None else x + 1 + 0 * y

    def plus_all(x: Tensor, others: list[Tensor]) -> Tensor:
        return torch.stack([x + 1, *others]).sum(0)

    function, kernel = (plus_optional, "plus_one_optional") if needs == "optional" else (plus_all, "plus_all")
    op = define(f"any_{needs}", function)
    installed = native.install(op, kernel)
    x, y = torch.randn(4), torch.randn(4)
    wrapped = (lambda t: t) if needs == "optional" else (lambda t: [t] * 70)
    result, calls = native.calls(lambda: op._opoverload(x, wrapped(y)))
    assert calls == 1
    torch.testing.assert_close(result, function(x, wrapped(y)))
    y.requires_grad_()
    result, calls = native.calls(lambda: op._opoverload(x, wrapped(y)))
    assert result.requires_grad
    result.sum().backward()
    assert y.grad is not None
    if needs == "optional":
        assert native.calls(lambda: op._opoverload(x, None))[1] == 1
        assert native.calls(lambda: op._opoverload(x))[1] == 1
    installed.remove()


def test_every_kind_of_argument(native):
    schema = (
        "every(Tensor x, SymInt i, float f, bool b, str s, ScalarType dtype, SymInt[] ints, float[] floats, bool[] bools, "
        "SymInt? oi=None, float? of=None, str? os=None, Device? device=None) -> Tensor"
    )
    library = torch.library.Library("bridge_every", "DEF")
    library.define(schema)
    library.impl("every", lambda x, *_, **__: x.new_zeros(x.shape), "CompositeExplicitAutograd")
    installed = native.install("bridge_every::every", "every")
    x, ints = torch.zeros(12), list(range(300))
    given = (x, 7, 0.5, True, "ab", torch.bfloat16, ints, [0.25, 0.5], [True, False, True])
    result, calls = native.calls(lambda: torch.ops.bridge_every.every(*given))
    first = [7, 0.5, 1, ord("a") + 2 * ord("b"), 15, sum(ints), 0.75, 2]
    assert calls == 1
    assert result.tolist() == [*first, -1, -1, -1, 0]
    result = torch.ops.bridge_every.every(*given, -3, 1, "", torch.device("cpu"))
    assert result.tolist() == [*first, -3, 1, 0, 1]
    assert torch.ops.bridge_every.every(x, 1, 1.0, False, "", torch.int8, [], [], [])[:8].tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    installed.remove()
    assert not torch.ops.bridge_every.every(*given).any()
    library._destroy()


def test_several_outputs(native):
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2

    op = define("both", both)
    installed = native.install(op, "two")
    x = torch.randn(3)
    (y, z), calls = native.calls(lambda: op._opoverload(x))
    assert calls == 1
    torch.testing.assert_close((y, z), (x + 1, x + 2))
    installed.remove()


# ---- what needs Python ----------------------------------------------------------------------------------------------


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
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    torch.testing.assert_close(plus_one.call(conjugate), conjugate.resolve_conj() + 1)
    zero = torch._efficientzerotensor(4)
    assert plus_one.call(zero).tolist() == [1.0] * 4
    dense = torch.randn(3, 3)
    _, calls = native.calls(lambda: pytest.raises(Exception, plus_one.call, dense.to_sparse()))
    assert calls == 0


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
        plus_one.call(torch.ones(4))
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


# ---- operators that write -------------------------------------------------------------------------------------------


def test_a_stale_backward_raises(native, add_one_):
    weight, buffer = torch.randn(4, requires_grad=True), torch.randn(4)
    product = (weight * buffer).sum()
    expected, version = buffer + 1, buffer._version
    _, calls = native.calls(lambda: add_one_(buffer))
    assert (calls, buffer._version) == (1, version + 1)
    torch.testing.assert_close(buffer, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_versions_without_gradients(native, add_one_):
    leaf = torch.zeros(2, requires_grad=True)
    with torch.no_grad():
        assert native.calls(lambda: add_one_(leaf))[1] == 1
    with torch.inference_mode():
        assert native.calls(lambda: add_one_(leaf))[1] == 1  # below Python's version counter
        inference = torch.zeros(2)
        assert native.calls(lambda: add_one_(inference))[1] == 1
    assert (leaf.tolist(), leaf._version) == ([2.0, 2.0], 2)
    add_one_(inference)
    assert inference.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError):
        add_one_(leaf)


def test_a_written_argument_is_returned(native):
    library = torch.library.Library("bridge_written", "DEF")
    library.define("add_one_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("add_one_", lambda x: x.add_(1), "CompositeExplicitAutograd")
    installed = native.install("bridge_written::add_one_", "in_place")
    x = torch.zeros(3)
    y, calls = native.calls(lambda: torch.ops.bridge_written.add_one_(x))
    assert calls == 1
    assert y is x
    assert (x.tolist(), x._version) == ([1.0] * 3, 1)
    installed.remove()
    library._destroy()


# ---- refusals and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [torch.ones(1, 1, 2), torch.ones(2, dtype=torch.float64)])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_what_c_refuses_runs_in_python(native, plus_one, x, mode):
    plus_one.call(x)  # a first call in inference mode would be one too many for the check of kernels
    with mode():
        y, calls = native.calls(lambda: plus_one.call(x))
    assert calls == 0
    torch.testing.assert_close(y, x + 1)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_an_error_in_c_is_its_message(native, plus_one, mode):
    with mode(), pytest.raises(RuntimeError) as caught:
        plus_one.call(torch.ones(1, 1, 1, 1))
    assert type(caught.value) is RuntimeError
    assert str(caught.value) == "bridge_test::plus_one: 100% too many dimensions"


@pytest.mark.parametrize("error", [KeyError("k"), StopIteration("s"), KeyboardInterrupt(), KernelError("mine")])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_python_errors_keep_their_type(native, plus_one, error, mode):
    def failing(x: Tensor) -> Tensor:
        raise error

    plus_one.op.register_kernel("cpu", failing, priority=1)
    x = torch.ones(1, 1, 2)
    with mode(), pytest.raises(type(error)) as caught:
        plus_one.call(x)
    assert caught.value.args == error.args


def test_none_for_a_tensor_is_explained(native, plus_one):
    with pytest.raises(ArgumentTypeError, match="the argument x must be a tensor"):
        plus_one.call(None)


# ---- installing -----------------------------------------------------------------------------------------------------


def test_removing_and_switching_off(native, plus_one):
    x, count = torch.ones(2), lambda: native.calls(lambda: plus_one.call(x))[1]
    assert count() == 1
    plus_one.installed.enabled = False
    assert (count(), plus_one.installed.enabled) == (0, False)
    plus_one.installed.enabled = True
    assert count() == 1
    with pytest.raises(KernelError, match="AutogradCPU already"):
        native.install(plus_one.op, "plus_one")
    plus_one.installed.remove()
    plus_one.installed.remove()
    assert not plus_one.installed.enabled
    for key in ("AutogradCPU", "CPU"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(plus_one.op.name, key)
    assert count() == 0
    torch.testing.assert_close(plus_one.call(x.requires_grad_()).requires_grad, True)
    again = native.install(plus_one.op, "plus_one")
    assert native.calls(lambda: plus_one.call(x.detach()))[1] == 1
    again.remove()


def test_an_operator_limited_to_a_device(native, recwarn):
    op = opkit.custom_op("bridge_test::limited", mutates_args=(), device_types="cpu")(_limited)
    installed = native.install(op, "plus_one")
    assert native.calls(lambda: op._opoverload(torch.ones(2)))[1] == 1
    assert op._opoverload(torch.ones(1, 1, 2)).tolist() == [[[2.0, 2.0]]]
    installed.remove()
    y, calls = native.calls(lambda: op._opoverload(torch.ones(2)))
    assert (y.tolist(), calls, len(recwarn)) == ([2.0, 2.0], 0, 0)
    opkit.remove(op.name)


def _limited(x: Tensor) -> Tensor:
    return x + 1


def test_mistakes_are_named(native, plus_one):
    plus_one.installed.remove()
    for name, kernel, device, message in (
        ("bridge_test::none", "plus_one", "cpu", "there is no operator bridge_test::none"),
        ("bridge_test::plus_one", "plus_all", "cpu", "the kernel was made for plus_all_kernel"),
        ("bridge_test::plus_one", "plus_one", "mps", "only for cpu, cuda"),
        ("aten::view", "plus_all", "cuda", "aten::view"),
    ):
        with pytest.raises(KernelError, match=message):
            native.install(name, kernel, device)


# ---- threads and memory ---------------------------------------------------------------------------------------------


def test_threads(native, plus_one):
    failures = []

    def work(needs):
        for i in range(2000):
            x = torch.full((4,), float(i), requires_grad=needs and i % 50 == 0)
            y = plus_one.call(x)
            if y.tolist() != [i + 1.0] * 4 or y.requires_grad != x.requires_grad:
                failures.append(i)

    threads = [threading.Thread(target=work, args=(needs,)) for needs in (False, True, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_nothing_leaks(native, plus_one, add_one_):
    x, refused, failing = torch.ones(1 << 14), torch.ones(1, 1, 1 << 14), torch.ones(1, 1, 1, 1)
    references, start = sys.getrefcount(x), 0
    for i in range(10_500):
        if i == 500:
            start = resident()
        plus_one.call(x)
        add_one_(x)
        if i % 20 == 0:
            plus_one.call(refused)
            pytest.raises(RuntimeError, plus_one.call, failing)
    gc.collect()
    assert sys.getrefcount(x) == references
    assert x.untyped_storage()._use_count() <= 2 if hasattr(x.untyped_storage(), "_use_count") else True
    assert resident() - start < 100e6  # 10,000 outputs are 655 MB
