"""Compare a backend with eager on random programs, and print mismatches, shrunk, as scripts.

Hypothesis draws them (``tests/compiler/random_lines.py``), half with gradients. Run it with::

    python benchmarks/fuzz_compile.py [--graphs 2000] [--seed 0] [--backend opkit] [--dynamic] [--keep DIR]

The programs are drawn in lots, and a lot that finds a mismatch goes on with the next; so one bug does not hide others. What
is wrong with the backend "aot_eager" as well, which only runs the captured graph, is counted and passed over.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compile_backends import strict
from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "compiler"))

from random_compare import EagerError, mismatch
from random_graphs import Program
from random_lines import programs

_LOT = 50


class MismatchError(Exception):
    """A program on which compiled and eager are apart."""

    def __init__(self, program: Program, wrong: str) -> None:
        super().__init__(wrong)
        self.program, self.wrong = program, wrong


def lot(
    compile_: Callable[..., Any], grad: bool, count: int, number: int, tally: dict[str, int]
) -> MismatchError | None:
    """Try ``count`` programs; the smallest that is wrong, if any is."""

    @seed(number)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(programs(gradients=grad))
    def tried(program: Program) -> None:
        wrong = outcome(program, compile_, grad, tally)
        if wrong:
            raise MismatchError(program, wrong)

    try:
        tried()
    except MismatchError as found:
        return found
    return None


def outcome(program: Program, compile_: Callable[..., Any], grad: bool, tally: dict[str, int]) -> str | None:
    """What is wrong with a compiled program, errors included; nothing where the graph is wrong before a backend sees it."""
    try:
        wrong = compared(program, compile_, grad)
    except EagerError:
        tally["refused by eager"] += 1
        return None
    if wrong and compared(program, functools.partial(compile_, backend="aot_eager"), grad):
        tally["wrong without a backend"] += 1
        return None
    tally["graphs"] += 1
    return wrong


def compared(program: Program, compile_: Callable[..., Any], grad: bool) -> str | None:
    """What is wrong with a program, errors of the compiler included."""
    try:
        return mismatch(program, compile_, grad)
    except EagerError:
        raise
    except Exception as error:  # whatever a compiler dies of is what is looked for
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Print each mismatch as it is found, and one JSON line."""
    options = _options()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = strict(options.backend)

    def compile_(function: Callable[..., Any], backend: Any = chosen) -> Callable[..., Any]:
        return torch.compile(function, backend=backend, dynamic=options.dynamic or None)

    tally = {"graphs": 0, "refused by eager": 0, "wrong without a backend": 0}
    found, started = [], time.monotonic()
    for number in itertools.count():
        if tally["graphs"] >= options.graphs or len(found) >= options.most:
            break
        grad = {"both": bool(number % 2), "results": False, "gradients": True}[options.what]
        wrong = lot(
            compile_, grad, min(_LOT, options.graphs - tally["graphs"]), options.seed * 1_000_000 + number, tally
        )
        if wrong is not None:
            found.append(wrong)
            _report(wrong, grad, options, len(found))
        print(f"{tally['graphs']} graphs, {len(found)} mismatches", end="\r", file=sys.stderr, flush=True)
    print(json.dumps({**tally, "mismatches": len(found), "seconds": round(time.monotonic() - started, 1)}))


def _report(wrong: MismatchError, grad: bool, options: argparse.Namespace, number: int) -> None:
    script = wrong.program.script(options.backend)
    print(f"\n--- mismatch {number}{', with gradients' if grad else ''}\n{wrong.wrong[:1500]}\n\n{script}", flush=True)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        (options.keep / f"mismatch_{options.seed}_{number}.py").write_text(
            f'"""{wrong.wrong[:300]}"""\n{script}', encoding="utf-8"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="opkit")
    parser.add_argument("--what", choices=("both", "results", "gradients"), default="both")
    parser.add_argument("--dynamic", action="store_true", help="all sizes of arguments symbolic")
    parser.add_argument("--most", type=int, default=10, help="mismatches, after which it ends")
    parser.add_argument("--keep", type=Path, help="a folder for the scripts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
