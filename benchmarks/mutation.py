"""Measure how many of the defects that a script makes in correct operators opkit.check finds.

Kernels, gradients and fake implementations of the operators in ``tests/contract/mutation.py`` are made wrong in one place at a
time, and each mutant is checked in a process of its own. Those that compute the same as the original are listed in
``tests/contract/mutation_equivalent.py`` with the reason, and do not count::

    python benchmarks/mutation.py [--jobs 2] [--most 2] [--sample 40] [--targets dot softmax] [--classes bound] [--done FILE]
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contract"))

import isolated
import mutation
from mutation_equivalent import EQUIVALENT

_WHOLE, _EACH = 0.95, 0.80  # shares that must be found, of all and of each class


def main() -> None:
    """Check every mutant, and print the shares, what survived, and a line of JSON."""
    options = _options()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    targets = [mutation.TARGETS[name] for name in options.targets or mutation.TARGETS]
    if not options.mutants_alone:
        _baseline(targets, options)
    chosen = [each for target in targets for each in _mutants(target, options)][:: options.every]
    found = _judged(chosen[: options.sample], options)
    _show(found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--most", type=int, default=2, help="mutants of a class of an operator")
    parser.add_argument("--sample", type=int, default=None, help="mutants in all")
    parser.add_argument("--every", type=int, default=1, help="only every so many'th mutant")
    parser.add_argument("--targets", nargs="*")
    parser.add_argument("--classes", nargs="*")
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument(
        "--dearest", type=float, default=0.1, help="seconds a case of the most expensive property that is checked"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="after which a mutant counts as hanging")
    parser.add_argument("--done", type=Path, help="a file of results, which is read first and added to")
    parser.add_argument("--mutants-alone", action="store_true", help="do not check the originals first")
    return parser.parse_args()


def _mutants(target: mutation.Target, options: argparse.Namespace) -> list[mutation.Mutant]:
    found = [each for each in mutation.mutants(target) if not options.classes or each.defect in options.classes]
    return mutation.spread([each for each in found if each.name not in EQUIVALENT], options.most)


def _baseline(targets: Sequence[mutation.Target], options: argparse.Namespace) -> None:
    """The originals must pass, or nothing that is said of mutants means anything."""

    def check_one(target: mutation.Target) -> Any:
        return mutation.judge(mutation.original(target), options.examples, options.dearest, every=True)

    for target, result, how in isolated.each(check_one, targets, options.jobs, 3 * options.seconds):
        failures = result["failures"] if result else [["process", how, ""]]
        print(
            f"original {target.name:18} {result['seconds'] if result else 0:6.1f} s  {'fails' if failures else 'holds'}",
            flush=True,
        )
        for property_, message, case in failures:
            print(f"    {property_}: {message}\n        {case}")


def _judged(chosen: Sequence[mutation.Mutant], options: argparse.Namespace) -> list[dict[str, Any]]:
    done = _done(options.done)
    found = [done[_key(each)] for each in chosen if _key(each) in done]
    rest = [each for each in chosen if _key(each) not in done]
    ended = []
    for mutant, result, how in _asked(rest, options, whole=False):
        if result is None and how.startswith("signal"):
            ended.append(mutant)
        else:
            found.append(_reported(mutant, result, how, options))
    found += [_reported(*each, options) for each in _asked(ended, options, whole=True)]
    return found


def _asked(rest: Sequence[mutation.Mutant], options: argparse.Namespace, whole: bool) -> Any:
    """Property by property, which is quick; or in one check, which survives what ends the process."""

    def check_one(mutant: mutation.Mutant) -> Any:
        return mutation.judge(mutant, options.examples, options.dearest, whole=whole)

    return isolated.each(check_one, rest, options.jobs, options.seconds)


def _reported(mutant: mutation.Mutant, result: Any, how: str, options: argparse.Namespace) -> dict[str, Any]:
    row = _row(mutant, result, how)
    print(f"{row['outcome']:9} {row['by']:24} {row['seconds']:6.1f} s  {mutant.name[:120]}", flush=True)
    if options.done:
        with options.done.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def _key(mutant: mutation.Mutant) -> str:
    return hashlib.sha256(f"{mutant.name}{mutant.source}".encode()).hexdigest()


def _done(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    return {row["key"]: row for row in map(json.loads, path.read_text().splitlines())}


def _row(mutant: mutation.Mutant, result: Any, how: str) -> dict[str, Any]:
    """A mutant that ends or hangs its process is not found: a check must survive it."""
    failures = result["failures"] if result else []
    return {
        "key": _key(mutant),
        "name": mutant.name,
        "target": mutant.target,
        "class": mutant.defect,
        "outcome": "killed" if failures else "survived" if result else "lost",
        "by": failures[0][0] if failures else "" if result else how.strip().splitlines()[-1][:200],
        "message": failures[0][1] if failures else "",
        "seconds": result["seconds"] if result else 0.0,
    }


def _show(found: Sequence[dict[str, Any]]) -> None:
    for row in found:
        if row["outcome"] != "killed":
            print(f"{row['outcome']}: {row['name']}  {row['by']}")
    by = collections.Counter(row["by"] for row in found if row["outcome"] == "killed")
    print("killed by " + ", ".join(f"{name} {count}" for name, count in by.most_common()))
    shares = _table(found)
    killed = sum(row["outcome"] == "killed" for row in found)
    share = killed / max(len(found), 1)
    good = share >= _WHOLE and all(each >= _EACH for each in shares.values())
    line = {"mutants": len(found), "killed": killed, "share": round(share, 4), "classes": shares, "good": good}
    print(json.dumps(line))


def _table(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    counts: dict[str, list[int]] = {}
    for row in found:
        count = counts.setdefault(row["class"], [0, 0])
        count[0] += row["outcome"] == "killed"
        count[1] += 1
    print(f"{'class':16} {'killed':>7} {'of':>5} {'share':>7}")
    for name, (killed, of) in sorted(counts.items()):
        print(f"{name:16} {killed:7} {of:5} {killed / of:7.0%}")
    return {name: round(killed / of, 3) for name, (killed, of) in sorted(counts.items())}


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
