"""Count the operators of PyTorch's own OpInfo database that backends compile to eager's results, forward and gradient.

Operators run in processes of :mod:`workers`, in an order that is random and always the same, so that those done within
``--seconds`` are a fair sample. The same samples, tolerances and seeds serve every backend and every device::

    python benchmarks/opinfo_compile.py [--backend opkit,inductor] [--device cuda] [--dtypes float32,bfloat16] [--seconds 100]
        [--jobs 14] [--limit 3] [--json FILE [--resume]] [NAME ...]
    python benchmarks/opinfo_compile.py --compare inductor.json opkit.json

The last line says how many cases pass of those that all backends have run. The results of several backends are in a file each:
with ``--json all.json`` in ``all_opkit.json`` and ``all_inductor.json``. It exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import workers
from compile_backends import strict

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "compiler"))

from database_compiled import Found, asked, infos

OUTCOMES = ("pass", "wrong", "error", "fallback", "time", "died", "none")


def measure(options: argparse.Namespace, backend: str, file: Path | None) -> list[dict[str, Any]]:
    """A row for each operator and dtype, in the order in which they end; failures are printed, rows written to a file."""
    names = options.names or [*infos()][:: options.every]
    items = [(name, dtype) for name in names for dtype in options.dtypes]
    random.Random(0).shuffle(items)
    rows: list[dict[str, Any]] = []
    if options.resume and file is not None and file.exists():
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    done = {(row["name"], row["dtype"]) for row in rows}
    call = functools.partial(_one, backend=backend, limit=options.limit, device=options.device)
    for (name, dtype), found, how in workers.run(
        call,
        [item for item in items if item not in done],
        options.device,
        options.jobs,
        options.seconds,
        options.case_seconds,
    ):
        dead = {"outcome": "time" if how == "time" else "died", "message": how[-600:]}
        row = {"name": name, "dtype": dtype, **(found or dead)}
        rows.append(row)
        if row["outcome"] not in ("pass", "none"):
            print(f"{row['outcome']:8} {name} {dtype}: {' '.join(row['message'].split())[:220]}", flush=True)
        if file is not None:
            content = {"backend": backend, "device": options.device, "rows": rows}
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return rows


def _one(item: tuple[str, str], report: workers.Report, *, backend: str, limit: int, device: str) -> None:
    """Report the row of an operator and a dtype."""
    if backend == "inductor":
        from torch._inductor import config  # seconds, for this backend alone

        config.compile_threads = 1  # there is a process for each core already
    started = time.monotonic()
    try:
        found = asked(item[0], getattr(torch, item[1]), strict(backend), limit, device)
    except Exception as error:  # compiling and calling raise none: there are no samples to be had
        found = Found("none", message=f"samples: {type(error).__name__}: {error}"[:600])
    report({**dataclasses.asdict(found), "seconds": round(time.monotonic() - started, 2)})


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many operators have each outcome, by dtype."""
    counts = collections.defaultdict(lambda: dict.fromkeys(OUTCOMES, 0))
    for row in rows:
        counts[row["dtype"]][row["outcome"]] += 1
    return dict(counts)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the counts."""
    print(f"\n{'':10}" + "".join(f"{outcome:>9}" for outcome in ("cases", *OUTCOMES)))
    for dtype, counts in summary(rows).items():
        numbers = (sum(counts.values()), *(counts[outcome] for outcome in OUTCOMES))
        print(f"{dtype:10}" + "".join(f"{number:9}" for number in numbers))


def passed(rows_of: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Return how many cases pass with each backend, of those that all have run and that eager mode has."""
    outcomes = [{(row["name"], row["dtype"]): row["outcome"] for row in rows} for rows in rows_of.values()]
    shared = set.intersection(*({case for case, outcome in each.items() if outcome != "none"} for each in outcomes))
    counts = [sum(each[case] == "pass" for case in shared) for each in outcomes]
    return ", ".join(f"{name} {count} of {len(shared)}" for name, count in zip(rows_of, counts, strict=True))


def compare(first: Path, second: Path) -> dict[str, int]:
    """Print the operators on which two result files differ; how many pass in each alone, in both, and in neither."""
    one, other = (_by_case(path) for path in (first, second))
    kinds = collections.Counter[str]()
    for case in sorted(one.keys() & other.keys()):
        passed = [rows[case]["outcome"] == "pass" for rows in (one, other)]
        if "none" in (one[case]["outcome"], other[case]["outcome"]):
            continue
        kinds[
            {(True, True): "both", (True, False): first.stem, (False, True): second.stem, (False, False): "neither"}[
                *passed
            ]
        ] += 1
        if passed[0] != passed[1]:
            worse = other[case] if passed[0] else one[case]
            side = second.stem if passed[0] else first.stem
            print(
                f"{side} alone fails {case[0]} {case[1]}: {worse['outcome']}: {' '.join(worse['message'].split())[:200]}"
            )
    return dict(kinds)


def _by_case(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(row["name"], row["dtype"]): row for row in rows}


def main() -> None:
    """Print what does not pass, the counts, and one JSON line."""
    options = _options()
    if options.compare:
        print(json.dumps(compare(*options.compare)))
        return
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for backend in options.backend:
        started, file = time.monotonic(), options.json
        if file is not None and len(options.backend) > 1:
            file = file.with_stem(f"{file.stem}_{backend}")
        rows = rows_of[backend] = measure(options, backend, file)
        show(rows)
        described = {"backend": backend, "device": options.device}
        print(json.dumps({**described, **summary(rows), "seconds": round(time.monotonic() - started, 1)}), flush=True)
    print(passed(rows_of))
    sys.exit(any(row["outcome"] == "wrong" for rows in rows_of.values() for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="operators; all by default")
    parser.add_argument("--backend", type=lambda text: text.split(","), default=["opkit"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32"])
    parser.add_argument("--limit", type=int, default=3, help="samples of an operator")
    parser.add_argument("--every", type=int, default=1, help="take every so manieth operator")
    parser.add_argument("-n", "--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which a backend gets no more operators"
    )
    parser.add_argument("--case-seconds", type=float, default=120.0, help="after which an operator counts as hanging")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--resume", action="store_true", help="leave out what the file of --json has")
    parser.add_argument("--compare", type=Path, nargs=2, help="two such files")
    options = parser.parse_args()
    if options.resume and not options.json:
        parser.error("--resume needs --json")
    return options


if __name__ == "__main__":
    main()
