"""Operators from library functions that take pointers: a small library made here, OpenBLAS, and the example."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.errors import DeclarationError, KernelError, UnknownOperatorError
from opkit.kernels.cc import compilation
from opkit.kernels.libraries import shared_library

F64 = torch.float64

SMALL = """
#define API __attribute__((visibility("default")))
API int scale(const double* x, double by, int n, double* y) {
    if (by < 0) return 7;
    for (int i = 0; i < n; i++) y[i] = x[i] * by;
    return 0;
}
API double total(const double* x, unsigned short n, double* y) { *y = 0; while (n--) *y += *x++; return *y; }
API void rows(const double* x, int n, double* y) { *y = n; (void)x; }
enum mode { PLAIN, SQUARED };
API void powers(enum mode mode, char letter, long size, const double* x, double* y) {
    for (long i = 0; i < size; i++) y[i] = (mode == SQUARED ? x[i] * x[i] : x[i]) + letter;
}
"""
SCALE = "int scale(const double* x, double by, int n, double* y)"


@pytest.fixture(scope="session")
def small():
    """The path of a library built from SMALL."""
    unit = compilation.Unit("small.c", SMALL, "c")
    return compilation.build(compilation.Request("small", (unit,)))


def scaled(x: Float[Tensor, "n"], by: float) -> Float[Tensor, "n"]:
    return x * by


def summed(x: Float[Tensor, "n"]) -> Float[Tensor, "1"]:
    return x.sum().reshape(1)


def test_error_codes(name, small):
    op = opkit.from_library(name, small, SCALE, reference=scaled, bind={"y": "out"})
    x = torch.randn(5, dtype=F64, requires_grad=True)
    torch.testing.assert_close(op(x, 2.0), x * 2)
    assert torch.autograd.gradcheck(lambda x: op(x, 3.0), (x,))
    with pytest.raises(RuntimeError, match=rf"{name} \(kernel scale\): it returned the error code 7"):
        op(x.detach(), -1.0)


def test_what_is_returned_can_be_ignored(name, small):
    op = opkit.from_library(name, small, SCALE, reference=scaled, bind={"y": "out"}, returns="ignore")
    assert op(torch.ones(2, dtype=F64), -1.0).shape == (2,)
    declared = "double total(const double* x, unsigned short n, double* y)"
    op = opkit.from_library(
        f"{name}_total", small, declared, reference=summed, bind={"y": "out", "n": "n * 1"}, returns="ignore"
    )
    assert op(torch.ones(3, dtype=F64)).item() == 3
    with pytest.raises(RuntimeError, match="n, which is n \\* 1, does not fit into short unsigned"):
        op(torch.ones(2**16, dtype=F64))
    opkit.remove(f"{name}_total")


@pytest.mark.parametrize("meaning", ["n", "n * 1"])
def test_sizes_that_do_not_fit_are_not_cut_off(name, small, meaning):
    def rows(x: Float[Tensor, "n _"]) -> Float[Tensor, "1"]:
        return x.new_full((1,), x.shape[0])

    declared = "void rows(const double* x, int n, double* y)"
    op = opkit.from_library(name, small, declared, reference=rows, bind={"y": "out", "n": meaning})
    assert op(torch.empty(2**31 - 1, 0, dtype=F64)).item() == 2**31 - 1
    with pytest.raises(RuntimeError, match=r"n.* does not fit into int"):
        op(torch.empty(2**31, 0, dtype=F64))


def test_a_header_does_not_contradict_the_declaration(name, small, tmp_path):
    header = (
        "typedef long size; enum mode { PLAIN, SQUARED };\nvoid powers(enum mode, char, size, const double*, double*);"
    )
    (tmp_path / "small.h").write_text(header)
    op = opkit.from_library(
        name,
        small,
        "void powers(enum mode mode, char letter, size n, double const *x, double *restrict y)",
        reference=lambda_of("x: Float[Tensor, 'n']", "x * x + 65"),
        bind={"mode": 1, "letter": "A", "y": "out"},
        preamble="#include <small.h>",
        flags=[f"-I{tmp_path}"],
    )
    x = torch.randn(4, dtype=F64)
    torch.testing.assert_close(op(x), x * x + 65)


def lambda_of(parameters, body):
    """A function with annotations, for one expression."""
    scope = {"Float": Float, "Tensor": Tensor, "__name__": __name__}
    exec(f"def reference({parameters}) -> Tensor:\n    return {body}\n", scope)
    return scope["reference"]


WRONG = [
    ({"bind": {}}, "'y' stands for nothing"),
    ({"bind": {"y": "out", "n": "n +"}}, "neither a name nor an expression"),
    ({"bind": {"y": "out", "n": "size * 2"}}, "'size' stands for nothing"),
    ({"bind": {"y": "out", "n": 1.5}}, "Give it an integer"),
    ({"bind": {"y": "out", "n": 2**40}}, "does not fit into int"),
    ({"bind": {"y": "out", "by": "2 * by"}}, "it is no integer"),
    ({"bind": {"y": "out + 1"}}, "it is a pointer"),
    ({"bind": {"y": "out", "z": 1}}, "no such parameter"),
    ({"bind": {"y": "out", "n": [1]}}, "given a number, the name"),
    ({"returns": "value"}, "returns='value'"),
    ({"declaration": "double total(const double* x, double by, int n, double* y)"}, "it returns double"),
    ({"declaration": "int* scale(const double* x, double by, int n, double* y)"}, "which is no error code"),
]


def assert_undefined(name):
    with pytest.raises(UnknownOperatorError):
        opkit.get(name)
    assert not hasattr(torch.ops.drop_in, name.split("::")[1])


def test_what_does_not_fit_the_operator(name, small):
    for given, message in WRONG:
        options = {"declaration": SCALE, "bind": {"y": "out"}, "reference": scaled} | given
        with pytest.raises(DeclarationError, match=message) as caught:
            pytest.fail(f"{given}: {opkit.from_library(name, small, options.pop('declaration'), **options)}")
        assert name in str(caught.value), given
        assert_undefined(name)


def test_a_function_may_write_to_an_argument(name, small):
    def scale_(x: Float[Tensor, "n"], by: float) -> None:
        x.mul_(by)

    op = opkit.from_library(name, small, SCALE.replace("const ", ""), reference=scale_, bind={"y": "x"})
    x = torch.ones(3, dtype=F64)
    version = x._version
    op(x, 4.0)
    assert x.tolist() == [4, 4, 4]
    assert x._version > version
    strided = torch.ones(6, dtype=F64)
    op(strided[::2], 4.0)
    assert strided.tolist() == [4, 1, 4, 1, 4, 1]


# ---- OpenBLAS --------------------------------------------------------------------------------------------------------

GEMM = (
    "void {0}gemm{1}(int order, int transa, int transb, {2} m, {2} n, {2} k, {3} alpha, const {3}* a, {2} lda, "
    "const {3}* b, {2} ldb, {3} beta, {3}* c, {2} ldc)"
)
ROW_MAJOR = {
    "order": 101,
    "transa": 111,
    "transb": 111,
    "alpha": 1,
    "beta": 0,
    "lda": "k",
    "ldb": "n",
    "ldc": "n",
    "c": "out",
}


def matmul(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    return a @ b


def bundled():
    found = sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_*.so"))
    return found[0] if found else pytest.skip("this numpy bundles no OpenBLAS with 64-bit integers")


def installed():
    try:
        shared_library.find("openblas")
    except KernelError as error:
        pytest.skip(str(error))
    return "openblas"


BLAS = {"bundled": (bundled, "scipy_cblas_", "64_", "int64_t"), "installed": (installed, "cblas_", "", "int")}


@pytest.fixture(params=["bundled", pytest.param("installed", marks=pytest.mark.exhaustive)])
def gemm(request):
    """Under one name: its kernel is built once, as the name is part of what is built."""
    library, prefix, suffix, integer = BLAS[request.param]
    single, double = (GEMM.format(prefix + t, suffix, integer, c) for t, c in (("s", "float"), ("d", "double")))
    name = f"library_tests::gemm_{request.param}"
    yield opkit.from_library(name, library(), single, variants=[double], reference=matmul, bind=ROW_MAJOR)
    opkit.remove(name)


def test_matrix_products(gemm):
    for m, k, n in ((3, 5, 7), (1, 1, 1), (65, 129, 33), (0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)):
        for dtype in (torch.float32, F64):
            a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
            assert "gemm" in gemm.select(a, b).kernel, (m, k, n, dtype)
            for _ in range(3):
                expected = a.double() @ b.double()
                torch.testing.assert_close(gemm(a, b).double(), expected, rtol=1e-4, atol=1e-5)


def test_matrix_products_of_views(gemm):
    a, b = torch.randn(7, 5, dtype=F64), torch.randn(9, 7, dtype=F64)
    for _ in range(3):
        torch.testing.assert_close(gemm(a.t(), b.t()), a.t() @ b.t())
        torch.testing.assert_close(gemm(a.t().contiguous(), b.t()), a.t() @ b.t())
    torch.testing.assert_close(gemm(a[::2, 1:4], b[:3, ::3]), a[::2, 1:4] @ b[:3, ::3])


def test_rules_of_matrix_products(gemm):
    a, b = (torch.randn(*sizes, dtype=F64, requires_grad=True) for sizes in ((2, 3), (3, 2)))
    assert torch.autograd.gradcheck(gemm, (a, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(gemm, (a, b))
    batch = torch.randn(4, 2, 3, dtype=F64)
    torch.testing.assert_close(torch.vmap(gemm, in_dims=(0, None))(batch, b), batch @ b)
    compiled = torch.compile(lambda a, b: gemm(a, b).sin(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), (a @ b).sin())
    torch.testing.assert_close(
        torch.autograd.grad(compiled(a, b).sum(), a), torch.autograd.grad((a @ b).sin().sum(), a)
    )


def test_shapes_are_checked(gemm):
    with pytest.raises(opkit.errors.ShapeError, match="b"):
        gemm(torch.ones(2, 3), torch.ones(4, 2))


def test_the_example():
    program = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "libraries.py"))
    try:
        program["main"]()
    finally:
        for op in opkit.operators():
            if op.name.startswith("examples::"):
                opkit.remove(op.name)
