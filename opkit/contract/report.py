"""What a check found, for people and for programs."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opkit.contract.cases import Case
from opkit.errors import ContractError

Progress = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A property that does not hold, with the smallest example that was found.

    Attributes:
        property: its dotted name.
        message: what was seen, and what was expected.
        case: the example as data.
        repro: a script that runs by itself and shows the failure.
        rule: what the property says.
        defect: what goes wrong where it does not hold.
        tried: how many examples were tried until then, shrinking included.
    """

    property: str
    message: str
    case: Case | None
    repro: str
    rule: str = ""
    defect: str = ""
    tried: int = 0
    seconds: float = 0.0

    @builtins.property
    def args(self) -> tuple[Any, ...]:
        """The example's positional arguments, made anew."""
        return () if self.case is None else self.case.make().args

    @builtins.property
    def kwargs(self) -> dict[str, Any]:
        """The example's keyword arguments, made anew."""
        return {} if self.case is None else self.case.make().kwargs

    def __str__(self) -> str:
        example = "" if self.case is None else f"\n  on {self.case}"
        return f"{self.property}: {self.message}{example}"


@dataclasses.dataclass(frozen=True)
class Passed:
    """A property that held on every example."""

    property: str
    tried: int
    rule: str = ""
    seconds: float = 0.0
    refused: int = 0
    remarks: tuple[str, ...] = ()
    cut_short: bool = False

    def __str__(self) -> str:
        short = ", out of time" if self.cut_short else ""
        return f"{self.property}: {self.tried} examples{short}"


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A property that was not asked, and why."""

    property: str
    reason: str
    rule: str = ""

    def __str__(self) -> str:
        return f"{self.property}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`opkit.check` found out about one operator."""

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

    def __str__(self) -> str:
        count = f"{len(self.passed)} properties hold, {len(self.failures)} do not, {len(self.skipped)} skipped"
        lines = [f"{self.name}: {count} ({self.examples} examples, {self.seconds:.1f} s)"]
        lines += [f"FAIL {failure}" for failure in self.failures]
        lines += [f"pass {passed}" for passed in self.passed]
        lines += [f"skip {skipped}" for skipped in self.skipped]
        return "\n".join(lines)

    def to_html(self, path: str | Path) -> None:
        """Write a page that a person reads: property by property, what was tried, what failed and how to see it."""
        from opkit.contract.page import page  # the page's text is needed here alone

        Path(path).write_text(page([self]), encoding="utf-8")

    def to_json(self, path: str | Path) -> None:
        """Write the report as JSON."""
        from opkit.contract.page import as_json

        Path(path).write_text(as_json([self]), encoding="utf-8")
