"""Runs of topics: the file of a run, its tables, and the differences between two runs."""

from __future__ import annotations

import dataclasses
import gc
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import opkit
from opkit import errors
from opkit.bench import timing
from opkit.bench.topics import TOPICS, Case, Setting

_FORMAT = 1
_LEAST = 0.03
"""A smaller change is not marked, however little the rounds differ: where code and tensors lie in memory changes as much."""


@dataclasses.dataclass
class Figure:
    """One case.

    Attributes:
        topic, case: their names.
        seconds: of each way, opkit's first and then what it is compared with, round by round; the ways took turns.
        error: why there are no times, or "".
    """

    topic: str
    case: str
    seconds: dict[str, list[float]]
    error: str = ""

    @property
    def base(self) -> str | None:
        """What opkit is compared with."""
        return next((way for way in self.seconds if way != "opkit"), None)

    def speed(self, way: str, base: str) -> list[float]:
        """Return how many times as fast a way is as another, round by round."""
        return [b / a for a, b in zip(self.seconds[way], self.seconds[base], strict=True)]


@dataclasses.dataclass
class Run:
    """All figures of a run, and where they were measured."""

    setup: dict[str, Any]
    figures: list[Figure]

    def write(self, path: Path) -> None:
        """Write the run as JSON."""
        figures = [dataclasses.asdict(each) for each in self.figures]
        path.write_text(json.dumps({"format": _FORMAT, "setup": self.setup, "figures": figures}, indent=1), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Run:
        """Return the run in a file.

        Raises:
            opkit.ArgumentError: the file is not one that this version wrote.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            number = found["format"]
            if number == _FORMAT:
                return cls(found["setup"], [Figure(**each) for each in found["figures"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise errors.ArgumentError(f"{path} is not a file of `opkit bench run`: {error}") from error
        raise errors.ArgumentError(f"{path}: format {number}, and this version reads {_FORMAT}. Run it again.")


def setup_of(setting: Setting) -> dict[str, Any]:
    """Return where and how is measured."""
    on_gpu = torch.device(setting.device).type == "cuda"
    return {
        "opkit": opkit.__version__, "torch": torch.__version__, "python": platform.python_version(),
        "machine": torch.cuda.get_device_name(setting.device) if on_gpu else _processor(), "device": setting.device,
        "threads": torch.get_num_threads(), "quick": setting.quick,
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def chosen(names: Sequence[str], setting: Setting, only: str) -> list[tuple[str, Case]]:
    """Return the cases of topics whose names contain a text.

    Raises:
        opkit.ArgumentError: there is no such topic or case.
    """
    for name in names:
        if name not in TOPICS:
            raise errors.ArgumentError(f"there is no topic {name!r}. There are: {', '.join(TOPICS)}.")
    found = [
        (name, case) for name in names for case in TOPICS[name].cases(setting) if only.lower() in case.name.lower()
    ]
    if not found:
        raise errors.ArgumentError(f"no case of {', '.join(names)} has {only!r} in its name.")
    return found


def measured(topic: str, case: Case, setting: Setting) -> Figure:
    """Time the ways of a case in turn. A way that fails ends the case: its error is in the figure."""
    try:
        ways = case.make()
        for call in [*ways.values()] * 2:  # what is compiled, built or cached
            call()
        times = timing.rounds([*ways.values()], setting.device)
        seconds = {way: [t / case.calls for t in each] for way, each in zip(ways, times, strict=True)}
        return Figure(topic, case.name, seconds)
    except Exception as error:
        return Figure(topic, case.name, {}, f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        gc.collect()


# ---- tables ----------------------------------------------------------------------------------------------------------


def headings(figures: Sequence[Figure]) -> tuple[str, ...]:
    """Return the columns of a topic: the times of all ways, and how opkit compares."""
    ways = list(dict.fromkeys(way for each in figures for way in each.seconds))
    return ("case", *ways, "times as fast")


def row(figure: Figure, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the cells of a figure; "-" is a way that the case does not have."""
    if figure.error:
        return (figure.case, *["-"] * (len(columns) - 2), figure.error)
    times = [_time(statistics.median(figure.seconds[way])) if way in figure.seconds else "-" for way in columns[1:-1]]
    speed = statistics.median(figure.speed("opkit", figure.base)) if figure.base else None
    return (figure.case, *times, "-" if speed is None else f"{speed:.2f} ({figure.base})")


def _time(seconds: float) -> str:
    """
    >>> _time(2.5e-6), _time(0.012), _time(3)
    ('2.5 us', '12 ms', '3 s')
    """
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds >= s), (1e-9, "ns"))
    return f"{seconds / scale:.3g} {unit}"


def total(figures: Sequence[Figure]) -> str:
    """Return how opkit compares in all cases with the peer of each, as a sentence, or ""."""
    speeds = [statistics.median(each.speed("opkit", each.base)) for each in figures if each.base]
    if len(speeds) < 2:
        return ""
    mean = statistics.geometric_mean(speeds)
    return f"{len(speeds)} cases: {mean:.2f} times as fast (geometric mean), at least {min(speeds):.2f}"


def markdown(run: Run) -> str:
    """Return the run as Markdown, a table for each topic."""
    blocks = ["# Benchmarks", setup_line(run.setup)]
    for topic, figures in by_topic(run.figures).items():
        columns = headings(figures)
        lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *(row(each, columns) for each in figures)]
        blocks += [f"## {topic}", "\n".join(f"| {' | '.join(line)} |" for line in lines), total(figures)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def setup_line(setup: dict[str, Any]) -> str:
    """Return where a run was measured, as a sentence."""
    quick = ", quick" if setup["quick"] else ""
    threads = f", threads: {setup['threads']}" if setup["device"] == "cpu" else ""
    return f"{setup['machine']}, opkit {setup['opkit']}, torch {setup['torch']}{threads}{quick}."


def by_topic(figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """Return the figures of each topic."""
    return {
        topic: [each for each in figures if each.topic == topic] for topic in dict.fromkeys(f.topic for f in figures)
    }


# ---- two runs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Change:
    """How a case differs between two runs.

    Attributes:
        topic, case: their names.
        base: what opkit is compared with in both, so that a slower machine does not count; "" if there is no peer.
        old, new: how many times as fast as it, or seconds.
        change: how many times as fast the new run is.
        noise: by which share ``change`` may differ from 1 with nothing changed.
        verdict: "slower" or "faster" if the change is greater than the noise and 3 %; "gone", "new" or "failed" if a run has no
            times; else "".
    """

    topic: str
    case: str
    base: str
    old: float | None
    new: float | None
    change: float | None
    noise: float | None
    verdict: str


def changes(old: Run, new: Run) -> list[Change]:
    """Compare the topics of the later run, case by case."""
    topics = by_topic(new.figures)
    before, after = ({(f.topic, f.case): f for f in run.figures if f.topic in topics} for run in (old, new))
    return [_change(before.get(key), after.get(key), *key) for key in {**before, **after}]


def _change(old: Figure | None, new: Figure | None, topic: str, case: str) -> Change:
    if old is None or new is None or not old.seconds or not new.seconds:
        verdict = "gone" if new is None else "failed" if new.error else "new"
        return Change(topic, case, "", None, None, None, None, verdict)
    base = next((way for way in old.seconds if way != "opkit" and way in new.seconds), None)
    pair: list[list[float]] = [f.speed("opkit", base) if base else f.seconds["opkit"] for f in (old, new)]
    before, after = (statistics.median(each) for each in pair)
    change = after / before if base else before / after
    noise = sum(_noise(each) ** 2 for each in pair) ** 0.5
    verdict = "" if abs(change - 1) <= max(noise, _LEAST) else "faster" if change > 1 else "slower"
    return Change(topic, case, base or "", before, after, change, noise, verdict)


def _noise(values: Sequence[float]) -> float:
    """Return by which share a median may be wrong: the notches of McGill, Tukey and Larsen (Variations of box plots, 1978)."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return 1.57 * (high - low) / len(values) ** 0.5 / middle
