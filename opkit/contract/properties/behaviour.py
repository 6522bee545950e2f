"""The group ``behaviour``: results depend on the arguments' values alone, not on calls, threads, settings or addresses."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from opkit.contract.calls.cases import Call, Case, TensorCase
from opkit.contract.calls.histories import History, histories
from opkit.contract.calls.specs import Drawing
from opkit.contract.compare.rounding import beyond_rounding, difference, observe, quietly
from opkit.contract.observed import concurrency, devices, elementwise, global_state, randomness
from opkit.contract.observed.outcome import CallOutcome
from opkit.contract.processes import fresh_process
from opkit.contract.prop import CallRefused, Property, Remark, Violation, drawn
from opkit.contract.subject import Subject

_REPEATS = 6
_LATER = 100_000.5  # seconds: past midnight, and another number in any unit of the clock
_SHIFTS = (1, 2, 3)
_ROUNDS = 4
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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first = observe(subject, case).detached()
        return not any(difference(observe(subject, case), first) for _ in range(2 * _REPEATS))
    finally:
        torch.set_num_threads(threads)


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


_property = functools.partial(Property, share=0.3, cost=0.003)

PROPERTIES: tuple[Property, ...] = (
    _property(
        "behaviour.first",
        rule="A call returns the same whether it is the first of its process or comes after one with other numbers.",
        defect="a table that the first call for a size fills from its numbers, and that all later ones read",
        check=fresh_process.check_first,
        cases=drawn(Drawing(elements=256)),
        share=0.1,
        cost=0.0,  # it runs before any other property calls the operator in this process
        skip=fresh_process.cannot_fork,
        forked=False,
    ),
    _property(
        "behaviour.global_state",
        rule="A call leaves torch's settings, random generators, the environment and the floating-point mode as they were.",
        defect="torch.set_num_threads, set_default_dtype or manual_seed inside; numpy's generator; a mode that is never left",
        check=global_state.leaves_state,
        cost=0.0005,
    ),
    _property(
        "behaviour.deterministic",
        rule="Calls with equal arguments return equal bits, and no later call changes what an earlier one returned.",
        defect="a counter, a first call that differs, memory left over from another call, a result that is an internal buffer",
        check=_deterministic,
        cost=0.002,
        share=1.0,
        forked=False,
    ),
    _property(
        "behaviour.history",
        rule="What a call returns does not depend on which calls came before it.",
        defect="a workspace or table cached by too small a key: larger sizes, other dtypes, flags or NaN show in later results",
        check=_history,
        cases=histories,
        share=0.6,
        cost=0.002,
    ),
    _property(
        "behaviour.values",
        rule="What a call returns depends on the numbers in its arguments, not on their address or tensor.",
        defect="a cache keyed by data_ptr() or id(); loads that assume an alignment",
        check=_values,
        share=0.5,
        cost=0.002,
    ),
    _property(
        "behaviour.arguments",
        rule="Arguments are not referenced after the call, and may be passed by name in any order.",
        defect="a list or a cache that grows with every call; a wrapper that mixes up names",
        check=_arguments,
        share=0.2,
    ),
    _property(
        "behaviour.random",
        rule="Random results are torch.manual_seed's to the bit, and differ for other seeds and from call to call.",
        defect="a fixed seed, a generator of its own, a generator that is read and not advanced",
        check=randomness.check_random,
        share=0.4,
    ),
    _property(
        "behaviour.settings",
        rule="Results do not depend on the default dtype, the grad mode, deterministic mode or how denormals are treated.",
        defect="torch.zeros(n) without a dtype; a branch on torch.is_grad_enabled()",
        check=global_state.ignores_state,
    ),
    _property(
        "behaviour.threads",
        rule="Results are the same with any number of torch's threads, but for the rounding of sums in another order.",
        defect="threads that write to the same element; a last part that is dropped where the work does not divide",
        check=concurrency.check_thread_counts,
        cases=concurrency.large_cases,
        share=0.4,
        cost=0.01,
        forked=False,
    ),
    _property(
        "behaviour.concurrent",
        rule="Threads that call at the same time each get their own right results.",
        defect="a static or global buffer; a cache without a lock",
        check=concurrency.check_concurrent,
        cases=concurrency.larger_cases,
        cost=0.03,
        skip=concurrency.not_interpreted,
        forked=False,
    ),
    _property(
        "behaviour.elementwise",
        rule="A kernel that is declared elementwise gives for any part of the elements what it gives there for all.",
        defect="an element's neighbours that are read, a sum or a position that is counted over the whole",
        check=elementwise.check_parts,
        share=0.5,
        skip=elementwise.declares_nothing,
    ),
    _property(
        "behaviour.streams",
        rule="Work is launched on the current stream.",
        defect="a launch on the default stream, which reads arguments before they are there",
        check=devices.check_stream,
        share=0.2,
        cost=0.02,
        skip=devices.needs_cuda,
        forked=False,
    ),
    _property(
        "behaviour.second_device",
        rule="Tensors on a device that is not the current one give the same results, there.",
        defect="a launch on the current device; a current device that stays changed",
        check=devices.check_second_device,
        share=0.2,
        cost=0.02,
        skip=devices.needs_second_device,
        forked=False,
    ),
)
