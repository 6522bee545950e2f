"""Measure how long ``opkit.check`` takes, how many examples it tries, and whether it respects its budget.

Two elementwise operators, ``torch.library.custom_op``'s and opkit's, at default settings without and with the Inductor property;
then the same with budgets. Each check is a new process with nothing in its caches. Run it with ``python benchmarks/check.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor

import opkit
from opkit.testing import tensor

INDUCTOR = "compile.inductor"
THREADS = 2
SECONDS = {"without Inductor": 10.0, "with Inductor": 30.0}
EXAMPLES = 200
BUDGETS = (5.0, 10.0, 20.0)
WITHIN = 0.10


def reference(x: Tensor, y: Tensor) -> Tensor:
    """What both operators compute."""
    return torch.nn.functional.silu(x) * y


def operator(kind: str) -> Any:
    """One of the two operators."""
    if kind == "opkit":
        return opkit.custom_op("bench_check::gate", reference, mutates_args=())
    made = torch.library.custom_op("bench_check::gate", reference, mutates_args=())
    made.register_fake(lambda x, y: torch.empty_like(x))
    made.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return made


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    gate = torch.sigmoid(x)
    return grad * y * gate * (1 + x * (1 - gate)), grad * torch.nn.functional.silu(x)


def measure(kind: str, inductor: bool, budget: float | None) -> dict[str, Any]:
    """One check in this process."""
    from opkit.contract import properties

    torch.set_num_threads(THREADS)
    there = any(prop.name == INDUCTOR for prop in properties.PROPERTIES)
    spec = tensor("*batch n", (torch.float32, torch.float64, torch.bfloat16, torch.float16))
    start = time.perf_counter()
    report = opkit.check(
        operator(kind),
        args=(spec, spec),
        reference=reference,
        budget=budget,
        exclude=[INDUCTOR] if there and not inductor else [],
        database=False,
    )
    return {
        "operator": kind,
        "what": "with Inductor" if inductor else "without Inductor",
        "budget": budget,
        "seconds": round(time.perf_counter() - start, 2),
        "examples": report.examples,
        "failed": [failure.property for failure in report.failures],
        "held": len(report.passed),
        "skipped": len(report.skipped),
        "slowest": sorted(((round(p.seconds, 2), p.property) for p in report.passed), reverse=True)[:5],
    }


def in_new_process(kind: str, inductor: bool, budget: float | None) -> dict[str, Any]:
    """The same in a process of its own, whose caches are empty."""
    command = [sys.executable, __file__, "--one", json.dumps([kind, inductor, budget])]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OPKIT_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def met(row: dict[str, Any]) -> bool:
    """Whether a check stayed within its figure, and failed nothing: both operators are right."""
    most = SECONDS[row["what"]] if row["budget"] is None else row["budget"] * (1 + WITHIN)
    enough = row["budget"] is not None or row["examples"] >= EXAMPLES
    return row["seconds"] <= most and enough and not row["failed"]


def main() -> None:
    """Print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    one = parser.parse_args().one
    if one is not None:
        print(json.dumps(measure(*json.loads(one))))
        return
    plan = [(kind, inductor, None) for kind in ("custom_op", "opkit") for inductor in (False, True)]
    rows = [in_new_process(*each) for each in [*plan, *(("custom_op", True, budget) for budget in BUDGETS)]]
    print(f"{'operator':10} {'':17} {'budget':>7} {'seconds':>8} {'examples':>9} {'held':>5} {'skipped':>8}")
    for row in rows:
        budget = "-" if row["budget"] is None else f"{row['budget']:.0f} s"
        short = "" if met(row) else "  short"
        print(f"{row['operator']:10} {row['what']:17} {budget:>7} {row['seconds']:8.2f} {row['examples']:9} "
              f"{row['held']:5} {row['skipped']:8}{short} {' '.join(row['failed'])}")  # fmt: skip
    print(json.dumps({"rows": rows, "goals": {"seconds": SECONDS, "examples": EXAMPLES, "budget_within": WITHIN}}))


if __name__ == "__main__":
    main()
