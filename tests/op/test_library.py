"""Operators from functions of installed libraries: libm, the OpenBLAS that numpy brings, and a small one made here."""

import inspect
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.errors import DeclarationError, DtypeError, KernelError, RuleError, UnknownOperatorError
from opkit.kernels import compilation, shared_library

HYPOT, HYPOTF = "double hypot(double x, double y)", "float hypotf(float x, float y)"
F64 = torch.float64


@pytest.fixture
def hypot(name):
    return opkit.from_library(name, "m", HYPOT, variants=[HYPOTF])


# ---- functions of numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["tgamma", "erf", "lgamma", "expm1", "atanh"])
def test_functions_of_libm(name, function):
    op = opkit.from_library(name, "m", f"double {function}(double x)")
    x = torch.linspace(0.05, 0.95, 101, dtype=F64)
    expected = [getattr(math, function.replace("tgamma", "gamma"))(value) for value in x.tolist()]
    torch.testing.assert_close(op(x), torch.tensor(expected, dtype=F64), rtol=1e-14, atol=1e-15)


def bessel(n, x):
    """Bessel's integral, by the trapezoidal rule, which converges exponentially for it."""
    angle = torch.arange(128, dtype=F64) * (2 * math.pi / 128)
    return torch.cos(n * angle - x[:, None] * angle.sin()).mean(-1)


def test_integers_stay_numbers(name):
    jn = opkit.from_library(name, "m", "double jn(int n, double x)")
    assert str(inspect.signature(jn)) == "(n: int, x: torch.Tensor) -> torch.Tensor"
    assert jn.schema == f"{name}(SymInt n, Tensor x) -> Tensor"
    x = torch.linspace(0, 20, 50, dtype=F64)
    torch.testing.assert_close(jn(0, x), bessel(0, x), rtol=0, atol=1e-14)
    torch.testing.assert_close(jn(n=3, x=x), bessel(3, x), rtol=0, atol=1e-14)
    with pytest.raises(RuntimeError, match=rf"{name} .*n does not fit into int"):
        jn(2**31, x)


def test_a_number_given_by_bind_is_no_argument(name):
    j0 = opkit.from_library(name, "m", "double jn(int n, double x)", bind={"n": 0})
    x = torch.rand(5, dtype=F64)
    assert list(inspect.signature(j0).parameters) == ["x"]
    torch.testing.assert_close(j0(x), bessel(0, x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("declared", ["int ilogb(double x)", "long lround(double x)", "double cabs(double _Complex x)"])
def test_the_types_of_results(name, declared):
    op = opkit.from_library(name, "m", declared)
    x = torch.tensor([1.6, 9.0, 1024.0], dtype=torch.complex128 if "Complex" in declared else F64)
    expected = {"int": [0, 3, 10], "long": [2, 9, 1024], "double": [1.6, 9.0, 1024.0]}[declared.split()[0]]
    assert op(x).tolist() == expected
    assert op(x).dtype == {"int": torch.int32, "long": torch.int64, "double": F64}[declared.split()[0]]


def test_variants_are_chosen_by_dtype(hypot):
    for dtype, kernel in ((F64, "hypot"), (torch.float32, "hypotf")):
        x, y = torch.rand(7, dtype=dtype), torch.rand(7, dtype=dtype)
        assert hypot.select(x, y).kernel == kernel
        torch.testing.assert_close(hypot(x, y), torch.hypot(x, y))


def test_other_dtypes_are_refused(hypot):
    with pytest.raises(
        DtypeError, match="takes x: float16, y: float16; hypot takes x: float64, y: float64; hypotf takes"
    ):
        hypot(torch.ones(2).half(), torch.ones(2).half())
    with pytest.raises(DtypeError, match="x: float32, y: float64"):
        hypot(torch.ones(2), torch.ones(2, dtype=F64))
    with pytest.raises(DtypeError):
        torch.compile(hypot, backend="eager")(torch.ones(2).half(), torch.ones(2).half())


LAYOUTS = {
    "equal": lambda x: (x, x + 1),
    "row": lambda x: (x, x[0, 0]),
    "column": lambda x: (x[:, :1], x[:1]),
    "transposed": lambda x: (x.mT, (x + 1).mT),
    "mixed": lambda x: (x.mT, x.mT.contiguous() + 1),
    "steps": lambda x: (x[::2, :, ::3], x[::2, :, 1::3][..., : x[0, 0, ::3].numel()].clone()),
    "expanded": lambda x: (x[:1].expand(5, -1, -1), x[0]),
    "0-dim": lambda x: (x[0, 0, 0], x[1, 1, 1]),
    "0-dim and more": lambda x: (x[0, 0, 0], x),
    "empty": lambda x: (x[:0], x[:1]),
    "size 1": lambda x: (x[:1, :1, :1], x[:1, 0, :1]),
    "deep": lambda x: (x.reshape(2, 2, 1, 5, 1, 3, 2), x.flatten()[:3].reshape(3, 1)),
    "offset": lambda x: (x[1:, 1:, 1:], x[:-1, :-1, :-1]),
    "flipped order": lambda x: (x.permute(2, 0, 1), x.permute(2, 0, 1).flip(0)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(hypot, layout):
    x, y = LAYOUTS[layout](torch.randn(4, 5, 6, dtype=F64))
    result = hypot(x, y)
    assert result.shape == torch.broadcast_shapes(x.shape, y.shape)
    torch.testing.assert_close(result, torch.hypot(x, y))
    torch.testing.assert_close(hypot(x.float(), y.float()), torch.hypot(x.float(), y.float()))


@pytest.mark.parametrize("parallel", [True, False])
def test_large_tensors(name, parallel):
    op = opkit.from_library(name, "m", HYPOT, parallel=parallel)
    x, y = torch.randn(301, 257, dtype=F64), torch.randn(257, dtype=F64)
    torch.testing.assert_close(op(x, y), torch.hypot(x, y))
    torch.testing.assert_close(op(x.t(), y[:, None]), torch.hypot(x.t(), y[:, None]))


def test_vmap(hypot):
    x, y = torch.randn(3, 4, 5, dtype=F64), torch.randn(5, 3, dtype=F64)
    torch.testing.assert_close(torch.vmap(hypot, in_dims=(0, 1))(x, y), torch.hypot(x, y.t()[:, None]))
    torch.testing.assert_close(torch.vmap(hypot, in_dims=(1, None), out_dims=1)(x, y[:, 0]), torch.hypot(x, y[:, 0]))
    twice = torch.vmap(torch.vmap(hypot, in_dims=(0, None)), in_dims=(None, 1))
    torch.testing.assert_close(twice(x, y), torch.hypot(x, y.t()[:, None, None, :]))


def test_compile_and_export(hypot):
    x, y = torch.randn(3, 4), torch.randn(4)
    compiled = torch.compile(lambda x, y: hypot(x, y) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), torch.hypot(x, y) * 2)
    assert hypot(x.to("meta"), y.to("meta")).shape == (3, 4)


def test_without_a_reference_there_is_no_gradient(hypot):
    with pytest.raises(RuleError, match="no autograd formula"):
        hypot(torch.ones(2, requires_grad=True), torch.ones(2)).sum().backward()
    with pytest.raises(RuleError, match="forward-mode"):
        torch.func.jvp(hypot, (torch.ones(2), torch.ones(2)), (torch.ones(2), torch.ones(2)))


def test_a_reference_gives_gradients(name):
    def erf(x: Tensor) -> Tensor:
        return torch.erf(x)

    op = opkit.from_library(name, "m", "double erf(double x)", reference=erf, variants=["float erff(float x)"])
    x = torch.randn(3, 4, dtype=F64, requires_grad=True)
    assert op.select(x).kernel == "erf"
    assert op.select(x.half()).kernel == "reference"
    assert torch.autograd.gradcheck(op, (x,), check_forward_ad=True, check_batched_grad=True)
    torch.testing.assert_close(op(x.mT).stride(), x.mT.stride())
    torch.testing.assert_close(torch.vmap(op)(x), torch.erf(x))


def test_a_reference_says_what_stays_a_number(name):
    def shifted(y: float, input: Tensor) -> Tensor:
        return torch.hypot(input, torch.full_like(input, y))

    op = opkit.from_library(name, "m", HYPOT, reference=shifted, bind={"x": "input"})
    torch.testing.assert_close(op(4.0, torch.tensor([3.0], dtype=F64)).item(), 5.0)


def test_a_reference_of_other_sizes_is_found_out(name):
    def wrong(x: Tensor, y: Tensor) -> Tensor:
        return torch.hypot(x, y)[:1]

    op = opkit.from_library(name, "m", HYPOT, reference=wrong)
    with pytest.raises(RuntimeError, match="not those to which the arguments broadcast"):
        op(torch.ones(3, dtype=F64), torch.ones(3, dtype=F64))


# ---- mistakes --------------------------------------------------------------------------------------------------------


def half(x: Tensor) -> Tensor:
    return x / 2


MISTAKES = [
    ({"library": "nonesuch"}, KernelError, "libnonesuch.so.<version> was looked for in .*/usr/lib"),
    ({"library": "fftw3_missing/"}, KernelError, "there is no such file"),
    ({"library": __file__}, KernelError, "not a shared library for this machine"),
    ({"library": None}, KernelError, "give a name"),
    ({"library": "m\0"}, KernelError, "give a name"),
    ({"declaration": "double tgama(double x)"}, KernelError, "no function 'tgama'. It has .*tgamma"),
    ({"declaration": "double signgam(double x)"}, KernelError, "signgam is a variable"),
    ({"declaration": "double erf(double)"}, DeclarationError, "has no name"),
    ({"declaration": "double erf(double x) { return x; }"}, DeclarationError, "leave it out"),
    ({"declaration": "double erf(double x); double exp(double x);"}, DeclarationError, "it declares erf, exp"),
    ({"declaration": "erf"}, DeclarationError, "it declares none"),
    ({"declaration": ""}, DeclarationError, "give the C declaration"),
    ({"declaration": "double erf(real x)"}, DeclarationError, "`real x`: real is no C type"),
    ({"declaration": "long double erfl(long double x)"}, DeclarationError, "no tensor has elements"),
    ({"declaration": "double erf(double lambda)"}, DeclarationError, "cannot be called lambda"),
    ({"declaration": "double erf(double out)"}, DeclarationError, "cannot be called out"),
    ({"declaration": "double pow(double x, double x)"}, DeclarationError, "two parameters"),
    ({"declaration": "double frexp(double x, int* e)"}, DeclarationError, "Give reference="),
    ({"declaration": "double erf(int x)"}, DeclarationError, "none of its parameters would be a tensor"),
    ({"bind": {"y": 1}}, DeclarationError, "no such parameter. It has x"),
    ({"bind": {"x": "y"}}, DeclarationError, "nothing but numbers"),
    ({"bind": {"x": 1.0}}, DeclarationError, "none of its parameters"),
    ({"bind": ["x"]}, DeclarationError, "give a dictionary"),
    ({"returns": "ignore"}, DeclarationError, "a function of numbers"),
    ({"dtypes": [torch.float32]}, DeclarationError, "goes with reference="),
    ({"variants": "float erff(float x)"}, DeclarationError, "a list of declarations"),
    ({"variants": ["double erf(double x)"]}, DeclarationError, "declared twice"),
    ({"variants": ["float erff(float y)"]}, DeclarationError, "parameters of the first declaration"),
    ({"variants": ["float hypotf(float x, float y)"]}, DeclarationError, "parameters of the first declaration"),
    ({"option": 1}, DeclarationError, "no option option="),
    ({"reference": math.erf}, DeclarationError, "a Python function"),
    ({"reference": half, "bind": {"x": "y"}}, DeclarationError, "none of its parameters is a tensor of"),
    ({"reference": half, "declaration": HYPOT}, DeclarationError, "'y' stands for nothing"),
    ({"reference": lambda x: x}, DeclarationError, "Annotate the reference's parameters"),
]


@pytest.mark.parametrize(("given", "error", "message"), MISTAKES, ids=[message for _, _, message in MISTAKES])
def test_mistakes_are_named_and_leave_nothing(name, given, error, message):
    given = {"library": "m", "declaration": "double erf(double x)"} | given
    with pytest.raises(error, match=message) as caught:
        opkit.from_library(name, given.pop("library"), given.pop("declaration"), **given)
    assert name in str(caught.value)
    assert_undefined(name)


def assert_undefined(name):
    with pytest.raises(UnknownOperatorError):
        opkit.get(name)
    assert not hasattr(torch.ops.drop_in, name.split("::")[1])


def test_a_name_without_a_namespace():
    with pytest.raises(opkit.errors.DefinitionError, match="no namespace"):
        opkit.from_library("erf", "m", "double erf(double x)")


# ---- other functions -------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_the_operator(name, small, given, message):
    given = {"declaration": SCALE, "bind": {"y": "out"}, "reference": scaled} | given
    with pytest.raises(DeclarationError, match=message) as caught:
        opkit.from_library(name, small, given.pop("declaration"), **given)
    assert name in str(caught.value)
    assert_undefined(name)


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


@pytest.fixture(params=BLAS)
def gemm(name, request):
    library, prefix, suffix, integer = BLAS[request.param]
    single, double = (GEMM.format(prefix + t, suffix, integer, c) for t, c in (("s", "float"), ("d", "double")))
    return opkit.from_library(name, library(), single, variants=[double], reference=matmul, bind=ROW_MAJOR)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (1, 1, 1), (65, 129, 33), (0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
def test_matrix_products(gemm, dtype, sizes):
    m, k, n = sizes
    a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    assert "gemm" in gemm.select(a, b).kernel
    for _ in range(3):
        torch.testing.assert_close(gemm(a, b).double(), a.double() @ b.double(), rtol=1e-4, atol=1e-5)


def test_matrix_products_of_views(gemm):
    a, b = torch.randn(7, 5, dtype=F64), torch.randn(9, 7, dtype=F64)
    for _ in range(3):
        torch.testing.assert_close(gemm(a.t(), b.t()), a.t() @ b.t())
    torch.testing.assert_close(gemm(a[::2, 1:4], b[:3, ::3]), a[::2, 1:4] @ b[:3, ::3])


def test_rules_of_matrix_products(gemm):
    a, b = (torch.randn(*sizes, dtype=F64, requires_grad=True) for sizes in ((3, 4), (4, 2)))
    assert torch.autograd.gradcheck(gemm, (a, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(gemm, (a, b))
    batch = torch.randn(5, 3, 4, dtype=F64)
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
