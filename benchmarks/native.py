"""Compare building, loading and calling a C kernel with the same operator by ``load_inline``.

Every part runs in a process of its own with a cache of its own; peers that are compared are interleaved in one process.
Figures are medians of many rounds and ratios medians of the rounds' own ratios, but load_inline, which takes long, is
built once. It needs ninja and a C++ compiler. Run it with ``python benchmarks/native.py``; it takes a minute or two.
"""

from __future__ import annotations

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

import opkit
from opkit.kernels import bridge
from opkit.op.native import function as native
from opkit.op.torch_private import torch_paths

BUILDS, LOADS, MANY = 9, 7, 500
ROUNDS, CALLS = 61, 1000
GOALS = {
    "build / load_inline": 1 / 50, "cached load ms": 5.0, "torch.ops / load_inline": 0.65, "torch.ops / torch.sin": 1.3,
    "op(x) / torch.sin": 1.6, "torch.ops / no gradient rule": 1.3, "500 kernels s": 30.0,
}  # fmt: skip

SOURCE = """
void scaled(const T* x, T* out, int64_t x_numel) {{
    for (int64_t i = 0; i < x_numel; i++) out[i] = {factor} * x[i];
}}
"""
INLINE = """
at::Tensor scaled(const at::Tensor& x) {
    const at::Tensor a = x.contiguous();
    at::Tensor out = at::empty_like(a);
    const float* from = a.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    for (int64_t i = 0; i < a.numel(); i++) to[i] = 2 * from[i];
    return out;
}
TORCH_LIBRARY(bench_inline, m) { m.def("scaled(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(bench_inline, CPU, m) { m.impl("scaled", scaled); }
"""


def operator(number: int) -> Any:
    """An operator without kernels that multiplies by ``number``."""

    def scaled(x: Tensor) -> Tensor:
        return x * number

    return opkit.custom_op(f"bench_native::scaled_{number}", scaled, mutates_args=())


def registered(op: Any, number: int) -> native.NativeFunction:
    """``op`` with its kernel, not built yet."""
    op.register_kernel("cpu", opkit.c_kernel(SOURCE.format(factor=number), dtypes=["float32"]))
    return op._operator.kernels.kernels[0].function


def _timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


# ---- parts, each a process ------------------------------------------------------------------------------------------


def first_builds() -> dict[str, Any]:
    """Seconds from a source to a kernel that can be called, each source new; the first one imports the parser."""
    ops = [operator(number) for number in range(2, 3 + BUILDS)]
    first, *others = [_timed(lambda n=n, op=op: registered(op, n).load()) for n, op in enumerate(ops, 2)]
    return {"first": first, "others": statistics.median(others)}


def load_inline(folder: str) -> dict[str, Any]:
    """Seconds that torch's own way takes for the same operator."""
    from torch.utils import cpp_extension

    folder = str(Path(sys.executable).parent)  # where this environment has ninja
    os.environ["PATH"] = os.pathsep.join([folder, os.environ["PATH"]])

    def build() -> None:
        cpp_extension.load_inline("bench_inline", INLINE, build_directory=folder, is_python_module=False)

    return {"seconds": _timed(build)}


def cached_load() -> dict[str, Any]:
    """Seconds to get a kernel that is in the cache, in a process that has loaded none."""
    op = operator(2)
    start = time.perf_counter()
    function = registered(op, 2)
    middle = time.perf_counter()
    function.load()
    return {"load": time.perf_counter() - middle, "whole": time.perf_counter() - start}


def build_bridge() -> dict[str, Any]:
    """Seconds that the bridge takes to build."""
    return {"seconds": _timed(lambda: bridge.build(torch_paths()))}


def calls(inline: str) -> dict[str, Any]:
    """Medians of microseconds for each way of calling, and of the ratios to one another."""
    torch.set_num_threads(1)
    torch.ops.load_library(inline)
    op, x = operator(2), torch.randn(4)
    function = registered(op, 2)
    for _ in range(5):
        op(x)
    ways = {
        "torch.ops": torch.ops.bench_native.scaled_2,
        "op(x)": op,
        "load_inline": torch.ops.bench_inline.scaled,
        "no gradient rule": _bare(function),
        "torch.sin": torch.sin,
    }
    assert all(torch.equal(way(x), 2 * x) for name, way in ways.items() if name != "torch.sin")
    rounds = [{name: _seconds(ways[name], x) for name in _rotated(list(ways), k)} for k in range(ROUNDS)]
    pairs = [name.split(" / ") for name in GOALS if name.split(" / ")[0] in ways]
    return {
        "bridged": op._operator.bridged.serving,
        "us": {name: statistics.median(r[name] for r in rounds) * 1e6 for name in ways},
        "ratios": {f"{a} / {b}": statistics.median(r[a] / r[b] for r in rounds) for a, b in pairs},
    }


def _bare(function: native.NativeFunction) -> Any:
    """The same kernel on an operator that has no gradient rule, and no Python, at all."""
    library = torch.library.Library("bench_bare", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    _kept.extend([library, function.load().register("bench_bare::scaled", "CPU", False)])
    return torch.ops.bench_bare.scaled


_kept: list[Any] = []


def _rotated(names: list[str], k: int) -> list[str]:
    """The same in another order each round, so that none always follows the same one."""
    return names[k % len(names) :] + names[: k % len(names)]


def _seconds(function: Callable[[Tensor], Any], x: Tensor) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        function(x)
    return (time.perf_counter() - start) / CALLS


def many() -> dict[str, Any]:
    """Seconds to build many kernels at once, one for each core at a time."""
    ops = [operator(number) for number in range(2, 2 + MANY)]
    prepared = _timed(lambda: [registered(op, number) for number, op in enumerate(ops, 2)])
    results: list[Any] = []
    seconds = _timed(lambda: results.extend(native.build_all([op._operator for op in ops])))
    assert len({str(path) for path in results if isinstance(path, Path)}) == MANY, results
    return {"build": seconds, "register": prepared, "cores": len(os.sched_getaffinity(0))}


PARTS = {part.__name__: part for part in (first_builds, load_inline, cached_load, build_bridge, calls, many)}


# ---- the whole ------------------------------------------------------------------------------------------------------


def run(part: Callable[..., Any], cache: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a part reports, run in a process of its own."""
    settings = os.environ | {"OPKIT_CACHE_DIR": cache} | environment
    command = [sys.executable, __file__, part.__name__, *arguments]
    done = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path) -> dict[str, Any]:
    """Every part's report."""
    cache, inline = str(folder / "cache"), folder / "inline"
    inline.mkdir()
    found: dict[str, Any] = {"builds": run(first_builds, cache, OPKIT_BRIDGE="0")}
    found["inline"] = run(load_inline, cache, str(inline))
    found["loads"] = [run(cached_load, cache, OPKIT_BRIDGE="0") for _ in range(LOADS)]
    found["bridge"] = run(build_bridge, cache)
    library = str(inline / "bench_inline.so")
    found["calls"] = run(calls, cache, library)
    found["calls without the bridge"] = run(calls, cache, library, OPKIT_BRIDGE="0")
    found["many"] = run(many, str(folder / "many"), OPKIT_BRIDGE="0")
    return found


def goals(found: dict[str, Any]) -> dict[str, float]:
    """The figure for each goal."""
    return {
        "build / load_inline": found["builds"]["others"] / found["inline"]["seconds"],
        "cached load ms": statistics.median(each["load"] for each in found["loads"]) * 1e3,
        **found["calls"]["ratios"],
        "500 kernels s": found["many"]["build"],
    }


def show(found: dict[str, Any]) -> None:
    """The tables."""
    whole = statistics.median(each["whole"] for each in found["loads"]) * 1e3
    very_first = found["builds"]["first"] * 1e3
    lines = [
        (
            "first build",
            found["builds"]["others"],
            f"a process's very first, which imports the parser, {very_first:.0f}",
        ),
        ("load_inline", found["inline"]["seconds"], "the same operator, into an empty folder"),
        ("cached load", goals(found)["cached load ms"] / 1e3, f"with importing the parser and parsing, {whole:.1f}"),
        ("500 kernels", found["many"]["build"], f"on {found['many']['cores']} cores"),
        ("the bridge", found["bridge"]["seconds"], "once for each torch"),
    ]
    for name, seconds, remark in lines:
        print(f"{name:12} {seconds * 1e3:9.1f} ms  ({remark})")
    print()
    ways = found["calls"]["us"], found["calls without the bridge"]["us"]
    print(f"{'a call, 4 elements':20} {'us':>7} {'without the bridge':>19}")
    for name in ways[0]:
        print(f"{name:20} {ways[0][name]:7.2f} {ways[1][name]:19.2f}")
    print(f"\n{'figure':32} {'is':>8} {'goal':>8}")
    for name, figure in goals(found).items():
        print(f"{name:32} {figure:8.3f} {GOALS[name]:8.3f}{'' if figure <= GOALS[name] else '  short'}")


def main() -> None:
    """Print the tables and one JSON line; with arguments, be one of the parts."""
    if len(sys.argv) > 1:
        print(json.dumps(PARTS[sys.argv[1]](*sys.argv[2:])))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    show(found)
    assert found["calls"]["bridged"], "the bridge did not serve the calls"
    assert not found["calls without the bridge"]["bridged"]
    print(json.dumps(found | {"goals": goals(found)}))


if __name__ == "__main__":
    main()
