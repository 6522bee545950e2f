"""schema: a planted defect that each property must catch, right operators that it must pass."""

import functools
import inspect

import pytest
import torch
from hypothesis import strategies as st

import opkit
from opkit.testing import tensor

ROWS, VECTOR = (tensor("b n"),), (tensor("n"),)


@pytest.fixture
def op():
    """``op(schema, function)``: an operator of torch.library that lives as long as the test."""
    library = torch.library.Library("contract_schema_tests", "FRAGMENT")

    def define(schema, function):
        library.define(schema)
        name = schema.split("(")[0]
        library.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.contract_schema_tests, name).default

    yield define
    library._destroy()


def zeroes_sign(x):
    x.add_(0)  # turns -0.0 to 0.0
    return x + 1


def puts_back(x):
    x.neg_()
    result = 1 - x
    x.neg_()
    return result


def large_only(x):
    if x.numel() > 8:
        x[..., 0] = 1
    return x + 1


def beside(x):
    torch.as_strided(x, (1,), (1,), 0).fill_(3)
    return x + 1


def resizes(x):
    result = x + 1
    x.unsqueeze_(0)
    return result


@pytest.mark.sweep(4)
@pytest.mark.parametrize("function", [zeroes_sign, puts_back, beside, resizes, large_only])
def test_writes_that_nobody_declared_are_found(fails, op, function):
    failure = fails("schema.mutation", op("f(Tensor x) -> Tensor", function), args=ROWS)
    assert failure.args[0].numel() <= 12
    fails("schema.mutation", function, args=ROWS, reference=lambda x: x + 1)


def test_writes_that_are_declared_are_right(holds, op):
    def writes(x):
        x.mul_(2)

    holds("schema.mutation", op("g(Tensor(a!) x) -> ()", writes), args=ROWS, max_examples=10)
    holds("schema.mutation", lambda x: x.mul_(2), args=ROWS, reference=lambda x: x.mul_(2), max_examples=10)
    holds("schema.mutation", torch.sin, args=ROWS, reference=torch.sin, max_examples=10)
    resizing = op("r(Tensor x, *, Tensor(a!) out) -> ()", lambda x, *, out: out.resize_(x.shape).copy_(x) and None)
    passed = holds("schema.mutation", resizing, args=ROWS, kwargs={"out": VECTOR[0]}, max_examples=10)
    assert passed.refused < passed.tried


def test_a_declared_write_that_does_not_happen_is_found(fails, holds, op):
    def copies(x):
        x.contiguous().mul_(2)

    holds("schema.mutation_declared", torch.ops.aten.sin.out, args=VECTOR, kwargs={"out": tensor("0")})
    silent = op("h(Tensor(a!) x) -> ()", lambda x: None)
    fails("schema.mutation_declared", silent, args=ROWS)
    copy = op("h2(Tensor(a!) x) -> ()", copies)
    failure = fails("schema.mutation_declared", copy, args=ROWS, reference=lambda x: x.mul_(2))
    assert not failure.args[0].is_contiguous()


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.contiguous() if x.numel() > 4 else x.clone(),
        lambda x: x if not x.numel() else x + 1,
        lambda x: torch.from_numpy(x.detach().numpy()[...]) if x.is_contiguous() and not x.is_neg() else x + 1,
        lambda x: x,
        lambda x: x.to(torch.float32),
    ],
)
def test_results_that_are_arguments_are_found(fails, op, function):
    fails("schema.alias", op("k(Tensor x) -> Tensor", function), args=ROWS)
    fails("schema.alias", function, args=ROWS, reference=lambda x: x + 1)


def test_what_torch_and_opkit_say_of_a_result_is_a_failure(fails):
    @torch.library.custom_op("contract_schema_tests::same", mutates_args=())
    def same(x: torch.Tensor, s: float) -> torch.Tensor:
        return x if s == 1.0 else x * s

    failure = fails("schema.alias", same, args=(*ROWS, st.sampled_from([0.5, 1.0])))
    assert failure.args[0].shape == (1, 1)
    assert failure.args[1] == 1.0

    @opkit.custom_op("contract_schema_tests::view")
    def view(x: torch.Tensor) -> torch.Tensor:
        return x

    view.register_kernel("cpu")(lambda x: x[:])
    assert fails("schema.alias", view, args=ROWS).args[0].shape == (1, 1)


def test_two_results_of_one_storage_are_found(fails, op):
    failure = fails(
        "schema.alias", op("m(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1).unbind(0)[:1] * 2), args=ROWS
    )
    assert "result 1 shares memory with result 0" in failure.message


def test_aliases_that_are_declared_are_right(holds):
    holds("schema.alias", torch.ops.aten.add_.Tensor, args=(*ROWS, *ROWS), max_examples=15)
    holds("schema.alias", torch.ops.aten.transpose.int, args=(*ROWS, 0, 1), max_examples=15)
    assert holds("schema.alias", torch.ops.aten.dropout.default, args=(*ROWS, 0.5, False), max_examples=15).remarks
    holds("schema.alias", torch.ops.aten.conv1d.default, args=(tensor("1 2 n"), tensor("2 2 1")), max_examples=15)


def test_none_for_a_tensor_is_found(fails):
    fails("schema.returns", lambda x: None if x.numel() == 0 else x + 1, args=ROWS, reference=lambda x: x + 1)


@pytest.mark.parametrize(
    ("schema", "returned"),
    [
        ("r(Tensor x) -> Tensor", lambda x: None if x.numel() > 2 else x + 1),
        ("r(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x + 2)[: 1 if x.numel() > 2 else 2]),
    ],
)
def test_results_that_the_schema_does_not_promise_are_found(fails, op, schema, returned):
    failure = fails("schema.returns", op(schema, returned), args=VECTOR)
    assert "its schema promises" in failure.message
    assert failure.args[0].shape == (3,)


def test_results_that_the_schema_promises_are_right(holds):
    for function, args in ((torch.ops.aten.max.dim, (*ROWS, 0)), (torch.ops.aten.unbind.int, ROWS)):
        holds("schema.returns", function, args=args, max_examples=15)


def test_a_wrapper_with_a_default_of_its_own_is_found(fails, holds):
    def scales(x, by=2.0):
        return x * by

    @functools.wraps(scales)
    def wrapped(*args, **kwargs):
        return scales(*args, **{"by": 3.0, **kwargs})

    failure = fails("schema.defaults", wrapped, args=VECTOR)
    assert failure.args[0].shape == (1,)
    assert "defaults" in failure.message
    holds("schema.defaults", scales, args=VECTOR)


@pytest.fixture
def packet():
    """``packet(default, other)``: an operator with two overloads."""
    library = torch.library.Library("contract_overload_tests", "FRAGMENT")

    def define(default, other):
        for schema, function in (
            ("v(Tensor x) -> Tensor", default),
            ("v.other(Tensor x, *, int k=0) -> Tensor", other),
        ):
            library.define(schema)
            library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
        return torch.ops.contract_overload_tests.v

    yield define
    library._destroy()


def test_overloads_that_disagree_are_found(fails, packet):
    failure = fails("schema.overloads", packet(lambda x: x + 1, lambda x, k=0: x + 1 + (x.numel() > 4)), args=VECTOR)
    assert "'other'" in failure.message
    assert failure.args[0].shape == (5,)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.sin, lambda x, k=0: x.double().sin().float()),
        (torch.rand_like, lambda x, k=0: torch.rand_like(x)),
        (lambda x: torch.complex(x, x), lambda x, k=0: torch.complex(x, x)),
    ],
    ids=["rounding", "random", "complex"],
)
def test_overloads_that_agree_are_right(holds, packet, one, other):
    holds("schema.overloads", packet(one, other), args=VECTOR)


def test_keywords_that_are_swapped_are_found(fails, holds):
    def swaps(*args, **kwargs):
        return torch.sub(kwargs["b"], kwargs["a"]) if kwargs else torch.sub(*args)

    swaps.__signature__ = inspect.signature(lambda a, b: None)
    fails("schema.defaults", swaps, args=(*ROWS, *ROWS))
    holds("schema.defaults", torch.ops.aten.gelu.default, args=ROWS)


def scales(x, by: float):
    return x * by


def divides(x, by: float):
    return x * (1 // by if isinstance(by, int) else 1 / by)


def test_an_integer_for_a_float_is_as_good(fails, holds, asked):
    args = (*ROWS, st.floats(0.5, 8))
    assert "with 2.0 for by, and with 2" in fails("schema.kinds", divides, args=args).message
    holds("schema.kinds", scales, args=args)
    holds("schema.kinds", torch.ops.aten.nan_to_num.default, args=args)
    assert asked("schema.kinds", torch.sin, args=ROWS).skipped
