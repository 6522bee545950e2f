"""The group ``behaviour``: threads, calls at once, parts of the tensors, CUDA streams and devices."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextvars
import dataclasses
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from opkit.contract.calls.cases import Call, Case
from opkit.contract.calls.specs import LARGE, Drawing
from opkit.contract.compare.calls import beyond_rounding, is_random, observe
from opkit.contract.compare.outcome import CallOutcome, same_bits
from opkit.contract.prop import Violation
from opkit.contract.properties.behaviour import behaviour_property, threads
from opkit.contract.subject import CallRefused, Subject
from opkit.op.native.function import NativeFunction

_COUNTS = (2, 3, 5)
_REPEATS = 2
_THREADS = 8
_INPUTS = 4
_CALLS = 6  # of each thread
_ELEMENTS = 2**16
_MAX_CALLS = 96  # of each thread, where calls are short
_SECONDS = 0.02  # for all of them: a race shows by chance, sooner with more calls
_PATIENCE = 60.0  # seconds to wait for threads that wait for each other


def _large_cases(subject: Subject) -> SearchStrategy[Case]:
    """Draw calls that are large enough to be divided among threads, and to overlap."""
    return subject.spec.cases(Drawing(largest=LARGE, elements=_ELEMENTS))


def _larger_cases(subject: Subject) -> SearchStrategy[Case]:
    """Draw the largest of four calls: a longer call overlaps with more others."""
    some = _large_cases(subject)
    return st.tuples(some, some, some, some).map(lambda several: max(several, key=_elements))


def _elements(case: Case) -> int:
    return sum(math.prod(tensor.shape) for tensor in case.tensors())


def _thread_counts(subject: Subject, case: Case) -> None:
    """Check that results are the same with any number of torch's threads, up to the order of sums.

    Raises:
        Violation: they differ by more.
    """
    with threads(1):
        alone = observe(subject, case).detached()
    if is_random(subject, case):
        return  # the distribution of random numbers over threads may differ
    for count in _COUNTS:
        with threads(count):
            outcomes = [observe(subject, case).detached() for _ in range(_REPEATS)]
        for outcome in outcomes:
            if found := beyond_rounding(subject, case, outcome, alone):
                raise Violation(
                    f"with torch.set_num_threads({count}) {found} with one thread. Perhaps threads write to the same memory, or "
                    "the last part of the work is dropped where it does not divide."
                )


def _not_interpreted(subject: Subject) -> str:
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


def _concurrent(subject: Subject, case: Case) -> None:
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


def _declares_nothing(subject: Subject) -> str:
    """Return why no parts can be compared, or ""."""
    kernels = [] if subject.operator is None else subject.operator._operator.kernels.kernels
    native = [each.function.native for each in kernels if isinstance(each.function, NativeFunction)]
    return "" if any(each.elementwise for each in native) else "no kernel of it is declared elementwise"


def _elementwise(subject: Subject, case: Case) -> None:
    """Check that each part of the arguments gives that part of the result.

    Raises:
        CallRefused: the operator does not take the call, or no part of it.
        Violation: a part differs.
    """
    compared, refused = False, None
    call = case.make(subject.device)
    whole = subject.call(call).results[0]
    for where, part in _parts([tensor for tensor in call.tensors() if tensor.shape == whole.shape]):
        try:
            found = subject.call(call.map(functools.partial(_part, shape=whole.shape, part=part))).results[0]
        except CallRefused as error:  # an annotation requires the whole
            refused = error
            continue
        _compare(found, whole[part], where)
        compared = True
    if refused is not None and not compared:
        raise refused


def _part(tensor: torch.Tensor, shape: torch.Size, part: tuple[slice, ...]) -> torch.Tensor:
    return tensor[part] if tensor.shape == shape else tensor


def _parts(tensors: list[torch.Tensor]) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Yield the parts on both sides of a cut of each dimension: after its first element, and in the middle."""
    if not tensors:
        return
    for dimension, size in enumerate(tensors[0].shape):
        for at in {1, size // 2} - {0, size}:
            for begin, end in ((0, at), (at, size)):
                part = (*[slice(None)] * dimension, slice(begin, end))
                yield f"elements {begin} to {end} of dimension {dimension}", part


def _compare(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        raise Violation(
            f"a kernel is declared elementwise, but of {where} alone the result differs from that of the whole: "
            f"{str(error).splitlines()[0]} What an element becomes may depend on elements at its place only."
        ) from error


_BUSY = 20_000_000  # cycles, about 10 ms, for which a stream is blocked


def _needs_cuda(subject: Subject) -> str:
    """Return why streams do not apply, or ""."""
    return "" if torch.device(subject.device).type == "cuda" else f"the device is {subject.device}: it has no streams"


def _needs_second_device(subject: Subject) -> str:
    """Return why a second device does not apply, or ""."""
    if torch.device(subject.device).type != "cuda":
        return f"the device is {subject.device}"
    return "" if torch.cuda.device_count() > 1 else "there is one GPU"


def _stream(subject: Subject, case: Case) -> None:
    """Check that work is launched on the current stream, after earlier work on it.

    The arguments are filled only after a while, on a side stream. A kernel on any other stream reads old numbers.

    Raises:
        Violation: results are those of the old numbers.
    """
    if is_random(subject, case):
        return
    expected = observe(subject, case).detached()
    right = case.make(subject.device)
    staged = case.make(subject.device)
    pairs = [(late, now) for late, now in zip(staged.tensors(), right.tensors(), strict=True) if _writable(late)]
    for late, _ in pairs:
        late.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_BUSY)  # torch 2.13: there is no public way to keep a stream busy
        for late, now in pairs:
            late.copy_(now)
        ours = observe(subject, staged).detached()
    torch.cuda.synchronize()
    if found := beyond_rounding(subject, case, ours, expected):
        raise Violation(f"on a stream other than the default {found}. Launch on torch.cuda.current_stream().")


def _writable(tensor: torch.Tensor) -> bool:
    return 0 not in tensor.stride() or tensor.numel() < 2


def _second_device(subject: Subject, case: Case) -> None:
    """Check that the operator works on tensors of a device that is not the current one.

    Raises:
        Violation: results are wrong, on another device, or the current device has changed.
    """
    if is_random(subject, case):
        return
    expected = observe(subject, case).detached()
    with torch.cuda.device(0):
        ours = observe(subject, case.make("cuda:1"))
        current = torch.cuda.current_device()
    if current != 0:
        raise Violation(f"the call changes the current device from 0 to {current}. Use torch.cuda.device as a context.")
    for number, tensor in enumerate(ours.tensors()):
        if tensor.device.type == "cuda" and tensor.device.index != 1:
            raise Violation(f"for tensors on cuda:1, result {number} is on {tensor.device}.")
    if found := beyond_rounding(subject, case, ours.detached(), expected):
        raise Violation(
            f"for tensors on cuda:1, while cuda:0 is current, {found}. Launch under torch.cuda.device_of(x)."
        )


_property = functools.partial(behaviour_property, forked=False)

PROPERTIES = (
    _property(
        "behaviour.threads",
        rule="Results are the same with any number of torch's threads, but for the rounding of sums in another order.",
        defect="threads that write to the same element; a last part that is dropped where the work does not divide",
        check=_thread_counts,
        cases=_large_cases,
        share=0.4,
        cost=0.01,
    ),
    _property(
        "behaviour.concurrent",
        rule="Threads that call at the same time each get their own right results.",
        defect="a static or global buffer; a cache without a lock",
        check=_concurrent,
        cases=_larger_cases,
        cost=0.03,
        skip=_not_interpreted,
    ),
    _property(
        "behaviour.elementwise",
        rule="A kernel that is declared elementwise gives for any part of the elements what it gives there for all.",
        defect="an element's neighbours that are read, a sum or a position that is counted over the whole",
        check=_elementwise,
        share=0.5,
        skip=_declares_nothing,
        forked=True,
    ),
    _property(
        "behaviour.streams",
        rule="Work is launched on the current stream.",
        defect="a launch on the default stream, which reads arguments before they are there",
        check=_stream,
        share=0.2,
        cost=0.02,
        skip=_needs_cuda,
    ),
    _property(
        "behaviour.second_device",
        rule="Tensors on a device that is not the current one give the same results, there.",
        defect="a launch on the current device; a current device that stays changed",
        check=_second_device,
        share=0.2,
        cost=0.02,
        skip=_needs_second_device,
    ),
)
