"""The report of a check: the properties that fail, hold and were skipped, as objects, text and JSON; the progress bar."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.report.page import page
from opkit.errors import ContractError
from opkit.page import frame

Progress = Callable[[str, float], None]

FORMAT = 1
"""The version of the JSON: it is raised where a field changes its meaning or goes away; new fields may appear without."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A property that does not hold, with the smallest example that was found.

    Attributes:
        property: its dotted name.
        message: what was observed, and what was expected.
        case: the example as data.
        repro: a script that runs by itself and shows the failure.
        rule: what the property requires.
        defect: what goes wrong where it does not hold.
        tried: the number of examples that were tried until then, shrinking included.
        seconds: the time that this took.
        operator: the operator's name.
        cut_short: whether time ran out before the example was as small as it could be.
    """

    property: str
    message: str
    case: Case | None
    repro: str
    rule: str = ""
    defect: str = ""
    tried: int = 0
    seconds: float = 0.0
    operator: str = ""
    cut_short: bool = False

    @builtins.property
    def args(self) -> tuple[Any, ...]:
        """The example's positional arguments, created again."""
        return () if self.case is None else self.case.make().args

    @builtins.property
    def kwargs(self) -> dict[str, Any]:
        """The example's keyword arguments, created again."""
        return {} if self.case is None else self.case.make().kwargs

    @builtins.property
    def example(self) -> str:
        """The example as a call: ``scale(float32[1, 65], 0.5)``."""
        return "" if self.case is None else f"{_called(self.operator)}{self.case}"

    def __str__(self) -> str:
        lines = [
            f"{self.property}: {self.rule}",
            f"  {self.example}",
            *(f"  {line}" for line in self.message.splitlines()),
        ]
        lines += ["  (time ran out: smaller examples may fail too)"] if self.cut_short else []
        return "\n".join(line for line in lines if line.strip())


@dataclasses.dataclass(frozen=True)
class Passed:
    """A property that held on every example.

    Attributes:
        property: its dotted name.
        tried: the number of examples that were tried.
        rule: what the property requires.
        seconds: the time that this took.
        refused: the number of examples that the operator refused, by raising.
        remarks: differences that the contract allows.
        cut_short: whether time ran out before all examples were tried.
        defect: the defect that the property catches.
        examples: a few of the examples, as text.
        refusals: a few of the refused ones, with what the operator raised.
    """

    property: str
    tried: int
    rule: str = ""
    seconds: float = 0.0
    refused: int = 0
    remarks: tuple[str, ...] = ()
    cut_short: bool = False
    defect: str = ""
    examples: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    def __str__(self) -> str:
        refused = f", {self.refused} of them refused" if self.refused else ""
        return f"{self.property}: {self.tried} examples{refused}{', out of time' if self.cut_short else ''}"


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A property that was not checked, and why.

    Attributes:
        property: its dotted name.
        reason: why.
        rule: what the property requires.
        defect: the defect that the property catches.
        tried: the number of examples that were tried until the reason was found.
        seconds: the time that this took.
        refusals: a few of the refused examples, with what the operator raised.
    """

    property: str
    reason: str
    rule: str = ""
    defect: str = ""
    tried: int = 0
    seconds: float = 0.0
    refusals: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.property}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of :func:`opkit.check` for one operator.

    Attributes:
        name: the operator's name.
        failures: the properties that do not hold.
        passed: the properties that held on every example.
        skipped: the properties that were not checked.
        examples: the number of distinct examples over all properties.
        seconds: the duration of the check.
        seed: the seed of the search.
    """

    name: str
    failures: tuple[Failure, ...] = ()
    passed: tuple[Passed, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    examples: int = 0
    seconds: float = 0.0
    seed: int = 0

    @property
    def ok(self) -> bool:
        """Whether no property failed."""
        return not self.failures

    def raise_for_failures(self) -> None:
        """Raise unless every property held.

        Raises:
            ContractError: with the whole report.
        """
        if self.failures:
            raise ContractError(str(self))

    def skipped_by_reason(self) -> dict[str, list[Skipped]]:
        """Return the skipped properties, grouped by the reason."""
        groups: dict[str, list[Skipped]] = {}
        for each in self.skipped:
            groups.setdefault(each.reason, []).append(each)
        return groups

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the page of :meth:`to_html` in a frame."""
        return frame(as_html([self]), f"The contract of {self.name}", str(self))

    def __str__(self) -> str:
        examples = _count(self.examples, "example", "examples")
        first = f"{self.name}: {self.verdict()} ({examples}, {self.seconds:.1f} s)"
        failed = [f"FAIL {failure}" for failure in self.failures]
        skipped = [
            f"skipped: {', '.join(each.property for each in members)}: {reason}"
            for reason, members in self.skipped_by_reason().items()
        ]
        return "\n".join([first, *failed, *self._held(), *skipped])

    def verdict(self) -> str:
        """Say in one line how many properties were checked and how many of these hold.

        >>> Report("op", passed=(Passed("a.b", 1), Passed("a.c", 1)), skipped=(Skipped("a.d", "no reason"),)).verdict()
        'holds: 2 of 3 properties checked, 1 skipped'
        """
        checked, skipped = len(self.failures) + len(self.passed), len(self.skipped)
        found = "holds" if checked else "not checked"
        count = f"{checked:,} of {_count(checked + skipped, 'property', 'properties')} checked"
        if self.failures:
            found, count = (
                "fails",
                f"{len(self.failures):,} of {_count(checked, 'checked property', 'checked properties')}",
            )
        return f"{found}: {count}, {skipped:,} skipped" if skipped else f"{found}: {count}"

    def to_html(self, path: str | Path) -> None:
        """Write the report as an HTML page: for each property what was tried, what failed and how to reproduce it."""
        Path(path).write_text(as_html([self]), encoding="utf-8")

    def to_json(self, path: str | Path) -> None:
        """Write the report as JSON; docs/contract.md describes it."""
        Path(path).write_text(as_json([self]), encoding="utf-8")

    def _held(self) -> Iterator[str]:
        groups = Counter(passed.property.split(".")[0] for passed in self.passed)
        cut = sum(passed.cut_short for passed in self.passed)
        if groups:
            short = f"; {cut} of them with fewer examples, because time ran out" if cut else ""
            yield f"held: {', '.join(f'{group} ({count})' for group, count in groups.items())}{short}"
        for passed in self.passed:
            for remark in passed.remarks:
                yield f"remark: {passed.property}: {remark}"


def _called(name: str) -> str:
    """Return the name that a call is written with: ``scale`` for "demo::scale.default" and for "test.<locals>.scale"."""
    if "::" in name:
        return name.split("::")[-1].split(".")[0]
    last = name.split(".")[-1]
    return "op" if not last or "<" in last else last


def _count(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


# ---- JSON and HTML ----------------------------------------------------------------------------------------------------


def as_json(reports: Sequence[Report], not_checked: Mapping[str, str] | None = None) -> str:
    """Return one JSON document for several operators; ``not_checked`` gives the reasons why others were not checked."""
    document = {
        "format": FORMAT,
        "ok": all(report.ok for report in reports),
        "torch": str(torch.__version__),
        "operators": [_operator_as_data(report, digits=3) for report in reports],
        "not_checked": [{"name": name, "reason": reason} for name, reason in (not_checked or {}).items()],
    }
    return json.dumps(document, indent=2) + "\n"


def as_html(reports: Sequence[Report], not_checked: Mapping[str, str] | None = None) -> str:
    """Return one HTML page for several operators; ``not_checked`` gives the reasons why others were not checked."""
    return page(
        [_operator_as_data(each, digits=6) | {"verdict": each.verdict()} for each in reports], not_checked or {}
    )


def _operator_as_data(report: Report, digits: int) -> dict[str, Any]:
    return {
        "name": report.name,
        "ok": report.ok,
        "examples": report.examples,
        "seconds": round(report.seconds, digits),
        "seed": report.seed,
        "properties": [_entry_as_data(each, digits) for each in (*report.failures, *report.passed, *report.skipped)],
    }


def _entry_as_data(each: Failure | Passed | Skipped, digits: int) -> dict[str, Any]:
    common = {
        "property": each.property,
        "status": {Failure: "failed", Passed: "passed", Skipped: "skipped"}[type(each)],
        "rule": each.rule,
        "defect": each.defect,
        "tried": each.tried,
        "seconds": round(each.seconds, digits),
    }
    if isinstance(each, Failure):
        return common | {
            "message": each.message,
            "example": each.example,
            "repro": each.repro,
            "cut_short": each.cut_short,
        }
    if isinstance(each, Skipped):
        return common | {"message": each.reason, "refusals": [*each.refusals]}
    return common | {
        "cut_short": each.cut_short,
        "remarks": [*each.remarks],
        "examples": [*each.examples],
        "refused": each.refused,
        "refusals": [*each.refusals],
    }


# ---- the progress bar ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress_of(wanted: Progress | bool | None, name: str) -> Generator[Progress]:
    """Yield the function to call with a property's name and the share of the work that is done: the user's, a bar, or none."""
    if callable(wanted):
        yield wanted
    elif wanted:
        with bar() as shown:
            yield lambda prop, done: shown(f"{name} {prop}", done)
    else:
        yield lambda prop, done: None


@contextlib.contextmanager
def bar() -> Generator[Progress]:
    """Show a bar on stderr with a text and the share of the work that is done; show nothing if stderr is no terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=1.0)
        yield lambda text, done: shown.update(task, completed=done, description=escape(text))
