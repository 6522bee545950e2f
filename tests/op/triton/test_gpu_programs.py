"""Compiled programs with Triton kernels on a GPU: how many kernels they launch, ahead of time, in Gluon, on another GPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import opkit

pytestmark = pytest.mark.gpu

_FILE = Path(__file__).parent / "kernels.py"


@pytest.fixture(scope="module")
def ops():
    for op in [op for op in opkit.operators() if op.name.startswith("triton_tests::")]:
        opkit.remove(op.name)
    spec = importlib.util.spec_from_file_location("triton_gpu_programs", _FILE)
    module = sys.modules["triton_gpu_programs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launched(function, *args):
    """The names of the kernels that one call launches, after one that compiles."""
    function(*args)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        function(*args)
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in events if not event.name.startswith(("Mem", "Activity"))]


def test_what_is_around_a_kernel_is_one_kernel_on_each_side(ops):
    def around(x):
        return torch.relu(ops.scaled(x * 2 + 1) + 3) * x

    x = torch.randn(64, 128, device="cuda")
    names = launched(torch.compile(around, fullgraph=True), x)
    assert len(names) == 3
    assert sum("_scaled" in name for name in names) == 1
    assert len(launched(around, x)) == 6


@pytest.mark.skipif(
    not hasattr(torch._inductor.config, "epilogue_fusion_user_defined_triton_kernel"),
    reason="torch 2.12 and newer fuse what follows a kernel of the user's into it",
)
def test_what_follows_a_kernel_is_fused_into_it(ops):
    def followed(x):
        return torch.relu(ops.scaled(x))

    x = torch.randn(1000, device="cuda")
    with torch._inductor.config.patch(epilogue_fusion_user_defined_triton_kernel=True):
        compiled = torch.compile(followed, fullgraph=True)
        assert len(launched(compiled, x)) == 1
    torch.testing.assert_close(compiled(x), followed(x))


_AHEAD_OF_TIME = """
import sys
import torch

sys.path.insert(0, sys.argv[1])


def plain(x, weight):
    return x * weight


if sys.argv[2] == "kernel":
    from kernels import rms_norm as function
    from opkit import aoti_compile_and_package
    reference = function.reference
else:
    from torch._inductor import aoti_compile_and_package
    function = reference = plain


class Model(torch.nn.Module):
    def forward(self, x, weight):
        return function(x, weight) + 1


x, weight = torch.randn(64, 128, device="cuda"), torch.randn(128, device="cuda")
exported = torch.export.export(Model(), (x, weight), dynamic_shapes=({0: torch.export.Dim("rows")}, None))
package = aoti_compile_and_package(exported, package_path=sys.argv[3])
print("compiled", flush=True)
loaded = torch._inductor.aoti_load_package(package)
for rows in (64, 100):
    x = torch.randn(rows, 128, device="cuda")
    torch.testing.assert_close(loaded(x, weight), reference(x, weight) + 1)
print("right")
"""


def test_ahead_of_time(tmp_path):
    def run(what):
        command = [sys.executable, "-c", _AHEAD_OF_TIME, str(_FILE.parent), what, str(tmp_path / f"{what}.pt2")]
        return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)

    if (done := run("kernel")).returncode == 0:
        return
    assert "compiled" in done.stdout, done.stderr
    plain = run("plain")
    if plain.returncode < 0:
        pytest.skip(f"compiled; torch's loader ends with signal {-plain.returncode} here, whatever it loads")
    raise AssertionError(done.stderr)


def test_gluon():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    @gluon.jit
    def double(x, out, n, BLOCK: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
        gl.store(out + at, gl.load(x + at, at < n) * 2, at < n)

    @opkit.custom_op("triton_gpu::gluon")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    kernel = opkit.triton_kernel(double, grid=lambda n: -(-n // 128), n=lambda x: x.numel, BLOCK=128, num_warps=4)
    op.register_kernel("cuda", kernel)
    x = torch.randn(1000, device="cuda")
    torch.testing.assert_close(op(x), x * 2)
    torch.testing.assert_close(torch.compile(lambda x: op(x) + 1, fullgraph=True)(x), x * 2 + 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compiled", [False, True])
def test_another_gpu_than_the_current_one(ops, compiled):
    function = torch.compile(ops.rms_norm) if compiled else ops.rms_norm
    x, weight = torch.randn(8, 64, device="cuda:1"), torch.randn(64, device="cuda:1")
    for current in (0, 1):
        with torch.cuda.device(current):
            out = function(x, weight)
        assert out.device.index == 1
        torch.testing.assert_close(out, ops.rms_norm.reference(x, weight), rtol=1e-5, atol=1e-5)
