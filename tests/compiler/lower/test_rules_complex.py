"""Complex numbers, lowered and interpreted, against eager; the programs are verified before and after the passes."""

import functools
import math

import pytest
import torch
from torch.nn import functional as F

from opkit.compiler.ir.kernel import KernelLaunch
from opkit.compiler.ir.printer import program_text
from opkit.compiler.ir.verifier import verify_kernel, verify_program
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.scheduling import schedule
from tests.compiler.graphs import computes, externs, graph_of, program_of, run_graph, same
from tests.compiler.lower import test_scheduling

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values", "ignore:ComplexHalf support")


def r(*shape, dtype=torch.complex128):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)), dtype=dtype)


def check(function, *args, lowered=True, **tolerances):
    """Compares the lowered function with eager, values and types, and what it writes to its arguments."""
    copies, given = [a.clone() for a in args], [a.clone() for a in args]
    expected = function(*copies)
    expected = expected if isinstance(expected, list | tuple) else [expected]
    graph, constants = graph_of(function, *args)
    verify_program(lower(graph, tidy=False))
    program = lower(graph)
    verify_program(program)
    for step in schedule(program).steps:
        if isinstance(step, KernelLaunch):
            verify_kernel(step.kernel)
    assert not (lowered and externs(program)), externs(program)
    limits = tolerances or _limits(expected)
    for x, y in zip([*run_graph(graph, program, constants, given), *given], [*expected, *copies], strict=True):
        same(x, y, **limits)
    return program


def _limits(expected):
    precise = any(y.dtype in (torch.complex128, torch.float64) for y in expected)
    return {"rtol": 1e-12, "atol": 1e-12} if precise else {"rtol": 1e-5, "atol": 1e-5}


UNARY = {
    **{name: getattr(torch, name) for name in ("abs", "angle", "conj_physical", "exp", "log", "log2", "log10")},
    **{name: getattr(torch, name) for name in ("neg", "reciprocal", "rsqrt", "sgn", "sigmoid", "sqrt", "square")},
    **{name: getattr(torch, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{name: getattr(torch, name) for name in ("isnan", "isinf", "isfinite", "logical_not", "positive")},
    "conj": lambda z: z.conj() * 2,
    "real": lambda z: z.real + 0,
    "imag": lambda z: z.imag + 0,
    **{f"power {k}": functools.partial(torch.pow, exponent=k) for k in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 7, 2.5)},
    "to bool": lambda z: z.bool(),
    "to float": lambda z: z.to(torch.float32),
    "to another": lambda z: z.to(torch.complex64 if z.dtype == torch.complex128 else torch.complex128),
    "add a number": lambda z: z + (1 + 2j),
    "rsub": lambda z: 1j - z,
    "times a number": lambda z: z * 2.5,
    "divided by a number": lambda z: z / (1 - 2j),
    "a number divided": lambda z: 2 / z,
    "fill": lambda z: z.fill_(1 + 2j) + 1,
    "full": lambda z: torch.full_like(z, 2 - 1j) * z,
    "reals like it": lambda z: torch.full_like(z, 2, dtype=torch.float64) + torch.zeros_like(z, dtype=torch.float64),
    "ones": lambda z: torch.ones_like(z) + z,
    "view_as_real": lambda z: torch.view_as_real(z) * 2,
    "masked_fill": lambda z: z.masked_fill(z.real > 0, 1j),
}


@pytest.mark.parametrize("dtype", [torch.complex128, pytest.param(torch.complex64, marks=pytest.mark.exhaustive)])
def test_functions(subtests, dtype):
    for name in UNARY:
        with subtests.test(name):
            check(UNARY[name], r(3, 4, dtype=dtype))


@pytest.mark.sweep(10)
@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize(
    "given", [r(4, 3).t(), r(3, 8)[:, ::2], r(), r(0, 3), r(3, 1).expand(3, 4)], ids=lambda x: str(list(x.shape))
)
def test_functions_of_strided_and_empty_tensors(name, given):
    if name == "fill":
        given = given.contiguous()
    check(UNARY[name], given)


BINARY = {
    "add": torch.add,
    "add alpha": lambda x, y: torch.add(x, y, alpha=2 - 1j) if x.is_complex() else torch.add(x, y, alpha=2),
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "eq": torch.eq,
    "ne": torch.ne,
    "where": lambda x, y: torch.where(x.real > 0 if x.is_complex() else x > 0, x, y),
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}
OPERANDS = {
    "complex": (r(3, 4), r(3, 4) + 1),
    "broadcast": (r(3, 1), r(4)),
    "complex and float": (r(3, 4, dtype=torch.complex64), r(3, 4).real + 2),
    "float and complex": (r(3, 4).real + 1, r(4, dtype=torch.complex64)),
    "complex and integers": (r(3, 4), torch.arange(1, 5)),
    "two complex types": (r(3, 4, dtype=torch.complex64), r(3, 4)),
    "a number of no dimensions": (r(3, 4, dtype=torch.complex64), r()),
}


@pytest.mark.sweep
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("name", BINARY)
def test_operands(name, operands):
    check(BINARY[name], *OPERANDS[operands], rtol=1e-6, atol=1e-6)


def test_products_and_what_is_added_to_them():
    x, y, z = r(3, 4), r(3, 4), r(4)
    check(lambda x, y, z: torch.addcmul(x, y, z, value=1 - 2j), x, y, z)
    check(lambda x, y, z: torch.addcdiv(x, y, z, value=2), x, y, z)
    check(lambda x, y, z: torch.lerp(x, y, 0.3) + torch.lerp(x, y, z), x, y, z)


# ---- views and what moves elements -----------------------------------------------------------------------------------

VIEWS = {
    "view": lambda z: z.view(6, 4),
    "reshape of a transpose": lambda z: z.transpose(0, 2).reshape(8, 3),
    "permute": lambda z: z.permute(2, 0, -2),
    "expand": lambda z: z[:, :1].expand(5, 2, 3, 4),
    "slice": lambda z: z[:, 1:, ::2],
    "select": lambda z: z[1, :, -1],
    "split": lambda z: z.split([1, 3], -1),
    "unbind": lambda z: z.unbind(1),
    "diagonal": lambda z: z.diagonal(1, 1, 2),
    "flip": lambda z: z.flip(0, -1),
    "roll": lambda z: z.roll((1, -2), (0, 2)),
    "repeat": lambda z: z.repeat(2, 1, 3, 1),
    "cat": lambda z: torch.cat([z, z * 2, z[:, :1]], 1),
    "cat with a real one": lambda z: torch.cat([z, z.real.clone()], 1),
    "stack": lambda z: torch.stack([z, z + 1], -1),
    "pad": lambda z: F.pad(z, (1, 2, 0, 3)),
    "slice_scatter": lambda z: torch.slice_scatter(z, z[:, 1:] * 2, 1, 0, 2),
    "select_scatter": lambda z: torch.select_scatter(z, z[:, 0] * 2, 1, -1),
    "diagonal_scatter": lambda z: torch.diagonal_scatter(z, z[:, 0, :3] * 2, 0, 1, 2),
    "tril": lambda z: z.tril(),
    "index": lambda z: z[torch.arange(2).flip(0)],
    "index_select": lambda z: z.index_select(1, torch.arange(2) + 1),
    "gather": lambda z: z.gather(2, torch.zeros(2, 3, 1, dtype=torch.long)),
    "clone": lambda z: z.transpose(0, 1).clone(),
    "real of a view": lambda z: z[:, 1].real + z[:, 2].imag,
    "view_as_real": lambda z: torch.view_as_real(z).flatten(1) + 1,
    "halves": lambda z: torch.view_as_real(z * 2)[..., 0] + torch.view_as_real(z)[..., 1],
    "there and back": lambda z: torch.view_as_complex(torch.view_as_real(z) * 2) + z,
    "moved reals": lambda z: torch.view_as_real(z).transpose(1, 3) + 1,
    "sum of reals": lambda z: torch.view_as_real(z).sum(-1),
}


def test_views(subtests):
    for name in VIEWS:
        with subtests.test(name):
            check(VIEWS[name], r(2, 3, 4), rtol=0, atol=0)


@pytest.mark.exhaustive
def test_what_follows_a_view(subtests):
    def used(view, z):
        found = view(z * (1 + 1j))
        return tuple(part * 2 for part in (found if isinstance(found, tuple | list) else [found]))

    for name in VIEWS:
        with subtests.test(name):
            check(functools.partial(used, VIEWS[name]), r(2, 3, 4))


def test_from_real_tensors():
    x, y = r(3, 4).real.clone(), r(3, 4).imag.clone()
    check(torch.complex, x, y)
    check(torch.polar, x.abs(), y)
    check(lambda x: torch.view_as_complex(x.view(3, 2, 2)) * 2, x)
    check(lambda x: x.to(torch.complex64) * 1j, x)
    check(lambda x: torch.zeros(3, dtype=torch.complex64) + x.sum(), x)


# ---- reductions ------------------------------------------------------------------------------------------------------

REDUCTIONS = {
    "sum": lambda z: z.sum(),
    "sum of rows": lambda z: z.sum(0, keepdim=True),
    "sum of columns": lambda z: (z * z).sum(-1),
    "sum of reals": lambda z: z.real.sum(1, dtype=torch.complex128),
    "mean": lambda z: z.mean(),
    "mean of some": lambda z: z.mean((0, 2)),
    "cumsum": lambda z: z.cumsum(1),
    "any": lambda z: (z * 0).any(1),
    "all": lambda z: z.all(),
    "norm": lambda z: torch.linalg.vector_norm(z, dim=-1),
    "norm of order 1": lambda z: torch.linalg.vector_norm(z, 1),
    "greatest": lambda z: torch.linalg.vector_norm(z, math.inf, dim=(0, 1)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("given", [r(2, 3, 4), r(4, 3, 2).transpose(0, 2), r(2, 1, 4)], ids=["plain", "strided", "one"])
def test_reductions(name, given):
    check(REDUCTIONS[name], given)


def test_reductions_of_nothing(subtests):
    for name in ["sum", "sum of rows", "mean", "any", "all", "norm"]:
        with subtests.test(name):
            check(REDUCTIONS[name], r(2, 0, 4))


# ---- gradients -------------------------------------------------------------------------------------------------------


def gradients(function):
    """The function's gradients with regard to all of its arguments, of a sum in which both parts of each element count."""

    def both(*args):
        args = [a.detach().requires_grad_() for a in args]
        y = torch.view_as_real(function(*args))
        weights = torch.arange(y.numel()).reshape(y.shape).to(y.dtype) / y.numel()
        return torch.autograd.grad((y * weights).sum(), args)

    return both


GRADIENTS = {
    **{name: getattr(torch, name) for name in ("exp", "log", "sqrt", "sin", "tanh", "sigmoid", "reciprocal", "sgn")},
    "abs": lambda z: z.abs().to(z.dtype),
    "angle": lambda z: z.angle().to(z.dtype),
    "norm": lambda z: torch.linalg.vector_norm(z, dim=1).to(z.dtype),
    "real and imag": lambda z: (z.real * z.imag).to(z.dtype),
    "conj": lambda z: z.conj() * z * 1j,
    "slices": lambda z: z[:, 1:] / z[:, :1],
    "view_as_real": lambda z: torch.view_as_complex(torch.view_as_real(z).flip(-1)) * z,
    "mean": lambda z: (z * z).mean(0),
    "power": lambda z: z**3 + z**-2 + z**5,
}


@pytest.mark.sweep(keep=["abs", "angle", "exp", "power", "real and imag", "slices", "view_as_real"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    check(gradients(GRADIENTS[name]), r(3, 4), rtol=1e-9, atol=1e-9)


def test_gradients_of_two():
    for function in (torch.mul, torch.div, lambda x, y: (x * y.conj()).real.to(x.dtype)):
        check(gradients(function), r(3, 4), r(4) + 1, rtol=1e-9, atol=1e-9)


# ---- numbers at the edges --------------------------------------------------------------------------------------------

PARTS = [0.0, -0.0, 1.0, -2.0, math.inf, -math.inf, math.nan, 1e300, 1e-300]
EDGES = torch.tensor([complex(a, b) for a in PARTS for b in PARTS], dtype=torch.complex128)


def test_infinities_and_nan_as_in_eager(subtests):
    for name in ["mul", "eq", "ne"]:
        with subtests.test(name):
            check(BINARY[name], EDGES[:, None].clone(), EDGES[None].clone())


@pytest.mark.parametrize("name", ["add", "sub"])
def test_sums_of_infinities_part_by_part(name):
    """Eager multiplies the second operand by 1 + 0j, which makes a NaN of the 0 beside an infinity."""
    args = EDGES[:, None].clone(), EDGES[None].clone()
    graph, constants = graph_of(BINARY[name], *args)
    (found,) = run_graph(graph, lower(graph), constants, args)
    expected = BINARY[name](*(torch.view_as_real(each) for each in args))
    torch.testing.assert_close(torch.view_as_real(found), expected, rtol=0, atol=0, equal_nan=True)


def test_functions_of_infinities_and_nan(subtests):
    names = ["abs", "angle", "isnan", "isinf", "isfinite", "conj_physical", "neg"]
    for name in names:
        with subtests.test(name):
            check(UNARY[name], EDGES)


def test_what_is_large_and_small_overflows_only_where_the_result_does():
    large = torch.tensor([1e300 + 1e300j, -1e308 + 1e305j, 3e-300 - 2e-300j, 1e-310 + 0j], dtype=torch.complex128)
    check(lambda z: (z.abs(), z / z, z.sqrt(), 1 / (z * 1e-3)), large)
    check(
        lambda z: z.exp(),
        torch.tensor([709.5 + 1.5j, -800 + 1j, 710 + 0j, -math.inf + 0j, math.inf + 0j]).to(large.dtype),
    )
    check(lambda z: (z.tanh(), z.tan()), torch.tensor([400 + 1j, -400 - 2j, 1 + 400j], dtype=torch.complex128))


def test_zero_divisors():
    x = torch.tensor([1 + 2j, -1 - 1j, 2 + 0.5j], dtype=torch.complex128)
    check(lambda x: x / torch.zeros_like(x), x)
    check(lambda x: (x * 0).sgn(), x)


def test_roots_on_both_sides_of_the_cut():
    x = torch.tensor([complex(-4, 0.0), complex(-4, -0.0), complex(0, -2), complex(0, 0), complex(-0.0, 1)])
    check(lambda z: z.sqrt(), x.to(torch.complex128))


# ---- writes ----------------------------------------------------------------------------------------------------------

WRITES = {
    "mul_": lambda z: z.mul_(1 + 2j),
    "copy_ of a transpose": lambda z: z.copy_(z.t().clone() + z.t()),
    "copy_ of the conjugate": lambda z: z.copy_(z.conj()),
    "copy_ of reals": lambda z: z.copy_(z.abs()),
    "parts exchanged": lambda z: z.copy_(torch.complex(z.imag, z.real)),
    "a part of it": lambda z: z.real.add_(1),
    "a slice": lambda z: z[1:].mul_(z[:1]),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    check(lambda z: (WRITES[name](z), z + 1)[1], r(4, 4))


# ---- programs --------------------------------------------------------------------------------------------------------


def test_equal_values_are_computed_once():
    assert len(computes(program_of(lambda z, w: (z * w).exp() + (z * w).exp(), r(3), r(3)))) == 6


def test_an_imaginary_part_that_nobody_reads_is_not_computed():
    assert len(computes(program_of(lambda z, w: (z * w).real * 2, r(3), r(3)))) == 2


def test_parts_of_what_a_call_gives_are_views_where_calls_take_them():
    program = program_of(lambda z: torch.fft.fft(z).real @ z.real.t().contiguous(), r(4, 4))
    assert "copy" not in program_text(program)
    assert sum("view_as_real" in line for line in externs(program)) == 1


def test_real_numbers_in_memory_that_a_call_takes_as_complex():
    x = torch.randn(4, 6, 2)
    assert [s.split(":")[0] for s in externs(program_of(lambda x: torch.fft.fft(torch.view_as_complex(x)), x))] == [
        "aten.view_as_complex.default",
        "aten._fft_c2c.default",
    ]


def test_what_has_no_rule_says_why():
    program = program_of(lambda z: (z * 2).asin() + torch.cumprod(z, 0), r(3))
    assert [line.split(": ") for line in externs(program)] == [
        ["aten.asin.default", "complex numbers"],
        ["aten.cumprod.default", "complex numbers"],
    ]


def test_half_precision_complex_numbers_are_called():
    (line,) = externs(program_of(lambda z: z * 2, torch.randn(3, dtype=torch.complex32)))
    assert line == "aten.mul.Tensor: numbers of c32"


# ---- as C ------------------------------------------------------------------------------------------------------------


def rotary(x, turns):
    """Rotary position embedding by complex products (Su and others, 2021, as in Llama)."""
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * turns[:, None]).flatten(3).type_as(x)


ONE_KERNEL = {
    "a product": (lambda z, w: z * w, r(5, 7), r(7)),
    "a chain": (lambda z, w: ((z * w + z).conj() / w).abs().log(), r(5, 7), r(7)),
    "a sum": (lambda z, w: (z * w).sum(1), r(5, 7), r(7)),
    "a sum of rows": (lambda z, w: (z * w).sum(0), r(5, 70), r(70)),
    "normalised": (lambda z: z / z.abs().sum(-1, keepdim=True), r(5, 7)),
    "two parts": (lambda z: (z.real * 2, z.imag + 1), r(5, 7)),
    "a copy": (lambda z: z.t().clone(), r(5, 7)),
    "made of two": (lambda x, y: torch.complex(x, y) * 2, r(5, 7).real, r(5, 7).imag),
    "in place": (lambda z: z.mul_(z.conj() + 1), r(5, 7)),
    "parts exchanged": (lambda z: z.copy_(torch.complex(z.imag, z.real)), r(5, 7)),
    "rotary": (rotary, r(2, 3, 4, 8).real.float(), torch.polar(torch.ones(3, 4), r(3, 4).real.float())),
    "rotary of bfloat16": (rotary, r(2, 3, 4, 8).real.bfloat16(), torch.polar(torch.ones(3, 4), r(3, 4).real.float())),
}


@pytest.mark.sweep(keep=["a chain", "a sum of rows", "in place", "made of two", "normalised", "rotary"])
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name):
    function, *args = ONE_KERNEL[name]
    kernels = 2 if name == "a sum of rows" else 1  # columns in blocks, and those left over
    made = test_scheduling.check(function, *(a.contiguous() for a in args), kernels=kernels, rtol=1e-5, atol=1e-5)
    for step in made.steps:
        verify_kernel(step.kernel)
