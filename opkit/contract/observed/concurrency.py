"""This module checks calls with several numbers of threads, and several calls at once."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Generator

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from opkit.contract.calls.cases import Call, Case
from opkit.contract.calls.sizes import LARGE
from opkit.contract.calls.specs import Drawing
from opkit.contract.compare.rounding import beyond_rounding, observe
from opkit.contract.observed.outcome import CallOutcome, same_bits
from opkit.contract.observed.randomness import is_random
from opkit.contract.prop import CallRefused, Violation
from opkit.contract.subject import Subject

_COUNTS = (2, 3, 5)
_REPEATS = 2
_THREADS = 8
_INPUTS = 4
_CALLS = 6  # of each thread
_ELEMENTS = 2**16
_MAX_CALLS = 96  # of each thread, where calls are short
_SECONDS = 0.02  # for all of them: a race shows by chance, sooner with more calls
_PATIENCE = 60.0  # seconds to wait for threads that wait for each other


def large_cases(subject: Subject) -> SearchStrategy[Case]:
    """Draw calls that are large enough to be divided among threads, and to overlap."""
    return subject.spec.cases(Drawing(largest=LARGE, elements=_ELEMENTS))


def larger_cases(subject: Subject) -> SearchStrategy[Case]:
    """Draw the largest of four calls: a longer call overlaps with more others."""
    some = large_cases(subject)
    return st.tuples(some, some, some, some).map(lambda several: max(several, key=_elements))


def _elements(case: Case) -> int:
    return sum(math.prod(tensor.shape) for tensor in case.tensors())


@contextlib.contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_thread_counts(subject: Subject, case: Case) -> None:
    """Check that results are the same with any number of torch's threads, up to the order of sums.

    Raises:
        Violation: they differ by more.
    """
    with _threads(1):
        alone = observe(subject, case).detached()
    if is_random(subject, case):
        return  # the distribution of random numbers over threads may differ
    for count in _COUNTS:
        with _threads(count):
            outcomes = [observe(subject, case).detached() for _ in range(_REPEATS)]
        for outcome in outcomes:
            if found := beyond_rounding(subject, case, outcome, alone):
                raise Violation(
                    f"with torch.set_num_threads({count}) {found} with one thread. Perhaps threads write to the same memory, or "
                    "the last part of the work is dropped where it does not divide."
                )


def not_interpreted(subject: Subject) -> str:
    """Return why calls cannot overlap here, or ""."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter runs one kernel at a time"
    return ""


@dataclasses.dataclass
class _Worker:
    """One thread: the calls to make, how often, and their outcomes."""

    inputs: list[int]
    calls: list[Call]
    rounds: int = 1
    outcomes: list[CallOutcome] = dataclasses.field(default_factory=list)
    error: BaseException | None = None

    def run(self, subject: Subject, barrier: threading.Barrier) -> None:
        try:
            barrier.wait(_PATIENCE)
            for call in self.calls * self.rounds:
                self.outcomes.append(subject.call(call))
        except BaseException as error:  # the main thread raises it
            self.error = error


def _variants(case: Case) -> list[Case]:
    """Return the case with other numbers and equal sizes, so that calls share what is cached by size."""
    return [case.reseeded(by) for by in range(_INPUTS)]


def check_concurrent(subject: Subject, case: Case) -> None:
    """Check that eight threads that call at once, with equal and with other numbers, each get their own correct results.

    Raises:
        Violation: one gets another's result, a mixed one, or an exception.
    """
    if is_random(subject, case):
        return  # calls draw from one generator, in any order
    variants = _variants(case)
    started = time.perf_counter()
    expected = [observe(subject, each).detached() for each in variants]
    rounds = _rounds(subject, variants, expected, (time.perf_counter() - started) / _INPUTS)
    workers = [_worker(subject, variants, number, rounds) for number in range(_THREADS)]
    _run(subject, workers)
    for worker in workers:
        if worker.error is not None:
            raise Violation(_raised(worker.error)) from worker.error
        for number, outcome in zip(worker.inputs * worker.rounds, worker.outcomes, strict=True):
            if _equal(outcome, expected[number]):
                continue
            if found := beyond_rounding(subject, variants[number], outcome, expected[number]):
                raise Violation(
                    f"{_THREADS} threads called at once, and in one {found} when called alone. Memory that calls share, such as "
                    "a static or global buffer, needs a lock, or to be each call's own."
                )


def _equal(outcome: CallOutcome, expected: CallOutcome) -> bool:
    """Return whether a quick comparison finds two outcomes equal; they may be equal even if it does not."""
    pairs = [*zip(outcome.results, expected.results, strict=False)]
    pairs += [*zip(outcome.call.tensors(), expected.call.tensors(), strict=True)]
    tensors = all(isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) for a, b in pairs)
    if not tensors or len(outcome.results) != len(expected.results):
        return False
    return all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def _rounds(subject: Subject, variants: list[Case], expected: list[CallOutcome], seconds: float) -> int:
    """Return how often a thread makes its calls: more than once if they are short and do not change their arguments."""
    if not subject.functional or subject.device != "cpu":
        return 1
    for case, outcome in zip(variants, expected, strict=True):
        if not all(map(same_bits, case.make().tensors(), outcome.call.tensors())):
            return 1
    calls = int(_SECONDS / max(seconds, 1e-6) / _THREADS)
    return max(1, min(calls, _MAX_CALLS) // _CALLS)


def _worker(subject: Subject, variants: list[Case], number: int, rounds: int) -> _Worker:
    inputs = [(number + step) % _INPUTS for step in range(_CALLS)]
    return _Worker(inputs, [variants[index].make(subject.device) for index in inputs], rounds)


def _run(subject: Subject, workers: list[_Worker]) -> None:
    barrier = threading.Barrier(len(workers))
    contexts = [contextvars.copy_context() for _ in workers]
    threads = [
        threading.Thread(target=context.run, args=(worker.run, subject, barrier), daemon=True)
        for context, worker in zip(contexts, workers, strict=True)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE)
    finally:
        sys.setswitchinterval(interval)
    if any(thread.is_alive() for thread in threads):
        raise Violation(f"{_THREADS} threads called at once, and after {_PATIENCE:.0f} s some still wait: a deadlock.")


def _raised(error: BaseException) -> str:
    what = str(error) if isinstance(error, CallRefused) else f"{type(error).__name__}: {error}"
    return f"{_THREADS} threads called at once, and one raised {what}; called alone, it does not."
