"""The group ``behaviour``: results depend on the arguments' values alone, not on calls before them, addresses or names."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import time
from collections.abc import Generator
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.multiprocessing.reductions import StorageWeakRef

from opkit.contract.calls.cases import Call, Case, History, TensorCase
from opkit.contract.calls.specs import Drawing
from opkit.contract.compare.calls import beyond_rounding, difference, observe, quietly
from opkit.contract.compare.outcome import CallOutcome
from opkit.contract.processes import child
from opkit.contract.prop import NotApplicable, Property, Remark, Violation, drawn
from opkit.contract.subject import CallRefused, Subject

_REPEATS = 6
_LATER = 100_000.5  # seconds: past midnight, and another number in any unit of the clock
_SHIFTS = (1, 2, 3)
_ROUNDS = 4
_MAX_BETWEEN = 2
_NOTE = "behaviour.first"
_LONG = 10.0  # seconds: an operator that compiles in its first call would do so for every case
_LONGEST = 30.0  # seconds for one case; a busy machine takes a while to import what the first one needs
_NEARLY = 1e-2  # of the largest number: stale numbers are off by more, and a tuned kernel may round differently
_NO_STATE = "A call must not leave state that reaches another call."


def _with_nan(_: int, tensor: TensorCase) -> TensorCase:
    bounded = tensor.low is not None or tensor.high is not None
    return dataclasses.replace(tensor, fill="nan") if tensor.differentiable and not bounded else tensor


def _deterministic(subject: Subject, case: Case) -> None:
    first = observe(subject, case)
    copy = first.detached()
    for number in range(2, _REPEATS + 1):
        _expect(subject, case, observe(subject, case), copy, f"call {number} with equal arguments: ")
        other = case.reseeded(number)
        quietly(subject, other.map(_with_nan) if number == 3 else other)
        _expect_unchanged(first, copy)
    _expect(subject, case, _later(subject, case), copy, "the same call at another time of day: ")


def _later(subject: Subject, case: Case) -> CallOutcome:
    now = time.time() + _LATER
    with mock.patch("time.time", return_value=now), mock.patch("time.time_ns", return_value=int(now * 1e9)):
        return observe(subject, case)


def _expect(subject: Subject, case: Case, ours: CallOutcome, expected: CallOutcome, when: str) -> None:
    """Require equal bits, or equal numbers where threads may add up in any order."""
    found = difference(ours, expected)
    if not found:
        return
    message = f"{when}{found} the first time"
    if not beyond_rounding(subject, case, ours, expected) and _reorders(subject, case):
        raise Remark(f"{message}: the rounding of sums in another order")
    raise Violation(f"{message}. {_NO_STATE}")


def _reorders(subject: Subject, case: Case) -> bool:
    """Return whether threads make rounding differ: on a GPU unless torch forbids it, on a CPU if one thread never differs."""
    if torch.device(subject.device).type != "cpu":
        return not torch.are_deterministic_algorithms_enabled()
    with threads(1):
        first = observe(subject, case).detached()
        return not any(difference(observe(subject, case), first) for _ in range(2 * _REPEATS))


@contextlib.contextmanager
def threads(count: int) -> Generator[None]:
    """Let torch compute with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _expect_unchanged(first: CallOutcome, copy: CallOutcome) -> None:
    if found := difference(first, copy):
        raise Violation(
            f"a later call changes an earlier one's: {found} when it was returned. Return memory that no other call uses."
        )


def _history(subject: Subject, case: Case) -> None:
    between = case.between if isinstance(case, History) else ()
    case = Case(case.args, case.kwargs)
    first = observe(subject, case)
    copy = first.detached()
    outcomes = [_outcome_or_none(subject, other) for other in between]
    _expect_unchanged(first, copy)
    _expect(subject, case, observe(subject, case), copy, f"after a call of {_listed(between)}: ")
    for other, before in [*zip(between, outcomes, strict=True)][::-1]:
        again = _outcome_or_none(subject, other)
        if before is not None and again is not None:
            _expect(subject, other, again, before, f"the call of {other}, repeated after other calls: ")
    _expect(subject, case, observe(subject, case), copy, f"after calls of {_listed(between)}: ")


def _outcome_or_none(subject: Subject, case: Case) -> CallOutcome | None:
    try:
        return observe(subject, case).detached()
    except CallRefused:
        return None


def _histories(subject: Subject) -> SearchStrategy[Case]:
    """Draw calls with one or two others between them: of any sizes, dtypes, flags and numbers."""
    others = subject.spec.cases(Drawing(fills=("normal", "nan", "infinite", "large")))
    both = st.tuples(subject.spec.cases(), st.lists(others, min_size=1, max_size=_MAX_BETWEEN))
    return both.map(lambda drawn: History(drawn[0].args, drawn[0].kwargs, tuple(drawn[1])))


def _listed(cases: tuple[Case, ...]) -> str:
    return " and ".join(map(str, cases)) or "the same"


def _values(subject: Subject, case: Case) -> None:
    expected = observe(subject, case).detached()
    _new_numbers_in_old_tensors(subject, case)
    for shift in _SHIFTS:
        shifted = case.make(subject.device).map(lambda tensor, shift=shift: _shifted(tensor, shift))
        ours = observe(subject, shifted).detached()
        if found := beyond_rounding(subject, case, ours, expected):
            raise Violation(
                f"with the same numbers {shift} elements further in memory, {found} at first. Assume no alignment."
            )


def _shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Return a tensor of equal numbers and strides at an address that is less aligned."""
    if not tensor.is_contiguous() or tensor.is_neg():
        return tensor
    memory = torch.empty(tensor.numel() + by, dtype=tensor.dtype, device=tensor.device)
    return torch.as_strided(memory, tensor.shape, tensor.stride(), by).copy_(tensor)


def _new_numbers_in_old_tensors(subject: Subject, case: Case) -> None:
    """Write new numbers to the tensors of an earlier call, which reveals a cache by a tensor's address or identity."""
    used, fresh = case.make(subject.device), case.reseeded().make(subject.device)
    expected = observe(subject, fresh.map(torch.clone)).detached()
    observe(subject, used)
    for old, new in zip(used.tensors(), fresh.tensors(), strict=True):
        if old is not new:
            old.copy_(new)
    ours = observe(subject, used).detached()
    if found := beyond_rounding(subject, case.reseeded(), ours, expected):
        raise Violation(
            f"after new numbers were written to the tensors of an earlier call, {found} for the same numbers in other tensors. "
            "Do not cache by a tensor's address or identity."
        )


def _arguments(subject: Subject, case: Case) -> None:
    _keyword_arguments(subject, case)
    rounds = [_call_and_weak_references(subject, case.reseeded(by)) for by in range(_ROUNDS)]
    if not any(_alive(refs) for refs in rounds):
        return
    gc.collect(2 if "_keeps" not in subject.__dict__ else 0)  # a full collection is slow, and one is enough
    if _alive(rounds[0]) and all(_alive(refs) for refs in rounds):
        subject.__dict__["_keeps"] = True
        raise Violation(
            f"the arguments of {_ROUNDS} calls all stay in memory after their results are gone. Do not store a reference to one."
        )
    if any(_alive(refs) for refs in rounds):
        raise Remark("the arguments of the last calls stay in memory until later ones come")


def _call_and_weak_references(subject: Subject, case: Case) -> list[StorageWeakRef]:
    constants = [leaf for leaf in case.args if isinstance(leaf, torch.Tensor)]
    call = case.make(subject.device)
    created = [tensor for tensor in call.tensors() if not any(tensor is constant for constant in constants)]
    observe(subject, call)
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in created]


def _alive(refs: list[StorageWeakRef]) -> bool:
    return any(not ref.expired() for ref in refs)


def _keyword_arguments(subject: Subject, case: Case) -> None:
    """Check that the same call with every argument passed by name, the last first, gives equal results."""
    expected, call = observe(subject, case).detached(), case.make(subject.device)
    names = [] if subject.schema is None else [a.name for a in subject.schema.arguments if not a.kwarg_only]
    if len(names) < len(call.args) or "self" in names:  # a plain callable's parameters may be positional only
        names = []
    positional = call.args if not names else ()
    named = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    ours = observe(subject, Call(positional, dict(reversed(named.items()))))
    without_arguments = (dataclasses.replace(each, call=Call((), {})) for each in (ours, expected))
    if found := difference(*without_arguments):
        raise Violation(f"with arguments passed by name, in another order, {found} otherwise.")


# ---- first calls ---------------------------------------------------------------------------------------------------------


def _cannot_fork(subject: Subject) -> str:
    """Return why the operator cannot be called in forked processes, or ""."""
    if subject.device != "cpu":
        return f"the device is {subject.device}, which does not survive a fork"
    return "" if child.available() else "processes cannot be forked here"


def _first(subject: Subject, case: Case) -> None:
    """Check that a call returns the same whether it is the first or comes after one with other numbers.

    Raises:
        Violation: it does not.
    """
    if subject.notes.get("hangs in a child"):
        raise NotApplicable("it does not return in a forked process")
    worker = subject.notes.setdefault(_NOTE, child.Worker(lambda one: _compare_first(subject, one)))
    started = time.monotonic()
    try:
        worker.check(case, _LONGEST)
    except child.ChildEnded as ended:  # memory.crash reports that
        raise CallRefused(ended) from ended
    if time.monotonic() - started > _LONG:
        raise NotApplicable("its first call takes long")


def _compare_first(subject: Subject, case: Case) -> None:
    """Compare the results of two children of this process, which has not called the operator."""
    alone, after = (_results_in_child(subject, before, case) for before in ((), (case.reseeded(),)))
    for number, (first, second) in enumerate(zip(alone, after, strict=True)):
        if not _nearly_equal(first, second):
            raise Violation(
                f"in a process that has not called it before, result {number} begins {_few(first)}; where a call with other "
                f"numbers came before, {_few(second)}. Do not cache by sizes alone what depends on numbers."
            )


def _results_in_child(subject: Subject, before: tuple[Case, ...], case: Case) -> list[list[Any]]:
    def results() -> str:
        for other in before:
            quietly(subject, other)
        return json.dumps([_numbers(tensor) for tensor in observe(subject, case).tensors()])

    return json.loads(child.in_child(results))


def _numbers(tensor: torch.Tensor) -> list[Any]:
    plain = tensor.detach()
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    return (plain.double() if plain.is_floating_point() else plain).reshape(-1).tolist()


def _nearly_equal(first: list[Any], second: list[Any]) -> bool:
    if len(first) != len(second):
        return False
    largest = max((abs(value) for value in first if abs(value) < float("inf")), default=0.0)
    exact = not any(isinstance(value, float) for value in first)
    allowed = 0.0 if exact else _NEARLY * largest
    return all(a == b or abs(a - b) <= allowed or (a != a and b != b) for a, b in zip(first, second, strict=True))


def _few(numbers: list[Any]) -> str:
    return f"[{', '.join(f'{value:.6g}' for value in numbers[:4])}]"


behaviour_property = functools.partial(Property, share=0.3, cost=0.003)

PROPERTIES = (
    behaviour_property(
        "behaviour.first",
        rule="A call returns the same whether it is the first of its process or comes after one with other numbers.",
        defect="a table that the first call for a size fills from its numbers, and that all later ones read",
        check=_first,
        cases=drawn(Drawing(elements=256)),
        share=0.1,
        cost=0.0,  # it runs before any other property calls the operator in this process
        skip=_cannot_fork,
        forked=False,
    ),
    behaviour_property(
        "behaviour.deterministic",
        rule="Calls with equal arguments return equal bits, and no later call changes what an earlier one returned.",
        defect="a counter, a first call that differs, memory left over from another call, a result that is an internal buffer",
        check=_deterministic,
        cost=0.002,
        share=1.0,
        forked=False,
    ),
    behaviour_property(
        "behaviour.history",
        rule="What a call returns does not depend on which calls came before it.",
        defect="a workspace or table cached by too small a key: larger sizes, other dtypes, flags or NaN show in later results",
        check=_history,
        cases=_histories,
        share=0.6,
        cost=0.002,
    ),
    behaviour_property(
        "behaviour.values",
        rule="What a call returns depends on the numbers in its arguments, not on their address or tensor.",
        defect="a cache keyed by data_ptr() or id(); loads that assume an alignment",
        check=_values,
        share=0.5,
        cost=0.002,
    ),
    behaviour_property(
        "behaviour.arguments",
        rule="Arguments are not referenced after the call, and may be passed by name in any order.",
        defect="a list or a cache that grows with every call; a wrapper that mixes up names",
        check=_arguments,
        share=0.2,
    ),
)
