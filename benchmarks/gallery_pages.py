"""Write a Markdown page for each operator of examples/gallery, and an index: for the site, which builds them anew each time.

A page has what the file's docstring says, a chart and a table of the stored timings (``results/gallery/``), the operator's
passport (its schema, its kernels, where each rule comes from), and the source. Charts are SVG files next to the pages::

    python -m benchmarks.gallery_pages FOLDER
"""

from __future__ import annotations

import argparse
import html
import inspect
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import gallery

RESULTS = Path(__file__).parent / "results" / "gallery" / "cpu.json"
Rows = list[list[str]]


def write(folder: Path, results: Path = RESULTS) -> list[Path]:
    """Write the pages into a folder, which is made if it is missing.

    Args:
        folder: where pages and charts go.
        results: the stored run of ``benchmarks/gallery.py``; without it pages have no timings.

    Returns:
        The files that were written, ``index.md`` first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = json.loads(results.read_text(encoding="utf-8")) if results.exists() else None
    written, lines = [folder / "index.md"], []
    for name in gallery.names():
        example = gallery.module(name)
        timings = [row for table in run["tables"] for row in table["rows"] if row[0] == name] if run else []
        written.append(folder / f"{name}.md")
        written[-1].write_text(page(name, example, timings, run["setup"] if run else ""), encoding="utf-8")
        if timings:
            written.append(folder / f"{name}.svg")
            written[-1].write_text(chart(timings), encoding="utf-8")
        lines.append([f"[{name}]({name}.md)", title(example), " / ".join(row[4] for row in timings if row[4])])
    heading = (
        "# Gallery of operators\n\nEach is one file to copy: a reference, kernels where they pay, and its tests.\n\n"
    )
    menu = "\n".join(["```{toctree}", ":hidden:", "", *gallery.names(), "```"])
    rows = table(("operator", "", "times as fast"), lines)
    written[0].write_text(f"{heading}{rows}\n\n{menu}\n", encoding="utf-8")
    return written


def title(example: ModuleType) -> str:
    """Return what an operator computes, from the first sentence of its file."""
    return (example.__doc__ or "").partition(": ")[0].partition(".\n")[0]


def page(name: str, example: ModuleType, timings: Rows, setup: str) -> str:
    """Return the Markdown page of an operator; arguments as of :func:`write`, and rows of the stored table."""
    documentation = inspect.getdoc(example) or ""
    blocks = [f"# {name}", documentation.rpartition("::\n\n")[0] + "."]  # without the command at the end
    if timings:
        blocks += [f"## Time\n\nCompared with: {gallery.alternative(example)}", f"![Times of {name}]({name}.svg)"]
        blocks += [table(gallery.COLUMNS[1:], [row[1:] for row in timings]), f"Measured on {setup}."]
    for operator in operators(example):
        blocks += ["## Passport of " + operator.describe().name, *passport(operator)]
    source = Path(inspect.getfile(example)).read_text(encoding="utf-8")
    blocks += [f"## Source\n\n`examples/gallery/{name}.py`", f"```{{code-block}} python\n{source}```"]
    return "\n\n".join(blocks) + "\n"


def operators(example: ModuleType) -> list[Any]:
    """Return the operators of a file for which it declares checks."""
    named = {value.describe().name: value for value in vars(example).values() if hasattr(value, "describe")}
    return [named[name] for name in example.OPKIT_CHECKS]


def passport(operator: Any) -> Iterable[str]:
    """Return the blocks that say what an operator has."""
    found = operator.describe()
    yield f"`{found.schema}`"
    kernels = [[each.name, each.device, each.condition or "every call"] for each in found.kernels]
    yield table(("kernel", "device", "takes"), [*kernels, ["reference", "any", "every other call"]])
    yield table(("rule", "origin", ""), [[each.rule, each.origin, each.detail] for each in found.rules])


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def chart(timings: Rows) -> str:
    """Return bars for the times of one operator, as SVG; the longest time of each size has the whole width."""
    width, left, line = 640, 190, 22
    parts = []
    for place, (_, size, *times, ratio) in enumerate(row for row in timings if row[4]):
        seconds = [float(each.removesuffix(" ms")) for each in times]
        for bar, (label, value, color) in enumerate(
            zip(("opkit", "alternative"), seconds, ("#0550ae", "#9aa5b1"), strict=True)
        ):
            y, length = (place * 3 + bar) * line + 8, (width - left - 150) * value / max(seconds)
            remark = f"{value:g} ms" + (f", {ratio} times as fast" if bar == 0 else "")
            parts.append(
                f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{html.escape(size) + ": "}{label}</text>'
            )
            parts.append(f'<rect x="{left}" y="{y}" width="{max(length, 1):.1f}" height="{line - 5}" fill="{color}"/>')
            parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 13}">{remark}</text>')
    height = len(parts) // 2 * line + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def main() -> None:
    """Write the pages into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(*write(options.folder), sep="\n")


if __name__ == "__main__":
    main()
