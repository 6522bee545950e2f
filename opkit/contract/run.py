"""This module checks all properties of one operator: it chooses their order, divides the time among them, and reports."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opkit import config
from opkit.contract import properties as table
from opkit.contract.processes import fork_pool
from opkit.contract.prop import Property
from opkit.contract.properties import behaviour_state
from opkit.contract.report.report import Failure, Passed, Progress, Report, Skipped, progress_of
from opkit.contract.report.repro import script
from opkit.contract.search import SearchResult, search, warm_up
from opkit.contract.subject import Subject, subject_of
from opkit.errors import ArgumentError
from opkit.op import torch_private as private

_DATABASE = "check"
_CRASHES = "memory.crash"
_UNSAFE = {  # checked first, in child processes; where one fails, nothing calls the operator in this process
    _CRASHES: "a call ends the process",
    "memory.guard": "a call leaves its arguments' memory",
    "memory.allocations": "a call leaves the memory that it allocated",
}
_OUT_OF_TIME = "out of time"
_MAX_SHOWN = 5
_COMPILES = "compile"
_COMPILER = "torch._inductor.compile_fx"
_IMPORTING = 3.0  # seconds, once in a process, before anything is compiled


class Interrupted(KeyboardInterrupt):
    """A check was interrupted from the keyboard. ``report`` has the results until then."""

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
    """Check an operator; see :func:`opkit.check` for the arguments."""
    seconds = Budget(budget, max_examples)
    started = time.monotonic()
    wanted = chosen(properties, exclude)
    subject = subject_of(op, args, kwargs, reference, device)
    if isinstance(op, private.CustomOpDef):
        importlib.import_module("torch._dynamo")  # torch imports it in the first call, which would seem slow otherwise
    if budget is not None:
        warm_up()
    folder = config.get().cache_dir / _DATABASE if database is True else database or None
    results: dict[Property, SearchResult] = {}
    with _global_state_restored(), progress_of(progress, subject.name) as show:
        try:
            for prop, result in _check_all(wanted, _Checker(subject, seconds, max_examples, seed, folder), show):
                results[prop] = result
        except KeyboardInterrupt as interrupt:
            rest = dict.fromkeys(wanted, SearchResult((), skipped="interrupted"))
            report = _report(subject, rest | results, time.monotonic() - started, seed)
            raise Interrupted(report) from interrupt
    ordered = {prop: results[prop] for prop in wanted}
    return _report(subject, ordered, time.monotonic() - started, seed)


def chosen(wanted: Iterable[str] | None, exclude: Iterable[str]) -> list[Property]:
    """Return the chosen properties, the cheap ones first; those that a crash would end come after those that find crashes.

    Raises:
        ArgumentError: one of the names is neither a property nor a group of properties.
    """
    wanted, left_out = None if wanted is None else set(wanted), set(exclude)
    names = {name for prop in table.PROPERTIES for name in (prop.name, prop.group)}
    unknown = sorted(((wanted or set()) | left_out) - names)
    if unknown:
        known = ", ".join(prop.name for prop in table.PROPERTIES)
        raise ArgumentError(f"opkit.check: there is no property {unknown[0]!r}. There are: {known}.")
    selected = [p for p in table.PROPERTIES if wanted is None or {p.name, p.group} & wanted]
    remaining = [p for p in selected if not {p.name, p.group} & left_out]
    unsafe = [*_UNSAFE]
    return sorted(remaining, key=lambda p: (unsafe.index(p.name) if p.name in _UNSAFE else len(unsafe), p.cost))


@dataclasses.dataclass(frozen=True)
class _Checker:
    """Checks properties of one operator, each in its part of the budget."""

    subject: Subject
    budget: Budget
    max_examples: int
    seed: int
    folder: Path | None

    def check(self, prop: Property, rest: Sequence[Property]) -> SearchResult:
        """Search for a case that breaks the property, in its part of the time that is left for it and ``rest``."""
        seconds = self.budget.share([prop, *rest])
        if seconds <= 0:
            return SearchResult((), skipped=_OUT_OF_TIME)
        left = self.budget.left()
        result = search(prop, self.subject, self.max_examples, self.seed, seconds, self.folder, left)
        self.budget.spent(prop, result)
        none_tried = result.cut_short and not result.tried
        return SearchResult((), skipped=_OUT_OF_TIME, seconds=result.seconds) if none_tried else result

    def reason_to_skip(self, prop: Property) -> str:
        """Return why the property does not apply, or ""."""
        try:
            return prop.skip(self.subject)
        except Exception as error:  # the operator raises where its attributes are read
            return f"could not be checked: {type(error).__name__}: {error}"


def _check_all(
    wanted: Sequence[Property], checker: _Checker, show: Progress
) -> Generator[tuple[Property, SearchResult]]:
    """Yield the result of each property as soon as it is known."""
    survives = False
    while wanted and wanted[0].name in _UNSAFE:
        prop, wanted = wanted[0], wanted[1:]
        show(prop.name, 0.0)
        result = checker.check(prop, wanted)
        yield prop, result
        if result.failure:
            yield from ((each, SearchResult((), skipped=f"{_UNSAFE[prop.name]}: see {prop.name}")) for each in wanted)
            return
        survives |= prop.name == _CRASHES and bool(result.tried) and not result.skipped
    reasons = {prop.name: checker.reason_to_skip(prop) for prop in wanted}
    yield from ((prop, SearchResult((), skipped=reasons[prop.name])) for prop in wanted if reasons[prop.name])
    remaining = [prop for prop in wanted if not reasons[prop.name]]
    total, done = sum(map(checker.budget.need, remaining)) or 1.0, list[Property]()

    def show_share(prop: Property) -> None:
        show(prop.name, min(sum(map(checker.budget.need, done)) / total, 1.0))

    for prop, result in _check_in_parallel(remaining, checker, survives, show_share):
        done.append(prop)
        yield prop, result


def _check_in_parallel(
    wanted: Sequence[Property], checker: _Checker, survives: bool, show: Callable[[Property], None]
) -> Generator[tuple[Property, SearchResult]]:
    """Check some properties in forked processes, if the operator is known to survive, and meanwhile the others here."""
    forked = fork_pool.forkable([prop for prop in wanted if prop.forked and survives])
    here = [prop for prop in wanted if prop not in forked]
    pool = fork_pool.ForkPool(forked, checker.check)
    for number, prop in enumerate(here):
        show(prop)
        yield prop, checker.check(prop, here[number + 1 :])
        while answer := pool.poll(0.0):
            yield answer
    while pool.left:
        show(pool.left[0])
        if answer := pool.poll():
            yield answer


@contextlib.contextmanager
def _global_state_restored() -> Generator[None]:
    """Restore torch's global state afterwards, whatever the check changes."""
    with behaviour_state.preserved(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def _report(subject: Subject, results: Mapping[Property, SearchResult], seconds: float, seed: int) -> Report:
    entries = [_entry(subject, prop, result) for prop, result in results.items()]
    examples = {text for result in results.values() for text in result.tried}
    return Report(
        subject.name,
        tuple(each for each in entries if isinstance(each, Failure)),
        tuple(each for each in entries if isinstance(each, Passed)),
        tuple(each for each in entries if isinstance(each, Skipped)),
        len(examples),
        seconds,
        seed,
    )


def _entry(subject: Subject, prop: Property, result: SearchResult) -> Failure | Passed | Skipped:
    tried, refused = len(result.tried), dict(result.refused)
    if result.failure is not None:
        case, message = result.failure
        repro = script(subject, prop, case)
        more = (prop.rule, prop.defect, tried, result.seconds, subject.name, result.cut_short)
        return Failure(prop.name, message, case, repro, *more)
    if result.skipped or (refused and len(refused) >= tried):
        example = next((" with ".join(item) for item in refused.items()), "")
        reason = result.skipped or f"the operator refused every example, such as {example}"
        return Skipped(prop.name, reason, prop.rule, prop.defect, tried, result.seconds, _reasons(refused))
    return Passed(
        prop.name,
        tried,
        prop.rule,
        result.seconds,
        len(refused),
        result.remarks,
        result.cut_short,
        prop.defect,
        result.tried[:: max(1, tried // _MAX_SHOWN)][:_MAX_SHOWN],
        _reasons(refused),
    )


def _reasons(refused: Mapping[str, str]) -> tuple[str, ...]:
    """Return the first example of each distinct exception that the operator raised."""
    first: dict[str, str] = {}
    for case, error in refused.items():
        first.setdefault(error, case)
    return tuple(f"{case}: {error}" for error, case in list(first.items())[:_MAX_SHOWN])


# ---- the time of properties ----------------------------------------------------------------------------------------------


class Budget:
    """The seconds that are left, and the expected seconds of a property's cases."""

    def __init__(self, seconds: float | None, max_examples: int) -> None:
        self._end = time.monotonic() + (float("inf") if seconds is None else seconds)
        self._max_examples = max_examples
        self._cases = 0
        self._excess = 0.0

    def left(self) -> float:
        """Return the seconds until the end."""
        return self._end - time.monotonic()

    def spent(self, prop: Property, result: SearchResult) -> None:
        """Record the time of a property's cases, to learn by how much this operator is slower than others."""
        cases = len(result.tried)
        self._cases += cases
        self._excess += cases * max(0.0, result.case_seconds - prop.cost)

    def case(self, prop: Property) -> float:
        """Return the expected seconds of one case: the property's cost, what this operator adds, and imports."""
        slow = self._excess / self._cases if self._cases else 0.0
        cold = _IMPORTING if prop.group == _COMPILES and _COMPILER not in sys.modules else 0.0
        return prop.cost + slow + cold

    def need(self, prop: Property) -> float:
        """Return the expected seconds of all cases of a property."""
        return self.case(prop) * max(prop.least, round(self._max_examples * prop.share))

    def share(self, rest: Sequence[Property]) -> float:
        """Return the seconds for the first of ``rest``: its part by need of what is left; 0 if no case would end in time."""
        left = self.left()
        possible = [prop for prop in rest if self.case(prop) <= left]
        if left == float("inf"):
            return left
        if rest[0] not in possible:
            return 0.0
        total = sum(map(self.need, possible)) or 1.0
        return left * max(self.need(rest[0]) / total, 1 / (2 * len(possible)))
