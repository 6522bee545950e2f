"""Every property of the contract, asked of one operator: in what order, for how long, and what comes of it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opkit import config
from opkit.contract import global_state
from opkit.contract import properties as table
from opkit.contract.prop import Property
from opkit.contract.report import Failure, Passed, Progress, Report, Skipped
from opkit.contract.repro import script
from opkit.contract.search import Found, search
from opkit.contract.subject import Subject, subject_of
from opkit.errors import ArgumentError

_DATABASE = "check"
_CRASHES = "memory.crash"


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
    progress: Progress | None,
) -> Report:
    """See :func:`opkit.check`."""
    chosen = _chosen(properties, exclude)
    subject = subject_of(op, args, kwargs, reference, device)
    started = time.monotonic()
    deadline = started + (float("inf") if budget is None else budget)
    folder = config.get().cache_dir / _DATABASE if database is True else database or None
    found: list[tuple[Property, Found]] = []
    with _undisturbed():
        for number, prop in enumerate(chosen):
            if progress is not None:
                progress(prop.name, number / len(chosen))
            found.append(
                (prop, _asked(prop, subject, found, max_examples, seed, _share(chosen[number:], deadline), folder))
            )
    return _report(subject, found, time.monotonic() - started, seed)


def _chosen(wanted: Iterable[str] | None, exclude: Iterable[str]) -> list[Property]:
    """The properties that were asked for, the cheap ones first."""
    names = {name for prop in table.PROPERTIES for name in (prop.name, prop.group)}
    unknown = [name for name in [*(wanted or ()), *exclude] if name not in names]
    if unknown:
        known = ", ".join(prop.name for prop in table.PROPERTIES)
        raise ArgumentError(f"opkit.check: there is no property {unknown[0]!r}. There are: {known}.")
    left_out = set(exclude)
    chosen = [p for p in table.PROPERTIES if wanted is None or {p.name, p.group} & set(wanted)]
    return sorted((p for p in chosen if not {p.name, p.group} & left_out), key=lambda p: p.cost)


def _share(rest: Sequence[Property], deadline: float) -> float:
    """Seconds for the first of ``rest``: its part, by cost, of what is left; the last takes all."""
    weights = [prop.cost * prop.share for prop in rest]
    return (deadline - time.monotonic()) * max(weights[0] / sum(weights), 1 / (2 * len(rest)))


def _asked(
    prop: Property,
    subject: Subject,
    before: list[tuple[Property, Found]],
    max_examples: int,
    seed: int,
    seconds: float,
    folder: Path | None,
) -> Found:
    if any(each.name == _CRASHES and found.failure for each, found in before):
        return Found((), skipped="a call ends the process: see memory.crash")
    if seconds <= 0:
        return Found((), skipped="out of time")
    return search(prop, subject, max_examples, seed, seconds, folder)


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """What a check changes of torch's global state is put back."""
    with global_state.preserved(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


def _report(subject: Subject, found: list[tuple[Property, Found]], seconds: float, seed: int) -> Report:
    failures, passed, skipped = [], [], []
    examples: set[str] = set()
    for prop, each in found:
        examples.update(each.tried)
        if each.skipped:
            skipped.append(Skipped(prop.name, each.skipped, prop.rule))
        elif each.failure is not None:
            case, message = each.failure
            failures.append(
                Failure(
                    prop.name,
                    message,
                    case,
                    script(subject, prop, case),
                    prop.rule,
                    prop.defect,
                    len(each.tried),
                    each.seconds,
                )
            )
        else:
            passed.append(_passed(prop, each))
    return Report(subject.name, tuple(failures), tuple(passed), tuple(skipped), len(examples), seconds, seed)


def _passed(prop: Property, found: Found) -> Passed | Skipped:
    if len(found.refused) and len(found.refused) >= len(found.tried):
        case, error = found.refused[0]
        return Skipped(prop.name, f"the operator refused every example, such as {case}: {error}", prop.rule)
    return Passed(
        prop.name, len(found.tried), prop.rule, found.seconds, len(found.refused), found.remarks, found.cut_short
    )
