"""Results as one HTML page: totals, plots, and a table with a filter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from opkit import page
from opkit.bench import plots
from opkit.bench.results import Record, not_whole, totals
from opkit.bench.text import HEADINGS, peer_lines, row, total_line


def results_page(records: Sequence[Record]) -> str:
    """Return the page."""
    title = f"{len({each['model'] for each in records})} models"
    body = [
        f"<h1>{escape(title)}</h1>",
        "<ul>",
        *(f"<li>{escape(line)}</li>" for line in [*map(total_line, totals(records)), *peer_lines(records)]),
        "</ul>",
        page.filter_form("timm, opkit, failed, aten..."),
        *(line for what in ("inference", "training") for line in _speeds(records, what)),
        *_table(records),
    ]
    return page.document(title, body)


def _text(record: Record) -> str:
    """Return what the filter searches."""
    words = (
        record["model"],
        record["backend"],
        record.get("family", ""),
        record["status"],
        record["dtype"],
        record["size"],
    )
    return escape(" ".join([*words, *record.get("fallbacks", {}), *not_whole(record)]))


def _speeds(records: Sequence[Record], what: str) -> Iterator[str]:
    """Yield a plot with a line for each model, slowest first, and a dot for each backend."""
    timed = [each for each in records if each["backend"] != "eager" and "ratio" in each.get(what, {})]
    by_model: dict[str, list[Record]] = {}
    for each in timed:
        by_model.setdefault(each["model"], []).append(each)
    rows = [
        plots.Row(name, " ".join(map(_text, mine)), {each["backend"]: each[what]["ratio"] for each in mine})
        for name, mine in by_model.items()
    ]
    yield from plots.speeds(f"{what.capitalize()}: times as fast as eager mode", rows)


# ---- the table -------------------------------------------------------------------------------------------------------


def _table(records: Sequence[Record]) -> Iterator[str]:
    yield "<h2>Models</h2>"
    headings = "".join(f'<th scope="col">{escape(each)}</th>' for each in (*HEADINGS, "details"))
    yield f'<div class="wide"><table><thead><tr>{headings}</tr></thead><tbody>'
    for record in records:
        name, *cells = map(escape, row(record))
        style = {"passed": "good", "skipped": "quiet"}.get(record["status"], "bad")
        cells[1] = f'<span class="{style}">{cells[1]}</span>'
        texts = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        yield f'<tr data-text="{_text(record)}"><th scope="row">{name}</th>{texts}<td>{_details(record)}</td></tr>'
    yield "</tbody></table></div>"


def _details(record: Record) -> str:
    parts = [
        *([f"error: {record['error']}"] if "error" in record else []),
        *record.get("wrong", ()),
        *(f"graph break: {each}" for each in not_whole(record)),
        *(f"fallback: {each} ({count} times)" for each, count in record.get("fallbacks", {}).items()),
        *([record["reference"]] if record.get("reference", "float64") != "float64" else []),
    ]
    items = "".join(f"<li>{escape(each)}</li>" for each in parts)
    return f"<details><summary>{len(parts)}</summary><ul>{items}</ul></details>" if parts else ""
