"""memory on a GPU: what lies beside arguments, fresh memory, and leaks, in this process: one that uses a GPU is not forked."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.memory import caching, poison
from opkit.contract.observed.outcome import CallOutcome
from opkit.contract.prop import CallRefused, Violation
from opkit.contract.subject import Subject

_MARGIN = 256  # elements before and after each argument
_BESIDE = (1, 3, 2)  # what these are: no index of them ends the process where its tensor has four elements
_CALLS = 50
_LEAST = 512  # bytes: what torch's smallest block takes


def _beside(subject: Subject, case: Case, value: int) -> CallOutcome:
    torch.manual_seed(0)
    return subject.call(case.make(subject.device, margin=_MARGIN, outside=value)).detached()


def red_zone(subject: Subject, case: Case) -> None:
    """Results are the same whatever lies beside the arguments; that it is not written is schema.mutation's.

    Raises:
        Violation: they are not.
    """
    found = poison.dependence(case, _BESIDE, functools.partial(_beside, subject, case))
    if found:
        raise Violation(f"reads memory beside its arguments: with other numbers there, {found}")


def _poisoned(run: Callable[[Case], CallOutcome], subject: Subject, case: Case, byte: int) -> CallOutcome:
    torch.manual_seed(0)
    with caching.poisoned(byte, torch.device(subject.device)):
        return run(case).detached()


def uninitialized(subject: Subject, case: Case) -> None:
    """Results are the same whatever fresh memory held.

    Raises:
        Violation: they are not, and the reference's are.
    """
    found = poison.dependence(case, poison.FRESH, functools.partial(_poisoned, subject.run, subject, case))
    if found and not _reference_depends(subject, case):
        raise Violation(f"results depend on what fresh memory held: {found}. Every element must be written.")


def _reference_depends(subject: Subject, case: Case) -> bool:
    if subject.reference is None:
        return False
    try:
        run = functools.partial(_poisoned, subject.expect, subject, case)
        return bool(poison.dependence(case, poison.FRESH, run))
    except CallRefused:
        return False


def leak(subject: Subject, case: Case) -> None:
    """Calls do not take more and more of torch's memory on the GPU.

    Raises:
        Violation: each call does.
    """
    device = torch.device(subject.device)
    _repeat(subject, case, 3)
    if min(_growth(subject, case, device) for _ in range(2)) >= _CALLS * _LEAST:
        steady = _growth(subject, case, device)
        if steady >= _CALLS * _LEAST:
            raise Violation(
                f"{steady // _CALLS} bytes more are allocated on the GPU after each call, for {3 * _CALLS} calls"
            )


def _growth(subject: Subject, case: Case, device: torch.device) -> int:
    gc.collect()
    before = caching.used(device)
    _repeat(subject, case, _CALLS)
    gc.collect()
    return caching.used(device) - before


def _repeat(subject: Subject, case: Case, calls: int) -> None:
    for _ in range(calls):
        subject.run(case)
