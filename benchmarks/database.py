"""Find false alarms of opkit.check on the functions of PyTorch's own OpInfo database.

Each function is wrapped as an operator of ``torch.library``'s (``tests/contract/database.py``) and checked against itself. What
is reported is a false alarm, or a finding in ATen that is listed with its reason. A function that ends the process costs
the others nothing::

    python benchmarks/database.py [--jobs 2] [--examples 10] [--exclude compile] [NAME ...]
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contract"))

import database
import isolated
from database_names import FINDINGS

from opkit.contract.properties import PROPERTIES


def main() -> None:
    """Check them all, print what was reported, and a line of JSON."""
    options = _options()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [name for name in options.names or database.names() if name in database.infos()]
    _warm()
    started = time.monotonic()
    found = []
    for name, result, how in isolated.each(lambda name: _one(name, options), names, options.jobs, options.seconds):
        found.append(result or {"name": name, "failures": [["process", how, ""]], "skipped": []})
        _report(found[-1])
        print(f"{len(found)} of {len(names)}: {name}", end="\r", file=sys.stderr)
    _show(sorted(found, key=lambda each: names.index(each["name"])), time.monotonic() - started)


def _warm() -> None:
    """What is imported or cached at a first check is shared by all processes. Nothing here may start a thread."""
    for name in ("abs", "addmm"):
        database.report(name, max_examples=2, properties=["numbers", "layout", "fake", "schema"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="functions; all by default")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--examples", type=int, default=10)
    parser.add_argument("--exclude", nargs="*", default=[], help="properties or groups that are not checked")
    parser.add_argument(
        "--dearest", type=float, default=0.1, help="seconds a case of the most expensive property that is checked"
    )
    parser.add_argument("--properties", nargs="*", default=None, help="these alone")
    parser.add_argument("--plain", action="store_true", help="check the functions as callables, without an operator")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a function counts as hanging")
    return parser.parse_args()


def _one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    try:
        how = {"max_examples": options.examples, "exclude": options.exclude}
        how["properties"] = options.properties or [prop.name for prop in PROPERTIES if prop.cost <= options.dearest]
        report = database.report(name, plain=options.plain, **how)
    except database.UnfitError as error:
        return {"name": name, "unfit": str(error), "failures": [], "skipped": []}
    return {
        "name": name,
        "failures": [[each.property, each.message, str(each.case)] for each in report.failures],
        "passed": [[each.property, each.tried, each.refused] for each in report.passed],
        "skipped": [[each.property, each.reason] for each in report.skipped],
        "slowest": [[each.property, round(each.seconds, 2)] for each in report.passed if each.seconds > 1],
        "seconds": round(time.monotonic() - started, 2),
    }


def _report(found: dict[str, Any]) -> None:
    for property_, message, case in found["failures"]:
        if (found["name"], property_) not in FINDINGS:
            print(f"{found['name']}: {property_}: {message}\n    on {case}", flush=True)


def _show(found: Sequence[dict[str, Any]], seconds: float) -> None:
    fit = [each for each in found if "unfit" not in each and each.get("passed")]
    reports = [(each["name"], failure[0]) for each in found for failure in each["failures"]]
    alarms = [name for name, property_ in reports if (name, property_) not in FINDINGS]
    genuine = len(reports) - len(alarms)
    _table(found)
    print(f"{len(fit)} functions were checked; {genuine} findings are known, {len(alarms)} reports are not.")
    line = {"functions": len(fit), "findings": genuine, "alarms": len(alarms), "of": sorted(set(alarms))}
    print(json.dumps({**line, "seconds": round(seconds, 1)}))


def _table(found: Sequence[dict[str, Any]]) -> None:
    passed, failed, skipped = (collections.Counter[str]() for _ in range(3))
    for each in found:
        passed.update(row[0] for row in each.get("passed", ()))
        failed.update(row[0] for row in each["failures"])
        skipped.update(row[0] for row in each["skipped"])
    print(f"{'property':36} {'holds':>6} {'fails':>6} {'skipped':>8}")
    for name in dict.fromkeys([*passed, *failed, *skipped]):
        print(f"{name:36} {passed[name]:6} {failed[name]:6} {skipped[name]:8}")


if __name__ == "__main__":
    main()
