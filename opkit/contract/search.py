"""This module searches for a case that breaks one property, and shrinks the first one to the smallest and simplest."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path

import hypothesis
from hypothesis import errors as hypothesis_errors
from hypothesis import strategies
from hypothesis.database import DirectoryBasedExampleDatabase

from opkit.contract.calls.cases import Case
from opkit.contract.calls.sweep import quiet_settings
from opkit.contract.prop import NotApplicable, Property, Remark, Violation
from opkit.contract.subject import CallRefused, Subject


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of the search for one property."""

    tried: tuple[str, ...]  # the cases, as text
    refused: tuple[tuple[str, str], ...] = ()  # the case as text, and why
    remarks: tuple[str, ...] = ()
    failure: tuple[Case, str] | None = None
    skipped: str = ""
    seconds: float = 0.0
    cut_short: bool = False
    case_seconds: float = 0.0  # the usual seconds of one case


class _OutOfTime(BaseException):
    """Ends a search from within; Hypothesis does not catch a BaseException."""


class _Ended(BaseException):
    """Ends a search at once, with the reason; Hypothesis would search for a smaller example of any Exception."""


class _AllRefused(BaseException):
    """Ends a search in which the operator refused every case; Hypothesis would draw many hundreds more."""


_MAX_REFUSED = 100  # refusals, where nothing was accepted


@dataclasses.dataclass
class _Log:
    tried: dict[str, None] = dataclasses.field(default_factory=dict)
    refused: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    remarks: dict[str, None] = dataclasses.field(default_factory=dict)
    failure: tuple[Case, str] | None = None
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def usual(self) -> float:
        """The mean seconds of a case, without the first if there are others: it pays for imports and caches."""
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
    """Search for a case that breaks the property.

    Args:
        prop: the property.
        subject: the operator.
        max_examples: the number of cases of a property whose share is 1.
        seed: the seed of the search; equal seeds search alike.
        seconds: the time after which the search ends with what it has, in the middle of shrinking too.
        database: a folder that stores failing cases, which are tried first the next time.
        left: seconds until no case may run any more: one that would not end in time is not started.
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
    except Exception as error:  # raised by the property itself, or by torch where no refusal was expected
        reason = f"could not be checked: {type(error).__name__}: {error}"
        return SearchResult(tuple(log.tried), skipped=reason, seconds=time.monotonic() - started)
    spent = time.monotonic() - started
    return SearchResult(
        tuple(log.tried), tuple(log.refused), tuple(log.remarks), log.failure, "", spent, cut_short, log.usual
    )


@dataclasses.dataclass(frozen=True)
class _Clock:
    """Runs cases until a search's deadline; after ``end`` no case may run any more."""

    deadline: float
    end: float
    log: _Log

    def check(self, prop: Property, subject: Subject, case: Case) -> None:
        """Check the property on the case, if there is time."""
        started = time.monotonic()
        late = started > self.deadline and self.log.times  # one case at least, as long as there is time at all
        if late or started + (self.log.usual if len(self.log.times) > 1 else 0.0) > self.end:
            raise _OutOfTime
        try:
            _check(prop, subject, case, self.log)
        finally:
            self.log.times.append(time.monotonic() - started)


def _sweep(prop: Property, subject: Subject, count: int, clock: _Clock, log: _Log) -> bool:
    """Try the property's fixed list of cases, and shrink the one that fails. Return whether time ran out."""
    if prop.first is None:
        return False

    def breaks(case: Case) -> bool:
        try:
            clock.check(prop, subject, case)
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
    except (_OutOfTime, _AllRefused) as ended:
        return isinstance(ended, _OutOfTime)
    return False


def _explore(
    prop: Property, subject: Subject, count: int, seed: int, clock: _Clock, database: Path | None, log: _Log
) -> bool:
    """Run Hypothesis. Return whether time ran out."""

    @hypothesis.seed(seed)
    @_settings(count, database)
    @hypothesis.given(prop.cases(subject))
    def attempt(case: Case) -> None:
        clock.check(prop, subject, case)

    # Hypothesis's database stores the failing cases of each operator and property under their own key.
    attempt.hypothesis.inner_test._hypothesis_internal_add_digest = f"{subject.name} {prop.name}".encode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt()
    except _OutOfTime:
        return True
    except (Violation, hypothesis_errors.Flaky, hypothesis_errors.FlakyFailure):
        return False  # the smallest failing case is in the log
    except (hypothesis_errors.Unsatisfiable, _AllRefused):
        return False  # all were refused
    return False


def warm_up() -> None:
    """Draw once: at its first draw Hypothesis reads the sources of local modules, for which no property has time."""

    @_settings(1, None)
    @hypothesis.given(strategies.integers(0, 1))
    def nothing(drawn: int) -> None:
        pass

    nothing()


def _check(prop: Property, subject: Subject, case: Case, log: _Log) -> None:
    if any(tensor.impossible for tensor in case.tensors()):
        hypothesis.reject()
    log.tried[str(case)] = None
    found = ""
    try:
        prop.check(subject, case)
    except CallRefused as refusal:
        log.refused.append((str(case), str(refusal)))
        if len(log.refused) >= _MAX_REFUSED and len(log.refused) > len(log.times):
            raise _AllRefused from refusal
        hypothesis.reject()
    except Remark as remark:
        log.remarks[str(remark)] = None
    except NotApplicable as reason:
        raise _Ended(str(reason)) from reason
    except Violation as violation:
        found = str(violation)
    if found:  # raised at one place: Hypothesis treats failures at different lines as different bugs
        log.failure = (case, found)
        raise Violation(found)


def _settings(count: int, database: Path | None) -> hypothesis.settings:
    return quiet_settings(
        count,
        database=None if database is None else DirectoryBasedExampleDatabase(database),
        derandomize=False,
        phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],  # which traces lines
        report_multiple_bugs=False,
    )
