"""torch.compile(backend="opkit") from end to end: what eager does, with fewer calls; and what happens where it fails."""

import copy
import dataclasses
import importlib.metadata
import logging
import os
import threading

import fresh_process
import pytest
import torch

import opkit
from opkit import errors
from opkit.compiler import backend, options
from opkit.compiler.backend import opkit_backend
from opkit.compiler.lower.target import GPU

pytestmark = pytest.mark.usefixtures("fresh")


def compiled(function, strict=True, **more):
    return torch.compile(function, backend=opkit_backend, options={"strict": strict}, **more)


def check(function, *inputs, times=2, **more):
    """The compiled function gives what the eager one does: values, strides, and what is written to inputs."""
    fast = compiled(function, **more)
    for _ in range(times):
        mine, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
        torch.testing.assert_close(fast(*mine), function(*theirs), equal_nan=True)
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    return fast


def mlp(x, w, b):
    return torch.softmax(torch.relu(x @ w + b), -1)


WEIGHTS = (torch.randn(8, 6), torch.randn(6))


# ---- values ----------------------------------------------------------------------------------------------------------


def test_inference():
    check(mlp, torch.randn(5, 8), *WEIGHTS)


def test_training_and_a_second_backward_of_the_same_graph():
    x, w, b = (t.clone().requires_grad_() for t in (torch.randn(5, 8), *WEIGHTS))
    y = compiled(mlp)(x, w, b)
    expected = torch.autograd.grad(mlp(x, w, b).square().sum(), (x, w, b))
    for keep in (True, False):
        given = torch.autograd.grad(y.square().sum(), (x, w, b), retain_graph=keep)
        torch.testing.assert_close(given, expected)


def test_gradients_that_come_with_other_strides():
    x = torch.randn(4, 6, requires_grad=True)
    y = compiled(lambda x: (x * 2).exp())(x)
    expected = torch.autograd.grad((x * 2).exp(), x, torch.ones(6, 4).t())
    torch.testing.assert_close(torch.autograd.grad(y, x, torch.ones(6, 4).t(), retain_graph=True), expected)
    torch.testing.assert_close(torch.autograd.grad(y, x, torch.ones(()).expand(4, 6)), expected)


@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_sizes_that_change(dynamic):
    fast = compiled(lambda x, w, b: mlp(x, w, b) * x.shape[0], dynamic=dynamic)
    for rows in (5, 7, 3, 1, 12):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fast(x, *WEIGHTS), mlp(x, *WEIGHTS) * rows)


@pytest.mark.exhaustive  # test_complex.py trains with sizes that change
def test_sizes_that_change_in_training():
    fast = compiled(mlp, dynamic=True)
    for rows in (5, 7, 3):
        x = torch.randn(rows, 8, requires_grad=True)
        expected = torch.autograd.grad(mlp(x, *WEIGHTS).square().sum(), x)
        torch.testing.assert_close(torch.autograd.grad(fast(x, *WEIGHTS).square().sum(), x), expected)


def test_integer_arguments_also_negative_ones():
    fast = compiled(lambda x, n: x * n + n, dynamic=True)
    for n in (3, 7, -4, 0):
        torch.testing.assert_close(fast(torch.ones(4), n), torch.ones(4) * n + n)


def test_sizes_that_are_maxima():
    check(
        lambda x, y: x.new_zeros(max(x.shape[0], y.shape[0]) + 1).add(1), torch.randn(5), torch.randn(7), dynamic=True
    )


def test_inputs_that_are_written_to():
    def step(x, y):
        x.add_(y).mul_(2)
        y[0] = x.sum()
        return x + y

    check(step, torch.randn(4), torch.randn(4))


@pytest.mark.exhaustive
def test_buffers_of_a_module_in_training():
    model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
    mine, theirs, x = copy.deepcopy(model), copy.deepcopy(model), torch.randn(2, 3, 9)
    for each in (compiled(mine), theirs):
        each(x).sum().backward()
    torch.testing.assert_close(mine[1].running_var, theirs[1].running_var)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_outputs_that_share_memory():
    x = torch.randn(4, 6)
    whole, part, same, given = compiled(lambda x: ((y := x * 2), y[1:, ::2], y, x.t()))(x)
    torch.testing.assert_close(part, (x * 2)[1:, ::2])
    assert whole is same or whole.data_ptr() == same.data_ptr()
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert given.data_ptr() == x.data_ptr()
    assert given.stride() == (1, 6)


def test_results_outlive_the_next_call():
    fast = compiled(lambda x: ((x + 1).cumsum(0), (x * 3)))
    x = torch.randn(64)
    first = fast(x)
    kept = copy.deepcopy(first)
    fast(x + 5)
    torch.testing.assert_close(first, kept)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("shape", [(0, 3), (), (1,), (3, 0)])
def test_empty_and_scalar_tensors(shape):
    check(lambda x: (x + 1, x.sum(), (x * 2).reshape(-1)), torch.randn(shape))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("view", [torch.t, lambda x: x[:1].expand(6, 6), lambda x: x[1:, 2:], lambda x: x[::2]])
def test_inputs_that_are_views(view):
    base = torch.randn(6, 6)
    fast = compiled(lambda x: (x.relu() + 1) @ x.t())
    torch.testing.assert_close(fast(view(base)), (view(base).relu() + 1) @ view(base).t())


@pytest.mark.exhaustive
def test_lazy_conjugates_and_negations():
    z = torch.randn(5, dtype=torch.complex64)
    for given in (z.conj(), z.conj().imag, z.conj().real):
        torch.testing.assert_close(compiled(lambda x: x * 2 + 1)(given), given * 2 + 1)


@pytest.mark.exhaustive
def test_complex_gradients():
    z = torch.randn(5, dtype=torch.complex64, requires_grad=True)
    expected = torch.autograd.grad((z * z.conj()).real.sum(), z)
    torch.testing.assert_close(torch.autograd.grad(compiled(lambda z: (z * z.conj()).real)(z).sum(), z), expected)


# ---- modes -----------------------------------------------------------------------------------------------------------


def test_inference_mode_first_and_then_none():
    fast, x = compiled(lambda x: torch.mm(x, x).relu().mm(x)), torch.randn(4, 4)
    with torch.inference_mode():
        assert fast(x).is_inference()
    torch.testing.assert_close(fast(x), torch.mm(x, x).relu().mm(x))
    y = x.clone().requires_grad_()
    fast(y).sum().backward()


def test_autocast():
    linear, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    fast = compiled(linear)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(x).dtype == torch.bfloat16
        torch.testing.assert_close(fast(x), linear(x))
    assert fast(x).dtype == torch.float32


def test_dropout_follows_the_seed():
    fast, x = compiled(lambda x: torch.nn.functional.dropout(x, 0.5)), torch.ones(1000)
    torch.manual_seed(3)
    first, second = fast(x), fast(x)
    torch.manual_seed(3)
    assert torch.equal(fast(x), first)
    assert not torch.equal(first, second)
    assert 400 < int((first != 0).sum()) < 600


def test_threads_at_once():
    fast, failed = compiled(mlp), []
    inputs = [torch.randn(32, 8) for _ in range(4)]
    expected = [mlp(x, *WEIGHTS) for x in inputs]
    fast(inputs[0], *WEIGHTS)

    def run(number):
        for _ in range(50):
            if not torch.allclose(fast(inputs[number], *WEIGHTS), expected[number], atol=1e-6):
                failed.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


FORK = """
import os, torch
from opkit.compiler.backend import opkit_backend
f = torch.compile(lambda x: (x.exp() + 1) * x, backend=opkit_backend, options={"strict": True})
x = torch.randn(1 << 20)
want = f(x)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(f(x), want) else 3)
torch.set_num_threads(1)
assert torch.equal(f(x), want)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Dynamo starts CUDA, which cannot be used in a forked child")
def test_a_forked_child_and_another_number_of_threads():
    fresh_process.run(["-c", FORK])


# ---- operators -------------------------------------------------------------------------------------------------------


def fused(caplog):
    """How many kernels the graphs had that were compiled meanwhile."""
    return [int(r.message.split(": ")[1].split()[0]) for r in caplog.records if r.name == "opkit.compiler.fusion"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("inline", [None, True, False])
@pytest.mark.parametrize("kernel", [False, True])
def test_operators_fuse_unless_they_have_a_kernel(name, inline, kernel, caplog):
    @opkit.custom_op(name, mutates_args=())
    def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by + 1

    calls = []
    if kernel:

        @scaled.register_kernel("cpu", name="counted")
        def _(x, by):
            calls.append(1)
            return x * by + 1

    fast, x = (
        torch.compile(
            lambda x: scaled(x.exp(), 2.0).relu(), backend=opkit_backend, options={"strict": True, "inline": inline}
        ),
        torch.randn(5),
    )
    seen_through = inline if inline is not None else not kernel
    with caplog.at_level(logging.DEBUG, "opkit.compiler.fusion"):
        fast(x)
        calls.clear()
        torch.testing.assert_close(fast(x), (x.exp() * 2 + 1).relu())
    assert fused(caplog) == [1 if seen_through else 2]
    assert len(calls) == (1 if kernel and not seen_through else 0)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strickt": True}, "Did you mean 'strict'"),
        ({"max_autotune": 1}, "no option"),
        ({"strict": "yes"}, "True or False"),
    ],
)
def test_options_are_checked(given, message):
    with pytest.raises(errors.ArgumentError, match=message):
        options.compile_options(given)


@pytest.mark.parametrize(
    ("mode", "cuda_graphs"),
    [("default", None), ("reduce-overhead", True), ("max-autotune", True), ("max-autotune-no-cudagraphs", False)],
)
def test_torchs_modes_decide_on_cuda_graphs(mode, cuda_graphs):
    assert options.compile_options(None, mode).cuda_graphs is cuda_graphs
    assert torch.compile(lambda x: x + 1, backend=opkit_backend, mode=mode)(torch.ones(1)) == 2


def test_an_unknown_mode_is_refused():
    with pytest.raises(Exception, match="no mode 'fastest'; it has 'default', 'reduce-overhead'"):
        torch.compile(lambda x: x + 1, backend=opkit_backend, mode="fastest")(torch.ones(1))


def test_the_setting_and_the_option(settings):
    settings(strict=1)
    assert options.compile_options(None).strict
    assert not options.compile_options({"strict": False}).strict


LOG = """
import torch
from opkit.compiler.backend import opkit_backend
f = torch.compile(lambda x: (x.exp() + 1).sum(), backend=opkit_backend)
f(torch.ones(8)), f(torch.ones(8, 2))
"""


def test_logs():
    run = fresh_process.run(["-c", LOG], os.environ | {"OPKIT_LOG": "fusion,recompiles,output_code"})
    for text in (
        "[opkit:fusion] inference 0: 1 kernels",
        "[opkit:recompiles] Recompiling",
        "opkit_segment_0",
        "def run(",
    ):
        assert text in run.stderr


def test_the_target_of_gpus_follows_torchs_settings(monkeypatch):
    assert backend.gpu_target() == GPU
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert backend.gpu_target() == dataclasses.replace(GPU, deterministic=True, tf32=False)


_INSTALLED = any(point.name == "opkit" for point in importlib.metadata.entry_points(group="torch_dynamo_backends"))

_PROGRAM = """
import sys
import torch

assert "opkit" not in sys.modules
compiled = torch.compile(lambda x: torch.softmax(x, -1) * 2, backend="opkit", options={"strict": True})
x = torch.randn(8, 100)
torch.testing.assert_close(compiled(x), torch.softmax(x, -1) * 2)
assert "opkit" in sys.modules
"""


@pytest.mark.skipif(not _INSTALLED, reason="opkit runs from its sources, and is not installed")
def test_the_backend_is_found_by_name(tmp_path):
    fresh_process.run(["-c", _PROGRAM], cwd=tmp_path)
