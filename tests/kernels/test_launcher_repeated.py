"""Calls like one that was made, which pass neither Python's half of the launcher nor torch's dispatcher."""

from __future__ import annotations

import pytest
import torch


def addresses(*tensors):
    return [x.data_ptr() for x in tensors]


def test_other_tensors_of_the_same_sizes(fake):
    add = fake.add()
    again = add.launcher.repeat(lambda: add(torch.ones(40, 8), torch.ones(40, 8)))
    x, y, out = torch.randn(3, 40, 8)
    again(addresses(x, y, out), 0)
    assert torch.equal(out, x + y)
    assert len(add.missed) == 1


def test_an_address_that_is_aligned_otherwise_makes_another_entry(fake):
    add = fake.add()
    again = add.launcher.repeat(lambda: add(torch.ones(40), torch.ones(40)))
    x, y, out = torch.randn(41)[1:], torch.randn(40), torch.empty(40)
    for _ in range(2):
        again(addresses(x, y, out), 0)
    assert torch.equal(out, x + y)
    assert len(add.missed) == 2


def test_what_was_found_once_is_kept_for_each_alignment_in_turn(fake):
    add = fake.add()
    again = add.launcher.repeat(lambda: add(torch.ones(40), torch.ones(40)))
    room = torch.randn(4, 41)
    for start in (0, 1, 1, 0, 0, 1):
        x, y = (row[start : start + 40].clone() if start == 0 else row[1:] for row in room[:2])
        out = torch.empty(40)
        again(addresses(x, y, out), 0)
        assert torch.equal(out, x + y)
    assert add.launcher.entries == len(add.missed) <= 4


def test_entries_that_are_forgotten_are_asked_for_again(fake):
    add = fake.add()
    again = add.launcher.repeat(lambda: add(torch.ones(40), torch.ones(40)))
    x, y, out = torch.randn(3, 40)
    for missed in (1, 2, 3):
        for _ in range(3):
            again(addresses(x, y, out), 0)
        assert len(add.missed) == missed
        assert torch.equal(out, x + y)
        add.launcher.clear()


def test_as_many_addresses_as_tensors(fake):
    add = fake.add()
    again = add.launcher.repeat(lambda: add(torch.ones(4), torch.ones(4)))
    with pytest.raises(ValueError, match="launched with 2 tensors, and takes 3"):
        again([0, 0], 0)


def test_a_launch_that_fails_says_why(fake):
    add = fake.add()
    x = torch.ones(4)
    again = add.launcher.repeat(lambda: add(x, x))
    fake.fail("cuLaunchKernel", 2)
    with pytest.raises(RuntimeError, match="cuLaunchKernel"):
        again(addresses(x, x, x), 0)


def test_calls_of_another_launcher_are_not_remembered(fake):
    add, other = fake.add(), fake.add()
    assert add.launcher.repeat(lambda: other(torch.ones(4), torch.ones(4))) is None


def test_what_lies_in_the_memory_of_a_call_cannot_be_repeated(fake):
    rows = [("TENSOR", "x", "tensor"), ("SCALAR_POINTER", "n", "int"), ("TENSOR", "out", "tensor")]
    entry = fake.entry("none", [("ptr", 0, 0)])
    op = fake.operator("optional(Tensor x, int? n) -> Tensor", rows, lambda call: entry)
    assert op.launcher.repeat(lambda: op(torch.ones(4), 3)) is None


def test_a_call_that_raises_leaves_nothing_behind(fake):
    add = fake.add()

    def call():
        add(torch.ones(4), torch.ones(4))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        add.launcher.repeat(call)
    assert add.launcher.repeat(lambda: None) is None
