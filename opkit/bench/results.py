"""The file of results: a JSON line for each architecture and backend; totals, and differences between two files."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Key = tuple[str, ...]

FASTER = 1.15
"""Ratios of run times that differ by less are no difference: the machine may have been busy."""

SLOWER_COMPILE = 1.5


def key_of(record: Record) -> Key:
    """Return what a record is of: it replaces earlier ones of the same key."""
    return tuple(str(record[name]) for name in ("model", "backend", "size", "device", "dtype"))


def read(path: Path) -> list[Record]:
    """Return the latest record of each key, in the file's order; lines that are not complete are left out.

    A run that was interrupted may leave such a line.
    """
    found: dict[Key, Record] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            found[key_of(record)] = record
        except (ValueError, KeyError, TypeError):
            continue
    return list(found.values())


def append(path: Path, record: Record) -> None:
    """Add a record in one write; a line that an interrupted run left open is closed first."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        begin = "\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else ""
        os.write(descriptor, f"{begin}{json.dumps(record)}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def not_whole(record: Record) -> list[str]:
    """Return why a model was not captured as one graph: its graph breaks, or that Dynamo captured nothing."""
    if record.get("graphs") == 0 and record["backend"] != "eager":
        return ["no graph was captured: Dynamo runs the model in eager mode", *record["breaks"]]
    return list(record.get("breaks", ()))


# ---- totals ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Totals:
    """What a backend did with all models; means are geometric, over the models that passed, and None without any.

    Attributes:
        passed, failed, skipped: numbers of models; those with wrong results have failed.
        broken, with_fallbacks: the numbers of models with graph breaks and with fallbacks.
        inference, training: how many times as fast as eager mode.
    """

    backend: str
    passed: int
    failed: int
    skipped: int
    broken: int
    with_fallbacks: int
    inference: float | None
    training: float | None


def totals(records: Sequence[Record]) -> list[Totals]:
    """Return the totals of each backend."""
    return [
        _totals(name, [each for each in records if each["backend"] == name])
        for name in dict.fromkeys(each["backend"] for each in records)
    ]


def _totals(backend: str, records: Sequence[Record]) -> Totals:
    passed = [each for each in records if each["status"] == "passed"]
    skipped = sum(each["status"] == "skipped" for each in records)
    return Totals(
        backend,
        len(passed),
        len(records) - len(passed) - skipped,
        skipped,
        sum(bool(not_whole(each)) for each in records),
        sum(bool(each.get("fallbacks")) for each in records),
        mean(each["inference"]["ratio"] for each in passed),
        mean(each["training"]["ratio"] for each in passed),
    )


def mean(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean, or None of nothing."""
    known = [each for each in ratios if each > 0 and math.isfinite(each)]
    return statistics.geometric_mean(known) if known else None


def over_peer(records: Sequence[Record], ours: str = "opkit", peer: str = "inductor") -> dict[str, float | None]:
    """Return geometric means over the models that passed with both backends: of run times, and of compile times.

    Both were timed in turn with eager mode, each in its own process: the ratios to it are compared.
    """
    by = {name: _passed(records, name) for name in (ours, peer)}
    pairs = [(by[ours][key], by[peer][key]) for key in by[ours].keys() & by[peer].keys()]
    figures: dict[str, Callable[[Record, Record], float]] = {
        "inference": lambda a, b: a["inference"]["ratio"] / b["inference"]["ratio"],
        "training": lambda a, b: a["training"]["ratio"] / b["training"]["ratio"],
        "cold compile": lambda a, b: compile_seconds(b, "cold") / compile_seconds(a, "cold"),
        "warm compile": lambda a, b: compile_seconds(b, "warm") / compile_seconds(a, "warm"),
    }
    return {"models": len(pairs), **{name: mean(figure(*each) for each in pairs) for name, figure in figures.items()}}


def _passed(records: Sequence[Record], backend: str) -> dict[Key, Record]:
    found = [each for each in records if each["backend"] == backend and each["status"] == "passed"]
    return {(each["model"], *key_of(each)[2:]): each for each in found}


def compile_seconds(record: Record, kind: str) -> float:
    """Return the seconds to compile for inference and for training, with the first call."""
    return record["inference"][kind] + record["training"][kind]


# ---- differences -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Difference:
    """What changed for a model and a backend."""

    model: str
    backend: str
    what: str
    old: str
    new: str


def differences(old: Sequence[Record], new: Sequence[Record]) -> list[Difference]:
    """Return what changed from one run to another, of the models that are in both or in one of them."""
    before, after = ({key_of(each): each for each in records} for records in (old, new))
    found: list[Difference] = []
    for key in dict.fromkeys([*before, *after]):
        a, b = before.get(key), after.get(key)
        found += [Difference(key[0], key[1], *each) for each in _changes(a, b)]
    return found


def _changes(old: Record | None, new: Record | None) -> Iterable[tuple[str, str, str]]:
    statuses = ["not run" if each is None else str(each["status"]) for each in (old, new)]
    if statuses[0] != statuses[1]:
        yield "result", statuses[0], statuses[1]
    if old is None or new is None:
        return
    for what, make in {
        "graph breaks": not_whole,
        "fallbacks": lambda record: sorted(record.get("fallbacks", {})),
        "recompiles": lambda record: [str(record["recompiles"])] if "recompiles" in record else [],
    }.items():
        texts = ["; ".join(make(each)) or "none" for each in (old, new)]
        if texts[0] != texts[1]:
            yield what, texts[0], texts[1]
    if statuses == ["passed", "passed"]:
        for what in ("inference", "training"):
            ratios = [each[what]["ratio"] for each in (old, new)]
            if max(ratios) > FASTER * min(ratios):
                yield f"{what}, times as fast as eager", f"{ratios[0]:.2f}", f"{ratios[1]:.2f}"
        if new["backend"] != "eager":
            seconds = [compile_seconds(each, "cold") for each in (old, new)]
            if max(seconds) > SLOWER_COMPILE * min(seconds):
                yield "cold compile, seconds", f"{seconds[0]:.1f}", f"{seconds[1]:.1f}"
