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
from hypothesis.database import DirectoryBasedExampleDatabase

from opkit.contract.cases import Case
from opkit.contract.prop import NotApplicable, Property, Refusal, Remark, Violation
from opkit.contract.subject import Subject


@dataclasses.dataclass(frozen=True)
class Found:
    """How the search for one property ended."""

    tried: tuple[str, ...]  # the cases, as text
    refused: tuple[tuple[Case, str], ...] = ()
    remarks: tuple[str, ...] = ()
    failure: tuple[Case, str] | None = None
    skipped: str = ""
    seconds: float = 0.0
    cut_short: bool = False


class _OutOfTime(BaseException):
    """Ends a search from within; Hypothesis passes what is no Exception through."""


@dataclasses.dataclass
class _Log:
    tried: dict[str, None] = dataclasses.field(default_factory=dict)
    refused: list[tuple[Case, str]] = dataclasses.field(default_factory=list)
    remarks: dict[str, None] = dataclasses.field(default_factory=dict)
    failure: tuple[Case, str] | None = None


def search(
    prop: Property,
    subject: Subject,
    max_examples: int,
    seed: int = 0,
    seconds: float = float("inf"),
    database: Path | None = None,
) -> Found:
    """Look for a case that breaks the property.

    Args:
        prop: the property.
        subject: the operator.
        max_examples: how many cases of a property whose share is 1.
        seed: of the search; equal seeds search alike.
        seconds: after which the search ends with what it has, in the middle of shrinking too.
        database: a folder where failing cases are kept, to be tried first the next time.
    """
    started = time.monotonic()
    reason = prop.skip(subject)
    if reason:
        return Found((), skipped=reason)
    log = _Log()
    count = max(prop.least, round(max_examples * prop.share))
    try:
        cut_short = _explore(prop, subject, count, seed, started + seconds, database, log)
    except NotApplicable as reason_found:
        return Found(tuple(log.tried), skipped=str(reason_found), seconds=time.monotonic() - started)
    except Exception as error:  # of the property itself, or of torch where no refusal was expected
        reason = f"could not be asked: {type(error).__name__}: {error}"
        return Found(tuple(log.tried), skipped=reason, seconds=time.monotonic() - started)
    return Found(
        tuple(log.tried), tuple(log.refused), tuple(log.remarks), log.failure, "", time.monotonic() - started, cut_short
    )


def _explore(
    prop: Property, subject: Subject, count: int, seed: int, deadline: float, database: Path | None, log: _Log
) -> bool:
    """Run Hypothesis; whether time ran out."""

    @hypothesis.seed(seed)
    @hypothesis.settings(**_settings(count, database))
    @hypothesis.given(prop.cases(subject))
    def attempt(case: Case) -> None:
        if time.monotonic() > deadline:
            raise _OutOfTime
        _ask(prop, subject, case, log)

    _key(attempt, f"{subject.name} {prop.name}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt()
    except _OutOfTime:
        return True
    except (Violation, hypothesis_errors.Flaky, hypothesis_errors.FlakyFailure):
        return False  # the smallest failing case is in the log
    except hypothesis_errors.Unsatisfiable:
        return False  # all were refused
    return False


def _ask(prop: Property, subject: Subject, case: Case, log: _Log) -> None:
    log.tried[str(case)] = None
    try:
        prop.check(subject, case)
    except Refusal as refusal:
        log.refused.append((case, str(refusal)))
        hypothesis.reject()
    except Remark as remark:
        log.remarks[str(remark)] = None
    except Violation as violation:
        log.failure = (case, str(violation))
        raise


def _settings(count: int, database: Path | None) -> dict[str, Any]:
    return {
        "max_examples": count,
        "database": None if database is None else DirectoryBasedExampleDatabase(database),
        "deadline": None,
        "derandomize": False,
        "print_blob": False,
        "report_multiple_bugs": False,
        "suppress_health_check": list(hypothesis.HealthCheck),
        "verbosity": hypothesis.Verbosity.quiet,
    }


def _key(function: Any, name: str) -> None:
    """Failing cases of one operator and property are kept apart from others'."""
    function.hypothesis.inner_test._hypothesis_internal_add_digest = name.encode()
