"""Kernels for GPUs as Triton: their results in Triton's interpreter, their number, their tiles, and that they compile."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from opkit.compiler.emit.triton.expressions import NotEmittable
from opkit.compiler.emit.triton.source import module, triton_kernel
from opkit.compiler.ir.expr import Callee, call, const, load, op, random
from opkit.compiler.ir.index import Axis, axis, index, size
from opkit.compiler.ir.kernel import Kernel, KernelArgument, KernelLaunch, Loop, Store
from opkit.compiler.ir.ops import OPS
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.scheduling import schedule
from opkit.compiler.lower.target import GPU
from opkit.kernels.triton.compiling import CompileRequest, build
from tests.compiler.emit.gpu_graphs import on_gpu
from tests.compiler.graphs import graph_of, program_of

ROOT = Path(__file__).parents[3]
HERE = "tests/compiler/emit"
RULES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/compiler/lower").glob("test_rules_*.py"))

# ---- results: in a child process, for Triton's interpreter must be on before Triton is imported --------------------------


# The installed opkit is imported before the checkout, with the same name in it, is on the path.
PYTEST = """
import sys
import opkit
import pytest
sys.path.insert(0, sys.argv.pop(1))
from tests.compiler.emit import triton_schedules
raise SystemExit(pytest.main(sys.argv[1:], plugins=[triton_schedules]))
"""


def interpreted(*paths):
    """What pytest prints of files whose kernels run in Triton's interpreter."""
    command = [sys.executable, "-P", "-c", PYTEST, str(ROOT), "-q", "-rs", "-n", "0", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


FURTHER = pytest.param(("-m", "exhaustive"), marks=pytest.mark.exhaustive, id="exhaustive")


@pytest.mark.parametrize("options", [pytest.param((), id="default"), FURTHER])
def test_graphs(options):
    """Graphs against eager, and random numbers, which are those of the kernels in C."""
    random = [f"{HERE}/test_kernel.py::test_random_numbers{rest}" for rest in ("", "_of_a_row_that_is_summed")]
    assert "skipped" not in interpreted(f"{HERE}/triton_graphs.py", *random, *options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", [f"{HERE}/test_kernel.py", *RULES])
def test_the_tests_of_other_stages(path):
    """The tests of lowering, which compare with eager, and those of the kernels in C, which compare with an interpreter."""
    assert " passed" in interpreted(path)


# ---- how many kernels, and their tiles -----------------------------------------------------------------------------------


def kernels(function, *args, sizes=None):
    program = lower(on_gpu(graph_of(function, *args)[0]), GPU)
    launches = [step for step in schedule(program, GPU).steps if isinstance(step, KernelLaunch)]
    return [triton_kernel(launch.kernel, f"kernel_{k}", sizes or {}, GPU.tiles) for k, launch in enumerate(launches)]


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta").new_empty(shape, device="cpu")


def layer_norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b)


ONE_KERNEL = {
    "chain": (lambda x, y: F.silu(x) * y + 1, empty(64, 300), empty(300)),
    "softmax": (lambda x: x.softmax(-1), empty(512, 1000)),
    "softmax of columns": (lambda x: x.softmax(1), empty(4, 100, 200)),
    "log softmax of long rows": (lambda x: x.log_softmax(-1), empty(512, 50257)),
    "layer norm": (layer_norm, empty(512, 768), empty(768), empty(768)),
    "sum": (lambda x: x.sum(-1), empty(4096, 768)),
    "transpose": (lambda x: x.t().contiguous() + 1, empty(512, 768)),
    "small steps": (lambda x, y: (x + 1, y * 2), empty(64), empty(8, 8)),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name):
    assert len(kernels(*ONE_KERNEL[name])) == 1


def test_large_steps_that_share_nothing_are_apart():
    assert len(kernels(lambda x, y: (x + 1, y * 2), empty(1 << 13), empty(1 << 13))) == 2


@pytest.mark.parametrize("name", ["softmax", "layer norm"])
def test_a_row_is_read_once(name):
    (kernel,) = kernels(*ONE_KERNEL[name])
    assert kernel.text.count("tl.load(p0") == 1
    assert "for " not in kernel.text


def test_a_long_row_of_a_softmax_is_read_twice():
    (kernel,) = kernels(*ONE_KERNEL["log softmax of long rows"])
    assert kernel.text.count("in range(0, ") == 2
    assert kernel.text.count("tl.load(p0") == 4  # the last step, with a mask, is apart


def cross_entropy(x, label):
    loss = F.cross_entropy(x, label)
    return torch.autograd.grad(loss, x)


def test_the_label_of_a_row_is_read_and_checked_once():
    x, label = empty(256, 50257).requires_grad_(), torch.zeros(256, dtype=torch.long)
    made = next(k for k in kernels(cross_entropy, x, label) if k.text.count("in range(0, ") == 2)
    before, _, loops = made.text.partition("for ")
    assert before.count("device_assert") == 1
    assert "device_assert" not in loops
    assert all("a1" in line for line in loops.splitlines() if "tl.load" in line)


def gelu_and_bias(x, b):
    y = F.gelu(x + b)
    return y, *torch.autograd.grad(y, (x, b), y)


@pytest.mark.parametrize(("dtype", "short"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_one_plus_erf_is_short_where_results_are_narrow(dtype, short):
    """Also in the kernel that sums a part of the gradient of a bias in float32."""
    x, b = empty(8192, 768, dtype=dtype).requires_grad_(), empty(768, dtype=dtype).requires_grad_()
    text = module(kernels(gelu_and_bias, x, b))
    assert ("q0 + " in text, "opk_one_plus_erf(" in text, "libdevice.erf(" in text) == (True, short, not short)


def test_one_plus_erf_that_is_stored_in_float32_is_not_short():
    (made,) = kernels(lambda x: (F.gelu(x), 1 + torch.erf(x.float())), empty(5000))
    assert "opk_one_plus_erf" not in made.text


LONG = {
    "columns": (lambda x: x.sum(0), empty(8192, 768)),
    "all": (lambda x: x.sum(), empty(8192, 768)),
    "all of a prime number": (lambda x: x.sum(), empty(1_000_003)),
    "few rows": (lambda x: x.sum(1), empty(4, 100_000)),
    "channels": (lambda x: x.sum((0, 2, 3)), empty(32, 64, 56, 56)),
    "columns and a function of them": (lambda x: x.sum(0).exp(), empty(8192, 768)),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_reduction_is_cut_into_parts_that_keep_a_gpu_busy(name):
    first, second = kernels(*LONG[name])
    assert 132 <= first.programs.constant <= 2048
    assert second.programs.constant <= first.programs.constant


def test_rows_next_to_each_other_are_read_together():
    """Also if the step reads values of a row, which lie next to each other along the other axis."""

    def weight_gradient(x, y, mean):
        return (x * (y - mean)).sum(0)

    for dtype, columns in ((torch.bfloat16, 64), (torch.float32, 32)):
        first, _ = kernels(weight_gradient, *(empty(4096, n, dtype=dtype) for n in (256, 256, 1)))
        assert dict(first.constants) == {"XBLOCK": 64, "RBLOCK": columns}


def test_a_norm_of_few_channels_is_cut_into_parts():
    def norm(x):
        return x - x.sum((0, 2, 3), keepdim=True)

    image = empty(8, 64, 32, 32).contiguous(memory_format=torch.channels_last)
    assert [k.programs.constant >= 64 for k in kernels(norm, image)] == [True, False, True]


def test_the_tile_of_a_transpose_has_two_dimensions():
    for function, *args in (
        ONE_KERNEL["transpose"],
        (lambda x: x.permute(0, 2, 1).contiguous(), empty(8, 100, 90)),
        (lambda x: x.contiguous(memory_format=torch.channels_last), empty(2, 64, 56, 56)),
    ):
        (kernel,) = kernels(function, *args)
        assert dict(kernel.constants)["RBLOCK"] >= 32


def test_a_pointwise_kernel_of_few_points_still_has_many_programs():
    (small,), (large,) = (kernels(lambda x: x + 1, empty(n)) for n in (1 << 15, 1 << 24))
    assert dict(small.constants)["XBLOCK"] < dict(large.constants)["XBLOCK"]
    assert small.programs.constant >= 132


# ---- kernels by themselves -------------------------------------------------------------------------------------------------


def pointwise(extent, body, dtype="f32", sizes=(), name="k"):
    at = axis(0, extent)
    arguments = (KernelArgument("p0", dtype, False), KernelArgument("p1", dtype, True))
    return Kernel(name, arguments, sizes, (Loop(Axis(0, extent), (Store("p1", at, body),), "parallel"),))


def test_parameters():
    n = size("s0")
    made = triton_kernel(
        pointwise(n, load("p0", "bf16", axis(0, n)), "bf16", ("s0",)), "first", {"s0": 1 << 20}, GPU.tiles
    )
    assert made.parameters == (("p0", "*bf16"), ("p1", "*bf16"), ("n_s0", "i64"), ("XBLOCK", "constexpr"))
    assert made.constants == (("XBLOCK", 1024),)
    assert made.programs == (n + 1023) // 1024
    assert made.text.startswith("@triton.jit\ndef first(p0, p1, n_s0, XBLOCK: tl.constexpr):\n")


@pytest.mark.parametrize(("extent", "wide"), [(1 << 20, False), (1 << 31, True)])
def test_indices_have_64_bits_where_they_need_them(extent, wide):
    made = triton_kernel(pointwise(index(extent), load("p0", "f32", axis(0, extent))), "k", {}, GPU.tiles)
    assert ("tl.int64" in made.text) == wide


def test_what_cannot_be_emitted():
    body = call(Callee("f", "libf.so", ("f32",), "f32"), load("p0", "f32", axis(0, 8)))
    with pytest.raises(NotEmittable, match="a call of f"):
        triton_kernel(pointwise(index(8), body), "k", {}, GPU.tiles)


def test_checks_are_reported():
    body = load("p0", "f32", axis(0, 8))
    assert not triton_kernel(pointwise(index(8), op("add", body, const(1.0, "f32"))), "k", {}, GPU.tiles).checks
    (made,) = kernels(lambda x, i: x[i], empty(9, 6), torch.tensor([3, 0]))
    assert made.checks


def test_the_schedule_for_a_cpu_is_another():
    program = program_of(lambda x: x.softmax(-1), torch.randn(4, 100))
    (launch,) = schedule(program).steps
    with pytest.raises(NotEmittable, match="memory of the thread"):
        triton_kernel(launch.kernel, "k", {}, GPU.tiles)


# ---- compilation -------------------------------------------------------------------------------------------------------------

COMPILED = {
    **{name: ONE_KERNEL[name] for name in ("chain", "softmax", "layer norm", "transpose", "log softmax of long rows")},
    **{name: LONG[name] for name in ("columns", "all of a prime number")},
    "gradient of a bias": (gelu_and_bias, empty(8192, 768).requires_grad_(), empty(768).requires_grad_()),
    "cross entropy": (cross_entropy, empty(256, 50257).requires_grad_(), torch.zeros(256, dtype=torch.long)),
    "scatter": (lambda x, i: torch.zeros(500, 64).index_add(0, i, x.float()), empty(700, 64), torch.zeros(700, dtype=torch.long)),
    "scatter of bf16": (lambda x, i: (x * 0)[:9].index_add(0, i, x), empty(70, 64), torch.zeros(70, dtype=torch.long)),
    "positions": (lambda x: x.argmax(-1), empty(17, 700)),
    "cumsum": (lambda x: x.cumsum(-1), empty(17, 70)),
    "functions": (lambda x: x.tan() + x.erfc() + x.log1p() + x % 2.5 + x**x + x.round(), empty(99)),
    "double": (lambda x: (x.exp() / x.sin()).sqrt().sum(1), empty(5, 20, dtype=torch.float64)),
    "bytes": (lambda x: (x >> 1, x // 3, x**3, x > 1), empty(99, dtype=torch.uint8)),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_compiled(name, target, tmp_path, monkeypatch):
    compiled(kernels(*COMPILED[name]), target, tmp_path, monkeypatch)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_random_numbers_are_compiled(target, tmp_path, monkeypatch):
    body = random(load("p0", "i64", index(0)), axis(0, 5000), "f32")
    arguments = (KernelArgument("p0", "i64", False), KernelArgument("p1", "f32", True))
    loop = Loop(Axis(0, index(5000)), (Store("p1", axis(0, 5000), body),), "parallel")
    compiled([triton_kernel(Kernel("k", arguments, (), (loop,)), "k", {}, GPU.tiles)], target, tmp_path, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_function_of_floats_is_compiled(target, dtype, tmp_path, monkeypatch):
    at = axis(0, 4096)
    args = [load(p, dtype, at) for p in ("p0", "p1")]
    functions = [f for f in OPS.values() if f.kind == "scalar" and "f" in f.takes and f.numpy and f.result == "same"]
    stores = [Store("p2", at * len(functions) + k, op(f.name, *args[: f.arity])) for k, f in enumerate(functions)]
    arguments = tuple(KernelArgument(p, dtype, p == "p2") for p in ("p0", "p1", "p2"))
    kernel = Kernel("k", arguments, (), (Loop(Axis(0, index(4096)), tuple(stores), "parallel"),))
    compiled([triton_kernel(kernel, "k", {}, GPU.tiles)], target, tmp_path, monkeypatch)


def compiled(made, target, folder, monkeypatch):
    path = folder / "opkit_test_kernels.py"
    path.write_text(module(made))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, loaded)
    spec.loader.exec_module(loaded)
    for kernel in made:
        options = {"num_warps": kernel.warps} | ({"debug": True, "sanitize_overflow": False} if kernel.checks else {})
        pointers = frozenset(name for name, kind in kernel.parameters if kind.startswith("*"))
        function = getattr(loaded, kernel.name)
        request = CompileRequest(
            function, dict(kernel.parameters), dict(kernel.constants), pointers, options=options, target=target
        )
        assert build(request).image
