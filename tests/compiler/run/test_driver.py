"""The driver: what it calls itself and what through Python, who owns tensors, and what becomes of errors."""

import contextlib
import dataclasses
import gc
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import opkit
from opkit import _core
from opkit.compiler import backend, graph_cache
from opkit.compiler.backend import opkit_backend
from opkit.compiler.run import driver, torch_operators
from opkit.compiler.run.runner import Runner, assemble
from opkit.ship.products import pack_convolution, pack_linear


@pytest.fixture
def runners(monkeypatch):
    """The runners that are made, in order."""
    torch._dynamo.reset()
    found: list[Runner] = []
    monkeypatch.setattr(graph_cache, "assemble", lambda *given: found.append(assemble(*given)) or found[-1])
    return found


def compiled(function, **more):
    return torch.compile(function, backend=opkit_backend, options={"strict": True}, **more)


def layers(x, w, b):
    return torch.relu(torch.relu(x @ w.t() + b) @ w)


@opkit.custom_op("driver_test::doubled")
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


seen: list[bool] = []
watched: list[weakref.ref[torch.UntypedStorage]] = []


@doubled.register_kernel("cpu")
def watching(x):
    seen.append(watched[0]() is None if watched else False)
    return x * 2


GIVEN = (torch.randn(4, 6), torch.randn(5, 6), torch.randn(5))


# ---- values ----------------------------------------------------------------------------------------------------------


def test_a_graph_of_products_and_kernels_calls_no_python(runners):
    torch.testing.assert_close(compiled(layers)(*GIVEN), layers(*GIVEN))
    assert runners[0].code.python == ""


@contextlib.contextmanager
def at_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


PRODUCTS = {
    "mm": lambda x, y: x @ y,
    "bmm": lambda x, y: torch.bmm(x.expand(3, *x.shape), y.expand(3, *y.shape)),
    "addmm": lambda x, y: torch.addmm(x @ y, x, y, beta=0.5, alpha=-2),
    "baddbmm": lambda x, y: torch.baddbmm(
        (x @ y).expand(2, 7, 3), x.expand(2, 7, 5), y.expand(2, 5, 3), beta=2, alpha=3
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products(product, dtype, runners):
    x, y = ((torch.randn(n, m, dtype=torch.float64) * 4).to(dtype) for n, m in ((7, 5), (5, 3)))
    given = compiled(lambda x, y: product(x, y) + 1)(x, y)
    close: dict[str, Any] = {"rtol": 0.05, "atol": 0.3} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(given, product(x, y) + 1, **close)
    assert any(isinstance(f, tuple) for f in runners[0].code.functions) == dtype.is_floating_point


OPERANDS = {  # left and right operands, of 70 numbers that are summed, or 300
    "rows": lambda: (torch.randn(65, 300), torch.randn(300, 1030)),
    "columns": lambda: (torch.randn(70, 65).t(), torch.randn(90, 70).t()),
    "parts": lambda: (torch.randn(80, 100)[3:68, 7:77], torch.randn(70, 200)[:, 5:70]),
    "batches": lambda: (torch.randn(3, 64, 70), torch.randn(3, 66, 70).mT),
    "one for all": lambda: (torch.randn(64, 70).expand(3, 64, 70), torch.randn(70, 64).expand(3, 70, 64)),
    "not finite": lambda: (torch.randn(64, 70), torch.full((70, 64), torch.inf)),
}


@pytest.mark.parametrize("made", OPERANDS.values(), ids=OPERANDS)
def test_own_products(made, runners, monkeypatch):
    monkeypatch.setattr(driver, "has_own_products", lambda: True)
    fast, (x, y) = compiled(lambda x, y: torch.matmul(x, y)), made()
    for isa in _core.isas():
        monkeypatch.setenv("OPKIT_ISA", isa)
        fast(x, y)
        driver.products("cpu")  # reads the variable
        found = fast(x, y)
        torch.testing.assert_close(found.double(), x.double() @ y.double(), rtol=0, atol=1e-4, equal_nan=True)
        if x.ndim == 2 and found.isfinite().all():  # the bits of these kernels, which torch's products have not
            packed = pack_linear(y.t())
            assert torch.equal(found, torch.ops.opkit.packed_linear(x, packed, y.shape[1], None, "none"))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_own_products_do_not_depend_on_threads_and_rows(threads, monkeypatch):
    monkeypatch.setattr(driver, "has_own_products", lambda: True)
    x, y = torch.randn(300, 600), torch.randn(600, 700)
    fast = compiled(lambda x, y: torch.matmul(x, y), dynamic=True)
    expected = fast(x, y)
    with at_threads(threads):
        assert torch.equal(fast(x[100:170], y), expected[100:170])
        assert torch.equal(fast(x, y[:, :65]), expected[:, :65])


def test_convolutions_with_one_tap_are_own_products(monkeypatch):
    monkeypatch.setattr(driver, "has_own_products", lambda: True)
    x, w, g = torch.randn(2, 80, 9, 8), torch.randn(70, 80, 1, 1), torch.randn(2, 70, 9, 8)
    rows, grads = (each.movedim(1, 3).flatten(0, 2) for each in (x, g))
    x, w = (each.to(memory_format=torch.channels_last).requires_grad_() for each in (x, w))
    multiply, fast = (compiled(each, dynamic=False) for each in (torch.matmul, torch.conv2d))
    matrix = w.detach()[:, :, 0, 0]
    with at_threads(1):  # torch.compile compiles again for several, with which torch's are as fast
        y = fast(x, w)
        y.backward(g)
    assert torch.equal(y.movedim(1, 3).flatten(0, 2), multiply(rows, matrix.t()))
    assert torch.equal(x.grad.movedim(1, 3).flatten(0, 2), multiply(grads, matrix))
    assert torch.equal(w.grad[:, :, 0, 0], multiply(grads.t(), rows))


def by_winograd(x, w, padding):
    settings = ((3, 3), (1, 1), padding, (1, 1), 1, len(w), 2, "none")
    return torch.ops.opkit.packed_convolution(x, pack_convolution(w, 1, 2), None, None, *settings)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("shape", "channels"), [((3, 32, 11, 12), 48), ((1, 256, 16, 18), 256)], ids=["plain", "large weight"]
)
def test_convolutions_by_winograds_method(threads, layout, shape, channels, monkeypatch):
    monkeypatch.setattr(driver, "has_own_products", lambda: True)
    x, w = torch.randn(shape), torch.randn(channels, shape[1], 3, 3)
    x, w = (each.to(memory_format=layout).requires_grad_() for each in (x, w))
    g = torch.randn(shape[0], channels, shape[2], shape[3] - 2)
    for isa in _core.isas():
        monkeypatch.setenv("OPKIT_ISA", isa)
        with at_threads(threads):
            y = compiled(lambda x, w: torch.conv2d(x, w, padding=(1, 0)), dynamic=False)(x, w)
            (image,) = torch.autograd.grad(y, x, g)
        assert torch.equal(
            y, by_winograd(x.detach(), w.detach(), (1, 0))
        )  # the bits of these kernels, which torch has not
        assert torch.equal(image, by_winograd(g, w.detach().transpose(0, 1).flip(2, 3), (1, 2)))


@pytest.mark.parametrize("number", [torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("which", [0, 1])
def test_numbers_that_are_not_finite_in_convolutions_by_winograds_method(which, number, monkeypatch):
    monkeypatch.setattr(driver, "has_own_products", lambda: True)
    args = torch.randn(2, 32, 14, 14), torch.randn(32, 32, 3, 3)
    args[1][4, 5, 0, 1] = 1e-9  # times infinity it is infinity
    args[which][1, 5, 2, 2] = number
    expected = torch.conv2d(*args, padding=1)
    torch.testing.assert_close(
        compiled(lambda x, w: torch.conv2d(x, w, padding=1))(*args), expected, equal_nan=True, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("vendor", "own"), [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)])
def test_whose_products_are_called(vendor, own, monkeypatch):
    monkeypatch.setattr(driver._core, "x86_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    theirs = driver._address("aoti_torch_cpu_mm_out")
    assert (driver.products("cpu")["aten.mm.default"] != theirs) == own
    rounded = types.SimpleNamespace(fp32_precision="bf16")  # torch may round to bfloat16
    monkeypatch.setattr(torch.backends.mkldnn, "matmul", rounded)
    assert driver.products("cpu")["aten.mm.default"] == theirs


@pytest.mark.parametrize("batch", [(), (2,)])
def test_products_that_add_before_they_round(batch, runners, monkeypatch):
    target = dataclasses.replace(backend._target(), narrow_products=True)
    monkeypatch.setattr(backend, "_target", lambda: target)
    c, x, y = (torch.randn(*batch, n, m).bfloat16() for n, m in ((7, 3), (7, 5), (5, 3)))
    function = torch.baddbmm if batch else torch.addmm
    given = compiled(lambda *of: function(*of).relu())(c + 0, x, y)
    torch.testing.assert_close(given, function(c, x, y).relu())
    assert [target for (target,) in runners[0].code.functions] == [f"aten.{function.__name__}.default"]


def test_products_go_through_python_where_the_shim_has_none(runners, monkeypatch):
    monkeypatch.setattr(driver, "products", lambda device: dict.fromkeys(driver.PRODUCTS, 0))
    called = []
    original = torch_operators.into
    monkeypatch.setattr(torch_operators, "into", lambda *given: called.append(given) or original(*given))
    torch.testing.assert_close(compiled(layers)(*GIVEN), layers(*GIVEN))
    assert len(called) == 2


@pytest.mark.sweep(1)
@pytest.mark.parametrize("sizes", [(4, 0, 5), (0, 6, 5), (4, 6, 0)])
def test_empty_products(sizes):
    n, k, m = sizes
    x, w, b = torch.randn(n, k), torch.randn(m, k), torch.randn(m)
    torch.testing.assert_close(compiled(layers)(x, w, b), layers(x, w, b))


@pytest.mark.exhaustive
def test_sizes_that_change(runners):
    fast = compiled(layers, dynamic=True)
    for n in (4, 7, 4, 1, 30):
        x = torch.randn(n, 6)[:, :]
        torch.testing.assert_close(fast(x, *GIVEN[1:]), layers(x, *GIVEN[1:]))
    assert len({id(r) for r in runners}) <= 2


def test_parts_of_larger_tensors():
    x, w = torch.randn(9, 8)[3:7, 1:7], torch.randn(7, 12)[1:6, ::2]
    torch.testing.assert_close(compiled(layers)(x, w, GIVEN[2]), layers(x, w, GIVEN[2]))


# ---- who owns tensors ------------------------------------------------------------------------------------------------


def test_nothing_is_held_after_a_call():
    torch._dynamo.reset()
    fast = compiled(layers)
    fast(*GIVEN)
    inputs = [t.clone() for t in GIVEN]
    died = [weakref.ref(t) for t in inputs]
    result = fast(*inputs)
    died.append(weakref.ref(result))
    del inputs, result
    gc.collect()
    assert [each() for each in died] == [None] * len(died)


def _ordered(runner, given=GIVEN):
    """These tensors in the order of a runner's inputs, by their sizes."""
    by_size = {tuple(t.shape): t for t in given}
    shapes = [tuple(s.constant for s in runner.plan.buffers[name].shape) for name in runner.plan.inputs]
    return [by_size[shape] for shape in shapes]


def test_an_input_goes_after_its_last_use(runners):
    compiled(lambda x, y: doubled(torch.relu(x @ y)))(torch.randn(3, 3), torch.randn(3, 3))
    inputs = [torch.randn(3, 3), torch.randn(3, 3)]
    storage = inputs[0].untyped_storage()
    watched[:] = [weakref.ref(storage)]
    del storage
    seen.clear()
    runners[0](inputs)
    watched.clear()
    assert seen == [True]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_of_torchs_is_raised_as_it_is_and_nothing_is_held(runners):
    compiled(layers)(*GIVEN)
    inputs = [torch.randn(4, 9) if t is GIVEN[0] else t.clone() for t in _ordered(runners[0])]
    died = [weakref.ref(t) for t in inputs]
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        runners[0](inputs)
    gc.collect()
    assert [each() for each in died] == [None] * len(died)
    torch.testing.assert_close(runners[0](_ordered(runners[0]))[0], layers(*GIVEN))


def test_an_error_of_a_python_kernel(runners):
    def broken(x):
        raise KeyError("mine")

    fast = compiled(lambda x: doubled(x + 1) @ x)
    fast(torch.randn(3, 3))
    x = torch.randn(3, 3)
    died = weakref.ref(x)
    doubled.register_kernel("cpu")(broken)
    try:
        with pytest.raises(KeyError, match="mine"):
            runners[0]([x])
    finally:
        doubled.register_kernel("cpu")(watching)
    del x
    gc.collect()
    assert died() is None


def test_memory_that_there_is_not():
    x = torch.ones(1)
    with pytest.raises(RuntimeError, match="allocate"):
        compiled(lambda x: x.expand(1 << 55) + 1)(x)


def test_an_index_out_of_range_names_its_segment():
    x, at = torch.randn(4, 4), torch.tensor([0, 9])
    with pytest.raises(IndexError, match="index 9 is out of range"):
        compiled(lambda x, at: (x @ x)[at] + 1)(x, at)


def test_none_in_the_place_of_a_tensor(runners):
    compiled(layers)(*GIVEN)
    with pytest.raises((TypeError, RuntimeError)):
        runners[0]([None] * 3)
    torch.testing.assert_close(runners[0](_ordered(runners[0]))[0], layers(*GIVEN))


def test_a_graph_without_kernels_needs_no_compiler(settings):
    torch._dynamo.reset()
    settings(cc="/no/compiler")
    x = torch.randn(5, 5)
    torch.testing.assert_close(torch.compile(torch.mm, backend=opkit_backend)(x, x), x @ x)


def test_another_number_of_inputs(runners):
    compiled(layers)(*GIVEN)
    with pytest.raises((RuntimeError, ValueError), match="inputs"):
        runners[0](list(GIVEN[:2]))


# ---- what surrounds a call -------------------------------------------------------------------------------------------


class PythonNames(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
def test_modes_and_profilers_see_products(runners):
    compiled(layers)(*GIVEN)
    with PythonNames() as mode:
        runners[0](_ordered(runners[0]))
    assert mode.names.count("aten::mm.out") == 2
    with torch.profiler.profile() as profile:
        runners[0](_ordered(runners[0]))
    assert sum(event.name == "aten::mm" for event in profile.events() or ()) == 2


def test_modes_see_convolutions(runners, monkeypatch):
    monkeypatch.setattr(driver, "has_own_products", lambda: True)
    x, w = torch.randn(2, 32, 14, 14), torch.randn(32, 32, 3, 3)
    expected = compiled(lambda x, w: torch.conv2d(x, w, padding=1))(x, w)
    with FlopCounterMode(display=False) as counter:
        (found,) = runners[0](_ordered(runners[0], (x, w)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert counter.get_total_flops() == 2 * 9 * 32 * expected.numel()


def test_flops_are_counted(runners):
    compiled(layers)(*GIVEN)
    with FlopCounterMode(display=False) as counter:
        runners[0](_ordered(runners[0]))
    assert counter.get_total_flops() == 2 * 2 * 4 * 6 * 5


def test_inference_mode_gives_inference_tensors():
    with torch.inference_mode():
        given = compiled(layers)(*GIVEN)
    assert given.is_inference()
    torch.testing.assert_close(given, layers(*GIVEN))


def test_threads():
    fast = compiled(lambda x: doubled(x @ x) @ x + 1)
    x = torch.randn(16, 16)
    expected = fast(x)
    wrong = []

    def work():
        for _ in range(50):
            if not torch.equal(found := fast(x), expected):
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_training_step_goes_without_aotautograd_after_the_first(cache):
    w = torch.randn(5, 6, requires_grad=True)
    fast = compiled(lambda x, b: layers(x, w, b))
    nodes = []
    for _ in range(3):
        y = fast(GIVEN[0], GIVEN[2])
        nodes.append(type(y.grad_fn).__module__ + y.grad_fn.name())
        (given,) = torch.autograd.grad(y.square().sum(), w)
        (expected,) = torch.autograd.grad(layers(GIVEN[0], w, GIVEN[2]).square().sum(), w)
        torch.testing.assert_close(given, expected)
    assert nodes[0] != nodes[1] == nodes[2]
