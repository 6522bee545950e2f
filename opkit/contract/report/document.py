"""``python -m opkit.contract.report.document docs/contract.md`` writes the tables of properties into the documentation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from opkit.contract import properties as table
from opkit.contract.prop import Property

_BEGIN = "<!-- properties: written by python -m opkit.contract.report.document docs/contract.md -->"
_END = "<!-- end of properties -->"
_MARKED = re.compile(rf"{re.escape(_BEGIN)}\n.*?{re.escape(_END)}", re.DOTALL)


def tables() -> str:
    """Return a heading and a table for each group, in Markdown."""
    groups: dict[str, list[Property]] = {}
    for prop in table.PROPERTIES:
        groups.setdefault(prop.group, []).append(prop)
    return "\n".join(line for group, members in groups.items() for line in _group(group, members))


def written(text: str) -> str:
    """Return the document with the current tables between its marks.

    Raises:
        ValueError: the document has no marks.
    """
    if not _MARKED.search(text):
        raise ValueError(f"the document has no place for the tables: {_BEGIN} and {_END}")
    return _MARKED.sub(lambda _: f"{_BEGIN}\n{tables()}\n{_END}", text)


def _group(group: str, members: list[Property]) -> Iterator[str]:
    yield f"\n### {group}\n"
    yield "| property | rule | defects that it finds |\n| --- | --- | --- |"
    for prop in members:
        yield f"| `{prop.name}` | {_cell(prop.rule)} | {_cell(prop.defect)} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(written(document.read_text(encoding="utf-8")), encoding="utf-8")
