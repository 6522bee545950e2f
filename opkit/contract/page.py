"""Reports as a self-contained HTML page, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opkit.contract.report import Report


def page(reports: Sequence[Report]) -> str:
    """One page for several operators."""
    return "<pre>" + "\n\n".join(map(str, reports)) + "</pre>"


def as_json(reports: Sequence[Report]) -> str:
    """One document for several operators."""
    return json.dumps([{"name": report.name, "ok": report.ok} for report in reports], indent=2)
