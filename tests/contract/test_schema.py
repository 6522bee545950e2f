"""schema: a planted defect that each property must catch, right operators that it must pass."""

import pytest
import torch

from opkit.testing import tensor

ROWS = (tensor("b n"),)


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


@pytest.mark.parametrize("function", [zeroes_sign, large_only, beside, resizes])
def test_writes_that_nobody_declared_are_found(fails, op, function):
    failure = fails("schema.mutation", op("f(Tensor x) -> Tensor", function), args=ROWS)
    assert failure.args[0].numel() <= 12
    fails("schema.mutation", function, args=ROWS, reference=lambda x: x + 1)


def test_writes_that_are_declared_are_right(holds, op):
    holds("schema.mutation", op("g(Tensor(a!) x) -> ()", lambda x: None), args=ROWS)
    holds("schema.mutation", lambda x: x.mul_(2), args=ROWS, reference=lambda x: x.mul_(2))
    holds("schema.mutation", torch.sin, args=ROWS, reference=torch.sin)


def test_a_declared_write_that_does_not_happen_is_found(fails, holds, op):
    def copies(x):
        x.contiguous().mul_(2)

    silent = op("h(Tensor(a!) x) -> ()", lambda x: None)
    fails("schema.mutation_declared", silent, args=ROWS)
    copy = op("h2(Tensor(a!) x) -> ()", copies)
    failure = fails("schema.mutation_declared", copy, args=ROWS, reference=lambda x: x.mul_(2))
    assert not failure.args[0].is_contiguous()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: x.contiguous() if x.numel() > 4 else x.clone(),
        lambda x: x if not x.numel() else x + 1,
        lambda x: torch.from_numpy(x.detach().numpy()[...]) if x.is_contiguous() and not x.is_neg() else x + 1,
        lambda x: x.to(torch.float32),
    ],
)
def test_results_that_are_arguments_are_found(fails, op, function):
    fails("schema.alias", op("k(Tensor x) -> Tensor", function), args=ROWS)
    fails("schema.alias", function, args=ROWS, reference=lambda x: x + 1)


def test_two_results_of_one_storage_are_found(fails, op):
    failure = fails(
        "schema.alias", op("m(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1).unbind(0)[:1] * 2), args=ROWS
    )
    assert "result 1 shares memory with result 0" in failure.message


def test_aliases_that_are_declared_are_right(holds):
    holds("schema.alias", torch.ops.aten.add_.Tensor, args=(*ROWS, *ROWS))
    holds("schema.alias", torch.ops.aten.transpose.int, args=(*ROWS, 0, 1))
    holds("schema.alias", torch.ops.aten.add.Tensor, args=(*ROWS, *ROWS))


def test_none_for_a_tensor_is_found(fails):
    fails("schema.returns", lambda x: None if x.numel() == 0 else x + 1, args=ROWS, reference=lambda x: x + 1)


def test_keywords_that_are_swapped_are_found(fails, holds):
    def swaps(*args, **kwargs):
        return torch.sub(kwargs["b"], kwargs["a"]) if kwargs else torch.sub(*args)

    import inspect

    swaps.__signature__ = inspect.signature(lambda a, b: None)
    fails("schema.defaults", swaps, args=(*ROWS, *ROWS))
    holds("schema.defaults", torch.ops.aten.gelu.default, args=ROWS)
