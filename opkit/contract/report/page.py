"""This module writes reports as an HTML page: one file, which loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from opkit.page import document

if TYPE_CHECKING:
    from opkit.contract.report.report import Failure, Passed, Report


def page(reports: Sequence[Report], not_checked: Mapping[str, str] | None = None) -> str:
    """Return one page for several operators; ``not_checked`` gives the reasons why others were not checked."""
    title = _title(reports)
    body = [
        f"<h1>{escape(title)}</h1>",
        *_summary(reports),
        *_left_out(not_checked or {}),
        *(line for number, report in enumerate(reports) for line in _operator(number, report)),
    ]
    return document(title, body)


def _title(reports: Sequence[Report]) -> str:
    failed = sum(not report.ok for report in reports)
    if len(reports) == 1:
        return f"{reports[0].name} {reports[0].verdict()}"
    return (
        f"{failed} of {len(reports)} operators break their contract" if failed else f"{len(reports)} operators checked"
    )


# ---- the table at the top --------------------------------------------------------------------------------------------

_HEADINGS = ("operator", "", "failed", "held", "skipped", "examples", "seconds")


def _summary(reports: Sequence[Report]) -> Iterator[str]:
    yield '<div class="wide"><table>'
    headings = "".join(f'<th scope="col">{each}</th>' for each in _HEADINGS)
    yield f"<thead><tr>{headings}</tr></thead><tbody>"
    for number, report in enumerate(reports):
        counts = (len(report.failures), len(report.passed), len(report.skipped), report.examples)
        cells = "".join(f'<td class="number">{count:,}</td>' for count in counts)
        yield (
            f'<tr><th scope="row"><a href="#op-{number}">{escape(report.name)}</a></th><td>{_verdict(report)}</td>'
            f'{cells}<td class="number">{report.seconds:.1f}</td></tr>'
        )
    yield "</tbody></table></div>"


def _verdict(report: Report) -> str:
    found, _, count = report.verdict().partition(":")
    style = "bad" if report.failures else "good" if report.passed else "quiet"
    return f'<span class="{style}">{found}</span> <span class="quiet">{count.strip()}</span>'


def _left_out(not_checked: Mapping[str, str]) -> Iterator[str]:
    if not_checked:
        yield "<h2>Not checked</h2>\n<ul>"
        for name, reason in not_checked.items():
            yield f"<li><code>{escape(name)}</code>: {escape(reason)}</li>"
        yield "</ul>"


# ---- one operator ----------------------------------------------------------------------------------------------------


def _operator(number: int, report: Report) -> Iterator[str]:
    yield f'<section aria-labelledby="op-{number}">\n<h2 id="op-{number}">{escape(report.name)} {_verdict(report)}</h2>'
    yield f"<p>{report.examples:,} distinct examples in {report.seconds:.1f} s, seed {report.seed}.</p>"
    for place, failure in enumerate(report.failures):
        yield from _failure(f"op-{number}-failure-{place}", failure)
    yield from _held(report.passed)
    yield from _skipped(report)
    yield "</section>"


def _failure(anchor: str, failure: Failure) -> Iterator[str]:
    yield f'<article class="failure" aria-labelledby="{anchor}">'
    yield f'<h3 id="{anchor}"><span class="bad">fails</span> {escape(failure.property)}</h3>'
    yield f"<p>{escape(failure.rule)}</p>"
    yield f'<p class="label">The smallest example</p>\n<pre><code>{escape(failure.example)}</code></pre>'
    yield f'<p class="label">What was observed</p>\n<pre>{escape(failure.message)}</pre>'
    short = "; time ran out, so that a smaller one may fail too" if failure.cut_short else ""
    yield f'<p class="quiet">Found in {_examples(failure.tried)}, {failure.seconds:.2f} s{short}. {_defect(failure.defect)}</p>'
    yield "<details><summary>A script that shows it</summary>"
    yield f'<div class="copied"><pre tabindex="0"><code>{escape(failure.repro)}</code></pre></div></details>\n</article>'


def _held(passed: Sequence[Passed]) -> Iterator[str]:
    if passed:
        yield f"<h3>Held: {len(passed)}</h3>"
    for group, members in _grouped(passed).items():
        seconds = sum(each.seconds for each in members)
        yield f"<h4>{escape(group)} <small>{len(members)} in {seconds:.1f} s</small></h4>"
        for each in members:
            yield from _one_held(each)


def _one_held(passed: Passed) -> Iterator[str]:
    marks = [f"{passed.refused:,} refused"] if passed.refused else []
    marks += ["out of time"] if passed.cut_short else []
    marks += [f"{len(passed.remarks)} {'remark' if len(passed.remarks) == 1 else 'remarks'}"] if passed.remarks else []
    facts = ", ".join([_examples(passed.tried), *marks, f"{passed.seconds:.2f} s"])
    yield (
        f'<details class="held"><summary title="{escape(passed.rule)}"><span class="good">holds</span> '
        f'{escape(passed.property)} <span class="quiet">{escape(facts)}</span></summary>'
    )
    yield f"<p>{escape(passed.rule)} {_defect(passed.defect)}</p>"
    yield from _listed("Some of what was tried", passed.examples)
    yield from _listed("Some of what the operator refused, and why", passed.refusals)
    yield from _listed("Remarks", passed.remarks)
    yield "</details>"


def _skipped(report: Report) -> Iterator[str]:
    if not report.skipped:
        return
    yield f"<h3>Skipped: {len(report.skipped)}</h3>\n<dl>"
    for reason, members in report.skipped_by_reason().items():
        names = ", ".join(f'<span title="{escape(each.rule)}">{escape(each.property)}</span>' for each in members)
        yield f"<dt>{escape(reason)}</dt>\n<dd>{names}</dd>"
    yield "</dl>"
    yield "<details><summary>What the skipped properties are</summary>\n<dl>"
    for each in report.skipped:
        yield f"<dt>{escape(each.property)}</dt>\n<dd>{escape(each.rule)} {_defect(each.defect)}</dd>"
    yield "</dl></details>"


def _grouped(passed: Iterable[Passed]) -> dict[str, list[Passed]]:
    groups: dict[str, list[Passed]] = {}
    for each in passed:
        groups.setdefault(each.property.split(".")[0], []).append(each)
    return groups


def _listed(heading: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        items = "".join(f"<li><code>{escape(text)}</code></li>" for text in texts)
        yield f'<p class="label">{heading}</p>\n<ul>{items}</ul>'


def _examples(count: int) -> str:
    return f"{count:,} example{'' if count == 1 else 's'}"


def _defect(defect: str) -> str:
    return f'<span class="quiet">It catches: {escape(defect)}.</span>' if defect else ""
