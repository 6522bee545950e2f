"""examples/packaged_op: built, made a wheel of, installed where there is no compiler, and used there."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import opkit
from opkit.kernels.cc import isa

EXAMPLE = Path(__file__).parents[1] / "examples" / "packaged_op"

PROGRAM = """
import os, sys, warnings
from pathlib import Path

import packaged_op, torch
import opkit
from opkit.errors import BuildCacheWarning, ToolchainError
from opkit.kernels.cc import toolchain

warnings.simplefilter("error", BuildCacheWarning)
assert Path(packaged_op.__file__).is_relative_to(sys.prefix), packaged_op.__file__
for language in ("c", "c++"):
    try:
        raise AssertionError(toolchain.find(language))
    except ToolchainError:
        pass

def compare(op, *args):
    assert op.select(*args).kernel == op.name.split("::")[1], op.select(*args)
    with opkit.use_kernel(op, "reference"):
        expected = op(*args)
    for _ in range(3):
        half = expected.dtype == torch.bfloat16
        torch.testing.assert_close(op(*args), expected, **({"rtol": 0.03, "atol": 0.03} if half else {}))

for dtype in (torch.float32, torch.bfloat16):
    for shape in ((4, 16), (1, 16), (2, 3, 16), (16,), (0, 16), (4, 1)):
        x, y = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        compare(packaged_op.rms_norm, x, y.new_ones(shape[-1]))
        compare(packaged_op.silu_mul, x, y)
        compare(packaged_op.silu_mul, x.mT if x.ndim > 1 else x, y.mT if x.ndim > 1 else y)

x = torch.randn(4, 16, dtype=torch.float32, requires_grad=True)
packaged_op.silu_mul(x, x).sum().backward()
assert x.grad is not None

maps = Path("/proc/self/maps")
if maps.exists():
    loaded = {Path(line.split()[-1]) for line in maps.read_text().splitlines() if "_opkit" in line}
    print("loaded", *sorted(path.name for path in loaded))
print("compiled", *[path for path in Path(os.environ["OPKIT_CACHE_DIR"]).rglob("*.so")])
"""

NO_COMPILER = """
import dataclasses, sys, warnings

import torch
import triton.compiler.compiler
from opkit import _core
from opkit.errors import BuildCacheWarning
from opkit.op.triton.variants import MACHINES

def refuse(*args, **options):
    raise AssertionError("Triton compiles")

triton.compiler.compiler.compile = refuse
warnings.simplefilter("error", BuildCacheWarning)
"""

FOUND = """
gpu = dataclasses.replace(
    MACHINES["cuda"],
    driver=lambda: _core.Driver(sys.argv[1], "cuda"), target=lambda device: sys.argv[2],
    model=lambda device: "a GPU", shared=lambda device: 65536,
)
MACHINES["cuda"] = gpu

import packaged_op
from opkit.op.triton.variants import Memory
from opkit.op.triton.evaluation import evaluate

(function,) = [k.function for k in packaged_op.silu_mul._operator.kernels.kernels if k.device == "cuda"]
bound, variants = function.bound, function.launching.variants
for dtype in (5, 6, 15):
    for address, numel in ((4096, 4096), (4096, 4097), (4100, 4096), (4096, 1), (4100, 1)):
        tensor = Memory(address, dtype, 0, (numel,), (1,))
        values = [tensor if source.kind == "tensor" else numel for source in bound.sources]
        named = {source.name: value for source, value in zip(bound.sources, values)} | dict(bound.constants)
        variants.entry(values, evaluate(bound.where, bound.formulas, named), 0)
print("found", len(variants._from_package))
"""

ON_A_GPU = """
import packaged_op

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for shape in ((4, 16), (1, 16), (2, 3, 17), (1, 1), (0, 16)):
        x, y = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
        assert packaged_op.silu_mul.select(x, y).kernel == "_silu_mul"
        for gate, up in ((x, y), (x.flatten()[1:], y.flatten()[1:])):
            if gate.shape == up.shape and gate.ndim:
                expected = packaged_op.silu_mul.reference(gate.double(), up.double())
                torch.testing.assert_close(packaged_op.silu_mul(gate, up).double(), expected, rtol=0.02, atol=0.02)
print("numbers are right")
"""


def can_make_wheels():
    try:
        from setuptools.command import bdist_wheel  # noqa: F401
    except ImportError:
        return False
    return shutil.which("gcc") is not None


pytestmark = pytest.mark.skipif(not can_make_wheels(), reason="needs gcc, and setuptools 70.1 or newer")


def checked(command, folder, environment):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=folder, env=environment, timeout=900
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packaged_op")
    project = shutil.copytree(
        EXAMPLE, folder / "project", ignore=shutil.ignore_patterns("_opkit", "build", "*.egg-info")
    )
    caches = {f"{name}_CACHE_DIR": str(folder / "cache" / name) for name in ("OPKIT", "TRITON")}
    environment = os.environ | caches
    command = [sys.executable, "-m", "opkit", "build", "--wheel", folder / "wheels", "packaged_op"]
    checked(command, project, environment)
    (made,) = (folder / "wheels").iterdir()
    return made


@pytest.mark.build
def test_the_wheel_is_for_one_platform_and_every_python(wheel):
    assert re.fullmatch(r"packaged_op-1\.0-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "packaged_op/_opkit/manifest.json" in names
    assert "packaged_op/silu_mul.c" in names
    assert sum(name.endswith(".cubin") for name in names) >= 3 * 3  # dtypes and architectures
    assert sum(name.endswith(".so") for name in names) == (6 if isa.machine() == "x86_64" else 2)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The interpreter of a virtual environment with the wheel; torch and opkit are those of the tests' environment."""
    place = tmp_path_factory.mktemp("clean") / "venv"
    checked([sys.executable, "-m", "venv", "--without-pip", place], place.parent, os.environ)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    checked([*pip, wheel], place.parent, os.environ)
    (packages,) = place.glob("lib/python3*/site-packages")
    paths = dict.fromkeys(str(Path(module.__file__).resolve().parents[1]) for module in (opkit, torch))
    (packages / "beside.pth").write_text("".join(f"{path}\n" for path in paths))
    return python


@pytest.mark.build
@pytest.mark.parametrize("cap", [None, "baseline"])
def test_it_works_where_there_is_no_compiler(installed, tmp_path, cap):
    environment = {"PATH": "/nonexistent", "OPKIT_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    if cap is not None and isa.machine() == "x86_64":
        environment["OPKIT_ISA"] = cap
    said = checked([installed, "-c", PROGRAM], tmp_path, environment)
    assert re.search(r"^compiled$", said, re.MULTILINE), said
    if "loaded" in said:
        chosen = environment.get("OPKIT_ISA", isa.host_isa())
        assert len(re.findall(rf"\.{chosen}\.[0-9a-f]{{8}}\.so", said)) == 2, said


@pytest.mark.build
@pytest.mark.sweep
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_100"])
def test_triton_kernels_are_found_without_a_gpu_and_a_compiler(installed, tmp_path, fake_driver, target):
    environment = {"PATH": "/nonexistent", "OPKIT_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    said = checked([installed, "-c", NO_COMPILER + FOUND, fake_driver, target], tmp_path, environment)
    assert "found 9" in said  # for each dtype: as in the example, for odd sizes, for any address
    assert not (tmp_path / ".triton").exists()


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("fake_driver") / "libfake_cuda.so"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-DCUDA", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run(
        ["gcc", *flags, str(Path(__file__).parent / "kernels" / "fake_driver.c"), "-o", str(path)], check=True
    )
    return path


@pytest.mark.gpu
def test_triton_kernels_on_a_gpu_without_a_compiler(installed, tmp_path):
    environment = os.environ | {
        "PATH": "/nonexistent", "OPKIT_CACHE_DIR": str(tmp_path / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")
    }  # fmt: skip
    assert "numbers are right" in checked([installed, "-c", NO_COMPILER + ON_A_GPU], tmp_path, environment)
