"""This module writes reports as JSON. The format is versioned, and docs/contract.md describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from opkit.contract.report.report import Failure, Passed, Report, Skipped

FORMAT = 1
"""The version: it is raised where a field changes its meaning or goes away; new fields may appear without."""


def as_json(reports: Sequence[Report], not_checked: Mapping[str, str] | None = None) -> str:
    """Return one JSON document for several operators; ``not_checked`` gives the reasons why others were not checked."""
    document = {
        "format": FORMAT,
        "ok": all(report.ok for report in reports),
        "torch": str(torch.__version__),
        "operators": [_operator(report) for report in reports],
        "not_checked": [{"name": name, "reason": reason} for name, reason in (not_checked or {}).items()],
    }
    return json.dumps(document, indent=2) + "\n"


def _operator(report: Report) -> dict[str, Any]:
    properties = [
        *map(_failed, report.failures),
        *map(_passed, report.passed),
        *map(_skipped, report.skipped),
    ]
    return {
        "name": report.name,
        "ok": report.ok,
        "examples": report.examples,
        "seconds": round(report.seconds, 3),
        "seed": report.seed,
        "properties": properties,
    }


def _common(status: str, each: Failure | Passed | Skipped) -> dict[str, Any]:
    return {
        "property": each.property,
        "status": status,
        "rule": each.rule,
        "defect": each.defect,
        "tried": each.tried,
        "seconds": round(each.seconds, 3),
    }


def _failed(failure: Failure) -> dict[str, Any]:
    return _common("failed", failure) | {
        "message": failure.message,
        "example": failure.example,
        "repro": failure.repro,
        "cut_short": failure.cut_short,
    }


def _passed(passed: Passed) -> dict[str, Any]:
    return _common("passed", passed) | {
        "cut_short": passed.cut_short,
        "remarks": list(passed.remarks),
        "examples": list(passed.examples),
        "refused": passed.refused,
        "refusals": list(passed.refusals),
    }


def _skipped(skipped: Skipped) -> dict[str, Any]:
    return _common("skipped", skipped) | {"message": skipped.reason, "refusals": list(skipped.refusals)}
