"""This module writes reports as an HTML page: one file, which loads nothing, with a filter of properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from opkit.page import code, document, filter_form

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
        filter_form("numbers, strides...", ("fails", "holds", "skipped")) if operators else "",
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
            f'<tr><th scope="row"><a href="#op-{number}">{escape(each["name"])}</a></th><td>{_outcome(each)}</td>'
            f'{cells}<td class="number">{each["seconds"]:.1f}</td></tr>'
        )
    yield "</tbody></table></div>"


def _of_status(operator: Data, status: str) -> list[Data]:
    return [each for each in operator["properties"] if each["status"] == status]


def _verdict(operator: Data) -> str:
    count = operator["verdict"].partition(":")[2].strip()
    return f'{_outcome(operator)} <span class="quiet">{count}</span>'


def _outcome(operator: Data) -> str:
    style = "bad" if _of_status(operator, "failed") else "good" if _of_status(operator, "passed") else "quiet"
    return f'<span class="{style}">{operator["verdict"].partition(":")[0]}</span>'


def _not_checked(reasons: Mapping[str, str]) -> Iterator[str]:
    if reasons:
        yield "<h2>Not checked</h2>\n<ul>"
        for name, reason in reasons.items():
            yield f"<li><code>{escape(name)}</code>: {escape(reason)}</li>"
        yield "</ul>"


# ---- one operator ----------------------------------------------------------------------------------------------------


def _operator(number: int, operator: Data) -> Iterator[str]:
    anchor = f"op-{number}"
    yield f'<section aria-labelledby="{anchor}" data-group>'
    yield f'<h2 id="{anchor}">{escape(operator["name"])} {_verdict(operator)}</h2>'
    seconds = f"{operator['seconds']:.1f}"
    yield f"<p>{operator['examples']:,} distinct examples in {seconds} s, seed {operator['seed']}.</p>"
    for place, failure in enumerate(_of_status(operator, "failed")):
        yield from _failure(f"{anchor}-failure-{place}", failure)
    for heading, status, key in (
        ("Held", "passed", lambda each: each["property"].split(".")[0]),
        ("Skipped", "skipped", lambda each: each["message"]),
    ):
        yield from _groups(heading, _grouped(_of_status(operator, status), key))
    yield "</section>"


def _failure(anchor: str, failure: Data) -> Iterator[str]:
    yield f'<article class="failure" aria-labelledby="{anchor}" {_searched(failure, "fails")}>'
    yield f'<h3 id="{anchor}"><span class="bad">fails</span> {escape(failure["property"])}</h3>'
    yield f"<p>{escape(failure['rule'])}</p>"
    yield f'<p class="label">The smallest example</p>\n<pre><code>{escape(failure["example"])}</code></pre>'
    yield f'<p class="label">What was observed</p>\n<pre>{escape(failure["message"])}</pre>'
    short = "; time ran out, so that a smaller one may fail too" if failure["cut_short"] else ""
    found = f"Found in {_examples(failure['tried'])}, {failure['seconds']:.2f} s{short}."
    yield f'<p class="quiet">{found} {_defect(failure)}</p>'
    yield "<details><summary>A script that shows it</summary>"
    yield f"{code(failure['repro'])}</details>\n</article>"


def _groups(heading: str, groups: Mapping[str, Sequence[Data]]) -> Iterator[str]:
    if groups:
        yield f"<div data-group><h3>{heading}: {sum(map(len, groups.values()))}</h3>"
        for group, members in groups.items():
            seconds = sum(each["seconds"] for each in members)
            yield f"<div data-group><h4>{escape(group)} <small>{len(members)} in {seconds:.1f} s</small></h4>"
            for each in members:
                yield from _property(each)
            yield "</div>"
        yield "</div>"


def _property(entry: Data) -> Iterator[str]:
    """Yield a property that held or was skipped: a line, which unfolds what is known of it."""
    style, status, marks = (
        ("quiet", "skipped", []) if entry["status"] == "skipped" else ("good", "holds", _marks(entry))
    )
    facts = ", ".join([_examples(entry["tried"]), *marks, f"{entry['seconds']:.2f} s"])
    yield (
        f'<details class="held" {_searched(entry, status)}><summary title="{escape(entry["rule"])}"><span class="{style}">'
        f'{status}</span> {escape(entry["property"])} <span class="quiet">{escape(facts)}</span></summary>'
    )
    yield f"<p>{escape(entry['rule'])} {_defect(entry)}</p>"
    yield from _listed("Some of what was tried", entry.get("examples", ()))
    yield from _listed("Some of what the operator refused, and why", entry["refusals"])
    yield from _listed("Remarks", entry.get("remarks", ()))
    yield "</details>"


def _marks(passed: Data) -> list[str]:
    remarks = len(passed["remarks"])
    marks = [f"{passed['refused']:,} refused"] if passed["refused"] else []
    marks += ["out of time"] if passed["cut_short"] else []
    return marks + ([f"{remarks} {'remark' if remarks == 1 else 'remarks'}"] if remarks else [])


def _searched(entry: Data, status: str) -> str:
    """Return the attributes that the filter reads."""
    words = " ".join([entry["property"], entry["rule"], entry.get("message", ""), status])
    return f'data-text="{escape(words)}" data-status="{status}"'


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
