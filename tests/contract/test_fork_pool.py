"""Properties asked in forked processes: all are answered, one that crashes is reported, and what ends there ends nothing here."""

import dataclasses
import os
import signal
import threading

import fresh_process
import pytest
import small_properties as small
import torch

import opkit
from opkit.contract.processes import child, fork_pool
from opkit.contract.prop import Remark, Violation
from opkit.contract.subject import CallRefused
from opkit.testing import tensor

pytestmark = pytest.mark.skipif(not child.available(), reason="processes are forked on Linux")
HERE = os.getpid()
ARGS = (tensor("n"),)


def pids(subject, case):
    raise Remark(str(os.getpid()))


def crashes_over(limit):
    def check(subject, case):
        if case.tensors()[0].shape[0] > limit:
            os.kill(os.getpid(), signal.SIGSEGV)

    return check


def crashes_once(counter=[0]):  # noqa: B006
    def check(subject, case):
        counter[0] += 1
        if counter[0] == 5:
            os.abort()

    return check


@pytest.fixture
def check(only):
    """Asks an operator about these properties, and whether it crashes."""

    def ask(*properties, op=small.sin, args=ARGS, **how):
        only([small.made("memory.crash"), *properties])
        return opkit.check(op, args=args, database=False, **{"max_examples": 20} | how)

    return ask


def forked(name, what=small.holds, **how):
    return small.made(name, what, forked=True, **how)


def named(entries):
    return {each.property: each for each in entries}


def test_what_may_be_forked_is_asked_elsewhere_and_the_rest_here(check):
    report = check(forked("a.there", pids), small.made("b.here", pids))
    passed = named(report.passed)
    assert passed["b.here"].remarks == (str(HERE),)
    assert passed["a.there"].remarks != (str(HERE),)


@pytest.mark.parametrize("runs", [True, False])
def test_a_backward_is_asked_for_where_it_runs(check, monkeypatch, runs):
    monkeypatch.setattr(child, "runs_backward", lambda: runs)
    passed = named(check(forked("a.there", pids), forked("a.backward", pids, backward=True)).passed)
    assert passed["a.there"].remarks != (str(HERE),)
    assert (passed["a.backward"].remarks != (str(HERE),)) is runs


def test_a_forked_process_runs_a_backward_where_autograd_has_no_threads():
    if torch.accelerator.device_count():
        assert not child.runs_backward()
    elif (
        torch.version.cuda is None
    ):  # a CUDA build starts autograd's threads once fake tensors are used, from torch 2.14 on
        assert child.runs_backward()


WITH_A_DEVICE = """
import torch, opkit
from torch.utils import backend_registration as registration
from opkit.testing import tensor

class Guard(registration._DummyDeviceGuard):
    def deviceCount(self):
        return 1

registration._setup_privateuseone_for_python_backend(device_guard=Guard())
torch.ones((), requires_grad=True).backward()
groups = ["memory.crash", "gradients", "transforms"]
report = opkit.check(torch.sin, args=(tensor("n"),), properties=groups, max_examples=4, database=False)
print(report)
passed = {each.property for each in report.passed}
assert {"gradients.pure", "gradients.saved", "transforms.functional", "transforms.checkpoint"} <= passed
"""


def test_gradients_are_asked_for_on_a_machine_with_a_device():
    """Another device, which torch learns of in Python, for which autograd starts a thread in its first backward."""
    assert "fork" not in fresh_process.run(["-c", WITH_A_DEVICE]).stdout


WITH_AUTOGRAD_INSIDE = """
import torch, opkit
from torch.utils import backend_registration as registration
from opkit.testing import tensor

class Guard(registration._DummyDeviceGuard):
    def deviceCount(self):
        return 1

registration._setup_privateuseone_for_python_backend(device_guard=Guard())
torch.ones((), requires_grad=True).backward()

def reference(x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.sin().sum(), x)[0]

groups = ["memory.crash", "numbers.accepts", "numbers.reference", "numbers.extreme"]
report = opkit.check(torch.cos, args=(tensor("n"),), reference=reference, properties=groups, max_examples=4, database=False)
print(report)
assert {each.property for each in report.passed} == set(groups)
assert not any(each.remarks or each.refused for each in report.passed)
"""


def test_a_reference_that_calls_autograd_is_compared_on_a_machine_with_a_device():
    fresh_process.run(["-c", WITH_AUTOGRAD_INSIDE])


def test_the_report_keeps_the_order_in_which_properties_are_asked(check):
    several = [forked(f"a.p{number}", cost=0.01 * number) for number in range(9)]
    report = check(small.made("b.last", cost=1.0), *several)
    assert [each.property for each in report.passed] == ["memory.crash", *(f"a.p{n}" for n in range(9)), "b.last"]


def test_without_a_process_that_survived_all_is_asked_here(check):
    report = check(forked("a.there", pids), exclude=["memory.crash"])
    assert named(report.passed)["a.there"].remarks == (str(HERE),)


def test_violations_come_back_with_their_smallest_case(check):
    report = check(forked("a.small", small.sizes_over(4)), forked("a.right"))
    failure = named(report.failures)["a.small"]
    assert failure.args[0].shape == (5,)
    assert failure.message == "5 elements\nare more than 4"
    assert "a.small" in failure.repro
    assert list(named(report.passed)) == ["memory.crash", "a.right"]


def test_a_crash_is_a_failure_with_a_small_case_and_costs_the_others_nothing(check):
    others = [forked(f"b.right{number}") for number in range(4)]
    report = check(forked("a.crash", crashes_over(6)), *others)
    failure = named(report.failures)["a.crash"]
    assert failure.args[0].shape == (7,)
    assert "the check ended the process with SIGSEGV" in failure.message
    assert len(report.passed) == 5


def test_a_crash_that_no_case_brings_about_by_itself_is_told_with_the_last_one(check):
    report = check(forked("a.crash", crashes_once([0])), forked("b.right"))
    assert "after other calls, the check ended the process with SIGABRT" in named(report.failures)["a.crash"].message
    assert "b.right" in named(report.passed)


def test_a_case_that_never_ends_is_given_up(check, monkeypatch):
    monkeypatch.setattr(fork_pool, "_PATIENCE", 1.0)
    report = check(forked("a.hangs", lambda subject, case: threading.Event().wait()), forked("b.right"))
    assert named(report.skipped)["a.hangs"].reason == "one of its cases did not end within 1 s"
    assert "b.right" in named(report.passed)


def test_what_cannot_be_written_is_asked_here(check):
    def never(subject, case):
        raise Violation(f"in {os.getpid()}")

    given = torch.ones(2)
    report = check(forked("a.fails", never), forked("b.right"), op=lambda x, y: x, args=(tensor("n"), given))
    assert named(report.failures)["a.fails"].message == f"in {HERE}"


def test_processes_that_do_not_begin_leave_everything_to_this_one(check, monkeypatch):
    monkeypatch.setattr(fork_pool._Tickets, "take", lambda tickets: os._exit(3))
    report = check(forked("a.here", pids), forked("b.here", pids))
    assert [each.remarks for each in report.passed[1:]] == [(str(HERE),)] * 2


def test_a_budget_is_shared(check, monkeypatch):
    clock = small.Clock(monkeypatch)
    several = [forked(f"a.slow{number}", clock.takes(0.02), cost=0.02, least=10**4) for number in range(8)]
    asked = check(*several, budget=1.5).passed[1:]
    assert len(asked) == 8
    assert all(each.cut_short for each in asked)
    processes = min(4, len(os.sched_getaffinity(0)))
    assert sum(each.seconds for each in asked) <= 1.1 * 1.5 * processes


def test_progress_ends_with_everything_done(check):
    reported = []
    check(forked("a.there"), small.made("b.here"), progress=lambda name, share: reported.append((name, share)))
    assert reported[0] == ("memory.crash", 0.0)
    assert all(0.0 <= share <= 1.0 for _, share in reported)
    assert {"b.here"} <= {name for name, _ in reported}


def test_an_answer_from_elsewhere_is_the_answer_that_is_found_here(check):
    def remarks(subject, case):
        if case.tensors()[0].shape[0] % 2:
            raise CallRefused(ValueError("odd"))
        raise Remark(f"{case.args[1]} is large")

    def answers(forked):
        several = [
            small.made("a.remarks", remarks, forked=forked),
            small.made("b.fails", small.sizes_over(4), forked=forked),
        ]
        args = (tensor("n", torch.bfloat16), float("inf"))
        report = check(*several, op=lambda x, y: x, args=args)
        return [dataclasses.replace(each, seconds=0.0) for each in (*report.failures, *report.passed[1:])]

    assert answers(forked=True) == answers(forked=False)
    assert [each.property for each in answers(forked=True)] == ["b.fails", "a.remarks"]
