"""Render the measurements of benchmarks/compile.py as tables, in text and in Markdown, each with its goals."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from compile_backends import DYNAMO, EAGER, FLOOR

Row = dict[str, Any]

GOALS: dict[str, float] = {
    "cold above floor / peer": 1 / 12, "warm / peer": 1.0, "warm less Dynamo (s)": 1.0, "run / peer, geometric mean": 0.95,
    "run / peer, worst": 1.05, "run / eager, worst": 1.0, "peak of training / peer, worst": 1.0, "seconds of 48 layers / 12": 4.0,
    "peer / kernel, worst": 1.0, "bandwidth / copy, worst": 0.85, "recompiles, most": 3,
}  # fmt: skip
"""The most that each figure may be; for the bandwidth, the least."""

_AT_LEAST = {"bandwidth / copy, worst", "peer / kernel, worst"}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, and the figures drawn from it that have goals."""

    name: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    summary: dict[str, float]
    failed: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The goals, met or short, and what failed."""
        goals = [_goal(name, figure) for name, figure in self.summary.items()]
        return goals + [f"failed: {each}" for each in self.failed]


def _goal(name: str, figure: float) -> str:
    goal = GOALS[name]
    met = figure >= goal if name in _AT_LEAST else figure <= goal
    return f"{name}: {figure:.3f} (goal {goal:.3f}){'' if met else '  short'}"


def figures(rows: Sequence[Row], ours: str, peer: str) -> list[Table]:
    """A table for each thing that was measured."""
    found = []
    for what, make in _TABLES.items():
        mine = [row for row in rows if row["what"] == what]
        if mine:
            good = [row for row in mine if "error" not in row or isinstance(row["error"], float)]
            failed = tuple(f"{_case(row)} {row.get('backend', '')}: {row['error']}" for row in mine if row not in good)
            found.append(dataclasses.replace(make(what, good, ours, peer), failed=failed))
    return found


def _case(row: Row) -> str:
    return " ".join(str(row[key]) for key in ("model", "kernel", "mode", "dtype") if key in row)


def _by_case(rows: Iterable[Row], value: Callable[[Row], float]) -> dict[str, dict[str, float]]:
    """For each case and backend, the median of a value over the rows."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        values.setdefault(_case(row), {}).setdefault(row["backend"], []).append(value(row))
    return {case: {name: statistics.median(of) for name, of in each.items()} for case, each in values.items()}


def _of(row: dict[str, float], name: str) -> float:
    return row.get(name, float("nan"))


def _text(value: float, digits: int = 2) -> str:
    return "-" if value != value else f"{value:.{digits}f}"


def _worst(name: str, values: Iterable[float]) -> dict[str, float]:
    """The figure of a goal over all cases: the one that is furthest from it; nothing where there is no case."""
    known = [value for value in values if value == value]
    return {name: (min if name in _AT_LEAST else max)(known)} if known else {}


def _compile(what: str, rows: Sequence[Row], ours: str, peer: str) -> Table:
    found = _by_case(rows, lambda row: row["seconds"])
    lines, above, whole, over = [], [], [], []
    for case, by in found.items():
        mine, other, floor, dynamo = (_of(by, name) for name in (ours, peer, FLOOR, DYNAMO))
        above.append((mine - floor) / (other - floor))
        whole.append(mine / other)
        over.append(mine - dynamo)
        texts = map(_text, (dynamo, floor, other, mine, whole[-1], above[-1]))
        lines.append((case, *texts))
    head = (f"{what} compile, seconds", "Dynamo", "AOTAutograd", peer, ours, "ratio", "above the floor")
    if what == "cold":
        return Table(what, head, lines, _worst("cold above floor / peer", above))
    return Table(what, head, lines, _worst("warm / peer", whole) | _worst("warm less Dynamo (s)", over))


def _run(what: str, rows: Sequence[Row], ours: str, peer: str) -> Table:
    lines, ratios, eager = [], [], []
    for row in rows:
        times = row["seconds"]
        ratios.append(_ratio(times, ours, peer))
        eager.append(_ratio(times, ours, EAGER))
        medians = (
            statistics.median(times[name]) * 1e3 if name in times else float("nan") for name in (EAGER, peer, ours)
        )
        texts = (*(_text(each, 1) for each in medians), _text(ratios[-1], 3), _text(eager[-1], 3))
        lines.append((_case(row), *texts, _text(_ratio(times, peer, EAGER), 3)))
    head = ("run time, ms", EAGER, peer, ours, f"{ours} / {peer}", f"{ours} / eager", f"{peer} / eager")
    known = [ratio for ratio in ratios if ratio == ratio]
    mean = {"run / peer, geometric mean": statistics.geometric_mean(known)} if known else {}
    return Table(what, head, lines, mean | _worst("run / peer, worst", ratios) | _worst("run / eager, worst", eager))


def _ratio(times: dict[str, list[float]], name: str, other: str) -> float:
    """The median of the rounds' own ratios."""
    if name not in times or other not in times:
        return float("nan")
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def _memory(what: str, rows: Sequence[Row], ours: str, peer: str) -> Table:
    peak, tensors = (_by_case(rows, lambda row, key=key: row[key]) for key in ("peak", "tensors"))
    lines, training = [], []
    for case, by in peak.items():
        ratio = _of(by, ours) / _of(by, peer)
        training += [ratio] if " training " in case else []
        lines.append((case, *(_text(_of(by, name), 1) for name in (EAGER, peer, ours)), _text(ratio, 3),
                      *(_text(_of(tensors[case], name), 1) for name in (EAGER, peer, ours))))  # fmt: skip
    names = tuple(f"{name}, tensors" for name in (EAGER, peer, ours))
    head = ("peak of a step, MiB", EAGER, peer, ours, f"{ours} / {peer}", *names)
    return Table(what, head, lines, _worst("peak of training / peer, worst", training))


def _numbers(what: str, rows: Sequence[Row], ours: str, peer: str) -> Table:
    loss, grads = (_by_case(rows, lambda row, key=key: row[key]) for key in ("loss", "gradients"))
    lines = [
        (case, *(f"{_of(of[case], name):.1e}" for of in (loss, grads) for name in (EAGER, peer, ours))) for case in loss
    ]
    names = tuple(f"{kind}, {name}" for kind in ("loss", "gradients") for name in (EAGER, peer, ours))
    return Table(what, ("error compared with float64", *names), lines, {})


def _depth(what: str, rows: Sequence[Row], ours: str, peer: str) -> Table:
    layers = sorted({row["layers"] for row in rows})
    found = {
        depth: _by_case([row for row in rows if row["layers"] == depth], lambda row: row["seconds"]) for depth in layers
    }
    lines, growth = [], []
    for case in found[layers[0]]:
        for name in (DYNAMO, FLOOR, peer, ours):
            seconds = [_of(found[depth].get(case, {}), name) for depth in layers]
            growth += [seconds[-1] / seconds[0]] if name == ours else []
            lines.append((case, name, *map(_text, seconds), _text(seconds[-1] / seconds[0])))
    head = ("cold compile, seconds", "", *(f"{depth} layers" for depth in layers), f"{layers[-1]} / {layers[0]}")
    return Table(what, head, lines, _worst("seconds of 48 layers / 12", growth))


def _kernels(what: str, rows: Sequence[Row], ours: str, peer: str) -> Table:
    lines, speed, bandwidth = [], [], []
    for row in rows:
        times = row["seconds"]
        rates = [
            row["bytes"] / statistics.median(times[n]) / 1e9 if n in times else float("nan")
            for n in ("copy", EAGER, peer, ours)
        ]
        speed.append(_ratio(times, peer, ours))
        bandwidth.append(_ratio(times, "copy", ours))
        share = (_text(100 * _ratio(times, "copy", name), 0) for name in (peer, ours))
        lines.append((_case(row), *(_text(rate, 1) for rate in rates), *share, _text(speed[-1], 2)))
    head = (
        "kernel alone, GB/s",
        "copy",
        EAGER,
        peer,
        ours,
        f"{peer}, % of copy",
        f"{ours}, % of copy",
        f"speed / {peer}",
    )
    return Table(
        what, head, lines, _worst("peer / kernel, worst", speed) | _worst("bandwidth / copy, worst", bandwidth)
    )


def _shapes(what: str, rows: Sequence[Row], ours: str, peer: str) -> Table:
    lines = [
        (
            _case(row),
            row["backend"],
            str(row["graphs"]),
            str(row["recompiles"]),
            _text(row["seconds"], 1),
            f"{row['error']:.1e}",
        )
        for row in rows
    ]
    head = ("20 sizes", "", "graphs", "recompiles", "seconds beyond eager", "error compared with eager")
    return Table(
        what, head, lines, _worst("recompiles, most", [row["recompiles"] for row in rows if row["backend"] == ours])
    )


_TABLES: dict[str, Callable[[str, Sequence[Row], str, str], Table]] = {
    "cold": _compile, "warm": _compile, "run": _run, "memory": _memory, "numbers": _numbers, "depth": _depth,
    "kernels": _kernels, "shapes": _shapes,
}  # fmt: skip


def show(tables: Sequence[Table]) -> None:
    """Print the tables as text."""
    for table in tables:
        widths = [max(len(row[at]) for row in (table.head, *table.rows)) for at in range(len(table.head))]
        for row in (table.head, *table.rows):
            cells = [
                cell.ljust(width) if not at else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells))
        print("\n".join(["", *table.lines(), ""]))


def markdown(tables: Sequence[Table], machine: dict[str, Any]) -> str:
    """The tables as markdown, below what they were measured on."""
    blocks = [
        "# What torch.compile with opkit's backend costs and gives",
        f"By `benchmarks/compile.py`, which says what each table is; {machine['cpu']}, {machine['threads']} threads, torch "
        f"{machine['torch']}. The floor is Dynamo and AOTAutograd with Inductor's decompositions; opkit's own asks AOTAutograd "
        "for none, and so can be below it. Ratios of run times are medians of the rounds' own.",
    ]
    for table in tables:
        rule = ("---", *(["---:"] * (len(table.head) - 1)))
        blocks.append("\n".join(f"| {' | '.join(row)} |" for row in (table.head, rule, *table.rows)))
        blocks += ["\n".join(f"- {line}" for line in table.lines())] if table.lines() else []
    return "\n\n".join(blocks) + "\n"
