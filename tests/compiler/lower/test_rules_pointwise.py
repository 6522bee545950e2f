"""Pointwise operators, activations and creation, lowered and interpreted, against eager."""

import pytest
import torch
from torch.nn import functional as F

from tests.compiler.graphs import check, computes, gradients, interpreted, program_of

FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
INTS = (torch.int64, torch.uint8, torch.int8, torch.int32)
INF, NAN = float("inf"), float("nan")
EDGES = [0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 0.5, -2.5, INF, -INF, NAN, 1e30, -1e-30, 7.25, 20.5]


def all_pairs(dtype):
    x = torch.tensor(EDGES).to(dtype)
    return x[:, None], x[None, :]


def close(dtype):
    return {"rtol": 4e-2, "atol": 4e-2} if dtype in (torch.bfloat16, torch.float16) else {"rtol": 1e-5, "atol": 1e-6}


# ---- one argument ----------------------------------------------------------------------------------------------------

_EXACT = (
    *("abs", "neg", "floor", "ceil", "trunc", "round", "sign", "sgn", "relu", "square", "frac", "reciprocal"),
    *(
        "isnan",
        "isinf",
        "isfinite",
        "isposinf",
        "isneginf",
        "signbit",
        "positive",
        "nan_to_num",
        "logical_not",
        "angle",
    ),
)
_CLOSE = (
    *("exp", "expm1", "log", "log1p", "log2", "log10", "exp2", "sin", "cos", "tan", "asin", "acos", "atan", "sinh"),
    *("cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sqrt", "sigmoid", "rsqrt", "deg2rad", "rad2deg"),
)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
def test_exact_functions(subtests, dtype):
    for name in _EXACT:
        with subtests.test(name):
            check(getattr(torch, name), torch.tensor(EDGES).to(dtype), exact=True)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elementary_functions(subtests, dtype):
    edges = torch.tensor([e for e in EDGES if abs(e) < 1e20 or e in (INF, -INF) or e != e]).to(dtype)
    for name in _CLOSE:
        with subtests.test(name):
            check(getattr(torch, name), edges, **close(dtype))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_functions_of_integers(subtests, dtype):
    def one(name):
        check(getattr(torch, name), torch.tensor([0, 1, 5, 100, 127]).to(dtype), exact=True)
        if dtype.is_signed:
            check(getattr(torch, name), torch.tensor([-1, -5, torch.iinfo(dtype).min]).to(dtype), exact=True)

    for case in ["abs", "neg", "sign", "relu", "square", "bitwise_not", "floor", "logical_not", "signbit"]:
        with subtests.test(str(case)):
            one(case)


@pytest.mark.parametrize("given", [torch.arange(5), torch.tensor([True, False])], ids=["integers", "bools"])
def test_functions_of_integers_give_floats(subtests, given):
    names = ["sin", "sigmoid", "sqrt", "exp", "reciprocal", "angle"]
    for name in names:
        with subtests.test(name):
            check(getattr(torch, name), given, rtol=1e-6, atol=1e-6)


# ---- two arguments ---------------------------------------------------------------------------------------------------

_BINARY = {
    "add": lambda x, y: x + y,
    "add scaled": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2),
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_xor": torch.logical_xor,
    "copysign": torch.copysign,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "where": lambda x, y: torch.where(x > y, x, y),
    "masked_fill": lambda x, y: torch.broadcast_to(x, (15, 15)).masked_fill(y > 0, 2.0),
    "clamp": lambda x, y: torch.clamp(x, y, y + 1),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", FLOATS[::2], ids=str)
def test_binary(subtests, dtype):
    inexact = ("maximum", "minimum", "fmax", "fmin", "clamp")
    for name in _BINARY:
        with subtests.test(name):
            check(_BINARY[name], *all_pairs(dtype), exact=name not in inexact)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", FLOATS[1::2], ids=str)
def test_binary_of_narrow_floats(subtests, dtype):
    x, y = torch.randn(4, 3).to(dtype), torch.randn(3).to(dtype)
    for name in ["add", "mul", "div", "lt", "maximum", "where", "fmod"]:
        with subtests.test(name):
            check(_BINARY[name], x, y)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_binary_of_integers(subtests, dtype):
    x = torch.tensor([0, 1, 5, 100, 127, -1, -7, -100]).to(dtype)
    names = ["add", "sub", "mul", "div", "floor", "trunc", "remainder", "fmod", "lt", "maximum", "where"]
    for name in names:
        with subtests.test(name):
            check(_BINARY[name], x[:, None], x[None, 1:], exact=True)


def test_functions_of_two(subtests):
    def one(name):
        check(getattr(torch, name), torch.randn(4, 1), torch.rand(3) + 0.1)
        if name != "hypot":
            check(getattr(torch, name), *all_pairs(torch.float32))

    for case in ["atan2", "hypot", "logaddexp", "xlogy"]:
        with subtests.test(str(case)):
            one(case)


def test_mixed_types():
    x, i, h, flag = torch.randn(3), torch.arange(3), torch.randn(3).bfloat16(), torch.tensor([True, False, True])
    one, whole = torch.tensor(0.3), torch.tensor(7)
    for a, c in (
        (x, i),
        (i, h),
        (h, x),
        (flag, i),
        (flag, x),
        (flag, flag),
        (i, one),
        (h, one),
        (x, whole),
        (h, whole),
    ):
        check(lambda a, c: (a + c, a * c, a / c, a < c, torch.where(a == c, a, c)), a, c, rtol=1e-2, atol=1e-2)


def test_numbers():
    x, i, flag = torch.randn(3), torch.arange(3), torch.tensor([True, False, True])
    check(lambda x: (x + 2, 2 - x, x * 0.1, x / 3, 1 / x, x > 1, x**2, x**3, x**0.5, x**-1, x**-0.5), x)
    check(lambda x: (x**-2, x**0, x**1, x**2.5, 2**x, x.clamp(-0.5), x.clamp(max=0.5), x.clamp(-0.1, 0.1)), x)
    check(lambda i: (i + 2, i * 2.5, i / 2, i // 2, i % 2, i > 1.5, i == 2, i**2, i**3, i & 1, i | 4, i ^ 1), i)
    check(lambda f: (f + 1, f * 2.5, f & True, f | False, ~f, f ^ True), flag)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 clamps to NaN on one side alone by ignoring it")
def test_clamp_to_nan():
    check(lambda x: x.clamp(NAN), torch.randn(3))


def test_lerp_and_fused_products():
    x, y, z = torch.randn(3, 4), torch.randn(4), torch.rand(3, 4)
    check(lambda x, y, z: (torch.lerp(x, y, z), torch.lerp(x, y, 0.7)), x, y.expand(3, 4).clone(), z)
    check(lambda x, y, z: (x.addcmul(y, z, value=0.5), x.addcdiv(y, z, value=-2)), x, y, z)


def test_no_dimensions_and_nothing():
    check(lambda x, y: (x + y, x.exp(), x > y), torch.tensor(1.5), torch.tensor(2.5))
    check(lambda x, y: (x + y, x.exp(), x > y), torch.randn(0, 3), torch.randn(3))


def test_casts():
    x = torch.tensor([0.0, -1.7, 2.5, 100.3])
    dtypes = torch.int32, torch.int64, torch.bool, torch.float64, torch.bfloat16, torch.float16
    check(lambda x: [y for dtype in dtypes for y in (x.to(dtype), x.to(dtype).to(torch.float64))], x, exact=True)


def test_a_cast_of_a_number():
    """Of a number next to one of each row, which vmap takes for a tensor."""
    check(torch.func.vmap(lambda row: row * (row.mean() + 2.5e-6)), torch.randn(3, 4))
    check(torch.func.vmap(lambda row: row * (row.sum() * 3).int()), torch.arange(12).reshape(3, 4))


def test_a_cast_that_was_asked_for_keeps_its_rounding():
    (compute,) = computes(program_of(lambda x: x.bfloat16().float(), torch.randn(3)))[-1:]
    assert compute.body.op == "cast"


# ---- activations -----------------------------------------------------------------------------------------------------

_ACTIVATIONS = {
    **{name: getattr(F, name) for name in ("relu", "silu", "gelu", "leaky_relu", "elu", "selu", "celu", "hardtanh")},
    **{name: getattr(F, name) for name in ("hardswish", "hardsigmoid", "softplus", "mish", "logsigmoid", "relu6")},
    **{name: getattr(F, name) for name in ("sigmoid", "tanh", "softshrink", "hardshrink", "softsign", "tanhshrink")},
    "gelu with tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.5, -1.0),
}
_ATEN = {
    "logit": lambda x: torch.logit(x.abs() / 50, 1e-3),
    "softplus at its threshold": lambda x: F.softplus(x, 2, 5),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("name", [*_ACTIVATIONS, *_ATEN])
def test_activations(name, dtype):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 0.5, -0.5, 6.0, 20.5, -20.5, NAN]).to(dtype)
    check(gradients({**_ACTIVATIONS, **_ATEN}[name]), x, **close(dtype))


# ---- creation --------------------------------------------------------------------------------------------------------


def test_creation():
    def made(x):
        same = torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.5), x.new_zeros(2, 3), x.new_full((2,), 1)
        ranges = torch.arange(5), torch.arange(1, 3, 0.3), torch.arange(7, 0, -2), torch.eye(3), torch.eye(2, 4)
        return *same, *ranges, torch.full((2,), 7), torch.scalar_tensor(3.5), x.tril(), x.triu(1), x.tril(-1), x.clone()

    check(made, torch.randn(3, 4))


def test_what_is_made_of_positions_is_not_stored():
    program = program_of(lambda x: x + torch.ones(4, 4).tril(1) * torch.arange(4), torch.randn(4, 4))
    assert len(computes(program)) == 1


def test_functions_of_positions_are_computed_once():
    program = program_of(lambda x: x * torch.arange(4).cos() + torch.full((4,), 2.0).cos(), torch.randn(3, 4))
    assert [len(step.axes) for step in computes(program)] == [1, 2, 2]


def test_dropout():
    x = torch.ones(1000)
    (y, mask) = interpreted(lambda x: torch.native_dropout(x, 0.25, True), x)
    assert 0.65 < mask.float().mean() < 0.85
    torch.testing.assert_close(y, torch.where(mask, x / 0.75, 0.0))
    check(lambda x: torch.native_dropout(x, 0.25, False), x)


def test_writes_to_an_argument():
    def shifted(x):
        flipped = x.flip(0)
        x.copy_(flipped * 2)
        return flipped

    check(shifted, torch.randn(3, 4))
    check(lambda x: x.add_(1).mul_(2), torch.randn(3, 4))
    check(lambda x: (x.copy_(x.flip(1)), x.sum())[1], torch.randn(3, 3))


def test_lists_of_tensors():
    def step(x, y, g):
        one, two = torch._foreach_mul([x, y], 0.9), torch._foreach_add([x, y], [g, g], alpha=0.1)
        three = torch._foreach_addcdiv(one, two, torch._foreach_add(torch._foreach_sqrt([g, g]), 1e-8), -0.5)
        four = torch._foreach_addcmul(one, two, [g, g], [0.1, 0.2])
        return *three, *four, *torch._foreach_div([x, y], [2.0, 3.0]), *torch._foreach_lerp([x, y], [g, g], 0.3)

    check(step, torch.randn(3), torch.randn(2, 3), torch.rand(3) + 0.1)
