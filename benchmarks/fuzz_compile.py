"""Compare a backend with eager on random programs, and print mismatches, shrunk, as scripts.

Hypothesis draws them (``tests/compiler/random_lines.py``), half with gradients. Run it with::

    python benchmarks/fuzz_compile.py [--graphs 2000] [--seed 0] [--backend opkit] [--device cuda] [--jobs 14] [--seconds 100]
        [--no-shrink] [--dynamic] [--keep DIR]

The programs are drawn in lots, each by a process of :mod:`workers`, and a lot that finds a mismatch ends; so one bug does not
hide others. With ``--no-shrink`` a lot goes on instead: mismatches are printed as drawn, and each kind of error or refusal
once. What is wrong with the backend "aot_eager" as well, which only runs the captured graph, is counted and passed over. It
exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workers
from compile_backends import strict
from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "compiler"))

from database_compiled import failure
from random_compare import EagerError, mismatch
from random_graphs import Program
from random_lines import programs

_LOT, _LOT_WITHOUT_SHRINKING = 50, 20  # programs
_KINDS = ("pass", "wrong", "error", "fallback", "time", "died", "refused by eager", "wrong without a backend")
_FAILURES = ("wrong", "error", "fallback", "time", "died")
_WRONG_OF_A_LOT = 2  # printed: programs of a lot are alike


class MismatchError(Exception):
    """A program on which compiled and eager are apart."""

    def __init__(self, program: Program, kind: str, wrong: str) -> None:
        super().__init__(wrong)
        self.program, self.kind, self.wrong = program, kind, wrong


def lot(number: int, report: workers.Report, *, options: argparse.Namespace) -> None:
    """Try the programs of a lot, and report a row for each: its kind, what is wrong, and the program."""
    grad = _has_gradients(number, options)
    phases = [Phase.generate, Phase.shrink] if options.shrink else [Phase.generate]
    chosen = strict(options.backend)

    def compile_(function: Callable[..., Any], backend: Any = chosen) -> Callable[..., Any]:
        return torch.compile(function, backend=backend, dynamic=options.dynamic or None)

    @seed(options.seed * 1_000_000 + number)
    @settings(max_examples=_size(options), database=None, deadline=None, phases=phases, report_multiple_bugs=False,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(programs(gradients=grad))
    def tried(program: Program) -> None:
        report({"kind": "started", "program": program})
        kind, wrong = outcome(program, compile_, grad, options.device)
        lost = workers.is_lost(options.device)
        if kind in ("wrong", "error") and options.shrink and not lost:
            report({"kind": "shrinking", "shrunk": kind, "wrong": wrong, "program": program})
            raise MismatchError(program, kind, wrong)
        report({"kind": kind, "wrong": wrong, "program": program})
        if lost:
            raise workers.LostDeviceError

    try:
        tried()
    except MismatchError as found:
        report({"kind": found.kind, "wrong": found.wrong, "program": found.program})


def outcome(program: Program, compile_: Callable[..., Any], grad: bool, device: str) -> tuple[str, str]:
    """The kind of what comes of a program, and what is wrong; its graph may be wrong before a backend sees it."""
    kind, wrong = compared(program, compile_, grad, device)
    if kind in ("wrong", "error") and not workers.is_lost(device):
        without = compared(program, functools.partial(compile_, backend="aot_eager"), grad, device)[0]
        if without != "pass":
            return "wrong without a backend", wrong
    return kind, wrong


def compared(program: Program, compile_: Callable[..., Any], grad: bool, device: str) -> tuple[str, str]:
    """The kind of what comes of a compiled program, and what is wrong, errors of the compiler included."""
    try:
        wrong = mismatch(program, compile_, grad, device)
    except EagerError:
        return "refused by eager", ""
    except Exception as error:  # whatever a compiler dies of is what is looked for
        return failure(error)
    return ("wrong", wrong) if wrong else ("pass", "")


def _has_gradients(number: int, options: argparse.Namespace) -> bool:
    return {"both": bool(number % 2), "results": False, "gradients": True}[options.what]


def _size(options: argparse.Namespace) -> int:
    return min(options.graphs, _LOT if options.shrink else _LOT_WITHOUT_SHRINKING)


def main() -> None:
    """Print each mismatch as it is found, and one JSON line."""
    options = _options()
    tally, started = dict.fromkeys(_KINDS, 0), time.monotonic()
    repeated = collections.Counter[tuple[str, str]]()
    last, shrinking = dict[int, Program](), dict[int, dict[str, Any]]()
    lots = range(-(-options.graphs // _size(options)))
    call = functools.partial(lot, options=options)
    for number, row, how in workers.run(
        call, lots, options.device, options.jobs, options.seconds, options.case_seconds
    ):
        row = row or {"kind": "time" if how == "time" else "died", "wrong": how, "program": last.get(number)}
        last[number] = row["program"]
        if row["kind"] == "shrinking":
            shrinking[number] = {**row, "kind": row["shrunk"]}
        elif row["kind"] != "started":
            tally[row["kind"]] += 1
            if row["kind"] in ("wrong", "error"):
                shrinking.pop(number, None)
            if row["kind"] in _FAILURES:
                _report(row, number, options, repeated)
        if tally["wrong"] >= options.most:
            break
    for number, row in shrinking.items():  # not done with when the time was up
        tally[row["kind"]] += 1
        _report(row, number, options, repeated)
    for (kind, text), count in repeated.most_common():
        if count > 1 and kind != "wrong":
            print(f"{count} times {kind}: {text[:150]}")
    described = {"backend": options.backend, "device": options.device, "cases": sum(tally.values())}
    print(json.dumps({**described, **tally, "seconds": round(time.monotonic() - started, 1)}))
    sys.exit(tally["wrong"] > 0)


def _report(
    row: dict[str, Any], number: int, options: argparse.Namespace, repeated: collections.Counter[tuple[str, str]]
) -> None:
    """Print a failure, unless one like it was: with its script if programs are shrunk, else in a few lines."""
    program, wrong = row["program"], row["wrong"]
    same = (row["kind"], f"lot {number}" if row["kind"] == "wrong" else re.sub(r"\d+", "#", wrong.partition("\n")[0]))
    repeated[same] += 1
    if repeated[same] > (_WRONG_OF_A_LOT if row["kind"] == "wrong" else 1):
        return
    dtypes = " ".join(dict.fromkeys(each.dtype for each in program.inputs)) if program else ""
    what = ", gradients" if _has_gradients(number, options) else ""
    print(f"{row['kind']:8} lot {number} of seed {options.seed}{what}, {dtypes}: {' '.join(wrong.split())[:180]}")
    if program and options.shrink and row["kind"] != "fallback":
        print(f"{wrong[:1500]}\n\n{program.script(options.backend, options.device)}")
    elif program and row["kind"] != "fallback":
        arguments = "; ".join(f"t{at} {each}" for at, each in enumerate(program.inputs))
        print(f"    {arguments}\n    {'; '.join(program.lines)}; return {', '.join(program.outputs)}")
    sys.stdout.flush()
    if program and options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        path = options.keep / f"{row['kind']}_{options.seed}_{number}_{time.monotonic_ns()}.py"
        path.write_text(f"# {' '.join(wrong.split())[:300]}\n{program.script(options.backend, options.device)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="opkit")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--what", choices=("both", "results", "gradients"), default="both")
    parser.add_argument("--dynamic", action="store_true", help="all sizes of arguments symbolic")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="print programs as drawn, and go on")
    parser.add_argument("--most", type=int, default=50, help="wrong results, after which it ends")
    parser.add_argument("-n", "--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no more programs are run")
    parser.add_argument("--case-seconds", type=float, default=120.0, help="after which a program counts as hanging")
    parser.add_argument("--keep", type=Path, help="a folder for the scripts of what is printed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
