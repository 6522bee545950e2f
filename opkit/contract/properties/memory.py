"""The group ``memory``: an operator stays within its own memory, and does not end the process."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable

import torch

from opkit.contract.calls.cases import Call, Case, distinct, places
from opkit.contract.calls.specs import ANYTHING, LARGE, Drawing
from opkit.contract.calls.tensors import WRITABLE
from opkit.contract.compare.calls import may_write
from opkit.contract.compare.outcome import AROUND, FRESH, CallOutcome, dependence
from opkit.contract.processes import guarded_memory as memory
from opkit.contract.processes.child import ChildEnded, Worker, available
from opkit.contract.processes.crashes import Crashes
from opkit.contract.prop import NotApplicable, Property, Violation, drawn
from opkit.contract.properties import memory_gpu
from opkit.contract.subject import CallRefused, Subject

_PATIENCE = 60.0  # seconds: generous, since the first call may compile a kernel
_REFERENCE_RUNS = 3  # of a reference on poisoned memory: it may get memory that is not fresh
_WINDOW = 50  # calls between two measurements of the heap
_SLOW = 0.002  # seconds; slower operators get fewer calls
_MIN_LEAK = 32  # bytes a call
_ALL_SIZES = dataclasses.replace(ANYTHING, largest=LARGE)
_WRITABLE = Drawing(layouts=WRITABLE)  # no two elements share memory
Check = Callable[[Subject, Case], None]


def needs_child(subject: Subject) -> str:
    """Return why the operator cannot be called in a child process, or ""."""
    if torch.device(subject.device).type != "cpu":
        return "it needs arguments on the CPU: a process that uses a GPU cannot be forked"
    return "" if available() else "it needs forked child processes, which Linux has"


def _needs(also: Callable[[], str], gpu: bool = False) -> Callable[[Subject], str]:
    """Return a ``skip`` for a property that needs a child process and ``also``; on a GPU nothing is needed, with ``gpu``."""
    return lambda subject: "" if gpu and _on_gpu(subject) else needs_child(subject) or also()


def _on_gpu(subject: Subject) -> bool:
    return torch.device(subject.device).type == "cuda"


def _either(cpu: Check, gpu: Check) -> Check:
    return lambda subject, case: (gpu if _on_gpu(subject) else cpu)(subject, case)


def _in_child(name: str, check: Check, explain: Callable[[Subject, Case, ChildEnded], str]) -> Check:
    """Return a check that calls ``check`` in a child process, which stays for the whole search of the property ``name``.

    Args:
        name: the property.
        check: runs in the child.
        explain: describes the violation if the child ends.
    """

    def checked(subject: Subject, case: Case) -> None:
        if "hangs in a child" in subject.notes:
            raise NotApplicable("a call does not return in a child process: see memory.crash")
        worker = subject.notes.setdefault(name, Worker(functools.partial(check, subject)))
        try:
            worker.check(case, _PATIENCE)
        except ChildEnded as ended:
            if ended.hung:
                subject.notes["hangs in a child"] = True
                raise NotApplicable(f"a call {ended} in a child process: see memory.crash") from ended
            raise Violation(explain(subject, case, ended)) from ended

    return checked


def _dies(function: Callable[[Case], object], case: Case) -> bool:
    """Return whether a process of its own ends by itself that calls the function on the case."""
    try:
        Worker(function).check(case, _PATIENCE, fresh=True)
    except ChildEnded as ended:
        return not ended.hung
    except (CallRefused, RuntimeError):
        return False
    return False


def _crash(subject: Subject, case: Case) -> None:
    subject.notes.setdefault("memory.crash", Crashes(subject)).check(case)


# ---- arguments -----------------------------------------------------------------------------------------------------------


def _run_guarded(subject: Subject, case: Case, only: int | None, at_end: bool, protection: int) -> None:
    call = case.make()
    chosen = {id(tensor) for number, tensor in distinct(call) if only is None or number == only}

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return memory.guarded(tensor, at_end, protection) if id(tensor) in chosen else tensor

    subject.call(call.map(place)).detached()


def _guard(subject: Subject, case: Case) -> None:
    for at_end in (True, False):
        _run_guarded(subject, case, None, at_end, memory.NOTHING)


def _overrun(subject: Subject, case: Case, ended: ChildEnded) -> str:
    """Describe which argument's memory is left at which end, and whether by a read or a write."""

    def dies(number: int, at_end: bool, protection: int) -> bool:
        return _dies(lambda each: _run_guarded(subject, each, number, at_end, protection), case)

    for number, _ in distinct(case.make()):
        for at_end, where in ((True, "past the end"), (False, "before the beginning")):
            if not dies(number, at_end, memory.NOTHING):
                continue
            place = places(case)[number]
            if dies(number, at_end, memory.ANYTHING):
                return f"the process ends where {place} is aligned to its elements and no further, as x[1:] is"
            access = "writes" if dies(number, at_end, memory.READ) else "reads"
            return f"{access} {where} of {place}: the process ended at the protected page there"
    return f"the call {ended}"


def _run_sealed(subject: Subject, case: Case, sealed: set[int]) -> None:
    call = case.make()
    chosen = {id(tensor) for number, tensor in distinct(call) if number in sealed}
    subject.call(call.map(lambda tensor: memory.sealed(tensor) if id(tensor) in chosen else tensor)).detached()


def _only_read(subject: Subject, case: Case) -> set[int]:
    return {number for number, _ in distinct(case.make())} - may_write(subject, case)


def _read_only(subject: Subject, case: Case) -> None:
    _run_sealed(subject, case, _only_read(subject, case))


def _written(subject: Subject, case: Case, ended: ChildEnded) -> str:
    for number in sorted(_only_read(subject, case)):
        if _dies(functools.partial(_run_sealed, subject, sealed={number}), case):
            reason = "it is not declared as written to, and the process ended where it could only be read"
            return f"{places(case)[number]} is written to, if for a moment: {reason}"
    return f"the call {ended} where its arguments could only be read"


def _unknown_writes(subject: Subject) -> str:
    known = subject.schema is not None or subject.reference is not None
    return needs_child(subject) or memory.guard_missing() or ("" if known else "nothing says what it may write to")


def _run_watched(subject: Subject, case: Case, byte: int) -> CallOutcome:
    call = case.make()
    copies = {id(tensor): memory.watched(tensor, byte) for _, tensor in distinct(call)}
    outcome = subject.call(call.map(lambda tensor: copies[id(tensor)].tensor)).detached()
    for number, tensor in distinct(call):
        copy = copies[id(tensor)]
        where = copy.touched()
        if where and copy.tensor.shape == tensor.shape:  # a resized tensor includes memory that was next to it
            raise Violation(f"writes outside of {places(case)[number]}: at {where}")
    return outcome


def _red_zone(subject: Subject, case: Case) -> None:
    found = dependence(case, AROUND, lambda byte: _run_watched(subject, case, byte))
    if found:
        raise Violation(f"reads memory next to its arguments: with other bytes there, {found}")


# ---- allocated memory ----------------------------------------------------------------------------------------------------


def _allocations(subject: Subject, case: Case) -> None:
    call, guard = case.make(), memory.guard()
    guard.begin()
    try:
        outcome = subject.call(call)  # nothing is freed before the child ends
    finally:
        guard.end()
    where = guard.touched()
    if where:
        raise Violation(f"writes {where} that torch allocated for it: a result, or a workspace")
    del outcome


def _overrun_block(subject: Subject, case: Case, ended: ChildEnded) -> str:
    try:
        Worker(lambda each: subject.run(each).detached()).check(case, _PATIENCE, fresh=True)
    except ChildEnded:
        return f"the call {ended}"
    return "reads or writes past an end of a result or a workspace: the process ended at the protected page there"


def _run_poisoned(run: Callable[[Call], CallOutcome], case: Case, byte: int) -> CallOutcome:
    call = case.make()
    torch.manual_seed(0)
    with memory.poisoned_heap(byte):
        return run(call).detached()


def _uninitialized(subject: Subject, case: Case) -> None:
    found = dependence(case, FRESH, lambda byte: _run_poisoned(subject.call, case, byte))
    if found and not _reference_depends(subject, case):
        raise Violation(f"results depend on what fresh memory held: {found}. Every element must be written.")


def _reference_depends(subject: Subject, case: Case) -> bool:
    """Return whether the reference's results depend on fresh memory too, as torch.empty's do."""
    if subject.reference is None:
        return False
    try:
        run = functools.partial(subject.call, function=subject.reference)
        return any(dependence(case, FRESH, lambda byte: _run_poisoned(run, case, byte)) for _ in range(_REFERENCE_RUNS))
    except CallRefused:
        return False


def _growth(subject: Subject, case: Case, calls: int) -> int:
    """Return the number of bytes by which the heap grows over so many calls."""
    gc.collect()
    before = memory.heap_bytes()
    for _ in range(calls):
        subject.run(case)
    gc.collect()
    return memory.heap_bytes() - before


def _leak(subject: Subject, case: Case) -> None:
    started = time.monotonic()
    for _ in range(3):
        subject.run(case)
    calls = _WINDOW if time.monotonic() - started < 3 * _SLOW else _WINDOW // 5
    _growth(subject, case, calls // 5)
    if any(_growth(subject, case, calls) < calls * _MIN_LEAK for _ in range(2)):
        return
    steady = _growth(subject, case, 4 * calls)
    if steady >= 4 * calls * _MIN_LEAK:
        raise Violation(f"{steady // (4 * calls)} bytes more are allocated after each call, for {6 * calls} calls")


_red_zone_on_cpu = _in_child(
    "memory.red_zone",
    _red_zone,
    lambda _, __, end: f"the call {end} once the memory next to its arguments held other bytes",
)
_uninitialized_on_cpu = _in_child(
    "memory.uninitialized", _uninitialized, lambda _, __, end: f"the call {end} once fresh memory held other bytes"
)
_leak_on_cpu = _in_child("memory.leak", _leak, lambda _, __, end: f"one of many equal calls {end}")

_property = functools.partial(Property, cases=drawn(ANYTHING), cost=0.003)

PROPERTIES = (
    _property(
        "memory.crash",
        rule="Whatever the arguments' sizes, layouts, dtypes and values, a call returns or raises.",
        defect="a segmentation fault at a size of 0, a failed assertion, an exit, a loop that never ends",
        check=_crash,
        cases=drawn(_ALL_SIZES),
        share=2.0,
        cost=0.0015,
        skip=needs_child,
    ),
    _property(
        "memory.guard",
        rule="No argument is read or written past either of its ends.",
        defect="a vector tail that reads whole vectors, a bound that is off by one, strides that are ignored",
        check=_in_child("memory.guard", _guard, _overrun),
        skip=_needs(memory.guard_missing),
    ),
    _property(
        "memory.read_only",
        rule="An argument that is not declared as written to is not written to, not even for a moment.",
        defect="a kernel that changes its input and restores it: another thread that reads it meanwhile gets wrong numbers",
        check=_in_child("memory.read_only", _read_only, _written),
        share=0.5,
        skip=_unknown_writes,
    ),
    _property(
        "memory.red_zone",
        rule="Memory next to an argument, and between its elements, is not written, and results do not depend on it.",
        defect="a kernel that takes a strided tensor for a contiguous one, or writes one element too many",
        check=_either(_red_zone_on_cpu, memory_gpu.red_zone),
        cost=0.005,
        skip=_needs(memory.guard_missing, gpu=True),
    ),
    _property(
        "memory.allocations",
        rule="No result and no workspace is read or written past either of its ends.",
        defect="a kernel that writes whole vectors to a result, or one element too many",
        check=_in_child("memory.allocations", _allocations, _overrun_block),
        cases=drawn(_WRITABLE),
        skip=_needs(memory.allocator_missing),
    ),
    _property(
        "memory.uninitialized",
        rule="Results do not depend on what fresh memory held.",
        defect="a result of torch.empty that is not all written, a sum that does not begin at zero",
        check=_either(_uninitialized_on_cpu, memory_gpu.uninitialized),
        cases=drawn(_WRITABLE),
        cost=0.006,
        skip=_needs(memory.heap_missing, gpu=True),
    ),
    _property(
        "memory.leak",
        rule="Calls do not allocate more than they give back.",
        defect="a workspace that is not freed, a cache that grows with each call, a reference that is never dropped",
        check=_either(_leak_on_cpu, memory_gpu.leak),
        cases=drawn(_WRITABLE),
        share=0.2,
        least=4,
        cost=0.03,
        skip=_needs(memory.heap_missing, gpu=True),
    ),
)
