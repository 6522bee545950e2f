"""Every property of the contract, asked of one operator: in what order, for how long, and what comes of it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opkit import config
from opkit.contract import properties as table
from opkit.contract.budget import Budget
from opkit.contract.observed import global_state
from opkit.contract.processes import fork_pool
from opkit.contract.prop import Property
from opkit.contract.report.bar import progress_of
from opkit.contract.report.report import Failure, Passed, Progress, Report, Skipped
from opkit.contract.report.repro import script
from opkit.contract.search import SearchResult, search, warm_up
from opkit.contract.subject import Subject, subject_of
from opkit.errors import ArgumentError
from opkit.op import torch_private as private

_DATABASE = "check"
_CRASHES = "memory.crash"
_UNSAFE = {  # asked first, in child processes; where one does not hold, nothing calls the operator in this process
    _CRASHES: "a call ends the process",
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
    found: dict[Property, SearchResult] = {}
    with _undisturbed(), progress_of(progress, subject.name) as tell:
        try:
            for prop, each in _answers(asked, _Asking(subject, seconds, max_examples, seed, folder), tell):
                found[prop] = each
        except KeyboardInterrupt as interrupt:
            rest = dict.fromkeys(asked, SearchResult((), skipped="interrupted"))
            report = _report(subject, rest | found, time.monotonic() - started, seed)
            raise Interrupted(report) from interrupt
    ordered = {prop: found[prop] for prop in asked}
    return _report(subject, ordered, time.monotonic() - started, seed)


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


@dataclasses.dataclass(frozen=True)
class _Asking:
    """What every property of one check is asked with."""

    subject: Subject
    budget: Budget
    max_examples: int
    seed: int
    folder: Path | None

    def ask(self, prop: Property, rest: Sequence[Property]) -> SearchResult:
        """Look for a case that breaks the property, in its part of the time that is left for it and ``rest``."""
        seconds = self.budget.share([prop, *rest])
        if seconds <= 0:
            return SearchResult((), skipped=_OUT_OF_TIME)
        left = self.budget.left()
        found = search(prop, self.subject, self.max_examples, self.seed, seconds, self.folder, left)
        self.budget.spent(prop, found)
        return (
            SearchResult((), skipped=_OUT_OF_TIME, seconds=found.seconds)
            if found.cut_short and not found.tried
            else found
        )

    def why_not(self, prop: Property) -> str:
        """Why the property does not apply."""
        try:
            return prop.skip(self.subject)
        except Exception as error:  # of an operator that raises where it is looked at
            return f"could not be asked: {type(error).__name__}: {error}"


def _answers(asked: Sequence[Property], asking: _Asking, tell: Progress) -> Generator[tuple[Property, SearchResult]]:
    """What is found of each property, as it is found."""
    survives = False
    while asked and asked[0].name in _UNSAFE:
        prop, asked = asked[0], asked[1:]
        tell(prop.name, 0.0)
        found = asking.ask(prop, asked)
        yield prop, found
        if found.failure:
            yield from ((each, SearchResult((), skipped=f"{_UNSAFE[prop.name]}: see {prop.name}")) for each in asked)
            return
        survives |= prop.name == _CRASHES and bool(found.tried) and not found.skipped
    reasons = {prop.name: asking.why_not(prop) for prop in asked}
    yield from ((prop, SearchResult((), skipped=reasons[prop.name])) for prop in asked if reasons[prop.name])
    remaining = [prop for prop in asked if not reasons[prop.name]]
    total, done = sum(map(asking.budget.need, remaining)) or 1.0, list[Property]()

    def telling(prop: Property) -> None:
        tell(prop.name, min(sum(map(asking.budget.need, done)) / total, 1.0))

    for prop, found in _found(remaining, asking, survives, telling):
        done.append(prop)
        yield prop, found


def _found(
    asked: Sequence[Property], asking: _Asking, survives: bool, tell: Callable[[Property], None]
) -> Generator[tuple[Property, SearchResult]]:
    """Ask some in processes beside this one, where the operator is known to survive, and the others here meanwhile."""
    beside = fork_pool.askable([prop for prop in asked if prop.forked and survives])
    here = [prop for prop in asked if prop not in beside]
    shared = fork_pool.ForkPool(beside, asking.ask)
    for number, prop in enumerate(here):
        tell(prop)
        yield prop, asking.ask(prop, here[number + 1 :])
        while answer := shared.poll(0.0):
            yield answer
    while shared.left:
        tell(shared.left[0])
        if answer := shared.poll():
            yield answer


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """What a check changes of torch's global state is put back."""
    with global_state.preserved(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def _report(subject: Subject, found: Mapping[Property, SearchResult], seconds: float, seed: int) -> Report:
    entries = [_entry(subject, prop, each) for prop, each in found.items()]
    examples = {text for each in found.values() for text in each.tried}
    return Report(
        subject.name,
        tuple(each for each in entries if isinstance(each, Failure)),
        tuple(each for each in entries if isinstance(each, Passed)),
        tuple(each for each in entries if isinstance(each, Skipped)),
        len(examples),
        seconds,
        seed,
    )


def _entry(subject: Subject, prop: Property, found: SearchResult) -> Failure | Passed | Skipped:
    if found.failure is not None:
        return _failure(subject, prop, found)
    refused = dict(found.refused)
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


def _failure(subject: Subject, prop: Property, found: SearchResult) -> Failure:
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


def _skipped(prop: Property, found: SearchResult, refused: Mapping[str, str]) -> Skipped:
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
