"""A property is tried on many cases; the first that breaks it is made as small and as simple as it can be."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import errors as hypothesis_errors
from hypothesis import strategies
from hypothesis.database import DirectoryBasedExampleDatabase

from opkit.contract.calls.cases import Case
from opkit.contract.prop import CallRefused, NotApplicable, Property, Remark, Violation
from opkit.contract.subject import Subject


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """How the search for one property ended."""

    tried: tuple[str, ...]  # the cases, as text
    refused: tuple[tuple[str, str], ...] = ()  # the case as text, and why
    remarks: tuple[str, ...] = ()
    failure: tuple[Case, str] | None = None
    skipped: str = ""
    seconds: float = 0.0
    cut_short: bool = False
    case_seconds: float = 0.0  # what one case took


class _OutOfTime(BaseException):
    """Ends a search from within; Hypothesis passes what is no Exception through."""


class _Ended(BaseException):
    """Ends a search at once, with the reason; Hypothesis would look for a smaller example of any Exception."""


class _Hopeless(BaseException):
    """Ends a search whose every case was refused; of an operator that takes none, Hypothesis would draw many hundreds."""


_HOPELESS = 100  # refusals, where nothing was accepted


@dataclasses.dataclass
class _Log:
    tried: dict[str, None] = dataclasses.field(default_factory=dict)
    refused: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    remarks: dict[str, None] = dataclasses.field(default_factory=dict)
    failure: tuple[Case, str] | None = None
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def usual(self) -> float:
        """Seconds that a case takes; the first pays for imports and caches, and is no measure where there are others."""
        counted = self.times[1:] or self.times
        return sum(counted) / len(counted) if counted else 0.0


def search(
    prop: Property,
    subject: Subject,
    max_examples: int,
    seed: int = 0,
    seconds: float = float("inf"),
    database: Path | None = None,
    left: float = float("inf"),
) -> SearchResult:
    """Look for a case that breaks the property.

    Args:
        prop: the property.
        subject: the operator.
        max_examples: how many cases of a property whose share is 1.
        seed: of the search; equal seeds search alike.
        seconds: after which the search ends with what it has, in the middle of shrinking too.
        database: a folder where failing cases are kept, to be tried first the next time.
        left: seconds until no case may run any more: one that would not end in time is not begun.
    """
    started = time.monotonic()
    reason = prop.skip(subject)
    if reason:
        return SearchResult((), skipped=reason)
    log = _Log()
    count = max(prop.least, round(max_examples * prop.share))
    try:
        clock = _Clock(started + seconds, started + left, log)
        cut_short = _sweep(prop, subject, count, clock, log)
        if not cut_short and log.failure is None:
            cut_short = _explore(prop, subject, count, seed, clock, database, log)
    except _Ended as reason_found:
        return SearchResult(tuple(log.tried), skipped=str(reason_found), seconds=time.monotonic() - started)
    except Exception as error:  # of the property itself, or of torch where no refusal was expected
        reason = f"could not be asked: {type(error).__name__}: {error}"
        return SearchResult(tuple(log.tried), skipped=reason, seconds=time.monotonic() - started)
    spent = time.monotonic() - started
    return SearchResult(
        tuple(log.tried), tuple(log.refused), tuple(log.remarks), log.failure, "", spent, cut_short, log.usual
    )


@dataclasses.dataclass(frozen=True)
class _Clock:
    """When a search ends, and when no case may run any more."""

    deadline: float
    end: float
    log: _Log

    def ask(self, prop: Property, subject: Subject, case: Case) -> None:
        """Ask the property of the case, if there is time."""
        started = time.monotonic()
        late = started > self.deadline and self.log.times  # one case at least, as long as there is time at all
        if late or started + (self.log.usual if len(self.log.times) > 1 else 0.0) > self.end:
            raise _OutOfTime
        try:
            _ask(prop, subject, case, self.log)
        finally:
            self.log.times.append(time.monotonic() - started)


def _sweep(prop: Property, subject: Subject, count: int, clock: _Clock, log: _Log) -> bool:
    """Try the property's first cases, and make the one that fails small; whether time ran out."""
    if prop.first is None:
        return False

    def breaks(case: Case) -> bool:
        try:
            clock.ask(prop, subject, case)
        except Violation:
            return True
        except hypothesis_errors.UnsatisfiedAssumption:
            return False
        return False

    plan = prop.first(subject)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            broken = next((row for row in plan.rows(2 * count) if breaks(plan.case(row))), None)
            if broken is not None:
                plan.shrink(broken, breaks)
    except (_OutOfTime, _Hopeless) as ended:
        return isinstance(ended, _OutOfTime)
    return False


def _explore(
    prop: Property, subject: Subject, count: int, seed: int, clock: _Clock, database: Path | None, log: _Log
) -> bool:
    """Run Hypothesis; whether time ran out."""

    @hypothesis.seed(seed)
    @hypothesis.settings(**_settings(count, database))
    @hypothesis.given(prop.cases(subject))
    def attempt(case: Case) -> None:
        clock.ask(prop, subject, case)

    _key(attempt, f"{subject.name} {prop.name}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt()
    except _OutOfTime:
        return True
    except (Violation, hypothesis_errors.Flaky, hypothesis_errors.FlakyFailure):
        return False  # the smallest failing case is in the log
    except (hypothesis_errors.Unsatisfiable, _Hopeless):
        return False  # all were refused
    return False


def warm_up() -> None:
    """Draw something: at its first draw Hypothesis reads the sources of local modules, for which no property has time."""

    @hypothesis.settings(**_settings(1, None))
    @hypothesis.given(strategies.integers(0, 1))
    def nothing(drawn: int) -> None:
        pass

    nothing()


def _ask(prop: Property, subject: Subject, case: Case, log: _Log) -> None:
    if any(tensor.impossible for tensor in case.tensors()):
        hypothesis.reject()
    log.tried[str(case)] = None
    found = ""
    try:
        prop.check(subject, case)
    except CallRefused as refusal:
        log.refused.append((str(case), str(refusal)))
        if len(log.refused) >= _HOPELESS and len(log.refused) > len(log.times):
            raise _Hopeless from refusal
        hypothesis.reject()
    except Remark as remark:
        log.remarks[str(remark)] = None
    except NotApplicable as reason:
        raise _Ended(str(reason)) from reason
    except Violation as violation:
        found = str(violation)
    if found:  # raised here alone: Hypothesis takes failures of different places for different bugs
        log.failure = (case, found)
        raise Violation(found)


def _settings(count: int, database: Path | None) -> dict[str, Any]:
    return {
        "max_examples": count,
        "database": None if database is None else DirectoryBasedExampleDatabase(database),
        "deadline": None,
        "derandomize": False,
        "phases": [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],  # which traces lines
        "print_blob": False,
        "report_multiple_bugs": False,
        "suppress_health_check": list(hypothesis.HealthCheck),
        "verbosity": hypothesis.Verbosity.quiet,
    }


def _key(function: Any, name: str) -> None:
    """Failing cases of one operator and property are kept apart from others'."""
    function.hypothesis.inner_test._hypothesis_internal_add_digest = name.encode()
