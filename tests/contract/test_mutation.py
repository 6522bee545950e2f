"""What a script makes wrong in right operators is found; all of it: benchmarks/mutation.py."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import isolated
import mutation
import mutation_c
import mutation_python
from mutation_equivalent import EQUIVALENT

KERNEL = """
void f(const T* x, T* out, int64_t n) {
    opk_acc sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (opk_acc)x[i] * 2;
    *out = (T)sum;
}
"""
FUNCTION = """
def f(x):
    total = torch.zeros(3)
    return (x - total) / x[1:].sum()
"""


IN_C = [
    ("bound", "i <= n"),
    ("bound", "x[i + 1]"),
    ("accumulator", "T sum = (T)0;"),
    ("term", "sum += (opk_acc)x[i];"),
    ("constant", "* 3;"),
    ("initialisation", "opk_acc sum;"),
    ("argument", "((T*)x)[0] += (T)1;"),
    ("state", "static opk_acc sum = 0;"),
]
IN_PYTHON = [
    ("operand", "total - x"),
    ("term", "return x - total"),
    ("bound", "x[1 - 1:]"),
    ("constant", "x[2:]"),
    ("initialisation", "torch.empty(3)"),
]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [([*mutation_c.mutants(KERNEL)], IN_C), ([*mutation_python.mutants(FUNCTION, "f", "kernel")], IN_PYTHON)],
    ids=["c", "python"],
)
def test_sources_are_made_wrong(found, wanted):
    made = [(defect, source) for defect, _, source in found]
    for defect, text in wanted:
        assert any(text in source for name, source in made if name == defect), f"{defect}: {text}"


def test_every_target_has_mutants():
    found = {name: list(mutation.mutants(target)) for name, target in mutation.TARGETS.items()}
    assert len(found) >= 20
    assert all(len(each) >= 5 for each in found.values())
    assert sum(map(len, found.values())) > 500
    names = {mutant.name for each in found.values() for mutant in each}
    assert EQUIVALENT.keys() <= names, "an equivalent mutant is not made any more"


@pytest.fixture
def survivors(record_property):
    """``survivors(mutants)``: the names of those that are not found out; the test's report says how many are."""

    def judged(mutants, max_examples=30):
        def ask(mutant, whole=False):
            return mutation.judge(mutant, max_examples, 0.01, whole=whole)

        ended = list(isolated.each(ask, mutants, 1, 200))
        again = [mutant for mutant, _, how in ended if how.startswith("signal")]
        ended += isolated.each(
            lambda mutant: ask(mutant, whole=True), again, 1, 200
        )  # it survives what ends the process
        found = {mutant.name for mutant, result, _ in ended if result and result["failures"]}
        record_property("mutants found out", f"{len(found)} of {len(mutants)}")
        return [mutant.name for mutant in mutants if mutant.name not in found]

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield judged
    torch.set_num_threads(before)


CHOSEN = (
    ("window_mean", ("operand", "gradient")),
    ("swapped", ("stride", "fake")),
    ("moments", ("term", "argument", "state")),
)


def test_mutants_are_found_out(survivors):
    made = [
        next(each for each in mutation.mutants(mutation.TARGETS[target]) if each.defect == defect)
        for target, defects in CHOSEN
        for defect in defects
    ]
    assert survivors(made, max_examples=10) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", mutation.TARGETS)
def test_most_mutants_of_each_operator_are_found_out(survivors, target):
    made = [each for each in mutation.mutants(mutation.TARGETS[target]) if each.name not in EQUIVALENT]
    chosen = mutation.spread(made, 1)  # one of each class of defect
    assert len(survivors(chosen)) <= len(chosen) // 4


def test_a_process_that_ends_is_told():
    import os

    ended = {item: how for item, _, how in isolated.each(lambda item: os.kill(os.getpid(), 9) if item else 1, [0, 1])}
    assert ended == {0: "returned", 1: "signal 9"}


def test_a_process_that_hangs_is_ended():
    import time

    [(_, result, how)] = isolated.each(time.sleep, [60], seconds=0.5)
    assert (result, how) == (None, "time")
