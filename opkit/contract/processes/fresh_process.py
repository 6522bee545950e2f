"""This module compares first calls in processes that have not called the operator before.

A table that the first call fills makes all later calls alike: in a process that has called the operator for these sizes, no
defect shows any more. So one process is forked before the first call, and two more from that one for each case.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import time
from typing import Any

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.compare.rounding import observe, quietly
from opkit.contract.processes import child
from opkit.contract.prop import CallRefused, NotApplicable, Violation
from opkit.contract.subject import Subject

_NOTE = "behaviour.first"
_LONG = 10.0  # seconds: an operator that compiles in its first call would do so for every case
_LONGEST = 30.0  # seconds for one case; a busy machine takes a while to import what the first one needs
_NEAR = 1e-2  # of the largest number: stale numbers are off by more, and a tuned kernel may round differently


def cannot_fork(subject: Subject) -> str:
    """Return why the operator cannot be called in forked processes, or ""."""
    if subject.device != "cpu":
        return f"the device is {subject.device}, which does not survive a fork"
    return "" if child.available() else "processes cannot be forked here"


def check_first(subject: Subject, case: Case) -> None:
    """Check that a call returns the same whether it is the first or comes after one with other numbers.

    Raises:
        Violation: it does not.
    """
    if subject.notes.get("hangs in a child"):
        raise NotApplicable("it does not return in a forked process")
    worker = subject.notes.setdefault(_NOTE, child.Worker(lambda one: _compare(subject, one)))
    started = time.monotonic()
    try:
        worker.check(case, _LONGEST)
    except child.ChildEnded as ended:  # memory.crash reports that
        raise CallRefused(ended) from ended
    if time.monotonic() - started > _LONG:
        raise NotApplicable("its first call takes long")


def _compare(subject: Subject, case: Case) -> None:
    """Compare the results of two children of this process, which has not called the operator."""
    alone, after = (_results_in_child(subject, before, case) for before in ((), (case.reseeded(),)))
    for number, (first, second) in enumerate(zip(alone, after, strict=True)):
        if not _near(first, second):
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


def _near(first: list[Any], second: list[Any]) -> bool:
    if len(first) != len(second):
        return False
    largest = max((abs(value) for value in first if abs(value) < float("inf")), default=0.0)
    exact = not any(isinstance(value, float) for value in first)
    allowed = 0.0 if exact else _NEAR * largest
    return all(a == b or abs(a - b) <= allowed or (a != a and b != b) for a, b in zip(first, second, strict=True))


def _few(numbers: list[Any]) -> str:
    return f"[{', '.join(f'{value:.6g}' for value in numbers[:4])}]"
