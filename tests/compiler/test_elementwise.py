"""C kernels that are declared elementwise are called in the loop of what is before and after them."""

import os

import fresh_process
import pytest
import torch
from torch import Tensor

import opkit
from opkit.compiler.backend import opkit_backend
from opkit.errors import DeclarationError
from tests.compiler.test_library_functions import fused, r, refused

pytestmark = pytest.mark.usefixtures("fresh")

SOFTSIGN = """
void softsign(const T* x, T* out, double by, int64_t x_numel) {
    for (int64_t i = 0; i < x_numel; i++) out[i] = (T)((opk_acc)x[i] * by / (1 + fabs((double)x[i])));
}
"""
MIXED = """
void mixed(int64_t count, const int64_t* n, bool negate, const float* x, double* out, int times) {
    for (int64_t i = 0; i < count; i++) out[i] = (negate ? -1.0 : 1.0) * x[i] * n[i] * times;
}
"""
DTYPES = [torch.float64, torch.bfloat16, torch.float32]


@pytest.fixture(scope="module")
def softsign():
    @opkit.custom_op("compiled::softsign")
    def softsign(x: Tensor, by: float = 1.0) -> Tensor:
        return x * by / (1 + x.abs())

    softsign.register_kernel("cpu", opkit.c_kernel(SOFTSIGN, dtypes=DTYPES, elementwise=True))
    yield softsign
    opkit.remove("compiled::softsign")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 77, 3), (), (3, 0, 2), (40, 1025), (0,), (1,), (700,), (4, 512)])
def test_what_is_before_and_after_is_in_its_kernel(softsign, dtype, shape):
    fused(lambda x: softsign(x * 2, 0.5) + 1, r(*shape, dtype=dtype))


def test_strides_and_broadcasting_around_it(softsign):
    fused(lambda x, y: softsign(x.t()[::2] + y) * x.t()[1::2], r(6, 8), r(1, 6))
    fused(lambda x: softsign(x.expand(4, 600).clone()).flip(1), r(600))


def test_before_and_after_a_reduction_and_along_a_scan(softsign):
    fused(lambda x: softsign(x - x.mean(-1, keepdim=True)).sum(-1), r(5, 900))
    fused(lambda x: softsign(x.sum(0)), r(700, 5))
    found = opkit.explain(lambda x: softsign(x.exp()).cumsum(-1), r(5, 900))
    torch.testing.assert_close(found.result, softsign(r(5, 900).exp()).cumsum(-1))
    assert not any(graph.calls for graph in found.graphs)


@pytest.mark.exhaustive  # test_library_functions.py asks the same of a library's function
def test_one_after_the_other_and_twice_of_the_same(softsign):
    fused(lambda x: softsign(softsign(x, 2.0), 3.0) * softsign(x, 2.0), r(3, 1100))


@pytest.mark.exhaustive  # test_library_functions.py asks the same of a library's function
def test_threads_and_not_a_number(softsign):
    x = r(300_000, dtype=torch.float32)
    x[::1000] = torch.nan
    fused(lambda x: softsign(x).nan_to_num(7.0) + x.isnan(), x)


def test_parameters_of_several_types(name):
    @opkit.custom_op(name)
    def mixed(x: Tensor, n: Tensor, negate: bool = False) -> Tensor:
        return x.double() * n * (-3 if negate else 3)

    names = {"count": "x_numel", "times": 3}
    mixed.register_kernel("cpu", opkit.c_kernel(MIXED, bind=names, elementwise=True))
    x, n = r(7, 130, dtype=torch.float32), torch.arange(910).view(7, 130)
    fused(lambda x, n: mixed(x + 1, n // 2, True).sin(), x, n)
    fused(lambda x, n: mixed(x[:, ::2], n[:, 1::2]) - 1, x, n)


def test_calls_go_on_as_they_were_before_compilation(name):
    @opkit.custom_op(name)
    def softsign(x: Tensor, by: float = 1.0) -> Tensor:
        return x * by / (1 + x.abs())

    softsign.register_kernel("cpu", opkit.c_kernel(SOFTSIGN, dtypes=DTYPES, elementwise=True))
    for _ in range(3):
        softsign(r(6, 300))
    fused(lambda x: softsign(x * 2) + 1, r(6, 300))
    for x in (r(6, 300), r(4, 600), r(2, 5).t(), r(7)):
        torch.testing.assert_close(softsign(x), x / (1 + x.abs()))


@pytest.mark.exhaustive  # test_library_functions.py asks the same of a library's function
def test_sizes_that_are_symbols(softsign):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: softsign(x * x.shape[0]) + 1, backend=opkit_backend, dynamic=True)
    for shape in ((3, 700), (5, 2), (2, 513)):
        torch.testing.assert_close(compiled(r(*shape)), softsign(r(*shape) * shape[0]) + 1)


def test_gradients(softsign):
    x = r(6, 300).requires_grad_()
    expected = torch.autograd.grad((softsign(x * 2) ** 2).sum(), x)
    compiled = torch.compile(lambda x: (softsign(x * 2) ** 2).sum(), backend=opkit_backend)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), expected)


def test_a_number_that_may_not_fit_is_left_to_the_call(name):
    @opkit.custom_op(name)
    def plus(x: Tensor, n: int) -> Tensor:
        return x + n

    source = "void plus(const T* x, T* out, int n, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] + n; }"
    plus.register_kernel("cpu", opkit.c_kernel(source, elementwise=True))
    fused(lambda x: plus(x * 2, 2**31 - 1), r(5))
    with pytest.raises(Exception, match="does not fit"):
        torch.compile(lambda x: plus(x * 2, 2**40), backend=opkit_backend)(r(5))


def test_one_that_shares_its_work_out_among_threads(name):
    @opkit.custom_op(name)
    def plus(x: Tensor) -> Tensor:
        return x + 1

    source = """
    typedef struct { const double* x; double* out; } both;
    static void part(int64_t begin, int64_t end, void* given) {
        const both* at = given;
        for (int64_t i = begin; i < end; i++) at->out[i] = at->x[i] + 1;
    }
    void plus(const double* x, double* out, int64_t x_numel) {
        both at = {x, out};
        opk_parallel_for(0, x_numel, 64, part, &at);
    }"""
    plus.register_kernel("cpu", opkit.c_kernel(source, elementwise=True))
    fused(lambda x: plus(x * 2).sin(), r(100_000))


def test_tensors_of_several_shapes_are_left_to_the_call(name):
    @opkit.custom_op(name)
    def scaled(x: Tensor, by: Tensor) -> Tensor:
        return x * by

    source = """
    void scaled(const double* x, const double* by, double* out, int64_t x_numel) {
        for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] * by[i];
    }"""
    scaled.register_kernel("cpu", opkit.c_kernel(source, elementwise=True))
    fused(lambda x, y: scaled(x, y) + 1, r(4, 3), r(4, 3))
    found = opkit.explain(lambda x, y: scaled(x, y)[:0] + 1, r(4, 3), r(1, 3))
    assert any("not of one shape" in text for graph in found.graphs for text in graph.calls)


def test_without_the_declaration_it_is_called(name):
    @opkit.custom_op(name)
    def softsign(x: Tensor, by: float = 1.0) -> Tensor:
        return x * by / (1 + x.abs())

    softsign.register_kernel("cpu", opkit.c_kernel(SOFTSIGN, dtypes=DTYPES))
    assert "no kernel of it is elementwise" in refused(lambda x: softsign(x * 2) + 1, r(5))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("void f(const T* x, T* out, int64_t x_size_0) {}", "'x_size_0'"),
        ("void f(const opk_tensor* x, T* out, int64_t x_numel) {}", "'x'"),
        ("int f(const T* x, T* out, int64_t x_numel) { return 0; }", "returns nothing"),
        ("void f(T* out, int64_t x_numel) {}", "takes none"),
        ('void f(const T* x, T* out, int64_t x_numel) { opk_fail("no"); }', "cannot fail"),
        ("void f(const T* x, T* out, int64_t n) {}", "'n'"),
    ],
)
def test_what_means_another_thing_for_a_part_is_refused(name, source, told):
    from jaxtyping import Float

    @opkit.custom_op(name)
    def f(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return x * 1

    with pytest.raises(DeclarationError, match=told):
        f.register_kernel("cpu", opkit.c_kernel(source, elementwise=True))


def test_a_size_that_counts_every_element(name):
    from jaxtyping import Float

    @opkit.custom_op(name)
    def f(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return x + 1

    source = "void f(const T* x, T* out, int64_t shape) { for (int64_t i = 0; i < shape; i++) out[i] = x[i] + 1; }"
    f.register_kernel("cpu", opkit.c_kernel(source, elementwise=True))
    fused(lambda x: f(x * 2).exp(), r(3, 400))


def test_the_check_asks_whether_the_declaration_is_true(name, softsign):
    report = opkit.check(softsign, properties=["behaviour.elementwise"], max_examples=10)
    assert [each.property for each in report.passed] == ["behaviour.elementwise"], str(report)

    @opkit.custom_op(f"{name}_sum")
    def running(x: Tensor) -> Tensor:
        return x.flatten().cumsum(0).view(x.shape)

    source = """
    void running(const T* x, T* out, int64_t x_numel) {
        T sum = 0;
        for (int64_t i = 0; i < x_numel; i++) out[i] = sum += x[i];
    }"""
    running.register_kernel("cpu", opkit.c_kernel(source, elementwise=True))
    report = opkit.check(running, properties=["behaviour.elementwise"], max_examples=20)
    assert [each.property for each in report.failures] == ["behaviour.elementwise"], str(report)
    opkit.remove(f"{name}_sum")


def test_what_takes_no_part_has_not_been_asked(name):
    from jaxtyping import Float

    @opkit.custom_op(f"{name}_four")
    def four(x: Float[Tensor, "4"]) -> Float[Tensor, "4"]:
        return x + 1

    source = (
        "void four(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] + 1; }"
    )
    four.register_kernel("cpu", opkit.c_kernel(source, elementwise=True))
    report = opkit.check(four, properties=["behaviour.elementwise"], max_examples=5)
    assert not report.passed, str(report)
    assert [each.property for each in report.skipped] == ["behaviour.elementwise"], str(report)
    opkit.remove(f"{name}_four")


def test_a_kernel_of_another_source_is_compiled_again(name):
    body = "for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] / (ADDED + fabs(x[i]));"
    x = r(5)

    def check(added):
        torch._dynamo.reset()
        op = opkit.custom_op(name, lambda x: x / (added + x.abs()), schema="(Tensor x) -> Tensor")
        source = f"void f(const T* x, T* out, int64_t x_numel) {{ {body.replace('ADDED', str(added))} }}"
        op.register_kernel("cpu", opkit.c_kernel(source, elementwise=True))
        torch.testing.assert_close(opkit.explain(lambda x: op(x * 2), x).result, x * 2 / (added + (x * 2).abs()))
        opkit.remove(name)

    check(1)
    check(2)


# ---- another process -------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, torch, opkit
from torch import Tensor
from opkit.compiler import backend, pipeline
made, original = [], pipeline.compile_graph
pipeline.compile_graph = lambda *given: made.append(given) or original(*given)
@opkit.custom_op("process::soft", mutates_args=())
def soft(x: Tensor, by: float) -> Tensor:
    return x * by / (1 + x.abs())
soft.register_kernel("cpu", opkit.c_kernel(sys.argv[1], elementwise=True))
fast = torch.compile(lambda x: soft(x * 2, 3.0) + 1, backend=backend.opkit_backend, options={"strict": True})
result = fast(torch.arange(3.0)).tolist()
print(len(made), result)
"""


@pytest.mark.exhaustive
def test_a_plan_of_another_process_is_found_until_the_source_changes(cache):
    environment = os.environ | {"OPKIT_CACHE_DIR": str(cache)}

    def ran(source):
        return fresh_process.run(["-c", PROGRAM, source], environment, cwd=cache).stdout.split(" ", 1)

    made, result = ran(SOFTSIGN)
    assert made == "1"
    assert ran(SOFTSIGN) == ["0", result]
    made, other = ran(SOFTSIGN.replace("1 + fabs", "2 + fabs"))
    assert made == "1"
    assert other != result
