"""Operators from functions of installed libraries: functions of numbers, and what is refused."""

import inspect
import math

import pytest
import torch
from torch import Tensor

import opkit
from opkit.errors import DeclarationError, DtypeError, KernelError, RuleError, UnknownOperatorError

HYPOT, HYPOTF = "double hypot(double x, double y)", "float hypotf(float x, float y)"
F64 = torch.float64


@pytest.fixture
def hypot():
    """Under one name: its kernel is built once, as the name is part of what is built."""
    yield opkit.from_library("library_tests::hypot", "m", HYPOT, variants=[HYPOTF])
    opkit.remove("library_tests::hypot")


# ---- functions of numbers --------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
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


def test_layouts(hypot):
    for layout, of in LAYOUTS.items():
        x, y = of(torch.randn(4, 5, 6, dtype=F64))
        for dtype in (F64, torch.float32):
            x, y = x.to(dtype), y.to(dtype)
            torch.testing.assert_close(
                hypot(x, y), torch.hypot(x, y), msg=lambda text, at=(layout, dtype): f"{at}: {text}"
            )


def test_layouts_of_the_same_sizes(hypot):
    x = torch.randn(6, 6, dtype=F64)
    for _ in range(3):
        for a, b in ((x, x), (x.t(), x), (x, x.t()), (x.t(), x.t()), (x[:1], x), (x[:1].expand(6, 6), x)):
            torch.testing.assert_close(hypot(a, b), torch.hypot(a, b))


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
    x = torch.randn(2, 3, dtype=F64, requires_grad=True)
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
    ({"bind": {"x": "y"}}, DeclarationError, "only numbers"),
    ({"bind": {"x": 1.0}}, DeclarationError, "none of its parameters"),
    ({"bind": ["x"]}, DeclarationError, "give a dictionary"),
    ({"returns": "ignore"}, DeclarationError, "a function of numbers"),
    ({"dtypes": [torch.float32]}, DeclarationError, "for use with reference="),
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


def test_mistakes_are_named_and_leave_nothing(name):
    for given, error, message in MISTAKES:
        options = {"library": "m", "declaration": "double erf(double x)"} | given
        with pytest.raises(error, match=message) as caught:
            pytest.fail(
                f"{given}: {opkit.from_library(name, options.pop('library'), options.pop('declaration'), **options)}"
            )
        assert name in str(caught.value), given
        assert_undefined(name)


def assert_undefined(name):
    with pytest.raises(UnknownOperatorError):
        opkit.get(name)
    assert not hasattr(torch.ops.drop_in, name.split("::")[1])


def test_a_name_without_a_namespace():
    with pytest.raises(opkit.errors.DefinitionError, match="no namespace"):
        opkit.from_library("erf", "m", "double erf(double x)")
