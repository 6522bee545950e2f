"""behaviour: operators that remember, each in another way, and operators that rightly do not return equal bits."""

import random
import time

import pytest
import torch
import torch.nn.functional as F

from opkit.testing import tensor

N = (tensor("n"),)
ROWS = (tensor("b n"), tensor("n"))


def test_every_third_call_is_found(fails):
    calls = []

    def op(x):
        calls.append(None)
        return x + 1 if len(calls) % 3 == 0 else x.clone()

    failure = fails("behaviour.deterministic", op, args=N)
    assert failure.args[0].numel() <= 1
    assert "equal arguments" in failure.message


def test_a_first_call_that_differs_is_found(fails):
    seen = set()

    def op(x):
        new = tuple(x.shape) not in seen
        seen.add(tuple(x.shape))
        return torch.zeros_like(x) if new else x.clone()

    fails("behaviour.deterministic", op, args=(tensor("n", low=1, high=2),))


def test_a_table_that_the_first_call_fills_is_found(fails):
    means = {}

    def op(x):
        return x - means.setdefault(x.shape, x.mean() if x.numel() else 0)

    failure = fails("behaviour.first", op, args=N)
    assert failure.args[0].numel() <= 1
    assert "has not called it before" in failure.message


def test_what_depends_on_sizes_alone_may_be_kept(holds):
    tables = {}

    def op(x):
        return x * tables.setdefault(x.shape, torch.arange(x.numel()) + 1)

    holds("behaviour.first", op, args=N)


def test_a_result_that_is_an_internal_buffer_is_found(fails):
    buffers = {}

    def op(x):
        return buffers.setdefault(x.shape, torch.empty_like(x)).copy_(x * 2)

    assert "later call" in fails("behaviour.deterministic", op, args=N).message


def test_a_generator_of_its_own_is_found(fails):
    generator = torch.Generator()
    fails("behaviour.deterministic", lambda x: x + torch.rand(x.shape, generator=generator), args=N)


def test_the_time_of_day_is_found(fails):
    fails("behaviour.deterministic", lambda x: x + time.time_ns() % 1009, args=(tensor("n", torch.float64),))


def test_a_workspace_that_is_not_cleared_is_found(fails):
    workspace = torch.zeros(4096)

    def op(x):
        workspace[: x.numel()] = x
        return workspace[: x.numel() + 1].sum()

    failure = fails("behaviour.history", op, args=N)
    assert failure.args[0].numel() <= 2
    assert "around calls of" in str(failure)


def test_a_largest_size_that_is_remembered_is_found(fails):
    largest = [0]

    def op(x):
        largest[0] = max(largest[0], x.numel())
        return x.sum() / max(largest[0], 1)

    fails("behaviour.history", op, args=(tensor("n", low=1, high=2),))


def test_a_flag_that_sticks_is_found(fails):
    from hypothesis import strategies as st

    stuck = []

    def op(x, negate):
        if negate:
            stuck.append(None)
        return -x if len(stuck) % 2 else x.clone()

    fails("behaviour.history", op, args=(*N, st.booleans()))


@pytest.mark.parametrize("key", [lambda x: x.data_ptr(), id], ids=["address", "identity"])
def test_a_cache_by_address_is_found(fails, key):
    cache = {}

    def op(x, weight):
        alive = cache.setdefault(key(weight), (weight, weight * 2))
        return x + alive[1]

    fails("behaviour.values", op, args=(tensor("n"), tensor("n")))


def test_an_assumed_alignment_is_found(fails):
    fails("behaviour.values", lambda x: x + 1 if x.data_ptr() % 16 else x.clone(), args=N)


def test_arguments_that_are_kept_are_found(fails):
    kept = []

    def op(x):
        kept.append(x)
        return x * 2

    assert "stay in memory" in fails("behaviour.arguments", op, args=N).message


def test_one_argument_that_is_kept_is_a_remark(holds):
    last = {}

    def op(x):
        last["x"] = x
        return x * 2

    assert holds("behaviour.arguments", op, args=N, max_examples=20).remarks


def test_a_fixed_state_that_is_not_moved_on_is_found(fails):
    def op(x):
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(torch.initial_seed()))

    assert "one after another" in fails("behaviour.random", op, args=N).message


def test_operators_that_do_not_draw_are_not_asked_about_random_numbers(asked):
    assert asked("behaviour.random", torch.add, args=(tensor("n"), tensor("n"))).skipped


def test_random_numbers_of_pythons_generator_are_found(fails):
    fails("behaviour.global_state", lambda x: x * random.random(), args=N)


RIGHT = {
    "in place": (lambda x, y: x.add_(y), ROWS),
    "dropout": (lambda x: F.dropout(x, 0.5), N),
    "empty": (lambda x: None, N),
    "rounds a mean": (lambda x: torch.round(x / (x.mean().abs() + 1e-3)).to(torch.int32), (tensor("b n"),)),
    "max": (lambda x: torch.max(x, -1), (tensor("b n", low=-1, high=1),)),
    "add": (torch.add, ROWS),
    "softmax": (torch.softmax, (tensor("b n"), -1)),
    "matmul": (torch.matmul, (tensor("a b"), tensor("b c"))),
}
NAMES = ("first", "deterministic", "history", "values", "arguments", "global_state", "settings")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", RIGHT)
def test_right_operators_hold(name, asked):
    op, args = RIGHT[name]
    for rule in NAMES:
        report = asked(f"behaviour.{rule}", op, args=args, max_examples=10)
        assert report.ok, str(report)


def test_random_operators_hold(holds):
    holds("behaviour.random", lambda x: F.dropout(x, 0.5), args=N)
    holds("behaviour.random", torch.bernoulli, args=(tensor("b n", low=0, high=1),))
