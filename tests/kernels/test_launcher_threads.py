"""Calls, misses and clear() from several threads at once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from opkit import _core


def _together(*works: Callable[[], None]) -> None:
    """Run these at once; raise what one of them raises."""
    problems: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        start.wait()
        try:
            work()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _scale(fake, role="exact", before=lambda: None):
    params = [("ptr", 0, 0), ("ptr", 1, 0), ("fp32", 2, 0), ("i32", 3, 0)]
    rows = [("PACKED_TENSOR", "x", "tensor"), ("PACKED_TENSOR", "out", "tensor"), ("SCALAR", "k", role)]

    def miss(call: _core.Call) -> _core.Entry:
        before()
        return fake.entry("scale", params)

    return fake.operator("scale(Tensor x, int k) -> Tensor", [*rows, ("NUMEL", "out", "int_width")], miss)


def _calls(op, keys: int, count: int) -> Callable[[], None]:
    def work() -> None:
        x = torch.arange(5.0)
        for i in range(count):
            k = i % keys
            assert torch.equal(op(x, k), x * k)

    return work


def test_calls_of_many_kinds_at_once(fake, often):
    fake.library.fake_quiet(1)
    op = _scale(fake)
    _together(*[_calls(op, keys, 600) for keys in (1, 7, 50, 50)])
    assert op.launcher.entries == 50


def test_entries_are_forgotten_while_they_are_used(fake, often):
    fake.library.fake_quiet(1)
    op = _scale(fake)
    done = threading.Event()

    def clear() -> None:
        while not done.is_set():
            op.launcher.clear()
            time.sleep(1e-4)

    def calls() -> None:
        _together(*[_calls(op, keys, 400) for keys in (3, 20, 20)])
        done.set()

    _together(clear, calls)
    op.launcher.clear()
    assert op.launcher.entries == 0
    _calls(op, 3, 9)()
    assert op.launcher.entries == 3


def test_two_misses_of_one_kind_leave_one_entry(fake):
    op = _scale(fake, before=lambda: time.sleep(0.05))
    _together(*[_calls(op, 1, 3)] * 4)
    assert 1 <= len(op.missed) <= 4
    assert op.launcher.entries == 1
    missed = len(op.missed)
    _calls(op, 1, 1)()
    assert len(op.missed) == missed


def test_a_call_meets_no_miss_of_another_thread(fake):
    """A miss that takes long holds no lock that other calls need."""
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(120)

    op = _scale(fake, before=wait)
    x = torch.arange(5.0)
    op(x, 1)
    thread = threading.Thread(target=op, args=(x, 2))
    thread.start()
    assert inside.wait(120)
    assert torch.equal(op(x, 1), x)  # a hit
    assert torch.equal(op(x, 3), 3 * x)  # a miss
    op.launcher.clear()
    go_on.set()
    thread.join()
    assert op.launcher.entries == 1


def test_an_operator_may_be_called_while_another_is_missed(fake):
    inner = _scale(fake)
    outer = _scale(fake, before=lambda: inner(torch.ones(2), 5))
    assert torch.equal(outer(torch.ones(2), 3), torch.full((2,), 3.0))
    assert (inner.launcher.entries, outer.launcher.entries) == (1, 1)


def test_an_operator_may_call_itself_in_a_miss(fake):
    def again() -> None:
        if len(op.missed) < 4:
            results.append(int(op(torch.ones(2), 10 * len(op.missed))[0]))

    results: list[int] = []
    op = _scale(fake, before=again)
    assert torch.equal(op(torch.ones(2), 3), torch.full((2,), 3.0))
    assert results == [30, 20, 10]
    assert op.launcher.entries == 4


def test_modules_are_loaded_once_by_several_threads(fake):
    shared = fake.entry("scale", [("ptr", 0, 0), ("ptr", 1, 0), ("fp32", 2, 0), ("i32", 3, 0)])
    rows = [("PACKED_TENSOR", "x", "tensor"), ("PACKED_TENSOR", "out", "tensor"), ("SCALAR", "k", "exact")]
    rows.append(("NUMEL", "out", "int_width"))
    op = fake.operator("scale(Tensor x, int k) -> Tensor", rows, lambda call: shared)
    _together(*[_calls(op, 4, 50)] * 4)
    assert len(fake.noted("load")) == 1
