"""Measure the first call of opkit.attention in a new process, when its kernel is compiled and when it is in opkit's cache.

    python benchmarks/first_call.py [--rounds 9] [--cold 1] [--only portable,backward,decode]

"portable" is a forward by this kernel, "decode" is that of one query, "backward" is that for Hopper, after a forward that is not
measured; "cuda" is the forward for Hopper, causal, and "cuda_packed" is that of packed sequences, for where a GPU is, and
"portable_backward" is for where no GPU is.
Each row is of processes of their own, which alternate: one with empty caches, others that find the kernels in a cache. Times
are of the host, in milliseconds, and begin when CUDA was started and the tensors are there; "CPU" is the processor's time, which
other processes do not lengthen. On a GPU a call ends when its results are there, and ``scaled_dot_product_attention`` of
torch is called first in processes of the same kind. Without a GPU the kernels are registered for CPU tensors, and the driver is
one that loads and launches nothing (tests/kernels/fake_driver.c): what is measured is all that opkit does up to the loading of a
binary, and not that nor the run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).parents[1] / "tests" / "kernels" / "fake_driver.c"
CASES = ("portable", "backward", "decode")
HERE = ("portable_backward",)  # only without a GPU, where a kernel can be chosen for the backward
THERE = ("cuda", "cuda_packed")  # only with one
BACKWARDS = ("backward", "portable_backward")
PEERLESS = ("packed", *THERE)
PARTS = ("import opkit", "opkit.attention", "call", "call, CPU", "of it finding", "call 2")
SLOW = ("triton", "sympy", "torch._dynamo", "torch._inductor")
_SIZES = {"decode": (4, 16, 1, 4096, 128)}
_USUAL = (1, 16, 1024, 1024, 128)


# ---- in a process of its own -----------------------------------------------------------------------------------------


class Clock:
    """Milliseconds of what is called, by name, summed up."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def __call__(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        start, of_process = time.perf_counter(), time.process_time()
        try:
            return function(*args)
        finally:
            self._add(name, time.perf_counter() - start)
            self._add(f"{name}, CPU", time.process_time() - of_process)

    def _add(self, name: str, seconds: float) -> None:
        self.times[name] = self.times.get(name, 0.0) + seconds * 1e3


def tensors(case: str, device: str) -> list[Tensor]:
    """Queries, keys, values and a gradient of the result."""
    batch, heads, queries, keys, d = _SIZES.get(case, _USUAL)
    made = [torch.ones(batch, heads, n, d, dtype=torch.bfloat16, device=device) for n in (queries, keys, keys, queries)]
    return [x.requires_grad_(case in BACKWARDS) for x in made[:3]] + made[3:]


def called(case: str, attention: Callable[..., Tensor], arguments: list[Tensor], **options: Any) -> Callable[[], Any]:
    """The call that is measured: of the gradients, after a forward that is not."""
    *arguments, gradient = arguments
    if case not in BACKWARDS:
        return lambda: attention(*arguments, **options)
    out = attention(*arguments, **options)
    torch.autograd.grad(
        arguments[0] * 1, arguments[0], gradient
    )  # what torch's own first backward imports is not counted
    return lambda: torch.autograd.grad(out, arguments, gradient, retain_graph=True)


def waited(function: Callable[[], Any]) -> Any:
    """Call a function, and wait for its results where a GPU computes them."""
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def on_cpu(case: str, library: str) -> None:
    """Let the kernels for GPUs take CPU tensors, on a driver that launches nothing."""
    from opkit import _core
    from opkit.attn import gradients
    from opkit.attn.gpu import kernels
    from opkit.attn.gpu.decode import decoding
    from opkit.attn.gpu.hopper import backward as hopper_backward
    from opkit.attn.operator import attention_operator
    from opkit.op.triton import variants

    driver = _core.Driver(library, "cuda")
    about: dict[str, Any] = {"target": lambda _: "sm_90", "model": lambda _: "none", "shared": lambda _: 232448}
    variants.MACHINES["cpu"] = variants.Machine("cpu", lambda: driver, **about)
    op = attention_operator()
    op.register_kernel("cpu", kernels.forward, name="portable", priority=90, trusted=True)
    op.register_kernel("cpu", decoding.decode, name="split", when=lambda q: q.shape[2] == 1, priority=92, trusted=True)
    backward = hopper_backward.backward if case == "backward" else kernels.backward
    gradients.backward_operator().register_kernel("cpu", backward, name="gradients", priority=90, trusted=True)


def child(case: str, library: str) -> None:
    """Print the parts of opkit's first call, as JSON."""
    clock = Clock()
    device = "cpu" if library else "cuda"
    arguments = tensors(case, device)
    waited(lambda: arguments[0].sum())  # CUDA is started
    clock("import opkit", __import__, "opkit")
    import opkit

    clock("opkit.attention", lambda: opkit.attention)
    if library:
        on_cpu(case, library)
    function = called(case, opkit.attention, arguments, **options_of(case, device))
    from opkit.kernels.triton import compiling

    build = compiling.build
    compiling.build = lambda request: clock("of it finding", build, request)
    before = set(sys.modules)
    clock("call", waited, function)
    imported = [name for name in SLOW if name in sys.modules and name not in before]
    clock("call 2", waited, function)
    launches = ctypes.CDLL(library).fake_launches() if library else None
    compiled = "triton" in sys.modules
    print(json.dumps({"times": clock.times, "imported": imported, "triton": compiled, "launches": launches}))


def options_of(case: str, device: str) -> dict[str, Any]:
    """The options of the call: its kernel, where it is not chosen by rule, and its mask."""
    if case == "cuda_packed":
        from opkit.masks import Segments

        keys = _USUAL[3]
        ids = torch.arange(keys, dtype=torch.int32, device=device)[None] // (keys // 4)
        return {"mask": Segments(ids), "kernel": "hopper_cuda"}
    if case == "cuda":
        from opkit.masks import Causal

        return {"mask": Causal(), "kernel": "hopper_cuda"}
    portable = {"kernel": "portable" if device == "cpu" else "triton"}
    by_rule = portable if device == "cpu" else {}
    return {"portable": portable, "portable_backward": portable, "backward": by_rule}.get(case, {})


def peer(case: str) -> None:
    """Print what torch's first call takes, as JSON."""
    clock = Clock()
    arguments = tensors(case, "cuda")
    waited(lambda: arguments[0].sum())
    function = called(case, torch.nn.functional.scaled_dot_product_attention, arguments)
    clock("call", waited, function)
    clock("call 2", waited, function)
    print(json.dumps({"times": clock.times, "imported": []}))


# ---- the measurement -------------------------------------------------------------------------------------------------


class Processes:
    """New processes, with caches in a folder: one that lasts, and an empty one for each that is to compile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library = "" if torch.cuda.is_available() else str(_fake_driver(folder))
        self._count = 0

    def run(self, *arguments: str, cold: bool = False) -> dict[str, Any]:
        """What a process of this file printed."""
        self._count += cold
        caches = self.folder / (f"cold{self._count}" if cold else "warm")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"OPKIT_CACHE_DIR": str(caches / "opkit"), "TRITON_CACHE_DIR": str(caches / "triton")}
        environment["PYTHONPYCACHEPREFIX"] = str(self.folder / "bytecode")
        command = [sys.executable, __file__, *arguments]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    def measured(self, case: str, rounds: int, cold: int) -> dict[str, Any]:
        """Medians of the parts of a first call: with empty caches, with full ones, and of torch's."""
        own = "--child", case, self.library
        self.run(*own)
        found: dict[str, list[dict[str, Any]]] = {"cold": [], "cached": [], "torch": []}
        for number in range(rounds):
            found["cached"].append(self.run(*own))
            if not self.library and case not in PEERLESS:
                found["torch"].append(self.run("--peer", case))
            if number < cold:
                found["cold"].append(self.run(*own, cold=True))
        return {way: medians(rows) for way, rows in found.items() if rows}


def _fake_driver(folder: Path) -> Path:
    path = folder / "libfake.so"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-pthread", "-DCUDA"]
    subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(path)], check=True)
    return path


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each part, and which slow modules were imported in any of the processes."""
    times = {name: round(statistics.median(row["times"][name] for row in rows), 2) for name in rows[0]["times"]}
    return {**times, "imported": sorted({name for row in rows for name in row["imported"]})}


def line(case: str, way: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    parts = "".join(f"{found[name]:17.1f}" if name in found else f"{'-':>17s}" for name in PARTS)
    return f"{case:18s}{way:8s}{parts}  {', '.join(found['imported'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", type=int, default=1)
    parser.add_argument("--only", default=",".join(CASES + (THERE if torch.cuda.is_available() else HERE)))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
    elif options.peer:
        peer(options.peer)
    else:
        compare(options.only.split(","), options.rounds, options.cold)


def compare(cases: list[str], rounds: int, cold: int) -> None:
    """Measure, and print the table and a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        where = "no GPU: up to the loading of a binary" if processes.library else torch.cuda.get_device_name()
        print(f"{where}; torch {torch.__version__}; milliseconds, medians of {rounds} processes")
        print(f"{'case':18s}{'caches':8s}" + "".join(f"{name:>17s}" for name in PARTS) + "  imported")
        results: dict[str, Any] = {}
        for case in cases:
            results[case] = processes.measured(case, rounds, cold)
            for way, found in results[case].items():
                print(line(case, way, found), flush=True)
    print(json.dumps({"benchmark": "first_call", "gpu": not processes.library, "results": results}))


if __name__ == "__main__":
    main()
