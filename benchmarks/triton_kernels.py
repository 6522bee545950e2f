"""Compare the Triton kernels of examples/kernels with a copy, torch.compile and Liger-Kernel.

    python benchmarks/triton_kernels.py [--quick] [--cases swiglu rotary] [--dtypes bfloat16 float32] [--json FILE]

Each result is first compared with torch's functions in float32. Then a copy of as many bytes as the kernel must move, the
kernel, torch's functions as they are and compiled (Inductor, "max-autotune-no-cudagraphs"), and Liger-Kernel where it is
installed alternate, each after the cache was flushed. Times are medians by the GPU's own clock. Several processes compile
beforehand what torch.compile makes (``--jobs 0``: none do); its products of matrices are left to cuBLAS, as ours are.

The table: microseconds and GB/s of the kernel, its share of the copy's speed, and how many times as long the others take.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from triton_suite import Case, difference, widened

MODULES = ("triton_suite_norms", "triton_suite_glu")
ROUNDS, WARM = 25, 3
FLUSHED = 2**28  # bytes: several times the cache
HEAD_START = 500_000  # cycles that the GPU waits before a measurement, so that the host is ahead of it
Peers = dict[str, Callable[[], Any]]


def cases(wanted: Sequence[str]) -> list[Case]:
    """Those whose names begin with one of ``wanted``, or all."""
    found = [importlib.import_module(name).CASES for name in MODULES]
    return [case for listed in found for case in listed if not wanted or case.name.startswith(tuple(wanted))]


def sizes(case: Case, quick: bool) -> list[int]:
    """One in the middle, and the largest."""
    return sorted({case.sizes[(len(case.sizes) - 1) // 2], *([] if quick else case.sizes[-1:])})


# ---- what is measured ------------------------------------------------------------------------------------------------


def compiled(case: Case) -> Callable[..., Any]:
    """The case in torch's functions, to be compiled by Inductor at the first call."""
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.reset()
    torch._inductor.config.max_autotune_gemm_backends = "ATEN"
    return torch.compile(case.plain, mode="max-autotune-no-cudagraphs", dynamic=False)


def check(case: Case, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype) -> str:
    """How the kernel's results differ from those of torch's functions in float32."""
    if case.random:
        return ""
    ours = case.ours(*inputs)
    return difference(ours, case.plain(*widened(inputs, dtype)), case.slack)


def peers(case: Case, inputs: tuple[torch.Tensor, ...], moved: int) -> Peers:
    """The candidates, which alternate; one that fails at its first call is left out, with its error."""
    source, target = (torch.empty(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    inductor = compiled(case)
    found: Peers = {
        "copy": lambda: target.copy_(source),
        "ours": lambda: case.ours(*inputs),
        "eager": lambda: case.plain(*inputs),
        "inductor": lambda: inductor(*inputs),
    }
    if (liger := case.liger) is not None:
        own = tuple(x.clone() for x in inputs)
        found["liger"] = lambda: liger(*own)
    return {name: run for name, run in found.items() if _works(case, name, run)}


def _works(case: Case, name: str, run: Callable[[], Any]) -> bool:
    try:
        for _ in range(WARM):
            run()
        torch.cuda.synchronize()
    except Exception as error:
        if name in ("copy", "ours"):
            raise
        print(f"{case.name}: {name} failed: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return False
    return True


def times(runs: Peers) -> dict[str, float]:
    """The median of each in microseconds."""
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    names = list(runs)
    taken: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    for k in range(ROUNDS):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.zero_()
            torch.cuda._sleep(HEAD_START)
            start.record()
            runs[name]()
            end.record()
            taken[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3 for name, pairs in taken.items()}


def measure(case: Case, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """One line of the table."""
    torch.manual_seed(0)
    inputs, moved = case.inputs(size, dtype, "cuda"), case.bytes(size, dtype)
    wrong = check(case, inputs, dtype)
    us = times(peers(case, inputs, moved))
    ours = us["ours"]
    return {
        "op": case.name,
        "size": size,
        "dtype": str(dtype).removeprefix("torch."),
        "us": us,
        "GB/s": moved / ours / 1e3,
        "of copy": us["copy"] / ours,
        "ratios": {name: us[name] / ours for name in ("eager", "inductor", "liger") if name in us},
        "wrong": wrong,
    }


# ---- compiling beforehand --------------------------------------------------------------------------------------------


def compile_only(chosen: Sequence[Case], quick: bool, dtypes: Sequence[torch.dtype]) -> None:
    """Leave what torch.compile makes in its cache, and our kernels in Triton's."""
    for case in chosen:
        for size, dtype in [(size, dtype) for size in sizes(case, quick) for dtype in dtypes]:
            torch.manual_seed(0)
            inputs = case.inputs(size, dtype, "cuda")
            for name, run in (("inductor", compiled(case)), ("opkit", case.ours)):
                _works(case, name, functools.partial(run, *inputs))
            del inputs
            torch.cuda.empty_cache()


def compile_beforehand(chosen: Sequence[Case], arguments: argparse.Namespace) -> None:
    """Share the cases among processes; one that fails is only slower, as this process compiles then.

    Which of our configs are the fastest they would find out while they disturb each other: that is forgotten.
    """
    shares = [[case.name for case in chosen[i :: arguments.jobs]] for i in range(arguments.jobs)]
    options = ["--dtypes", *arguments.dtypes, *(["--quick"] if arguments.quick else [])]
    command = [sys.executable, __file__, "--compile-only", *options, "--exactly"]
    with tempfile.TemporaryDirectory() as folder:
        settings = os.environ | {"OPKIT_CACHE_DIR": folder}
        shared = [names for names in shares if names]
        running = [subprocess.Popen([*command, *names], stdout=subprocess.DEVNULL, env=settings) for names in shared]
        for process in running:
            process.wait()


# ---- the whole -------------------------------------------------------------------------------------------------------


def shown(row: dict[str, Any]) -> str:
    """One line of the table."""
    ratios = "".join(f"{row['ratios'].get(name, float('nan')):10.2f}" for name in ("eager", "inductor", "liger"))
    start = f"{row['op']:32} {row['size']:8} {row['dtype']:9} {row['us']['ours']:9.1f} {row['GB/s']:7.0f}"
    return f"{start} {row['of copy']:7.1%} {ratios}{'  WRONG: ' + row['wrong'] if row['wrong'] else ''}".replace(
        "nan", "  -"
    )


def main() -> None:
    """Print the table and one JSON line."""
    arguments = parsed()
    chosen = [case for case in cases(arguments.cases) if not arguments.exactly or case.name in arguments.exactly]
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    warnings.simplefilter("ignore")
    if arguments.compile_only:
        compile_only(chosen, arguments.quick, dtypes)
        return
    start = time.perf_counter()
    if arguments.jobs:
        compile_beforehand(chosen, arguments)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled in {time.perf_counter() - start:.0f} s\n"
    )
    print(
        f"{'op':32} {'size':>8} {'dtype':9} {'us':>9} {'GB/s':>7} {'of copy':>7} {'eager':>10}{'inductor':>10}{'liger':>10}"
    )
    rows: list[dict[str, Any]] = []
    for case in chosen:
        for size, dtype in [(size, dtype) for size in sizes(case, arguments.quick) for dtype in dtypes]:
            rows.append(measure(case, size, dtype))
            print(shown(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    print(f"\n{time.perf_counter() - start:.0f} s")
    text = json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows})
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")
    if wrong := [row["op"] for row in rows if row["wrong"]]:
        raise SystemExit(f"wrong results: {', '.join(wrong)}")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[], help="how the names of those to measure begin")
    parser.add_argument("--quick", action="store_true", help="one size of each")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--jobs", type=int, default=4, help="processes that compile beforehand")
    parser.add_argument("--json", help="a file to write the results to")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--exactly", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
