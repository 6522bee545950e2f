"""A run of topics as one HTML page: plots, and tables with a filter."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from html import escape

from opkit import page
from opkit.bench import figures, plots
from opkit.bench.figures import Figure, Run


def run_page(run: Run) -> str:
    """Return the page."""
    body = [
        "<h1>Benchmarks</h1>",
        f"<p>{escape(figures.setup_line(run.setup))}</p>",
        page.filter_form("attention, custom_op, failed..."),
    ]
    for topic, mine in figures.by_topic(run.figures).items():
        rows = [plots.Row(each.case, _text(each), _speeds(each)) for each in mine if each.base]
        body += [*plots.speeds(f"{topic}: times as fast as what opkit is compared with", rows)]
        body += [f"<p>{escape(figures.total(mine))}</p>", *_table(mine)]
    return page.document("Benchmarks", body)


def _speeds(figure: Figure) -> dict[str, float]:
    """Return how fast opkit and further ways are, relative to what opkit is compared with."""
    base = figure.base
    return {way: statistics.median(figure.speed(way, base)) for way in figure.seconds if base and way != base}


def _text(figure: Figure) -> str:
    """Return what the filter searches."""
    return escape(" ".join([figure.topic, figure.case, *figure.seconds, "failed" if figure.error else ""]))


def _table(mine: Sequence[Figure]) -> Iterator[str]:
    columns = figures.headings(mine)
    headings = "".join(f'<th scope="col">{escape(each)}</th>' for each in columns)
    yield f'<div class="wide"><table><thead><tr>{headings}</tr></thead><tbody>'
    for each in mine:
        name, *cells = map(escape, figures.row(each, columns))
        texts = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        yield f'<tr data-text="{_text(each)}"><th scope="row">{name}</th>{texts}</tr>'
    yield "</tbody></table></div>"
