"""Calls of native kernels at the edges: tensors given twice, none at all, many outputs, exceptions, second derivatives."""

import threading
import time

import pytest
import torch
from torch import Tensor

import opkit

TWICE = "void twice(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i]; }"
ONES = "void ones({}float* out, int64_t out_numel) {{ for (int64_t i = 0; i < out_numel; i++) out[i] = 1; }}"
ADD = "void add(T* x, const T* y, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) x[i] += y[i]; }"


def c_kernel(source, *dtypes):
    return opkit.c_kernel(source, dtypes=dtypes or ["float32", "float64"])


# Each has one name, so that its kernel is built once: the name is part of what is built.


@pytest.fixture
def doubled():
    @opkit.custom_op("probed_calls::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_kernel("cpu", c_kernel(TWICE))
    yield doubled
    opkit.remove("probed_calls::doubled")


@pytest.fixture
def add_():
    @opkit.custom_op("probed_calls::add_", mutates_args=("x",))
    def add_(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    add_.register_kernel("cpu", c_kernel(ADD))
    yield add_
    opkit.remove("probed_calls::add_")


# ---- tensors that share memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: torch.zeros(4), lambda: torch.zeros(8)[::2]], ids=["dense", "strided"])
def test_both_writes_to_a_tensor_that_is_given_twice_count(name, make):
    @opkit.custom_op(name, mutates_args=("x", "y"))
    def both_(x: Tensor, y: Tensor) -> None:
        x.add_(1)
        y.add_(1)

    source = (
        "void both(T* x, T* y, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) { x[i] += 1; y[i] += 1; } }"
    )
    both_.register_kernel("cpu", c_kernel(source))
    for _ in range(4):
        x = make()
        both_(x, x)
        assert x.tolist() == [2.0] * 4


def test_a_strided_tensor_in_a_list_twice(name):
    @opkit.custom_op(name, mutates_args=("xs",))
    def scale_(xs: list[Tensor]) -> None:
        for x in xs:
            x.mul_(3)

    source = "void scale(T* const* xs, int64_t xs_len) { for (int64_t i = 0; i < xs_len; i++) xs[i][0] *= 3; }"
    scale_.register_kernel("cpu", c_kernel(source))
    x = torch.ones(4)[::4]
    scale_([x, x])
    assert x.item() == 9
    y = torch.ones(1, 2, 2).transpose(1, 2)
    scale_([y, y.contiguous(), y])
    assert y.flatten().tolist() == [9, 1, 1, 1]


def test_lazy_clones_are_two_tensors(name, add_):
    x = torch.ones(8)[::2]
    y = x._lazy_clone()
    add_(x, y)
    assert (x.tolist(), y.tolist()) == ([2] * 4, [1] * 4)


def test_an_argument_that_shares_memory_with_a_written_one_is_not_accused(add_):
    x = torch.ones(3)
    add_(x, x)
    assert x.tolist() == [2, 2, 2]
    a = torch.arange(10.0)
    add_(a[2::2], a[:-2:2])
    assert a[3::2].tolist() == [3, 5, 7, 9]


def test_writes_to_an_expanded_tensor_say_why_they_fail(add_):
    reason = ": .*single memory location" if torch.__version__ >= "2.13" else ""
    with pytest.raises(RuntimeError, match="(?s)kernel add.*copying a result back" + reason):
        add_(torch.zeros(1).expand(3), torch.ones(3))


# ---- no tensors -----------------------------------------------------------------------------------------------------


def test_a_factory(name):
    @opkit.custom_op(name, mutates_args=())
    def ones(n: int, device: torch.device) -> Tensor:
        return torch.ones(n, device=device)

    ones.register_kernel("cpu", c_kernel(ONES.format(""), "float32"))
    assert ones.select(3, torch.device("cpu")).kernel == "ones"
    for n in (3, 3, 3, 5, 0):
        assert ones(n, torch.device("cpu")).tolist() == [1] * n


def test_an_empty_list(name):
    @opkit.custom_op(name, mutates_args=())
    def ones(xs: list[Tensor], n: int) -> Tensor:
        return torch.ones(n)

    ones.register_kernel("cpu", c_kernel(ONES.format("const opk_tensor* xs, "), "float32"))
    for n in (3, 3, 3, 5):
        assert ones([], n).tolist() == [1] * n
        assert ones([torch.ones(2)], n).tolist() == [1] * n


def test_none_as_the_only_tensor(name):
    @opkit.custom_op(name, mutates_args=())
    def ones(x: Tensor | None, n: int) -> Tensor:
        return torch.ones(n)

    ones.register_kernel("cpu", c_kernel(ONES.format("const opk_tensor* x, "), "float32"))
    for n in (3, 3, 3, 5):
        assert ones(None, n).tolist() == [1] * n
        assert ones(torch.ones(2), n).tolist() == [1] * n


# ---- tensors of other kinds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("planned", ["python"], indirect=True)
def test_sparse_tensors_after_dense_ones_of_their_shape(planned, doubled):
    x = torch.ones(3)
    for _ in range(4):
        doubled(x)
    for other in (x.to_sparse(), x.to_mkldnn()):
        assert doubled(other).layout == other.layout
        assert doubled(other).to_dense().tolist() == [2, 2, 2]


def test_more_dimensions_than_programs_are_likely_to_have(doubled):
    x = torch.ones([1] * 70 + [2])
    for _ in range(3):
        assert doubled(x).shape == x.shape


def test_the_layouts_of_many_outputs(name):
    def spread(x: Tensor) -> tuple[(Tensor,) * 20]:
        return tuple(x + i for i in range(20))

    op = opkit.custom_op(name, spread, mutates_args=())
    outputs = ", ".join(f"T* out{i}" for i in range(20))
    op.register_kernel(
        "cpu",
        c_kernel(f"void o(const T* x, {outputs}) {{ {' '.join(f'out{i}[0] = x[0] + {i};' for i in range(20))} }}"),
    )
    for _ in range(4):
        assert [out.item() for out in op(torch.zeros([1] * 8))] == list(range(20))


# ---- debug builds ---------------------------------------------------------------------------------------------------


def test_debug_a_tensor_that_is_read_and_written(name):
    @opkit.custom_op(name, mutates_args=("x",))
    def add_(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    source = "void add(const T* y, T* x, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] += y[i]; }"
    add_.register_kernel("cpu", opkit.c_kernel(source, dtypes=["float32"], bind={"n": "x_numel"}, debug=True))
    x = torch.ones(3)
    add_(x, x)
    assert x.tolist() == [2, 2, 2]


# ---- failures -------------------------------------------------------------------------------------------------------


def test_any_cpp_exception_is_raised(doubled):
    source = 'extern "C" void thrower(const T* x, T* out, int64_t x_numel) { if (x_numel) throw 42; }'
    doubled.register_kernel("cpu", opkit.cpp_kernel(source, dtypes=["float32"]), priority=1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"kernel thrower.*no std::exception"):
            doubled(torch.ones(2))


def test_an_exception_within_parallel_for_is_told(doubled):
    source = """
    #include <stdexcept>
    static void part(int64_t, int64_t, void*) { throw std::runtime_error("part of it is wrong"); }
    extern "C" void thrower(const T* x, T* out) { opk_parallel_for(0, 1000, 1, part, nullptr); }"""
    doubled.register_kernel("cpu", opkit.cpp_kernel(source, dtypes=["float32"]), priority=1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="part of it is wrong"):
            doubled(torch.ones(2))


def test_a_dimension_that_a_tensor_has_not(doubled):
    source = "void second(const T* x, T* out, int64_t x_size_1) { out[0] = x_size_1; }"
    doubled.register_kernel("cpu", c_kernel(source), priority=1)
    with pytest.raises(RuntimeError, match="x_size_1 asks for dimension 1 of a tensor that has 1"):
        doubled(torch.ones(2))


FOREIGN = """
#include <pthread.h>
#include <unistd.h>
static void* reporter(void* n) { opk_fail("said by a thread of its own"); return NULL; }
void threaded(const T* x, T* out, int64_t x_numel) {
    pthread_t thread;
    if (x_numel == 3) {
        pthread_create(&thread, NULL, reporter, NULL);
        pthread_join(thread, NULL);
        usleep(300000);
    }
    for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i];
}"""


def test_a_report_of_a_foreign_thread_fails_the_call_that_runs_and_no_later_one(doubled):
    doubled.register_kernel("cpu", c_kernel(FOREIGN), priority=1)
    for n in (1, 2):
        doubled(torch.ones(n))
    failures = []

    def fail():
        with pytest.raises(RuntimeError, match="a thread of its own") as raised:
            doubled(torch.ones(3))
        failures.append(raised.value)

    failing = threading.Thread(target=fail)
    failing.start()
    time.sleep(0.15)
    assert doubled(torch.ones(2)).tolist() == [2, 2]  # begun after the report, ended before the call that it is of
    failing.join()
    assert len(failures) == 1


# ---- derivatives ----------------------------------------------------------------------------------------------------


def squares(op):
    return lambda x: (op(x) ** 2).sum()


def test_second_derivatives_by_nested_transforms(doubled):
    func, x = torch.func, torch.randn(3)
    for nested in (func.hessian, lambda f: func.jacrev(func.jacrev(f)), lambda f: func.jacfwd(func.jacfwd(f))):
        torch.testing.assert_close(nested(squares(doubled))(x), 8 * torch.eye(3))
    _, tangent = func.jvp(func.grad(squares(doubled)), (x,), (torch.ones(3),))
    assert tangent.tolist() == [8, 8, 8]
    third = func.grad(func.grad(func.grad(lambda x: doubled(x) ** 4)))
    assert third(torch.tensor(1.0)).item() == 16 * 24


def test_no_grad_within_nested_transforms_holds(doubled):
    def stopped(x):
        with torch.no_grad():
            return doubled(x) ** 2

    def plain(x):
        with torch.no_grad():
            return (x * 2) ** 2

    x = torch.tensor(3.0)
    twice = [torch.func.grad(torch.func.grad(lambda x, f=f: f(x) * x**2))(x) for f in (stopped, plain)]
    assert twice[0] == twice[1] != 0
