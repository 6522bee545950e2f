"""fake.symbolic and fake.unbacked: what holds at the sizes of the trace, and not at others."""

import itertools

import pytest
import torch
from torch import Tensor

from opkit.testing import tensor

NUMBERS = itertools.count()


def operator(kernel, fake):
    made = torch.library.custom_op(f"fake_symbolic_tests::op{next(NUMBERS)}", kernel, mutates_args=())
    made.register_fake(fake)
    return made


def total(x: Tensor) -> Tensor:
    return x.sum(-1)


def halves(x: Tensor) -> Tensor:
    return x[::2].clone()


def burned(x):
    size = x.shape[0]
    return x.new_empty(size.node.hint if isinstance(size, torch.SymInt) else size)


def branches(x):
    return x.new_empty(x.shape[0] if isinstance(x.shape[0], int) else x.shape[1])


def constant(x):
    return x.new_empty([int(size) for size in x.shape[:-1]])


def looks_up(x):
    sizes = {x.shape[0]: x.shape[0]}  # a symbol cannot be hashed
    return x.new_empty(sizes[x.shape[0]])


@pytest.mark.parametrize("fake", [burned, branches, constant, looks_up])
def test_symbols(fails, fake):
    failure = fails("fake.symbolic", operator(total, fake), args=(tensor("b n"),))
    assert max(failure.args[0].shape) <= 4


def test_a_wrong_rounding_of_symbols(fails):
    def fake(x):
        odd = isinstance(x.shape[0], int) and x.shape[0] % 2
        return x.new_empty(x.shape[0] // 2 + bool(odd))

    fails("fake.symbolic", operator(halves, fake), args=(tensor("n"),))


@pytest.mark.parametrize(
    ("kernel", "fake", "pattern"),
    [
        (total, lambda x: x.new_empty(x.shape[:-1]), "*b n"),
        (halves, lambda x: x.new_empty((x.shape[0] + 1) // 2), "n"),
        (halves, lambda x: x.new_empty(x.shape[0] // 2 + (1 if x.shape[0] % 2 else 0)), "n"),
    ],
)
def test_right_fakes(holds, kernel, fake, pattern):
    holds("fake.symbolic", operator(kernel, fake), args=(tensor(pattern),))


def test_results_as_many_as_rows_may_be_constant(holds):
    def rows(x: Tensor) -> list[Tensor]:
        return [row.clone() for row in x]

    fake = operator(rows, lambda x: [x.new_empty(x.shape[1]) for _ in range(x.shape[0])])
    holds("fake.symbolic", fake, args=(tensor("b n"),))


def positive(x: Tensor) -> Tensor:
    return x[x > 0].clone()


def found(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[x > 0].clone(), x[x < 0].clone()


def size(**how):
    return torch.library.get_ctx().new_dynamic_size(**how)


def one_for_both(x):
    n = size()
    return x.new_empty(n), x.new_empty(n)


def stated(x):
    n = size()
    torch._check(n < x.shape[0])
    return x.new_empty(n)


@pytest.mark.parametrize(
    ("kernel", "fake"),
    [
        (positive, lambda x: x.new_empty(size(min=1))),
        (positive, lambda x: x.new_empty(size(max=2))),
        (found, one_for_both),
        (positive, stated),
    ],
)
def test_unbacked(fails, kernel, fake):
    assert fails("fake.unbacked", operator(kernel, fake), args=(tensor("n"),)).args[0].numel() <= 3


def test_a_right_size_that_depends_on_data(holds):
    op = operator(positive, lambda x: x.new_empty(size()))
    for rule in ("shapes", "strides", "dtype", "symbolic", "unbacked", "requires_grad", "effects"):
        holds(f"fake.{rule}", op, args=(tensor("n"),))


def test_sizes_that_do_not_depend_on_data(asked):
    report = asked("fake.unbacked", operator(total, lambda x: x.new_empty(x.shape[:-1])), args=(tensor("b n"),))
    assert "depends on data" in report.skipped[0].reason


def test_strides_of_a_size_that_depends_on_data_are_left_to_compiled_programs(holds):
    def places(x: Tensor) -> Tensor:
        return x.nonzero()  # which torch lays out by columns

    fake = operator(places, lambda x: x.new_empty(size(), x.dim(), dtype=torch.int64))
    holds("fake.symbolic", fake, args=(tensor("b n"),))
