"""Count the operators of PyTorch's own OpInfo database that a backend compiles to eager's results, forward and gradient.

Each operator runs in a process of its own with a time limit, so one that crashes or hangs costs the others nothing. The same
samples, tolerances and seeds serve every backend::

    python benchmarks/opinfo_compile.py [--backend opkit] [--dtypes float32,int64] [--limit 3] [--json FILE] [NAME ...]
    python benchmarks/opinfo_compile.py --compare inductor.json opkit.json
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from compile_backends import strict

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "compiler"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contract"))

import isolated
from database_compiled import asked, infos

OUTCOMES = ("pass", "wrong", "error", "time", "died", "none")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each operator and dtype, in the order in which they end; written to ``--json`` as they come."""
    names = options.names or [*infos()][:: options.every]
    items = [(name, dtype) for name in names for dtype in options.dtypes]
    rows: list[dict[str, Any]] = []
    for row in _rows(items, options):
        rows.append(row)
        print(
            f"{len(rows)} of {len(items)}: {row['name']} {row['outcome']}{' ' * 30}",
            end="\r",
            file=sys.stderr,
            flush=True,
        )
        if options.json:
            options.json.write_text(
                json.dumps({"backend": options.backend, "rows": rows}, indent=1) + "\n", encoding="utf-8"
            )
    return rows


def _rows(items: Sequence[tuple[str, str]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen = strict(options.backend)

    def one(item: tuple[str, str]) -> dict[str, Any]:
        started = time.monotonic()
        found = asked(item[0], getattr(torch, item[1]), chosen, options.limit)
        return {**dataclasses.asdict(found), "seconds": round(time.monotonic() - started, 2)}

    for (name, dtype), found, how in isolated.each(one, items, options.jobs, options.seconds):
        dead = {"outcome": "time" if how == "time" else "died", "message": how[-600:]}
        yield {"name": name, "dtype": dtype, **(found or dead)}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many operators have each outcome, by dtype."""
    counts = collections.defaultdict(lambda: dict.fromkeys(OUTCOMES, 0))
    for row in rows:
        counts[row["dtype"]][row["outcome"]] += 1
    return dict(counts)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """What did not pass, with its message, and the counts."""
    for row in sorted(rows, key=lambda row: (row["outcome"], row["name"])):
        if row["outcome"] not in ("pass", "none"):
            print(f"{row['outcome']:6} {row['name']} {row['dtype']}: {' '.join(row['message'].split())[:220]}")
    print(f"\n{'':10}" + "".join(f"{outcome:>7}" for outcome in OUTCOMES))
    for dtype, counts in summary(rows).items():
        print(f"{dtype:10}" + "".join(f"{counts[outcome]:7}" for outcome in OUTCOMES))


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


def _warm(chosen: Any) -> None:
    """What compiling imports is imported once, in the process that the others fork from; nothing here may start a thread."""
    if chosen == "inductor":
        from torch._inductor import compile_fx, config  # noqa: F401  seconds, for this backend alone

        config.compile_threads = 1  # a pool of compilers does not live through a fork
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))


def main() -> None:
    """Print what does not pass, the counts, and one JSON line."""
    options = _options()
    if options.compare:
        print(json.dumps(compare(*options.compare)))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _warm(strict(options.backend))
    started = time.monotonic()
    rows = measure(options)
    show(rows)
    print(json.dumps({"backend": options.backend, **summary(rows), "seconds": round(time.monotonic() - started, 1)}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="operators; all by default")
    parser.add_argument("--backend", default="opkit")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32"])
    parser.add_argument("--limit", type=int, default=3, help="samples of an operator")
    parser.add_argument("--every", type=int, default=1, help="take every so manieth operator")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which an operator counts as hanging")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--compare", type=Path, nargs=2, help="two such files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
