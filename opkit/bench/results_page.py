"""Results as one HTML page: totals, plots, and a table with a filter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from opkit import page
from opkit.bench.results import Record, not_whole, totals
from opkit.bench.text import HEADINGS, peer_lines, row, total_line

_COLORS = ("var(--link)", "var(--bad)", "var(--good)")
_WIDTH, _LABEL, _LINE = 920, 260, 16

_FILTER = """\
<p><label>Filter <input id="filter" type="search" placeholder="timm, opkit, failed, aten..."></label> <span id="shown"></span></p>
"""

_FILTER_SCRIPT = """\
<script>
const field = document.getElementById("filter");
const parts = [...document.querySelectorAll("[data-text]")];
field.oninput = () => {
  const words = field.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const part of parts) {
    const fits = words.every((word) => part.dataset.text.includes(word));
    part.style.display = fits ? "" : "none";
    if (part.tagName === "TR") shown += fits;
  }
  document.getElementById("shown").textContent = words.length ? `${shown} rows` : "";
};
</script>
"""


def results_page(records: Sequence[Record]) -> str:
    """Return the page."""
    title = f"{len({each['model'] for each in records})} models"
    body = [
        f"<h1>{escape(title)}</h1>",
        "<ul>",
        *(f"<li>{escape(line)}</li>" for line in [*map(total_line, totals(records)), *peer_lines(records)]),
        "</ul>",
        _FILTER,
        *(line for what in ("inference", "training") for line in _speeds(records, what)),
        *_table(records),
        _FILTER_SCRIPT,
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
    return escape(" ".join([*words, *record.get("fallbacks", {}), *not_whole(record)]).lower(), quote=True)


# ---- plots -----------------------------------------------------------------------------------------------------------


def _speeds(records: Sequence[Record], what: str) -> Iterator[str]:
    """Yield a plot with a line for each model, slowest first, and a dot for each backend, on a logarithmic axis."""
    timed = [each for each in records if each["backend"] != "eager" and "ratio" in each.get(what, {})]
    if not timed:
        return
    backends = list(dict.fromkeys(each["backend"] for each in timed))
    ratios = [max(each[what]["ratio"], 1e-3) for each in timed]
    low, high = math.log2(min(*ratios, 0.5)), math.log2(max(*ratios, 2.0))
    rows = sorted({each["model"] for each in timed}, key=lambda name: _slowest(timed, name, what))
    height = _LINE * (len(rows) + 2)

    def at(ratio: float) -> float:
        return _LABEL + (_WIDTH - _LABEL - 20) * (math.log2(max(ratio, 1e-3)) - low) / (high - low)

    yield f"<h2>{what.capitalize()}: times as fast as eager mode</h2>"
    legend = " ".join(
        f'<tspan fill="{_COLORS[number % 3]}">● {escape(name)}</tspan>' for number, name in enumerate(backends)
    )
    yield (
        f'<div class="wide"><svg role="img" aria-label="{what}: times as fast as eager mode" width="{_WIDTH}" '
        f'height="{height}" font-size="12" fill="currentColor">'
    )
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = at(2.0**power)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_LINE}" y2="{height}" stroke="var(--line)"/>'
        yield f'<text x="{x:.1f}" y="12" text-anchor="middle">{2.0**power:g}</text>'
    yield f'<text x="0" y="12">{legend}</text>'
    for number, name in enumerate(rows):
        y = _LINE * (number + 2)
        mine = [each for each in timed if each["model"] == name]
        yield f'<g data-text="{" ".join(map(_text, mine))}"><text x="0" y="{y}">{escape(name)}</text>'
        for each in mine:
            ratio, color = each[what]["ratio"], _COLORS[backends.index(each["backend"]) % 3]
            tip = f"{escape(name)}, {escape(each['backend'])}: {ratio:.2f}"
            yield f'<circle cx="{at(ratio):.1f}" cy="{y - 4}" r="4" fill="{color}"><title>{tip}</title></circle>'
        yield "</g>"
    yield "</svg></div>"


def _slowest(records: Sequence[Record], name: str, what: str) -> float:
    return min(each[what]["ratio"] for each in records if each["model"] == name)


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
