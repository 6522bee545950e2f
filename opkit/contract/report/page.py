"""This module writes reports as an HTML page: one file, which loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from opkit.page import document

Data = Mapping[str, Any]
_HEADINGS = ("operator", "", "failed", "held", "skipped", "examples", "seconds")


def page(operators: Sequence[Data], not_checked: Mapping[str, str]) -> str:
    """Return one page.

    Args:
        operators: each as in the JSON of ``report``, with its ``verdict``.
        not_checked: the operators that were not checked, and the reasons.
    """
    failed = sum(not each["ok"] for each in operators)
    title = (
        f"{failed} of {len(operators)} operators break their contract"
        if failed
        else f"{len(operators)} operators checked"
    )
    if len(operators) == 1:
        title = f"{operators[0]['name']} {operators[0]['verdict']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        *_summary(operators),
        *_not_checked(not_checked),
        *(line for number, each in enumerate(operators) for line in _operator(number, each)),
    ]
    return document(title, body)


# ---- the table at the top --------------------------------------------------------------------------------------------


def _summary(operators: Sequence[Data]) -> Iterator[str]:
    yield '<div class="wide"><table>'
    headings = "".join(f'<th scope="col">{each}</th>' for each in _HEADINGS)
    yield f"<thead><tr>{headings}</tr></thead><tbody>"
    for number, each in enumerate(operators):
        counts = (*(len(_of_status(each, status)) for status in ("failed", "passed", "skipped")), each["examples"])
        cells = "".join(f'<td class="number">{count:,}</td>' for count in counts)
        yield (
            f'<tr><th scope="row"><a href="#op-{number}">{escape(each["name"])}</a></th><td>{_verdict(each)}</td>'
            f'{cells}<td class="number">{each["seconds"]:.1f}</td></tr>'
        )
    yield "</tbody></table></div>"


def _of_status(operator: Data, status: str) -> list[Data]:
    return [each for each in operator["properties"] if each["status"] == status]


def _verdict(operator: Data) -> str:
    found, _, count = operator["verdict"].partition(":")
    style = "bad" if _of_status(operator, "failed") else "good" if _of_status(operator, "passed") else "quiet"
    return f'<span class="{style}">{found}</span> <span class="quiet">{count.strip()}</span>'


def _not_checked(reasons: Mapping[str, str]) -> Iterator[str]:
    if reasons:
        yield "<h2>Not checked</h2>\n<ul>"
        for name, reason in reasons.items():
            yield f"<li><code>{escape(name)}</code>: {escape(reason)}</li>"
        yield "</ul>"


# ---- one operator ----------------------------------------------------------------------------------------------------


def _operator(number: int, operator: Data) -> Iterator[str]:
    anchor = f"op-{number}"
    yield f'<section aria-labelledby="{anchor}">\n<h2 id="{anchor}">{escape(operator["name"])} {_verdict(operator)}</h2>'
    seconds = f"{operator['seconds']:.1f}"
    yield f"<p>{operator['examples']:,} distinct examples in {seconds} s, seed {operator['seed']}.</p>"
    for place, failure in enumerate(_of_status(operator, "failed")):
        yield from _failure(f"{anchor}-failure-{place}", failure)
    yield from _held(_of_status(operator, "passed"))
    yield from _skipped(_of_status(operator, "skipped"))
    yield "</section>"


def _failure(anchor: str, failure: Data) -> Iterator[str]:
    yield f'<article class="failure" aria-labelledby="{anchor}">'
    yield f'<h3 id="{anchor}"><span class="bad">fails</span> {escape(failure["property"])}</h3>'
    yield f"<p>{escape(failure['rule'])}</p>"
    yield f'<p class="label">The smallest example</p>\n<pre><code>{escape(failure["example"])}</code></pre>'
    yield f'<p class="label">What was observed</p>\n<pre>{escape(failure["message"])}</pre>'
    short = "; time ran out, so that a smaller one may fail too" if failure["cut_short"] else ""
    found = f"Found in {_examples(failure['tried'])}, {failure['seconds']:.2f} s{short}."
    yield f'<p class="quiet">{found} {_defect(failure)}</p>'
    yield "<details><summary>A script that shows it</summary>"
    yield f'<div class="copied"><pre tabindex="0"><code>{escape(failure["repro"])}</code></pre></div></details>\n</article>'


def _held(passed: Sequence[Data]) -> Iterator[str]:
    if passed:
        yield f"<h3>Held: {len(passed)}</h3>"
    for group, members in _grouped(passed, lambda each: each["property"].split(".")[0]).items():
        seconds = sum(each["seconds"] for each in members)
        yield f"<h4>{escape(group)} <small>{len(members)} in {seconds:.1f} s</small></h4>"
        for each in members:
            yield from _one_held(each)


def _one_held(passed: Data) -> Iterator[str]:
    remarks = len(passed["remarks"])
    marks = [f"{passed['refused']:,} refused"] if passed["refused"] else []
    marks += ["out of time"] if passed["cut_short"] else []
    marks += [f"{remarks} {'remark' if remarks == 1 else 'remarks'}"] if remarks else []
    facts = ", ".join([_examples(passed["tried"]), *marks, f"{passed['seconds']:.2f} s"])
    yield (
        f'<details class="held"><summary title="{escape(passed["rule"])}"><span class="good">holds</span> '
        f'{escape(passed["property"])} <span class="quiet">{escape(facts)}</span></summary>'
    )
    yield f"<p>{escape(passed['rule'])} {_defect(passed)}</p>"
    yield from _listed("Some of what was tried", passed["examples"])
    yield from _listed("Some of what the operator refused, and why", passed["refusals"])
    yield from _listed("Remarks", passed["remarks"])
    yield "</details>"


def _skipped(skipped: Sequence[Data]) -> Iterator[str]:
    if not skipped:
        return
    yield f"<h3>Skipped: {len(skipped)}</h3>\n<dl>"
    for reason, members in _grouped(skipped, lambda each: each["message"]).items():
        names = ", ".join(f'<span title="{escape(each["rule"])}">{escape(each["property"])}</span>' for each in members)
        yield f"<dt>{escape(reason)}</dt>\n<dd>{names}</dd>"
    yield "</dl>"
    yield "<details><summary>What the skipped properties are</summary>\n<dl>"
    for each in skipped:
        yield f"<dt>{escape(each['property'])}</dt>\n<dd>{escape(each['rule'])} {_defect(each)}</dd>"
    yield "</dl></details>"


def _grouped(entries: Sequence[Data], key: Callable[[Data], str]) -> dict[str, list[Data]]:
    groups: dict[str, list[Data]] = {}
    for each in entries:
        groups.setdefault(key(each), []).append(each)
    return groups


def _listed(heading: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        items = "".join(f"<li><code>{escape(text)}</code></li>" for text in texts)
        yield f'<p class="label">{heading}</p>\n<ul>{items}</ul>'


def _examples(count: int) -> str:
    return f"{count:,} example{'' if count == 1 else 's'}"


def _defect(entry: Data) -> str:
    return f'<span class="quiet">It catches: {escape(entry["defect"])}.</span>' if entry["defect"] else ""
