"""memory.crash: calls that end the process, and calls that never return."""

import ctypes
import os
import sys
import threading
import time

import pytest
import torch

from opkit.contract.processes import crashes
from opkit.testing import tensor

ROWS = (tensor("b n"),)


def when(condition, act):
    """An operator that does something terrible where ``condition`` holds of its argument."""

    def op(x):
        if condition(x):
            act()
        return x + 1

    return op


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ctypes.string_at(8), "SIGSEGV"),
        (lambda: os._exit(3), "exit status 3"),
        (lambda: sys.exit(2), "SystemExit"),
        (os.abort, "SIGABRT"),
        (lambda: os.kill(os.getpid(), 8), "SIGFPE"),
    ],
)
def test_ends_of_the_process_shrink_to_the_smallest_size(fails, act, message):
    failure = fails("memory.crash", when(lambda x: x.numel() >= 9, act), args=ROWS)
    assert message in failure.message
    assert failure.args[0].numel() in range(9, 16)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "condition",
    [
        lambda x: not x.is_contiguous(),
        lambda x: x.dtype == torch.float16,
        lambda x: bool(x.isnan().any()),
        lambda x: x.numel() == 0,
    ],
    ids=["layout", "dtype", "values", "empty"],
)
def test_crashes_on_some_arguments_are_found(fails, condition):
    fails("memory.crash", when(condition, os.abort), args=(tensor("b n", (torch.float32, torch.float16)),))


def test_a_crash_of_the_second_call_is_found(fails):
    calls = []

    def op(x):
        calls.append(x)
        if len(calls) == 2:
            os.abort()
        return x + 1

    fails("memory.crash", op, args=ROWS)


def test_a_damaged_heap_is_found(fails):
    def op(x):
        result = torch.empty_like(x)
        ctypes.memset(result.data_ptr(), 255, 8 * result.numel() + 64)
        return result

    fails("memory.crash", op, args=(tensor("n"),))


@pytest.fixture
def never():
    """An event that ends what this process has begun, when the test is over; in a forked process it never comes."""
    event = threading.Event()
    yield event
    event.set()


def computes(event):
    while not event.is_set():
        pass


@pytest.mark.sweep(1)
@pytest.mark.parametrize("act", [computes, threading.Event.wait], ids=["computes", "waits"])
def test_a_call_that_never_returns_is_found(fails, monkeypatch, never, act):
    monkeypatch.setattr(crashes.child, "SECONDS", 0.5)
    monkeypatch.setattr(crashes, "_PATIENCE", 0.5)
    monkeypatch.setattr(crashes, "_SHORT", 0.1)
    failure = fails("memory.crash", when(lambda x: x.shape[0] > 2, lambda: act(never)), args=ROWS)
    assert "did not return" in failure.message
    assert failure.args[0].shape[0] == 3


def test_a_call_that_is_slow_is_no_failure(holds, monkeypatch):
    monkeypatch.setattr(crashes.child, "SECONDS", 0.1)
    holds("memory.crash", when(lambda x: x.numel() == 1, lambda: time.sleep(0.15)), args=ROWS, max_examples=10)


def test_nothing_else_is_asked_after_a_crash(asked):
    report = asked("memory", when(lambda x: True, os.abort), args=ROWS)
    assert [failure.property for failure in report.failures] == ["memory.crash"]
    assert all("memory.crash" in skipped.reason for skipped in report.skipped)


def test_an_operator_that_raises_does_not_crash(asked):
    def op(x):
        raise ValueError("no")

    report = asked("memory.crash", op, args=ROWS)
    assert report.ok
    assert report.skipped[0].tried <= 100
    assert "refused every example" in report.skipped[0].reason


def test_nothing_is_printed(capfd, asked):
    def op(x):
        os.write(2, b"terrible")
        os.abort()

    asked("memory.crash", op, args=ROWS)
    captured = capfd.readouterr()
    assert not captured.out
    assert not captured.err


def test_arguments_that_have_no_spelling_are_passed_all_the_same(holds):
    holds("memory.crash", lambda x, how: how(x), args=(*ROWS, torch.sin), max_examples=5)
