"""Results as text: the rows and the totals of the table that the command prints."""

from __future__ import annotations

from collections.abc import Sequence

from opkit.bench.results import Record, Totals, compile_seconds, not_whole, over_peer

HEADINGS = (
    "model", "backend", "result", "breaks", "fallbacks", "recompiles", "error / eager's", "cold s", "warm s",
    "inference", "training", "memory",
)  # fmt: skip


def row(record: Record) -> tuple[str, ...]:
    """Return a record's cells; "-" is what it does not have. Speeds are ratios to eager mode, and memory is that of training."""
    errors, eager = record.get("errors", {}), record.get("eager_errors", {})
    worst = max((value / max(eager[name], 1e-8) for name, value in errors.items()), default=None)
    timed = "training" in record
    compiled = timed and record["backend"] != "eager"
    memory = [record["training"].get(name) for name in ("memory", "eager_memory")] if timed else [None, None]
    return (
        record["model"],
        record["backend"],
        record["status"],
        str(len(not_whole(record))) if "breaks" in record else "-",
        str(len(record["fallbacks"])) if "fallbacks" in record else "-",
        str(record.get("recompiles", "-")),
        _number(worst),
        _number(compile_seconds(record, "cold") if compiled else None),
        _number(compile_seconds(record, "warm") if compiled else None),
        _number(record["inference"]["ratio"] if "inference" in record else None, "x"),
        _number(record["training"]["ratio"] if timed else None, "x"),
        _number(memory[0] / memory[1] if memory[0] and memory[1] else None, "x"),
    )


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def total_line(total: Totals) -> str:
    """Return the totals of a backend as a sentence."""
    skipped = f", {total.skipped} skipped" if total.skipped else ""
    speeds = [
        f"{name} {value:.2f} times as fast as eager mode"
        for name, value in (("inference", total.inference), ("training", total.training))
        if value is not None and total.backend != "eager"
    ]
    return "; ".join(
        [
            f"{total.backend}: {total.passed} of {total.passed + total.failed} pass{skipped}",
            f"{total.broken} with graph breaks, {total.with_fallbacks} with fallbacks",
            *speeds,
        ]
    )


def peer_lines(records: Sequence[Record]) -> list[str]:
    """Return how opkit compares with Inductor, if models passed with both."""
    found = over_peer(records)
    figures = [f"{name} {value:.2f}" for name, value in found.items() if name != "models" and value is not None]
    return (
        [f"opkit over Inductor, geometric means of {found['models']} models: {', '.join(figures)}"] if figures else []
    )


def failures(records: Sequence[Record]) -> list[str]:
    """Return a line for each model that failed, was wrong or was skipped, with the reason."""
    return [
        f"{each['model']}, {each['backend']}: {each['status']}: {_reason(each)}"
        for each in records
        if each["status"] != "passed"
    ]


def _reason(record: Record) -> str:
    stage = f" ({record['stage']})" if "stage" in record else ""
    return "; ".join(record.get("wrong", ())) or f"{record.get('error', '')}{stage}"
