"""CUDA C++ in two parts: what NVRTC compiles, and what launches it."""

import pytest

from opkit.kernels.cc.cuda_split import CannotSplit, place_of, split

SOURCE = """#include <cuda_fp16.h>
#include <vector>
using T = float;
const int WIDTH = 4;
static std::vector<int> seen;
__constant__ float table[4];
namespace inner {
struct Pair {
    float x, y;
    __device__ float sum() const { return x + y; }
    __host__ __device__ float first() const { return x; }
    int on_host() { return 1; }
};
static __device__ float twice(float x) { return x + __shfl_xor_sync(~0u, x, 1); }
template <typename E, int N>
__global__ void __launch_bounds__(256) each(const E* __restrict__ x, E* out, Pair pair = {}) {
    out[threadIdx.x] = twice(x[N]) + pair.sum();
}
}  // namespace inner
namespace {
__global__ void plain() {}
}
extern "C" void run(const T* x, T* out, int64_t n, cudaStream_t stream) {
    constexpr int AT = 2 * WIDTH;  // <<< not a launch
    const char* text = "<<<1, 2>>>";
    if (n > 0) inner::each<T, AT><<<dim3((n + 255) / 256), 256, 0, stream>>>(x, out);
    else plain<<<1, n < 3 ? 32 : 64>>>();
    cudaFuncSetAttribute((const void*)inner::each<T, AT>, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 16);
}
"""


def test_each_part_has_what_is_its_own():
    found = split(SOURCE)
    assert found.names == ("inner::each<T, (2 * WIDTH)>", "plain")
    for text in (
        "table[4]",
        "twice(x[N])",
        "const int WIDTH = 4;",
        "float sum() const { return x + y; }",
        "float first()",
    ):
        assert text in found.device, text
    for text in ("run(", "std::vector<int> seen"):
        assert text not in found.device, text
    for text in (
        "run(",
        "std::vector<int> seen",
        "const int WIDTH = 4;",
        "float first()",
        "int on_host()",
        "#include <vector>",
    ):
        assert text in found.host, text
    for text in ("table[4]", "__shfl_xor_sync", "float sum()", "cuda_fp16.h", "threadIdx"):
        assert text not in found.host, text


def test_launches_say_which_kernel_and_what_grid():
    host = split(SOURCE).host
    assert "if (n > 0) ::opk_configure(0, dim3((n + 255) / 256), 256, 0, stream), inner::each<T, AT>(x, out);" in host
    assert "else ::opk_configure(1, 1, n < 3 ? 32 : 64), plain();" in host
    assert "::opk_set_attribute(0, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 16);" in host
    assert (
        "each(const E* __restrict__ x, E* out, Pair pair = {}) { void* opk_arguments[] = {(void*)&x, (void*)&out, (void*)&pair};"
        in host
    )


def test_lines_stay_where_they_are():
    found = split(SOURCE)
    for number, line in enumerate(SOURCE.splitlines()):
        if "twice(x[N])" in line or "twice(float x)" in line:
            assert found.device.splitlines()[number] == line
        if "const char* text" in line:
            assert found.host.splitlines()[number] == line
    assert SOURCE.count("\n") == found.device.count("\n") == found.host.count("\n")


KERNEL = """#line 5 "mine.cu"
__global__ void one(float* x) { *x = 1; }
template <int N> __global__ void of(float* x) { *x = N; }
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#define GO(x) one<<<1, 1>>>(x)\n", "mine.cu:7: a macro launches a kernel"),
        ("#define KERNEL __global__\n", "mine.cu:7: a macro declares a kernel"),
        ("__global__ void two(float* x) {\n one<<<1, 1>>>(x); }", "mine.cu:8: a kernel launches another one"),
        ("template <int M>\nvoid go(float* x) { of<M + 1><<<1, 1>>>(x); }",
         "mine.cu:8: a function template launches 'of<M \\+ 1>', which depends on its 'M'"),
        ("void go(float* x) { of<<<1, 1>>>(x); }", "mine.cu:7: 'of' is a template: write its arguments, as in of<T>"),
        ("void go(float* x) { auto k = one;\n k<<<1, 1>>>(x); }", "mine.cu:8: 'k' is no kernel of this source"),
        ("void go(float* x) { (x ? one : one)<<<1, 1>>>(x); }", "mine.cu:7: it is not clear which kernel is launched"),
    ],
)  # fmt: skip
def test_what_only_nvcc_follows_is_refused_with_its_line(text, reason):
    with pytest.raises(CannotSplit, match=reason):
        split(KERNEL + text)


def test_a_template_that_launches_what_does_not_depend_on_it_is_split():
    assert split(KERNEL + "template <class E> void go(E* x) { of<3><<<1, 1>>>(x); }").names == ("of<3>",)


@pytest.mark.parametrize(
    ("launch", "name"),
    [
        ("void go(const float* x, half *y) { pair<<<1, 1>>>(x, y, 3); }", "pair<float, half>"),
        ("void go(const T* __restrict__ x, void* y) { pair<<<1, 1>>>(x, (int4*)y, 3); }", "pair<T, int4>"),
        ("void go(T* x, void* y) { pair<<<1, 1>>>(x, reinterpret_cast<const int4*>(y), 3); }", "pair<T, int4>"),
        (
            "void go(void* x) { const unsigned* z = f(x);\n for (int n = 0; n < 3; n++) { value<<<1, 1>>>(n, z); } }",
            "value<int>",
        ),
    ],
)
def test_arguments_of_templates_are_deduced(launch, name):
    kernels = """template <typename A, class B> __global__ void pair(const A* x, B* __restrict__ y, int n) {}
template <class V> __global__ void value(V x, const unsigned* y) {}
"""
    assert split(kernels + launch).names == (name,)


@pytest.mark.parametrize(
    "launch", ["void go(float* x) { V<<<1, 1>>>(x + 1, 2); }", "void go(auto x) { V<<<1, 1>>>(x, 2); }"]
)
def test_what_takes_a_compiler_to_deduce_is_refused(launch):
    kernels = (
        "template <class A> __global__ void V(A* x, int n) {}\ntemplate <class A> __global__ void by_value(A x) {}\n"
    )
    with pytest.raises(CannotSplit, match="is a template: write its arguments"):
        split(kernels + launch)


def test_a_place_is_that_of_the_last_directive():
    text = 'x\n#line 9 "b.cu"\ny\n#line 2 "<d>"\nz'
    assert [place_of(text, text.index(each)) for each in "xyz"] == ["<source>:1", "b.cu:9", "<d>:2"]
