"""Every property of the contract, asked of one operator: in what order, for how long, and what comes of it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opkit import config
from opkit.contract import global_state
from opkit.contract import properties as table
from opkit.contract.bar import progress_of
from opkit.contract.budget import Budget
from opkit.contract.prop import Property
from opkit.contract.report import Failure, Passed, Progress, Report, Skipped
from opkit.contract.repro import script
from opkit.contract.search import Found, search, warm_up
from opkit.contract.subject import Subject, subject_of
from opkit.errors import ArgumentError
from opkit.op import torch_private as private

_DATABASE = "check"
_UNSAFE = {  # asked first, in child processes; where one does not hold, nothing calls the operator in this process
    "memory.crash": "a call ends the process",
    "memory.guard": "a call leaves its arguments' memory",
    "memory.allocations": "a call leaves the memory that it allocated",
}
_OUT_OF_TIME = "out of time"
_SHOWN = 5


class Interrupted(KeyboardInterrupt):
    """A check was interrupted from the keyboard. ``report`` has what was found until then."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def run(
    op: Any,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    reference: Callable[..., Any] | None,
    max_examples: int,
    seed: int,
    properties: Iterable[str] | None,
    exclude: Iterable[str],
    budget: float | None,
    device: str,
    database: bool | Path,
    progress: Progress | bool | None,
) -> Report:
    """See :func:`opkit.check`."""
    seconds = Budget(budget, max_examples)
    started = time.monotonic()
    asked = chosen(properties, exclude)
    subject = subject_of(op, args, kwargs, reference, device)
    if isinstance(op, private.CustomOpDef):
        importlib.import_module("torch._dynamo")  # as torch does in its first call, which would seem a slow operator's
    if budget is not None:
        warm_up()
    folder = config.get().cache_dir / _DATABASE if database is True else database or None
    found: list[tuple[Property, Found]] = []
    with _undisturbed(), progress_of(progress, subject.name) as tell:
        try:
            for prop, each in _answers(asked, subject, seconds, max_examples, seed, folder, tell):
                found.append((prop, each))
        except KeyboardInterrupt as interrupt:
            left = [(prop, Found((), skipped="interrupted")) for prop in asked[len(found) :]]
            report = _report(subject, [*found, *left], time.monotonic() - started, seed)
            raise Interrupted(report) from interrupt
    return _report(subject, found, time.monotonic() - started, seed)


def chosen(wanted: Iterable[str] | None, exclude: Iterable[str]) -> list[Property]:
    """The properties that were asked for, the cheap ones first; what a crash would end comes after what finds crashes.

    Raises:
        ArgumentError: one of the names is no property, and no group of properties.
    """
    wanted, left_out = None if wanted is None else set(wanted), set(exclude)
    names = {name for prop in table.PROPERTIES for name in (prop.name, prop.group)}
    unknown = sorted(((wanted or set()) | left_out) - names)
    if unknown:
        known = ", ".join(prop.name for prop in table.PROPERTIES)
        raise ArgumentError(f"opkit.check: there is no property {unknown[0]!r}. There are: {known}.")
    kept = [p for p in table.PROPERTIES if wanted is None or {p.name, p.group} & wanted]
    places = [*_UNSAFE]
    remaining = [p for p in kept if not {p.name, p.group} & left_out]
    return sorted(remaining, key=lambda p: (places.index(p.name) if p.name in _UNSAFE else len(places), p.cost))


def _answers(
    asked: Sequence[Property],
    subject: Subject,
    budget: Budget,
    max_examples: int,
    seed: int,
    folder: Path | None,
    tell: Progress,
) -> Generator[tuple[Property, Found]]:
    """What is found of each property, in order, as time allows."""
    while asked and asked[0].name in _UNSAFE:
        prop, asked = asked[0], asked[1:]
        tell(prop.name, 0.0)
        found = _asked(prop, subject, max_examples, seed, budget.share([prop, *asked]), budget, folder)
        budget.spent(prop, found)
        yield prop, found
        if found.failure:
            yield from ((each, Found((), skipped=f"{_UNSAFE[prop.name]}: see {prop.name}")) for each in asked)
            return
    reasons = {prop.name: _why_not(prop, subject) for prop in asked}
    total = sum(budget.need(prop) for prop in asked if not reasons[prop.name]) or 1.0
    done = 0.0
    for number, prop in enumerate(asked):
        tell(prop.name, min(done / total, 1.0))
        if reasons[prop.name]:
            yield prop, Found((), skipped=reasons[prop.name])
            continue
        done += budget.need(prop)
        seconds = budget.share([each for each in asked[number:] if not reasons[each.name]])
        found = _asked(prop, subject, max_examples, seed, seconds, budget, folder)
        budget.spent(prop, found)
        yield prop, found


def _why_not(prop: Property, subject: Subject) -> str:
    try:
        return prop.skip(subject)
    except Exception as error:  # of an operator that raises where it is looked at
        return f"could not be asked: {type(error).__name__}: {error}"


def _asked(
    prop: Property, subject: Subject, max_examples: int, seed: int, seconds: float, budget: Budget, folder: Path | None
) -> Found:
    if seconds <= 0:
        return Found((), skipped=_OUT_OF_TIME)
    found = search(prop, subject, max_examples, seed, seconds, folder, budget.left())
    return Found((), skipped=_OUT_OF_TIME, seconds=found.seconds) if found.cut_short and not found.tried else found


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """What a check changes of torch's global state is put back."""
    with global_state.preserved(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def _report(subject: Subject, found: Sequence[tuple[Property, Found]], seconds: float, seed: int) -> Report:
    entries = [_entry(subject, prop, each) for prop, each in found]
    examples = {text for _, each in found for text in each.tried}
    return Report(
        subject.name,
        tuple(each for each in entries if isinstance(each, Failure)),
        tuple(each for each in entries if isinstance(each, Passed)),
        tuple(each for each in entries if isinstance(each, Skipped)),
        len(examples),
        seconds,
        seed,
    )


def _entry(subject: Subject, prop: Property, found: Found) -> Failure | Passed | Skipped:
    if found.failure is not None:
        return _failure(subject, prop, found)
    refused = {str(case): error for case, error in found.refused}
    if found.skipped or (refused and len(refused) >= len(found.tried)):
        return _skipped(prop, found, refused)
    return Passed(
        prop.name,
        len(found.tried),
        prop.rule,
        found.seconds,
        len(refused),
        found.remarks,
        found.cut_short,
        prop.defect,
        _few(found.tried),
        _reasons(refused),
    )


def _failure(subject: Subject, prop: Property, found: Found) -> Failure:
    assert found.failure is not None
    case, message = found.failure
    return Failure(
        prop.name,
        message,
        case,
        script(subject, prop, case),
        prop.rule,
        prop.defect,
        len(found.tried),
        found.seconds,
        subject.name,
        found.cut_short,
    )


def _skipped(prop: Property, found: Found, refused: Mapping[str, str]) -> Skipped:
    reason = (
        found.skipped
        or f"the operator refused every example, such as {next(' with '.join(i) for i in refused.items())}"
    )
    return Skipped(prop.name, reason, prop.rule, prop.defect, len(found.tried), found.seconds, _reasons(refused))


def _few(texts: Sequence[str]) -> tuple[str, ...]:
    """Some of the examples, evenly spread."""
    step = max(1, len(texts) // _SHOWN)
    return tuple(texts[::step][:_SHOWN])


def _reasons(refused: Mapping[str, str]) -> tuple[str, ...]:
    """For each distinct reason that was raised, the first example that it was raised for."""
    first: dict[str, str] = {}
    for case, error in refused.items():
        first.setdefault(error, case)
    return tuple(f"{case}: {error}" for error, case in list(first.items())[:_SHOWN])
