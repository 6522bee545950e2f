"""What a script makes wrong in right operators is found; all of it: benchmarks/mutation.py."""

import importlib

import isolated
import mutation
import mutation_c
import mutation_python
import pytest
import torch
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


@pytest.mark.parametrize(
    ("defect", "made"),
    [
        ("bound", "i <= n"),
        ("bound", "x[i + 1]"),
        ("accumulator", "T sum = (T)0;"),
        ("term", "sum += (opk_acc)x[i];"),
        ("constant", "* 3;"),
        ("initialisation", "opk_acc sum;"),
        ("argument", "((T*)x)[0] += (T)1;"),
        ("state", "static opk_acc sum = 0;"),
    ],
)
def test_c_is_made_wrong(defect, made):
    assert any(made in source for name, _, source in mutation_c.mutants(KERNEL) if name == defect)


@pytest.mark.parametrize(
    ("defect", "made"),
    [
        ("operand", "total - x"),
        ("term", "return x - total"),
        ("bound", "x[1 - 1:]"),
        ("constant", "x[2:]"),
        ("initialisation", "torch.empty(3)"),
    ],
)
def test_python_is_made_wrong(defect, made):
    found = [source for name, _, source in mutation_python.mutants(FUNCTION, "f", "kernel") if name == defect]
    assert any(made in source for source in found), found


def test_every_target_has_mutants():
    found = {name: list(mutation.mutants(target)) for name, target in mutation.TARGETS.items()}
    assert len(found) >= 20
    assert all(len(each) >= 5 for each in found.values())
    assert sum(map(len, found.values())) > 500
    names = {mutant.name for each in found.values() for mutant in each}
    assert EQUIVALENT.keys() <= names, "an equivalent mutant is not made any more"


FORKS_RUN_BACKWARDS = torch.version.cuda is None
"""In processes that are forked from one that used fake tensors; a CUDA build of torch starts autograd's threads then."""
CHOSEN = (
    ("window_mean", ("bound", "argument")),
    ("swapped", ("fake", "gradient") if FORKS_RUN_BACKWARDS else ("fake",)),
    ("moments", ("state",)),
)


def test_mutants_are_found_out():
    importlib.import_module("torch._dynamo")  # once, and not in each process that is forked
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = [
        next(each for each in mutation.mutants(mutation.TARGETS[target]) if each.defect == defect)
        for target, defects in CHOSEN
        for defect in defects
    ]
    try:
        ended = list(isolated.each(lambda mutant: mutation.judge(mutant, 10, 0.01), made, 1, 100))
    finally:
        torch.set_num_threads(before)
    assert [mutant.name for mutant, result, _ in ended if not (result and result["failures"])] == []


def test_a_process_that_ends_is_told():
    import os

    ended = {item: how for item, _, how in isolated.each(lambda item: os.kill(os.getpid(), 9) if item else 1, [0, 1])}
    assert ended == {0: "returned", 1: "signal 9"}


def test_a_process_that_hangs_is_ended():
    import time

    [(_, result, how)] = isolated.each(time.sleep, [60], seconds=0.5)
    assert (result, how) == (None, "time")
