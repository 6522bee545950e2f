"""Kernels in C++ and CUDA C++, in several files, with threads, and for several instruction sets."""

import threading

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.kernels.cc import isa

pytestmark = pytest.mark.usefixtures("bridge")


@pytest.fixture
def doubled(name):
    @opkit.custom_op(name, mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    return doubled


def assert_doubles(op, *shapes, dtype=torch.float32, device="cpu"):
    for shape in shapes:
        x = torch.randn(shape, device=device).to(dtype)
        assert op.select(x).kernel != "reference"
        for _ in range(3):
            torch.testing.assert_close(op(x), x * 2)


def test_cpp_with_its_own_library(doubled):
    source = """
    #include <algorithm>
    #include <vector>
    template <class F> static void each(int64_t n, F f) { for (int64_t i = 0; i < n; i++) f(i); }
    extern "C" void twice(const T* x, T* out, int64_t x_numel) {
        std::vector<T> two(x, x + x_numel);
        each(x_numel, [&](int64_t i) { two[i] = two[i] * T(2); });
        std::copy(two.begin(), two.end(), out);
    }"""
    doubled.register_kernel("cpu", opkit.cpp_kernel(source, dtypes=["float32", "bfloat16"]))
    for dtype in (torch.float32, torch.bfloat16):
        assert_doubles(doubled, (5,), (2, 3), (0,), (), dtype=dtype)


def test_a_cpp_exception_is_raised(doubled):
    source = """
    #include <stdexcept>
    extern "C" void twice(const T* x, T* out, int64_t x_numel) {
        if (x_numel == 3) throw std::runtime_error("three is too many");
        for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i];
    }"""
    doubled.register_kernel("cpu", opkit.cpp_kernel(source, dtypes=["float32"]))
    for _ in range(3):
        assert_doubles(doubled, (2,))
        with pytest.raises(RuntimeError, match="three is too many"):
            doubled(torch.ones(3))


def test_several_files_and_folders(doubled, tmp_path):
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "two.hpp").write_text("#pragma once\nfloat two();\n")
    (tmp_path / "two.cpp").write_text('#include "two.hpp"\nfloat two() { return 2; }\n')
    (tmp_path / "kernel.cpp").write_text(
        '#include "two.hpp"\n#include "beside.hpp"\n'
        'extern "C" void twice(const float* x, float* out, int64_t x_numel) {\n'
        "    for (int64_t i = 0; i < x_numel; i++) out[i] = two() * x[i] + NOTHING;\n}\n"
    )
    (tmp_path / "beside.hpp").write_text("#define NOTHING 0\n")
    kernel = opkit.cpp_kernel(
        tmp_path / "kernel.cpp", sources=[tmp_path / "two.cpp"], include_dirs=[tmp_path / "headers"]
    )
    doubled.register_kernel("cpu", kernel)
    assert_doubles(doubled, (5,))


def test_parallel_for_uses_torchs_threads(name):
    @opkit.custom_op(name, mutates_args=())
    def threads(x: Tensor) -> Tensor:
        return x.new_ones(x.shape)

    source = """
    typedef struct { float* out; } Work;
    static void part(int64_t begin, int64_t end, void* context) {
        Work* work = (Work*)context;
        for (int64_t i = begin; i < end; i++) work->out[i] = 1 + opk_thread_index();
        if (begin == 0 && end > 5) opk_fail("a part of %d", (int)end);
    }
    void threads(const float* x, float* out, int64_t x_numel) {
        (void)x;
        Work work = {out};
        opk_parallel_for(0, x_numel, 1, part, &work);
        if (opk_num_threads() < 1) opk_fail("no threads");
    }"""
    threads.register_kernel("cpu", opkit.c_kernel(source))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert set(threads(torch.zeros(4)).tolist()) == {1.0, 2.0}
        torch.set_num_threads(1)
        assert set(threads(torch.zeros(4)).tolist()) == {1.0}
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="a part of"):  # from a thread that is not the caller's
            threads(torch.zeros(400))
    finally:
        torch.set_num_threads(before)


def test_openmp_shares_torchs_threads(name):
    @opkit.custom_op(name, mutates_args=())
    def counted(x: Tensor) -> Tensor:
        return torch.full_like(x, float(torch.get_num_threads()))

    source = """
    #include <omp.h>
    void counted(const float* x, float* out, int64_t x_numel) {
        int threads = 1;
        (void)x;
        #pragma omp parallel
        {
            #pragma omp master
            threads = omp_get_num_threads();
        }
        #pragma omp parallel for
        for (int64_t i = 0; i < x_numel; i++) out[i] = threads;
    }"""
    counted.register_kernel("cpu", opkit.c_kernel(source))
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert counted(torch.zeros(100)).unique().tolist() == [float(count)]
    finally:
        torch.set_num_threads(before)


def test_every_instruction_set_gives_the_same(doubled):
    source = (
        "void twice(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i]; }"
    )
    sets = isa.WIDENING.get(isa.machine(), ("baseline",))
    for chosen in ("native", *sets[: sets.index(isa.host_isa()) + 1]):  # up to what this processor has
        kernel = opkit.c_kernel(source, dtypes=["float32", "bfloat16"], isa=chosen)
        doubled.register_kernel("cpu", kernel)
        for dtype in (torch.float32, torch.bfloat16):
            assert_doubles(doubled, (33,), dtype=dtype)


def test_threads_that_call_first_build_once(doubled):
    source = (
        "void twice(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i]; }"
    )
    doubled.register_kernel("cpu", opkit.c_kernel(source, dtypes=["float32"]))
    results = []
    threads = [
        threading.Thread(target=lambda k=k: results.append((doubled(torch.full((k,), 1.0)) == 2).all()))
        for k in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(results)


CUDA = """
template <class V> static __global__ void map(const V* x, V* out, int64_t n) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + x[i];
}
extern "C" const char* twice(const T* x, T* out, int64_t n, cudaStream_t stream) {
    map<<<(n + 255) / 256, 256, 0, stream>>>(x, out, n);
    return nullptr;
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_cuda(name, dtype):
    @opkit.custom_op(name)
    def doubled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32]
    bare = opkit.custom_op(name + "_bare", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    bare.register_kernel("cuda", opkit.cuda_kernel(CUDA, dtypes=dtypes, bind={"n": "x_numel"}))
    assert_doubles(bare, (5,), (1000,), (3, 7), (0,), (), dtype=dtype, device="cuda")
    opkit.remove(bare.name)


@pytest.mark.gpu
def test_cuda_runs_on_the_current_stream_and_reports_launches_that_fail(doubled):
    doubled.register_kernel("cuda", opkit.cuda_kernel(CUDA, dtypes=["float32"], bind={"n": "x_numel"}))
    x = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    doubled(x)
    for _ in range(5):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            y = x + 1
            z = doubled(y)
        stream.synchronize()
        assert (z == 2).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = doubled(x)
    x.fill_(3)
    graph.replay()
    assert (z == 6).all()


@pytest.mark.gpu
def test_a_launch_that_fails_is_reported(doubled):
    source = CUDA.replace("256, 0, stream", "4096, 0, stream")
    doubled.register_kernel("cuda", opkit.cuda_kernel(source, dtypes=["float32"], bind={"n": "x_numel"}))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"twice.*invalid"):
            doubled(torch.zeros(10, device="cuda"))


@pytest.mark.gpu
def test_cuda_gradients_and_compile(doubled):
    doubled.register_kernel("cuda", opkit.cuda_kernel(CUDA, dtypes=["float64", "float32"], bind={"n": "x_numel"}))
    x = torch.randn(3, 4, dtype=torch.float64, device="cuda", requires_grad=True)
    assert torch.autograd.gradcheck(doubled, (x,))
    compiled = torch.compile(lambda x: doubled(x + 1) * 3, fullgraph=True)
    torch.testing.assert_close(compiled(x), (x + 1) * 6)
    if torch.cuda.device_count() > 1:
        assert_doubles(doubled, (9,), device="cuda:1")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations"])
def test_loose_arithmetic_stays_in_its_kernel(doubled, flag):
    source = (
        "void twice(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i]; }"
    )
    doubled.register_kernel("cpu", opkit.c_kernel(source, dtypes=["float32"], flags=[flag]))
    assert_doubles(doubled, (5,))
    smallest = torch.tensor([1e-40])
    assert (smallest * 1).item() != 0  # gcc before 13 would turn subnormal numbers off in the whole process
