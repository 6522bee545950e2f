"""The plots of benchmarks/compile.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

Row = dict[str, Any]
_COLOURS = {"eager": "tab:gray", "dynamo": "lightgray", "aot": "silver", "copy": "black", "inductor": "tab:blue"}
_OURS = "tab:red"


def _bars(values: dict[str, dict[str, float]], title: str, unit: str) -> Figure:
    """A group of horizontal bars for each case, a bar for each backend."""
    names = list(dict.fromkeys(name for by in values.values() for name in by))
    figure = Figure(figsize=(8, 1.2 + 0.22 * len(values) * len(names)), layout="constrained", dpi=120)
    axes = figure.subplots()
    for number, name in enumerate(names):
        at = [case + (number + 0.5) / len(names) * 0.8 for case in range(len(values))]
        lengths = [by.get(name, 0.0) for by in values.values()]
        axes.barh(at, lengths, height=0.8 / len(names), label=name, color=_COLOURS.get(name, _OURS))
    axes.set(yticks=[case + 0.4 for case in range(len(values))], yticklabels=[*values], xlabel=unit, title=title)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, axis="x")
    axes.legend()
    return figure


def _medians(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    lists: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        lists.setdefault(_case(row), {}).setdefault(row["backend"], []).append(row["seconds"])
    return {case: {name: statistics.median(of) for name, of in each.items()} for case, each in lists.items()}


def _case(row: Row) -> str:
    return " ".join(str(row[key]) for key in ("model", "kernel", "mode", "dtype") if key in row)


def _compile(title: str) -> Callable[[Sequence[Row]], Figure]:
    return lambda rows: _bars(_medians(rows), title, "seconds")


def _run(rows: Sequence[Row]) -> Figure:
    values = {}
    for row in rows:
        times = {name: statistics.median(each) for name, each in row["seconds"].items()}
        values[_case(row)] = {name: each / times["eager"] for name, each in times.items()}
    return _bars(values, "A call", "of eager's time")


def _kernels(rows: Sequence[Row]) -> Figure:
    values = {
        _case(row): {name: row["bytes"] / statistics.median(each) / 1e9 for name, each in row["seconds"].items()}
        for row in rows
    }
    return _bars(values, "Kernels alone", "GB/s")


def _depth(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=120)
    axes = figure.subplots()
    for key in dict.fromkeys((_case(row), row["backend"]) for row in rows):
        points = sorted((row["layers"], row["seconds"]) for row in rows if (_case(row), row["backend"]) == key)
        style = "--" if "inference" in key[0] else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", color=_COLOURS.get(key[1], _OURS), label=" ".join(key))
    axes.set(xlabel="layers", ylabel="seconds", title="Cold compile", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    return figure


PLOTS: dict[str, Callable[[Sequence[Row]], Figure]] = {
    "cold": _compile("Cold compile: empty caches"),
    "warm": _compile("Warm compile: filled caches, a new process"),
    "run": _run,
    "kernels": _kernels,
    "depth": _depth,
}
