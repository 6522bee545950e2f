"""The kernels without Python and torch: a program that checks them (driver/), built here and for 64-bit Arm.

The program for Arm runs under qemu-aarch64, which has NEON but says nothing of speed.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import function_cases
import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "cpp_ext"
PACKAGES = {  # what runs, and the Debian package that has it
    "cmake": "cmake",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
}

pytestmark = [pytest.mark.build, pytest.mark.timeout(1800)]


def need(*tools: str) -> None:
    if missing := [PACKAGES[tool] for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"install it first: apt-get install {' '.join(missing)}")


def succeed(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-8000:]}"
    return done.stdout


def built(folder: Path, *options: str) -> Path:
    function_cases.write(folder)
    options = ("-DOPKIT_BUILD_DRIVER=ON", "-DCMAKE_BUILD_TYPE=Release", f"-DOPKIT_FUNCTIONS={folder}", *options)
    succeed("cmake", "-S", SOURCES, "-B", folder, *options)
    succeed("cmake", "--build", folder, "-j2")
    return folder / "driver" / "opkit_driver"


def checked(report: str) -> set[str]:
    """The instruction sets that the program says it checked."""
    return set(report.splitlines()[-1].partition(" were checked")[0].split())


def test_the_kernels_of_this_processor(tmp_path):
    """Those of AMX too: where the processor has no tiles but the vectors, its tiles are kept in memory."""
    need("cmake")
    _core = pytest.importorskip("opkit._core", reason="opkit runs from a source tree that was not installed")
    isas = set(_core.isas())
    emulated = "avx512_bf16" in isas and "amx" not in isas
    quickly = "-DCMAKE_CXX_FLAGS_RELEASE=-O1"  # the kernels as they are installed are those that other tests call
    program = built(tmp_path, quickly, f"-DOPKIT_EMULATE_TILES={'ON' if emulated else 'OFF'}")
    assert checked(succeed(program)) == isas | ({"amx"} if emulated else set())


@pytest.mark.skipif(platform.machine() == "aarch64", reason="this processor is 64-bit Arm: the other test checks NEON")
def test_the_kernels_of_64_bit_arm(tmp_path):
    need(*PACKAGES)
    program = built(tmp_path, f"-DCMAKE_TOOLCHAIN_FILE={HERE / 'driver' / 'aarch64.cmake'}")
    assert {"baseline", "neon"} <= checked(succeed("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program))
