"""``opkit check`` checks every operator of a module or a package against its whole contract."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from opkit import errors, terminal
from opkit.kernels.cc.progress import printable

if TYPE_CHECKING:
    from opkit.contract.packages import CheckTarget, Listing
    from opkit.contract.report.report import Failure, Report

_HEADINGS = ("operator", "", "failed", "held", "skipped", "examples", "seconds")
_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
_INTERRUPTED = 130
_STYLES = {"holds": "green", "not checked": "yellow", "fails": "bold red"}


def check(
    target: Annotated[
        str, typer.Argument(help="A module or package, as in my_ops; or one of its operators, as in my_ops:scale.")
    ],
    op: Annotated[list[str] | None, typer.Option(help="Only this operator; repeatable.")] = None,
    properties: Annotated[
        str, typer.Option(help="Only these properties or groups, as in numbers,fake.meta; by default all.")
    ] = "",
    exclude: Annotated[str, typer.Option(help="None of these properties or groups.")] = "",
    max_examples: Annotated[
        int | None, typer.Option(min=1, help="How many examples a cheap property is tried on.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the search; equal seeds search alike.")] = None,
    budget: Annotated[
        str, typer.Option(help="Time for everything, as in 60s, 5m or 1h; by default what it takes.")
    ] = "",
    device: Annotated[str | None, typer.Option(help="Where tensors are, as in cpu or cuda.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the reports to this file as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the reports to this file as a page for a browser.")] = None,
    repro: Annotated[
        Path | None, typer.Option(help="Write a script for each failure into this folder; each runs by itself.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print whole reports, and the scripts.")] = False,
) -> None:
    """Search for arguments on which operators break their contract; the status is 1 where one does."""
    flags = {"max_examples": max_examples, "seed": seed, "device": device}
    options = {name: value for name, value in flags.items() if value is not None}
    options |= {"properties": terminal.split_at_commas(properties)} if properties else {}
    options |= {"exclude": terminal.split_at_commas(exclude)} if exclude else {}
    seconds = _seconds(budget)
    with terminal.bad_input(errors.ArgumentError):
        listing = _find_operators(target, op or [], options)
        results = _check_all(listing, options, seconds, named=bool(op or ":" in target))
    scripts = _write_files(results, repro, json, html)
    for part in _output(results, verbose, scripts):
        terminal.console().print(part, soft_wrap=isinstance(part, str), markup=not isinstance(part, _Verbatim))
    raise typer.Exit(_status(results))


class _Verbatim(str):
    """Text that is printed without markup."""


@dataclasses.dataclass
class _Results:
    """The results of the operators, in order."""

    reports: list[Report] = dataclasses.field(default_factory=list)
    not_checked: dict[str, str] = dataclasses.field(default_factory=dict)
    interrupted: bool = False
    broken: bool = False


# ---- options and operators -------------------------------------------------------------------------------------------


def _seconds(text: str) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if not text:
        return None
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        terminal.refuse(f"--budget {text}: write a time such as 60s, 5m or 1h.")
    return float(match[1]) * _UNITS[match[2]]


def _find_operators(target: str, names: Sequence[str], options: dict[str, Any]) -> Listing:
    from opkit.contract import packages, run

    run.chosen(
        options.get("properties"), options.get("exclude", ())
    )  # reports unknown names before anything is imported
    module, _, name = target.partition(":")
    before = packages.registered()
    terminal.import_modules([module])
    failed = packages.import_submodules(module)
    listing = packages.listing(module, before)
    wanted = [name, *names] if name else names
    if wanted:
        return listing.named(module, wanted)
    if not listing.targets and not failed:
        terminal.refuse(
            f"{module} defines no operator. Name the module that does, or a function in it, as in {module}:function."
        )
    return dataclasses.replace(listing, left_out={**listing.left_out, **failed})


# ---- checking --------------------------------------------------------------------------------------------------------


def _check_all(listing: Listing, options: dict[str, Any], budget: float | None, named: bool) -> _Results:
    """Check one operator after another; each has an equal part of the time that is left.

    Raises:
        ArgumentError: an operator that the user named cannot be checked.
    """
    from opkit.contract.report.report import bar

    results = _Results(not_checked=dict(listing.left_out))
    end = None if budget is None else time.monotonic() + budget
    with bar() as shown:
        for number, target in enumerate(listing.targets):
            left = len(listing.targets) - number
            part = {} if end is None else {"budget": max(0.0, (end - time.monotonic()) / left)}
            progress = _progress_of_part(shown, target.name, number, len(listing.targets))
            _check_one(target, {**target.options, **options, **part, "progress": progress}, named, results)
            if results.interrupted:
                break
    return results


def _progress_of_part(
    shown: Callable[[str, float], None], name: str, number: int, count: int
) -> Callable[[str, float], None]:
    return lambda prop, done: shown(f"{printable(name)} {prop}", (number + done) / count)


def _check_one(target: CheckTarget, options: dict[str, Any], named: bool, results: _Results) -> None:
    from opkit.contract import check, packages
    from opkit.contract.run import Interrupted

    try:
        results.reports.append(dataclasses.replace(check(target.op, **options), name=target.name))
    except errors.ArgumentError as error:
        if named:
            raise
        hint = f" Declare these in {packages.DECLARATION} of its module for opkit check."
        results.not_checked[target.name] = str(error).removeprefix(f"{target.name}: ") + hint
    except Interrupted as interrupt:
        results.interrupted = True
        results.reports.append(dataclasses.replace(interrupt.report, name=target.name))
    except KeyboardInterrupt:
        results.interrupted = True
    except Exception as error:  # a mistake in the check or in a spec; the other operators are checked all the same
        results.broken = True
        results.not_checked[target.name] = f"the check itself ended with {type(error).__name__}: {error}"


def _status(results: _Results) -> int:
    if results.interrupted:
        return _INTERRUPTED
    if not results.reports and not results.broken:
        return 2
    return 1 if results.broken or not all(report.ok for report in results.reports) else 0


# ---- output ----------------------------------------------------------------------------------------------------------


def _write_files(
    results: _Results, repro: Path | None, json: Path | None, html: Path | None
) -> dict[tuple[str, str], Path]:
    """Write the requested files. Return where the script of each operator's failed property is."""
    from opkit.contract.report.report import as_html, as_json

    with terminal.bad_input(OSError):
        for path, render in ((json, as_json), (html, as_html)):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(render(results.reports, results.not_checked), encoding="utf-8")
        return {} if repro is None else _scripts(results, repro)


def _scripts(results: _Results, folder: Path) -> dict[tuple[str, str], Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for report in results.reports:
        for failure in report.failures:
            name = re.sub(r"\W+", "_", f"{report.name}_{failure.property}").strip("_")
            written[report.name, failure.property] = folder / f"{name}.py"
            written[report.name, failure.property].write_text(failure.repro, encoding="utf-8")
    return written


def _output(results: _Results, verbose: bool, scripts: dict[tuple[str, str], Path]) -> Iterator[Any]:
    if results.reports:
        yield terminal.table(_HEADINGS, [_row(report) for report in results.reports])
    for report in results.reports:
        if verbose:
            yield _Verbatim(f"\n{_lines(str(report))}")
        for failure in report.failures:
            yield _Verbatim("\n" + _failure(report, failure, scripts.get((report.name, failure.property)), verbose))
    for name, reason in results.not_checked.items():
        yield _Verbatim(f"\nnot checked: {printable(name)}: {printable(reason)}")
    if results.interrupted:
        yield _Verbatim("\nInterrupted: this is what was found until then.")


def _row(report: Report) -> tuple[str, ...]:
    word = report.verdict().partition(":")[0]
    checked, skipped = len(report.failures) + len(report.passed), len(report.skipped)
    verdict = f"[{_STYLES[word]}]{word}[/{_STYLES[word]}]"
    if report.ok and checked and skipped:
        verdict += f": {checked} of {checked + skipped} checked"
    counts = (len(report.failures), len(report.passed), len(report.skipped), report.examples)
    return escape(printable(report.name)), verdict, *(f"{count:,}" for count in counts), f"{report.seconds:.1f}"


def _failure(report: Report, failure: Failure, script: Path | None, verbose: bool) -> str:
    lines = (
        [f"A script that shows {failure.property}:", failure.repro] if verbose else [f"{report.name} breaks {failure}"]
    )
    lines += [f"  This script shows it: {script}"] if script is not None else []
    return _lines("\n".join(lines))


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.splitlines()))
