"""``opkit build``: what it builds, where it puts it, what it prints, and what it leaves alone when it fails."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import opkit
from opkit import cli
from opkit.errors import CompileError, ToolchainError
from opkit.kernels import bridge
from opkit.kernels.cc import isa, toolchain

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
    pytest.mark.skipif(isa.machine() != "x86_64", reason="the instruction sets in these tests are those of x86-64"),
]

HEAD = "import opkit\nfrom torch import Tensor\n"
OPERATOR = '''
@opkit.custom_op("cli_build::NAME", mutates_args=())
def NAME(x: Tensor) -> Tensor:
    return x * 2

NAME.register_kernel("cpu", opkit.c_kernel("""
    void NAME(const T* x, T* out, int64_t x_numel) {
        for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i];
    }
""", dtypes=["float32"]OPTIONS))
'''


def operator(name, options=""):
    return OPERATOR.replace("NAME", name).replace("OPTIONS", options)


def run(*arguments, programs=False):
    return CliRunner().invoke(cli.app, ["build", *map(str, arguments), *(["--programs"] if programs else [])])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path, cache, settings, monkeypatch):
    """A working directory for modules, which are forgotten afterwards, with their operators."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    settings(cache_dir=cache, bridge=0)
    before = set(sys.modules)
    yield tmp_path
    forget(before)


def forget(before):
    for each in opkit.operators():
        if each.name.startswith("cli_build::"):
            opkit.remove(each.name)
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("single", "pack"):
            del sys.modules[name]


def libraries(place):
    manifest = json.loads((place / "manifest.json").read_text())
    return {(each["operator"], each["isa"]): each["file"] for each in manifest["libraries"]}


def test_a_module_of_its_own(folder):
    (folder / "single.py").write_text(HEAD + operator("alone"))
    result = run("single")
    assert result.exit_code == 0, result.output
    place = folder / "_opkit_single"
    built = libraries(place)
    assert list(built) == [("cli_build::alone", each) for each in ("baseline", "avx2", "avx512")]
    assert {path.name for path in place.iterdir()} == {"manifest.json", *built.values()}
    for each in ("baseline", "avx2", "avx512"):
        assert re.search(
            rf"cli_build::alone\[alone\] +{each} +[\d.]+ KiB +0 programs +cli_build\.alone\S+\.so", result.stdout
        )
    assert re.search(r"3 libraries, [\d.]+ KiB in ", result.stdout)
    assert "libopkit.so" in result.stdout


def test_the_bridge_is_built_too(folder, settings, cache, monkeypatch):
    """Where the setting asks for it; a package is complete without it."""
    (folder / "single.py").write_text(HEAD + operator("alone"))
    settings(cache_dir=cache, bridge=1)
    monkeypatch.setattr(bridge, "build", lambda paths: Path("there.so"))
    assert "is there.so" in run("single", "--isa", "baseline").stdout

    def fail(paths):
        raise CompileError("no headers")

    monkeypatch.setattr(bridge, "build", fail)
    result = run("single", "--isa", "baseline")
    assert result.exit_code == 0
    assert "the bridge was not built" in result.output
    assert "no headers" in result.output


def make_package(folder):
    (folder / "pack" / "inner").mkdir(parents=True)
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "pack" / "one.py").write_text(HEAD + operator("one"))
    (folder / "pack" / "inner" / "__init__.py").write_text("from pack import one\n" + HEAD + operator("two"))
    (folder / "pack" / "inner" / "deep.py").write_text(HEAD + operator("three"))
    (folder / "single.py").write_text(HEAD + operator("alone"))


@pytest.mark.parametrize(
    ("module", "place", "names"),
    [
        ("pack.one", "pack/_opkit", ["one"]),
        ("pack.inner", "pack/inner/_opkit", ["two"]),
        ("pack.inner.deep", "pack/inner/_opkit", ["three", "two"]),
    ],
)
def test_a_package(folder, module, place, names):
    make_package(folder)
    assert run(module, "--isa", "baseline").exit_code == 0
    assert list(libraries(folder / place)) == [(f"cli_build::{name}", "baseline") for name in names]


def test_programs_are_worked_out(folder):
    (folder / "single.py").write_text(HEAD + operator("alone"))
    result = run("single", "--isa", "baseline", programs=True)
    assert re.search(r"cli_build::alone\[alone\] +baseline .* [1-9]\d+ programs", result.stdout)


def test_a_kernel_without_known_sizes_is_named(folder):
    (folder / "single.py").write_text(HEAD + operator("alone").replace("return x * 2", "return x[x > 0]"))
    result = run("single", "--isa", "baseline", programs=True)
    assert result.exit_code == 0
    assert re.search(
        r"for Python alone: cli_build::alone.*register_fake|for Python alone: .*depend on the data", result.stdout
    )


def test_instruction_sets(folder):
    (folder / "single.py").write_text(
        HEAD
        + operator("own", ', isa=["avx2", "neon"]')
        + operator("other", ', isa="neon"')
        + operator("usual", "")
        + operator("both", ', isa=["native", "baseline"]')
    )
    assert run("single", "--isa", "avx512").exit_code == 0
    assert list(libraries(folder / "_opkit_single")) == [
        ("cli_build::both", "baseline"),
        ("cli_build::both", "avx512"),
        ("cli_build::other", "baseline"),
        ("cli_build::own", "avx2"),
        ("cli_build::usual", "avx512"),
    ]


def test_output_and_what_else_lies_there(folder):
    (folder / "single.py").write_text(HEAD + operator("alone"))
    place = folder / "out" / "there"
    place.mkdir(parents=True)
    (place / "mine.so").write_text("mine")
    assert run("single", "--output", place, "--jobs", 1).exit_code == 0
    assert run("single", "--output", place, "--isa", "baseline").exit_code == 0
    built = libraries(place)
    assert len(built) == 1
    assert {path.name for path in place.iterdir()} == {"manifest.json", "mine.so", *built.values()}
    assert not (folder / "_opkit_single").exists()


def snapshot(place):
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_a_compile_error_leaves_the_old_package(folder):
    before = set(sys.modules)
    (folder / "single.py").write_text(HEAD + operator("good") + operator("bad"))
    assert run("single", "--isa", "baseline").exit_code == 0
    old = snapshot(folder / "_opkit_single")
    forget(before)
    broken = operator("bad").replace("out[i] = 2", "out[i] = nothing")
    (folder / "single.py").write_text(HEAD + operator("good").replace("2 * x", "3 * x") + broken)
    result = run("single")
    assert result.exit_code == 1
    assert "1 kernel cannot be built" in result.stderr
    assert result.stderr.count("cli_build::bad[bad]") == 1  # and not for each instruction set
    assert re.search(r"single\.py:\d+.*nothing", result.stderr)
    assert snapshot(folder / "_opkit_single") == old


def test_a_disk_that_fills_up_leaves_the_old_package(folder, monkeypatch):
    before = set(sys.modules)
    (folder / "single.py").write_text(HEAD + operator("good"))
    assert run("single", "--isa", "baseline").exit_code == 0
    old = snapshot(folder / "_opkit_single")
    forget(before)
    (folder / "single.py").write_text(HEAD + operator("good").replace("2 * x", "3 * x"))
    from opkit.kernels import cache_files

    def full(path, content, mode, write=cache_files.write_atomically):
        if path.name == "manifest.json":
            raise OSError(28, "No space left on device")
        write(path, content, mode)

    monkeypatch.setattr(cache_files, "write_atomically", full)
    result = run("single", "--isa", "avx2")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert snapshot(folder / "_opkit_single") == old


def test_debug_builds_are_refused(folder):
    (folder / "single.py").write_text(HEAD + operator("checked", ", debug=True"))
    result = run("single")
    assert result.exit_code == 1
    assert re.search(r"cli_build::checked: the kernel 'checked' \(\S+single\.py:\d+\) is a debug build", result.stderr)
    assert "Remove debug=True" in result.stderr


CUDA = '''
@opkit.custom_op("cli_build::on_gpu", mutates_args=())
def on_gpu(x: Tensor) -> Tensor:
    return x * 2

on_gpu.register_kernel("cuda", opkit.cuda_kernel("""
    __global__ void twice(const T* x, T* out, int64_t n) { if (threadIdx.x < n) out[threadIdx.x] = 2 * x[threadIdx.x]; }
    extern "C" void on_gpu(const T* x, T* out, int64_t x_numel, cudaStream_t stream) {
        twice<<<1, 256, 0, stream>>>(x, out, x_numel);
    }
""", dtypes=["float32"], flags=["-arch=sm_90"]))
'''


def test_cuda_kernels_are_left_out_where_there_is_no_nvcc(folder, monkeypatch):
    find = toolchain.find

    def without(language):
        if language == "cuda":
            raise ToolchainError("no CUDA compiler was found")
        return find(language)

    monkeypatch.setattr(toolchain, "find", without)
    (folder / "single.py").write_text(HEAD + operator("alone") + CUDA)
    result = run("single", "--isa", "baseline")
    assert result.exit_code == 0
    assert "left out: cli_build::on_gpu[on_gpu]: no CUDA compiler was found" in result.stdout
    assert list(libraries(folder / "_opkit_single")) == [("cli_build::alone", "baseline")]


@pytest.mark.parametrize(
    ("flags", "arch", "built"),
    [
        (', flags=["-arch=sm_90"]', ["sm_80"], ["sm_90", "compute_90"]),
        ("", ["sm_80,gfx942", "sm_90a", "sm100"], ["sm_80", "sm_90a", "sm_100", "compute_100"]),
    ],
    ids=["the author's", "the user's"],
)
def test_cuda_kernels_are_one_library_for_all_architectures(folder, flags, arch, built):
    try:
        toolchain.find("cuda")
    except ToolchainError:
        pytest.skip("there is no CUDA compiler")
    (folder / "single.py").write_text(HEAD + CUDA.replace(', flags=["-arch=sm_90"]', flags))
    result = run("single", *[each for name in arch for each in ("--arch", name)])
    assert result.exit_code == 0, result.output
    place = folder / "_opkit_single"
    assert list(libraries(place)) == [("cli_build::on_gpu", "cuda")]
    assert json.loads((place / "manifest.json").read_text())["libraries"][0]["architectures"] == built
    assert re.search(rf"on_gpu\[on_gpu\] +{', '.join(built)} ", result.stdout)


def test_cuda_kernels_are_left_out_where_no_architecture_is_theirs(folder):
    (folder / "single.py").write_text(HEAD + operator("alone") + CUDA.replace(', flags=["-arch=sm_90"]', ""))
    result = run("single", "--isa", "baseline", "--arch", "gfx942")
    assert result.exit_code == 0, result.output
    assert "left out: cli_build::on_gpu[on_gpu]: --arch names no GPU of NVIDIA's" in result.stdout
    assert list(libraries(folder / "_opkit_single")) == [("cli_build::alone", "baseline")]


TRITON = """
import triton
import triton.language as tl

@triton.jit
def _twice(x, out, x_numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, at < x_numel), at < x_numel)

@opkit.custom_op("cli_build::on_triton", mutates_args=())
def on_triton(x: Tensor) -> Tensor:
    return x * 2

on_triton.register_kernel("cuda", opkit.triton_kernel(
    _twice, grid=lambda x_numel, BLOCK: triton.cdiv(x_numel, BLOCK), BLOCK=128, examples=[{"x": "fp32[1024]"}]
))
"""


@pytest.fixture
def triton_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def binaries(place):
    manifest = json.loads((place / "manifest.json").read_text())
    return {(each["operator"], each["form"]["target"]): each["file"] for each in manifest["triton"]}


def test_triton_kernels(folder, triton_cache):
    (folder / "single.py").write_text(HEAD + TRITON)
    result = run("single", "--arch", "sm_90,gfx942", "--jobs", 2)
    assert result.exit_code == 0, result.output
    place = folder / "_opkit_single"
    assert list(binaries(place)) == [("cli_build::on_triton", "sm_90"), ("cli_build::on_triton", "gfx942")]
    assert all((place / file).is_file() for file in binaries(place).values())
    for each in ("sm_90", "gfx942"):
        assert re.search(rf"cli_build::on_triton\[_twice\] +{each} +[123] +[\d.]+ KiB", result.stdout)
    assert re.search(r"\d Triton binaries, [\d.]+ KiB in ", result.stdout)
    assert "libopkit.so" not in result.stdout


def test_c_and_triton_kernels(folder, triton_cache):
    before = set(sys.modules)
    (folder / "single.py").write_text(HEAD + operator("alone") + TRITON)
    result = run("single", "--isa", "baseline", "--arch", "sm_90")
    assert result.exit_code == 0, result.output
    assert re.search(r"1 library, \d Triton binar", result.stdout)
    place = folder / "_opkit_single"
    assert list(libraries(place)) == [("cli_build::alone", "baseline")]
    assert list(binaries(place)) == [("cli_build::on_triton", "sm_90")]
    old = {path.name: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    forget(before)
    (folder / "single.py").write_text(HEAD + operator("alone") + TRITON.replace("BLOCK=128", "BLOCK=100"))
    result = run("single", "--isa", "avx2", "--arch", "sm_90")
    assert result.exit_code == 1
    assert re.search(r"Nothing was written.*power of 2", result.stderr, re.DOTALL)
    assert {path.name: path.read_bytes() for path in place.rglob("*") if path.is_file()} == old
    forget(before)
    (folder / "single.py").write_text(HEAD + operator("alone"))
    assert run("single", "--isa", "baseline").exit_code == 0
    assert {path.name for path in place.iterdir()} == {"manifest.json", *libraries(place).values()}


def test_no_compiler_at_all(folder, monkeypatch):
    def without(language):
        raise ToolchainError("no C compiler was found")

    monkeypatch.setattr(toolchain, "find", without)
    (folder / "single.py").write_text(HEAD + operator("alone"))
    result = run("single")
    assert result.exit_code == 1
    assert result.stderr.count("no C compiler was found") == 1
    assert not (folder / "_opkit_single").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["no.such.module"], 2, "cannot be imported"),
        (["json"], 1, "json defines no operator with a kernel in C, C\\+\\+, CUDA or Triton"),
        (["single", "--arch", "sm_1"], 2, "'sm_1' is no architecture that kernels are compiled for"),
        (["single", "--isa", "avx3"], 2, r"--isa avx3: kernels on x86_64 are built for baseline, avx2, avx512"),
        (["single", "--isa", "neon"], 2, r"--isa neon"),
        (["single", "--jobs", "0"], 2, "jobs"),
        (["single", "--output", "single.py"], 1, r"single\.py.*cannot be written"),
        ([], 2, "(?i)missing argument"),
    ],
)
def test_bad_input(folder, arguments, status, complaint):
    (folder / "single.py").write_text(HEAD + operator("alone"))
    result = run(*arguments)
    assert result.exit_code == status
    assert re.search(complaint, result.stderr.replace("\n", " "))
    assert "Traceback" not in result.output
