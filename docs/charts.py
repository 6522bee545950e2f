"""Charts and figures of the site, made from the files in ``benchmarks/results`` while the site is built.

A chart is a table that has a bar next to each number, so that it can be read aloud, searched, and read on a phone::

    ```{chart} compiler/models
    :table: Cold
    :columns: inductor; opkit
    ```
"""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

# What the landing page shows: a label, a run, the beginning of a table's title and of a row, the columns of opkit's figure and
# of the one that it is compared with, and how both are written.
LANDING = [
    ("a first build of a C kernel, from source to call", "native/calls", "", "a first build",
     ("opkit", "{}"), ("compared with", "{}")),
    ("compiling a training step of BERT on a CPU, cold", "compiler/models", "Cold", "bert training float32",
     ("opkit", "{} s"), ("inductor", "Inductor: {} s")),
    ("attention with a causal mask as a function, on an H200", "attention_gpu/functions_h200", "2x16x8192x128", "causal",
     ("opkit, ms", "{} ms"), ("flex, ms", "FlexAttention: {} ms")),
]  # fmt: skip


def table(run: str, title: str) -> dict[str, Any]:
    """Return the first table of a run whose title, or else first column, begins with ``title``."""
    tables = json.loads((RESULTS / f"{run}.json").read_text(encoding="utf-8"))["tables"]
    return next(each for each in tables if (each["title"] or each["columns"][0]).startswith(title))


def landing() -> str:
    """Return the figures of the landing page as a Markdown table; a figure links to its results."""
    lines = ["| | opkit | compared with |", "| --- | ---: | ---: |"]
    for label, run, title, start, *columns in LANDING:
        found = table(run, title)
        row = next(row for row in found["rows"] if row[0].startswith(start))
        cells = [text.format(row[found["columns"].index(column)]) for column, text in columns]
        cells = [re.sub(r"(\d) (m?s)\b", "\\1\u00a0\\2", cell) for cell in cells]  # a number stays with its unit
        lines.append(f"| [{label}](../benchmarks/results/{run.partition('/')[0]}.md) | **{cells[0]}** | {cells[1]} |")
    return "\n".join(lines)


class Chart(SphinxDirective):
    """``{chart} topic/run``: bars for some columns of a table; rows without a number in one of them are left out."""

    required_arguments = 1
    option_spec = {"table": directives.unchanged, "columns": directives.unchanged_required}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        found = table(self.arguments[0], self.options.get("table", ""))
        self.env.note_dependency(str(RESULTS / f"{self.arguments[0]}.json"))
        columns = [name.strip() for name in self.options["columns"].split(";")]
        places = [found["columns"].index(name) for name in columns]
        rows = [(row[0], [row[place] for place in places]) for row in found["rows"]]
        rows = [(label, cells) for label, cells in rows if all(map(_is_number, cells))]
        most = max(float(cell) for _, cells in rows for cell in cells)
        body = "".join(_row(label, columns, cells, most) for label, cells in rows)
        return [nodes.raw("", f"<table class=chart>{body}</table>", format="html")]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _row(label: str, columns: list[str], cells: list[str], most: float) -> str:
    """Return a group of rows of HTML, a row for each cell: the column's name, the number, a bar."""
    lines = [
        f"<td>{escape(name)}</td><td>{cell}</td>"
        f"<td class={'opkit' if 'opkit' in name + label else 'other'}><span style='width: {float(cell) / most:.1%}'></span></td>"
        for name, cell in zip(columns, cells, strict=True)
    ]
    head = f"<th scope=rowgroup rowspan={len(cells)}>{escape(label).replace('`', '')}</th>"
    return f"<tbody><tr>{head}{'</tr><tr>'.join(lines)}</tr></tbody>"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("chart", Chart)
    return {"parallel_read_safe": True}
