"""Plots of speeds as SVG."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

_COLORS = ("var(--link)", "var(--bad)", "var(--good)", "var(--quiet)")
_WIDTH, _LABEL, _LETTER, _LINE = 920, 260, 6.5, 16


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a plot: its name, what the filter searches (escaped), and the values of each series."""

    name: str
    text: str
    values: Mapping[str, float]


def speeds(title: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a heading and a plot with a line for each row, the slowest first, and a dot for each value, on a logarithmic axis."""
    every = [max(value, 1e-3) for row in rows for value in row.values.values()]
    if not every:
        return
    series = list(dict.fromkeys(name for row in rows for name in row.values))
    low, high = math.log2(min(*every, 0.5)), math.log2(max(*every, 2.0))
    label = max(_LABEL, _LETTER * max(len(row.name) for row in rows))
    width, height = _WIDTH + label - _LABEL, _LINE * (len(rows) + 2)

    def at(value: float) -> float:
        return label + (width - label - 20) * (math.log2(max(value, 1e-3)) - low) / (high - low)

    colors = {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(series)}
    legend = " ".join(f'<tspan fill="{color}">● {escape(name)}</tspan>' for name, color in colors.items())
    yield f"<h2>{escape(title)}</h2>"
    yield (
        f'<div class="wide"><svg role="img" aria-label="{escape(title, quote=True)}" width="{width:.0f}" height="{height}" '
        'font-size="12" fill="currentColor">'
    )
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = at(2.0**power)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_LINE}" y2="{height}" stroke="var(--line)"/>'
        yield f'<text x="{x:.1f}" y="12" text-anchor="middle">{2.0**power:g}</text>'
    yield f'<text x="0" y="12">{legend}</text>'
    for number, row in enumerate(sorted(rows, key=lambda each: min(each.values.values(), default=math.inf))):
        y = _LINE * (number + 2)
        yield f'<g data-text="{row.text}"><text x="0" y="{y}">{escape(row.name)}</text>'
        for name, value in row.values.items():
            tip = f"{escape(row.name)}, {escape(name)}: {value:.2f}"
            yield f'<circle cx="{at(value):.1f}" cy="{y - 4}" r="4" fill="{colors[name]}"><title>{tip}</title></circle>'
        yield "</g>"
    yield "</svg></div>"
