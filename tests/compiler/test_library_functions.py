"""Operators of libraries' functions fuse with what is around them, or are called, with the reason."""

import os

import fresh_process
import pytest
import torch

import opkit
from opkit.compiler.backend import opkit_backend
from opkit.kernels.cc import compilation
from opkit.kernels.cc.compilation import Request, Unit

F64 = torch.float64

SOURCE = """
#define API __attribute__((visibility("default")))
API double cubed(double x) { return x * x * x; }
API float cubedf(float x) { return x * x * x; }
API double weighted(double x, int n, double y) { return x * n + y; }
API double shifted(double x, long n) { return x + n; }
API int truncated(double x) { return (int)x; }
static double total = 0;
API double so_far(double x) { return total += x; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The path of a library built from SOURCE."""
    path = tmp_path_factory.mktemp("library") / "libsmall.so"
    path.write_bytes(compilation.build(Request("small", (Unit("small.c", SOURCE, "c"),))).read_bytes())
    return path


pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(scope="module")
def cubed(library):
    yield opkit.from_library("compiled::cubed", library, "double cubed(double x)", variants=["float cubedf(float x)"])
    opkit.remove("compiled::cubed")


def fused(function, *args, kernels=1):
    """Compiled without a call; its results are eager's."""
    found = opkit.explain(function, *args)
    torch.testing.assert_close(found.result, function(*args))
    assert not any(graph.calls or graph.reason for graph in found.graphs)
    assert found.kernels == kernels
    return found


def refused(function, *args):
    """The reason for the one call; the results are eager's."""
    found = opkit.explain(function, *args)
    torch.testing.assert_close(found.result, function(*args))
    (each,) = [text for graph in found.graphs for text in graph.calls]
    return each


def r(*shape, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (700,), (3, 0, 2), (5, 77, 3)])
def test_what_is_before_and_after_is_in_its_kernel(cubed, dtype, shape):
    fused(lambda x: cubed(torch.sin(x) * 2) + 1, r(*shape, dtype=dtype))


def test_strides_and_broadcasting(name, library):
    op = opkit.from_library(name, library, "double weighted(double x, int n, double y)")
    fused(lambda x, y: op(x.t()[::2], -3, y) * 2, r(6, 8), r(1, 6))
    fused(lambda x, y: op(x.expand(4, 6), 2**31 - 1, y), r(6), r(4, 1))


def test_before_and_after_a_reduction(cubed):
    fused(lambda x: torch.softmax(cubed(x), -1), r(9, 40))
    fused(lambda x: cubed(x.sum(1)) + 1, r(9, 40))
    fused(lambda x: cubed(x * 2).sum(0), r(300, 40))


def test_not_a_number_and_infinity(cubed):
    x = torch.tensor([float("nan"), float("inf"), -0.0, 1e200], dtype=F64)
    found = opkit.explain(lambda x: cubed(x) * 1, x).result
    torch.testing.assert_close(found, cubed(x), rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(found[2])


def test_another_type_of_result(name, library):
    op = opkit.from_library(name, library, "int truncated(double x)")
    fused(lambda x: op(x * 9) + 1, r(50))


def test_what_is_computed_for_two_is_computed_once(cubed):
    found = fused(lambda x: (cubed(x.exp()) + 1, cubed(x.exp()) * x), r(300))
    assert found.graphs[0].source.count("= c_0(") == 1


def test_many_calls_in_threads(cubed):
    fused(lambda x: cubed(cubed(x).sigmoid() + x), r(1000, 301))


def test_sizes_that_are_symbols(cubed):
    compiled = torch.compile(lambda x: cubed(x) + 1, backend=opkit_backend, dynamic=True, options={"strict": True})
    for length in (5, 300, 0, 1):
        x = r(length)
        torch.testing.assert_close(compiled(x), cubed(x) + 1)


def test_a_reference_gives_the_gradient(name, library):
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    op = opkit.from_library(name, library, "double cubed(double x)", reference=cube)
    x = r(40).requires_grad_()
    found = opkit.explain(lambda x: op(x.sin()).sum(), x)
    assert [(graph.calls, len(graph.kernels)) for graph in found.graphs] == [((), 1), ((), 1)]
    torch.compile(lambda x: op(x.sin()).sum(), backend=opkit_backend, options={"strict": True})(x).backward()
    torch.testing.assert_close(x.grad, 3 * x.detach().sin() ** 2 * x.detach().cos())


# ---- what is called --------------------------------------------------------------------------------------------------


def test_a_function_with_state_is_called(name, library):
    op = opkit.from_library(name, library, "double so_far(double x)", parallel=False)
    found = opkit.explain(lambda x: op(x * 2) + 1, torch.ones(3, dtype=F64))
    assert found.result.tolist() == [3, 5, 7]
    (text,) = found.graphs[0].calls
    assert "so_far may have state: it was declared with parallel=False" in text


def test_what_the_function_does_not_take_is_left_to_the_reference(name, library):
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    op = opkit.from_library(name, library, "double cubed(double x)", reference=cube)
    assert "no variant of the function takes f32" in refused(lambda x: op(x * 2) + 1, r(9, dtype=torch.float32))


def test_a_rival_is_chosen_at_the_call(name, library):
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    op = opkit.from_library(name, library, "double cubed(double x)", reference=cube)
    op.register_kernel("cpu", lambda x: x * x * x, name="rival", when=lambda x: x.numel() > 5)
    assert "which of its kernels is called is decided at the call" in refused(lambda x: op(x * 2) + 1, r(9))


def test_a_kernel_of_whole_tensors_is_called(name):
    @opkit.custom_op(name)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_kernel("cpu", lambda x: x * 2)
    assert "no kernel of it is a library's function of numbers" in refused(lambda x: twice(x + 1) + 1, r(9))


def test_disabled_kernels_are_not_called(name, library):
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3 + 7

    op = opkit.from_library(name, library, "double cubed(double x)", reference=cube)
    with op.set_kernel_enabled("cpu", False):
        fused(lambda x: op(x * 2) + 1, r(9))


def test_a_number_that_does_not_fit_is_refused_by_the_operator(name, library):
    op = opkit.from_library(name, library, "double weighted(double x, int n, double y)")
    compiled = torch.compile(lambda x: op(x, 2**31, x), backend=opkit_backend)
    with pytest.raises(Exception, match="n does not fit into int"):
        compiled(r(4))


def test_a_size_is_passed_where_it_fits(name, library):
    op = opkit.from_library(name, library, "double shifted(double x, long n)")
    compiled = torch.compile(lambda x: op(x, x.shape[0]), backend=opkit_backend, dynamic=True, options={"strict": True})
    for length in (5, 7):
        assert torch.equal(compiled(torch.zeros(length, dtype=F64)), torch.full((length,), float(length), dtype=F64))


def test_it_is_called_where_the_options_say_so(cubed):
    x = r(9)
    compiled = torch.compile(lambda x: cubed(x * 2) + 1, backend=opkit_backend, options={"inline": False})
    torch.testing.assert_close(compiled(x), cubed(x * 2) + 1)


def test_a_library_that_was_removed_is_not_called(name, library, tmp_path):
    own = tmp_path / "libgone.so"
    own.write_bytes(library.read_bytes())
    op = opkit.from_library(name, own, "double cubed(double x)")
    op(r(3))  # its kernel is linked with the library
    own.unlink()
    assert f"{own}, which has cubed, is gone" in refused(lambda x: op(x * 2) + 1, r(9))


# ---- another process -------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch, opkit
from opkit.compiler import backend, pipeline
if sys.argv[2] == "warm":
    pipeline.compile_graph = None
op = opkit.from_library("process::cubed", sys.argv[1], "double cubed(double x)")
fast = torch.compile(lambda x: op(x * 2) + 1, backend=backend.opkit_backend, options={"strict": True})
print(fast(torch.arange(5.0, dtype=torch.float64)).tolist())
"""


@pytest.mark.exhaustive
def test_a_plan_of_another_process_is_found_until_the_library_changes(cache, library, tmp_path):
    own = tmp_path / "libown.so"
    own.write_bytes(library.read_bytes())
    environment = os.environ | {"OPKIT_CACHE_DIR": str(cache)}

    def ran(how):
        return fresh_process.run(["-c", PROGRAM, own, how], environment, check=False)

    assert ran("cold").stdout == ran("warm").stdout == f"{[8.0 * i**3 + 1 for i in range(5)]}\n"
    os.utime(own, (1, 1))
    assert ran("warm").returncode != 0
