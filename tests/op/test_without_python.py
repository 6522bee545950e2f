"""A model with C kernels, compiled by AOTInductor, runs in a program that has no Python in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from opkit.errors import ToolchainError
from opkit.kernels import aot_package
from opkit.kernels.cc import toolchain

pytestmark = pytest.mark.build

RUNNER = Path(__file__).with_name("runner.cpp")

OPERATORS = '''
import opkit, torch
from jaxtyping import Float
from torch import Tensor

@opkit.custom_op("without_python::rms_norm")
def rms_norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

rms_norm.register_kernel("cpu", opkit.c_kernel("""
    void rms_norm(const T* x, const T* weight, double eps, T* out, int64_t batch, int64_t d) {
        for (int64_t i = 0; i < batch; i++, x += d, out += d) {
            double sum = 0;
            for (int64_t j = 0; j < d; j++) sum += x[j] * x[j];
            for (int64_t j = 0; j < d; j++) out[j] = x[j] / sqrt(sum / d + eps) * weight[j] + MARK;
        }
    }
""", flags=["-DMARK=1000"]))

@opkit.custom_op("without_python::extremes")
def extremes(
    x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"], scale: float
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "d *batch"]]:
    return (x * scale + y).amax(-1), (x * scale - y).movedim(-1, 0).contiguous()

extremes.register_kernel("cpu", opkit.c_kernel("""
    void extremes(const T* x, const T* y, float scale, T* out0, T* out1, int64_t batch, int64_t d) {
        for (int64_t i = 0; i < batch; i++) {
            out0[i] = x[i * d] * scale + y[i * d];
            for (int64_t j = 0; j < d; j++) {
                const T sum = x[i * d + j] * scale + y[i * d + j];
                out0[i] = sum > out0[i] ? sum : out0[i];
                out1[j * batch + i] = x[i * d + j] * scale - y[i * d + j];
            }
        }
    }
"""))

class Model(torch.nn.Module):
    def forward(self, x, y, weight):
        normed = rms_norm(x + y, weight)
        most, turned = extremes(normed, y, 0.5)
        one = rms_norm(y[:1], weight)
        return normed * 2, most, turned + 1, one

def arguments(batch):
    made = torch.Generator().manual_seed(batch)
    return tuple(torch.randn(shape, generator=made) for shape in ((batch, 3, 8), (batch, 3, 8), (8,)))
'''

EXPORT = """
import sys, torch, numpy as np, opkit, no_python_ops
torch.set_num_threads(1)
model = no_python_ops.Model()
batch = torch.export.Dim("batch", min=2, max=64)
with torch.no_grad():
    program = torch.export.export(model, no_python_ops.arguments(5), dynamic_shapes=({0: batch}, {0: batch}, None))
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
    opkit.aoti_compile_and_package(program, package_path=sys.argv[2])
"""


def compiler():
    try:
        return toolchain.find("c++")
    except ToolchainError as error:
        pytest.skip(f"AOTInductor and the runner need a C++ compiler: {str(error).splitlines()[0]}")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without_python")
    (folder / "no_python_ops.py").write_text(OPERATORS)
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    caches = {"OPKIT_CACHE_DIR": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return folder, os.environ | caches | {"PYTHONPATH": paths}


def checked(command, environment, folder, limit=170):
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=limit)
    assert done.returncode == 0, f"{command[:3]} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def made(environment):
    """The folder with the runner, the packages without and with kernels, and the kernels' libraries; made side by side."""
    folder, variables = environment
    root, cxx = Path(torch.__file__).parent, compiler()
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    link = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    commands = [
        [*cxx.command, "-std=c++20", "-O0", "-w", abi, *include, RUNNER, "-o", folder / "runner", *link],
        [sys.executable, "-c", EXPORT, folder / "model.pt2", folder / "whole.pt2"],
    ]
    running = [subprocess.Popen(list(map(str, c)), cwd=folder, env=variables, stderr=subprocess.PIPE) for c in commands]
    build = [
        sys.executable,
        "-m",
        "opkit",
        "build",
        "no_python_ops",
        "--programs",
        "--isa",
        "baseline",
        "--output",
        "built",
    ]
    checked(build, variables, folder)
    for each in running:
        _, errors = each.communicate(timeout=900)
        assert each.returncode == 0, errors.decode()
    return folder


def write(path, array):
    header = np.array([array.ndim, *array.shape], dtype=np.int64)
    path.write_bytes(header.tobytes() + np.ascontiguousarray(array, dtype=np.float32).tobytes())


def read(path):
    content = path.read_bytes()
    rank = int(np.frombuffer(content[:8], dtype=np.int64)[0])
    shape = np.frombuffer(content[8 : 8 + 8 * rank], dtype=np.int64)
    return torch.from_numpy(np.frombuffer(content[8 + 8 * rank :], dtype=np.float32).reshape(tuple(shape)).copy())


def arguments(batch):
    made = torch.Generator().manual_seed(batch)
    return [torch.randn(shape, generator=made) for shape in ((batch, 3, 8), (batch, 3, 8), (8,))]


def expected(x, y, weight):
    """The model in plain torch; the kernel of rms_norm adds 1000, so that its reference cannot take its place."""

    def rms_norm(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight + 1000

    normed = rms_norm(x + y)
    return normed * 2, (normed * 0.5 + y).amax(-1), (normed * 0.5 - y).movedim(-1, 0) + 1, rms_norm(y[:1])


BATCHES = (2, 5, 64)


@pytest.mark.parametrize("package", ["model.pt2", "whole.pt2"])
def test_a_compiled_model_runs_without_python(made, package):
    cases = made / f"cases of {package}"
    for batch in BATCHES:
        folder = cases / str(batch)
        folder.mkdir(parents=True)
        for i, tensor in enumerate(arguments(batch)):
            write(folder / f"in{i}.bin", tensor.numpy())
    manifest = json.loads((made / "built" / "manifest.json").read_text())
    kernels = [made / "built" / library["file"] for library in manifest["libraries"]]
    assert len(kernels) == 2
    loaded = [aot_package.runtime_library(), *kernels] if package == "model.pt2" else []
    bare = {"PATH": "/nonexistent", "OMP_NUM_THREADS": "1", "TMPDIR": str(made)}
    said = checked([made / "runner", made / package, cases, *loaded], bare, made)
    assert "no Python" in said
    for batch in BATCHES:
        for i, tensor in enumerate(expected(*arguments(batch))):
            torch.testing.assert_close(read(cases / str(batch) / f"out{i}.bin"), tensor, rtol=1e-5, atol=1e-3)
    assert not list(made.glob("opkit-*"))  # files of kernels in a package


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [(b"", "cannot be loaded"), (None, "cannot be loaded")],
    ids=["empty", "absent"],
)
def test_a_library_that_cannot_be_loaded_is_named(made, tmp_path, broken, complaint):
    kernel = tmp_path / "kernel.so"
    if broken is not None:
        kernel.write_bytes(broken)
    command = [
        str(made / "runner"),
        str(made / "model.pt2"),
        str(tmp_path),
        str(aot_package.runtime_library()),
        str(kernel),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "kernel.so" in done.stderr
