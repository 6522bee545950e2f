"""Child processes: what they answer, how they end, and what threads of the parent they do without."""

import concurrent.futures
import ctypes
import os
import shutil
import subprocess
import threading

import pytest
import torch

from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.processes import child, crashes
from opkit.contract.processes.child import ChildEnded, Worker, in_child
from opkit.contract.prop import Violation
from opkit.contract.subject import CallRefused
from opkit.testing import tensor

CASE = Case((TensorCase((2,)),))


def raises(error):
    raise error


def test_what_a_child_finds_is_told_as_what_it_is():
    assert in_child(lambda: 3) == "3"
    with pytest.raises(Violation, match="broken"):
        in_child(lambda: raises(Violation("broken")))
    with pytest.raises(CallRefused, match="ValueError: no"):
        in_child(lambda: raises(CallRefused(ValueError("no"))))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_child(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("act", "message"),
    [(os.abort, "SIGABRT"), (lambda: os._exit(7), "exit status 7"), (lambda: raises(KeyboardInterrupt()), "Keyboard")],
)
def test_ends_are_reported(act, message):
    with pytest.raises(ChildEnded, match=message) as caught:
        in_child(act)
    assert not caught.value.hung


def test_a_child_that_waits_is_ended():
    worker = Worker(lambda case: None if case == CASE else threading.Event().wait())
    worker.check(CASE)  # what the child does first is not counted
    with pytest.raises(ChildEnded) as waits:
        worker.check(CASE.replace(seed=1), 0.5)
    assert waits.value.hung
    assert not waits.value.busy


def test_a_child_that_waits_for_a_process_of_its_own_is_given_time(tmp_path):
    started = []

    def question(case):
        if case == CASE:
            started.append(subprocess.Popen(["sh", "-c", "until test -e go; do sleep 0.05; done"], cwd=tmp_path))
            return None
        return started[0].wait()

    worker = Worker(question)
    worker.check(CASE)
    end = threading.Timer(0.5, (tmp_path / "go").touch)
    end.start()
    assert worker.check(CASE.replace(seed=1), 0.1) == "0"
    end.join()


def test_a_process_that_never_ends_is_no_excuse(monkeypatch):
    monkeypatch.setattr(child, "_BUILDING", 0.3)
    with pytest.raises(ChildEnded, match="did not return"):
        in_child(lambda: subprocess.Popen(["cat"], stdin=subprocess.PIPE).wait(), 0.1)  # it ends with the child


def test_a_worker_is_one_process_until_it_ends():
    worker = Worker(lambda case: os.getpid() if case == CASE else os.abort())
    first = worker.check(CASE)
    assert first == worker.check(CASE) != str(os.getpid())
    assert worker.check(CASE, fresh=True) != first
    with pytest.raises(ChildEnded):
        worker.check(CASE.replace(seed=1))
    assert worker.check(CASE) != first


_SOURCE = """void twice(const float *x, float *y, long n) {
#pragma omp parallel for num_threads(4)
  for (long i = 0; i < n; i++) y[i] = x[i] * 2;
}"""


@pytest.fixture
def parallel(tmp_path):
    """A kernel whose OpenMP threads were started in this process."""
    if shutil.which("gcc") is None:
        pytest.skip("it needs gcc")
    library = str(tmp_path / "kernel.so")
    command = ["gcc", "-O1", "-fopenmp", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=_SOURCE.encode(), check=True)
    twice = ctypes.CDLL(library).twice

    def op(x):
        x = x.contiguous()
        y = torch.empty_like(x)
        twice(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(x.numel()))
        return y

    assert torch.equal(op(torch.ones(100)), torch.full((100,), 2.0))
    return op


def test_kernels_with_threads_of_openmp_are_asked(asked, parallel):
    report = asked("memory", parallel, args=(tensor("n"),), max_examples=8)
    assert len(report.passed) == 6, str(report)


def test_kernels_with_threads_of_their_own_are_passed_over(asked, monkeypatch):
    monkeypatch.setattr(crashes.child, "SECONDS", 0.5)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def op(x):
            return pool.submit(torch.neg, x).result()

        op(torch.ones(1))
        report = asked("memory", op, args=(tensor("n"),), reference=torch.neg)
    assert report.ok
    assert not report.passed
    assert "but not in a forked process" in report.skipped[0].reason
    assert all("see memory.crash" in skipped.reason for skipped in report.skipped[1:])
