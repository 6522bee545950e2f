"""Kernels in CUDA C++ where there is no nvcc: compiled by NVRTC, and launched on a GPU's driver without a GPU."""

import os
import re
import subprocess
import sys

import pytest

from opkit import errors
from opkit.kernels import build_cache
from opkit.kernels.cc import build_plan, compilation, nvrtc, processes, toolchain
from opkit.kernels.cc.compilation import Request, Unit


def _there():
    try:
        return nvrtc.library()
    except errors.ToolchainError:
        return None


needs_nvrtc = pytest.mark.skipif(_there() is None, reason="this torch has no NVRTC")

SCALED = """
#include <cstdint>
#include <type_traits>
#include <vector>
template <typename E, int N>
static __global__ void __launch_bounds__(128) scaled(const E* x, E* out, float by, int64_t n) {
    static_assert(std::is_same<E, float>::value, "");
    extern __shared__ float room[];
    const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (i < n) out[i] = N * by * x[i];
}
extern "C" __attribute__((visibility("default"))) int run(const float* x, float* out, float by, int64_t n, cudaStream_t stream) {
    const std::vector<int> threads = {128};
    constexpr int TIMES = 3;
    cudaFuncSetAttribute(scaled<float, TIMES>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
    scaled<float, TIMES><<<dim3(unsigned((n + 127) / 128), 2), threads[0], 1 << 16, stream>>>(x, out, by, n);
    return cudaGetLastError();
}
"""
RUN = """
import ctypes, sys
driver, library = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(sys.argv[1])
driver.fake_log.restype = ctypes.c_char_p
driver.fake_library_sizes(b"8 8 4 8")
if sys.argv[2:]:
    driver.fake_fail(b"cuLaunchKernel", int(sys.argv[2]))
for _ in range(2):
    print(library.run(ctypes.c_void_p(16), ctypes.c_void_p(32), ctypes.c_float(1.5), ctypes.c_int64(300), ctypes.c_void_p(7)))
print(driver.fake_log().decode())
"""


def request(text, name="k.cu", **options):
    return Request("test::kernel", (Unit(name, text, "cuda"),), **options)


def run(path, fake, folder, *arguments):
    """What a process prints that calls a library on the fake driver."""
    if not (folder / "libcuda.so.1").exists():
        (folder / "libcuda.so.1").symlink_to(fake["cuda"])
    command = [sys.executable, "-I", "-S", "-c", RUN, str(path), *map(str, arguments)]
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()


@pytest.fixture
def without_nvcc(tmp_path, settings, monkeypatch):
    """The build cache is empty, and there is no nvcc."""
    settings(cache_dir=tmp_path / "cache")
    monkeypatch.setattr(toolchain, "_CUDA_DEFAULT", "/nonexistent")
    for name in ("NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("gcc", "g++"):
        found = toolchain.find({"gcc": "c", "g++": "c++"}[name]).path
        (tools / name).symlink_to(found)
    # the compilers look for what they start next to themselves, and for as and ld on PATH
    for name in ("as", "ld"):
        (tools / name).symlink_to(
            subprocess.run(["which", name], check=True, capture_output=True, text=True).stdout.strip()
        )
    monkeypatch.setenv("PATH", str(tools))
    return tmp_path


@needs_nvrtc
def test_a_kernel_is_launched_as_its_author_wrote(without_nvcc, fake_libraries):
    path = compilation.build(request(SCALED, flags=("-gencode=arch=compute_90,code=sm_90",)))
    first, second, *log = run(path, fake_libraries, without_nvcc)
    assert (first, second) == ("0", "0")
    rows = [line.split("|") for line in log]
    launched = [row for row in rows if row[0] == "cuLaunchKernel"]
    assert len(launched) == 2
    for row in launched:
        assert re.match(r"\w*scaled\w*Li3E\w* 8 8 4 8$", row[1])
        assert row[2:6] == ["3,2,1", "128,1,1", "65536", "0x7"]
        assert row[-1].split() == ["1000000000000000", "2000000000000000", "0000c03f", "2c01000000000000"]
    assert [row for row in rows if row[0] == "library"] == [["library", "code", "mode 2"]]  # once
    assert [row[1:3] for row in rows if row[0] == "attribute"] == [["8", "65536"]] * 2


@needs_nvrtc
def test_what_the_driver_refuses_is_returned(without_nvcc, fake_libraries):
    path = compilation.build(request(SCALED, flags=("-gencode=arch=compute_90,code=sm_90",)))
    assert run(path, fake_libraries, without_nvcc, 701)[:2] == ["701", "701"]
    other = compilation.build(request(SCALED, flags=("-gencode=arch=compute_80,code=sm_80",)))
    assert run(other, fake_libraries, without_nvcc)[:2] == ["209", "209"]  # there is no code for this GPU


@needs_nvrtc
@pytest.mark.parametrize(
    ("images", "loaded"),
    [
        (("sm_90a", "compute_80"), "code"),
        (("sm_80", "sm_120", "compute_80"), "text"),
        (("compute_80", "sm_89"), "text"),
        (("sm_100a", "sm_100f"), ""),
    ],
    ids=" ".join,
)
def test_the_code_for_a_device_is_chosen(without_nvcc, fake_libraries, images, loaded):
    """The device's compute capability is 9.0."""
    flags = [f"-gencode=arch={each.replace('sm', 'compute')},code={each}" for each in images]
    first, *log = run(compilation.build(request(SCALED, flags=tuple(flags))), fake_libraries, without_nvcc)
    assert first == ("0" if loaded else "209")
    assert f"library|{loaded}|mode 2" in log or not loaded


@needs_nvrtc
def test_without_an_architecture_there_is_ptx_for_all(without_nvcc, fake_libraries):
    path = compilation.build(request(SCALED))
    first, *log = run(path, fake_libraries, without_nvcc)
    assert first == "0"
    assert "library|text|mode 2" in log


@needs_nvrtc
def test_a_mistake_is_shown_with_its_file_and_line(without_nvcc):
    text = SCALED.replace("N * by * x[i]", "N * bye * x[i]")
    with pytest.raises(errors.CompileError) as raised:
        compilation.build(request(f'#line 41 "mine.py"\n{text}'))
    said = str(raised.value)
    assert said.startswith('test::kernel: NVRTC refused the source.\nmine.py(50): error: identifier "bye" is undefined')
    assert "    if (i < n) out[i] = N * bye * x[i];\n" in said
    again = subprocess.run(raised.value.command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1
    assert 'identifier "bye" is undefined' in again.stdout


@needs_nvrtc
def test_a_function_of_cuda_that_is_not_there_is_shown_with_its_line(without_nvcc):
    text = SCALED.replace("constexpr int TIMES", "cudaGraphCreate(); constexpr int TIMES")
    with pytest.raises(errors.CompileError) as raised:
        compilation.build(request(f'#line 41 "mine.py"\n{text}'))
    assert "mine.py:54:5: error: 'cudaGraphCreate' was not declared in this scope" in str(raised.value)
    assert "   54 |     cudaGraphCreate(); constexpr int TIMES = 3;" in str(raised.value)


@needs_nvrtc
def test_what_was_built_is_found(without_nvcc, monkeypatch):
    path = compilation.build(request(SCALED))
    monkeypatch.setattr(processes, "run", None)
    compilation._verified.clear()
    assert compilation.build(request(SCALED)) == path
    (entry,) = build_cache.entries()
    assert entry.compiler.startswith("NVRTC 1")


@needs_nvrtc
def test_headers_of_the_author_have_two_parts_too(without_nvcc, fake_libraries):
    folder = without_nvcc / "headers"
    (folder / "inner").mkdir(parents=True)
    (folder / "scaled.cuh").write_text('#pragma once\n#include "inner/threads.h"\n' + SCALED.split('extern "C"')[0])
    (folder / "inner" / "threads.h").write_text(
        "#ifndef THREADS\n#define THREADS 128\nstatic int of_block() { return THREADS; }\n"
        "static __device__ int lane() { return threadIdx.x % 32; }\n#endif\n"
    )
    text = (
        '#include "scaled.cuh"\n#include "scaled.cuh"\n#include "inner/threads.h"\nextern "C"'
        + SCALED.split('extern "C"')[1]
    )
    options = {"include_dirs": (folder,), "flags": ("-gencode=arch=compute_90,code=sm_90",)}
    path = compilation.build(request(text.replace("= {128}", "= {of_block()}"), **options))
    assert any("|3,2,1|128,1,1|65536|" in line for line in run(path, fake_libraries, without_nvcc))
    with pytest.raises(errors.CompileError, match=r"k.cu:9:\d+: error: 'oops' was not declared"):
        compilation.build(request(text.replace("return cuda", "oops();\nreturn cuda"), **options))
    (folder / "scaled.cuh").write_text((folder / "scaled.cuh").read_text().replace("x[i]", "y[i]"))
    with pytest.raises(errors.CompileError, match=r'scaled.cuh\(12\): error: identifier "y" is undefined'):
        compilation.build(request(text, **options))


@needs_nvrtc
def test_half_precision_and_complex_numbers(without_nvcc):
    text = "".join(
        f"#include <{header}>\nstatic __global__ void k{n}({kind}* x, {kind} y) {{ *x = {value}; }}\n"
        f'extern "C" void run{n}({kind}* x, {kind} y) {{ k{n}<<<1, 1>>>(x, y); }}\n'
        for n, (header, kind, value) in enumerate([
            ("cuda_fp16.h", "__half", "__hadd(*x, y)"), ("cuda_bf16.h", "__nv_bfloat16", "*x + y"),
            ("cuda_fp16.h", "half2", "*x * y"), ("cuComplex.h", "cuFloatComplex", "cuCmulf(*x, y)"),
            ("cuda_runtime.h", "float4", "make_float4(y.x, 0, 0, 0)"),
        ])
    )  # fmt: skip
    assert compilation.build(request(text)).is_file()


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("#include <cub/cub.cuh>\n", {}, r"k.cu:1: it includes cub/cub.cuh, of which NVRTC has none"),
        ("#define GO scaled<float, 1><<<1, 1>>>\n", {}, r"k.cu:1: a macro launches a kernel"),
        ("", {"libraries": ("cublas",)}, "it is linked with other libraries"),
        ("", {"flags": ("--compress-mode=size",)}, "the flag '--compress-mode=size' is nvcc's"),
        ("", {"flags": ("-arch=native",)}, "the flag -arch=.*native.* names no architecture"),
    ],
)
def test_what_only_nvcc_compiles_is_refused_or_goes_to_nvcc(text, options, reason, without_nvcc, settings):
    with pytest.raises(
        errors.ToolchainError, match=f"test::kernel: NVRTC, .* cannot compile this source: .*{reason}.* nvcc can"
    ):
        build_plan.plan(request(text + SCALED, **options))
    (without_nvcc / "tools" / "nvcc").touch(0o700)
    toolchain._search.cache_clear()
    assert build_plan.plan(request(text + SCALED, **options)).compiler.family == "nvcc"
    settings(cuda_compiler="nvrtc")
    with pytest.raises(errors.ToolchainError, match=reason):
        build_plan.plan(request(text + SCALED, **options))


@needs_nvrtc
def test_the_settings_choose(without_nvcc, settings):
    assert toolchain.find("cuda").family == "nvrtc"
    (without_nvcc / "tools" / "nvcc").touch(0o700)
    for values, family in (
        ({}, "nvrtc"),
        ({"nvcc": without_nvcc / "tools" / "nvcc"}, "nvcc"),
        ({"cuda_compiler": "nvrtc"}, "nvrtc"),
    ):
        settings(**values)
        assert toolchain.find("cuda").family == family
    settings(cuda_compiler="clang")
    with pytest.raises(
        errors.ConfigError, match=r"OPKIT_CUDA_COMPILER='clang' is not known\. Set it to one of nvrtc, nvcc"
    ):
        toolchain.find("cuda")


def test_a_torch_without_cuda_is_the_reason(without_nvcc, monkeypatch, tmp_path, settings):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n")
    monkeypatch.setattr(nvrtc, "_torch", lambda: folder)
    with pytest.raises(
        errors.ToolchainError, match=r"built for CUDA, and this one is not\. No CUDA compiler was found: none of nvcc"
    ):
        toolchain.find("cuda")
    (folder / "version.py").write_text("cuda: Optional[str] = '12.8'\n")
    nvrtc._cuda_of.cache_clear()
    monkeypatch.setattr(nvrtc, "_folders", lambda torch: iter([folder / "lib"]))
    with pytest.raises(
        errors.ToolchainError, match=r"built for CUDA 12\.8, and there is no libnvrtc\.so\.12 in .*Install nvidia-cuda"
    ):
        toolchain.find("cuda")
    (folder / "lib").mkdir()
    for name in ("libnvrtc-builtins-1a2b.so.12.8", "libnvrtc-1a2b3c.so.12"):
        (folder / "lib" / name).touch()
    nvrtc._library.cache_clear()
    assert nvrtc.library().name == "libnvrtc-1a2b3c.so.12"
    nvrtc._cuda_of.cache_clear(), nvrtc._library.cache_clear()
