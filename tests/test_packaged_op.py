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
from opkit.kernels import isa

EXAMPLE = Path(__file__).parents[1] / "examples" / "packaged_op"

PROGRAM = """
import os, sys, warnings
from pathlib import Path

import packaged_op, torch
import opkit
from opkit.errors import BuildCacheWarning, ToolchainError
from opkit.kernels import toolchain

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


def can_make_wheels():
    try:
        from setuptools.command import bdist_wheel  # noqa: F401
    except ImportError:
        return False
    return shutil.which("gcc") is not None


pytestmark = pytest.mark.skipif(not can_make_wheels(), reason="needs gcc, and setuptools 70.1 or newer")


def checked(command, folder, environment):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=folder, env=environment, timeout=150
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, child_environment):
    folder = tmp_path_factory.mktemp("packaged_op")
    project = shutil.copytree(
        EXAMPLE, folder / "project", ignore=shutil.ignore_patterns("_opkit", "build", "*.egg-info")
    )
    environment = child_environment | {"OPKIT_CACHE_DIR": str(folder / "cache")}
    checked([sys.executable, "-m", "opkit", "build", "packaged_op"], project, environment)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    checked([*pip, "--wheel-dir", folder / "wheels", "."], project, environment)
    (made,) = (folder / "wheels").iterdir()
    return made


def test_the_wheel_is_for_one_platform_and_every_python(wheel):
    assert re.fullmatch(r"packaged_op-1\.0-py3-none-(linux|macosx)_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "packaged_op/_opkit/manifest.json" in names
    assert "packaged_op/silu_mul.c" in names
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
