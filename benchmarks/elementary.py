"""Measure the speed and accuracy of the elementary functions in generated C, compared with eager's.

One thread and 65536 elements, so that they stay in the cache; ours and eager's calls alternate, and figures are medians.
``python benchmarks/elementary.py`` takes half a minute. ``--stride 64`` also checks every 64th float32 against float64,
and ``--exhaustive`` every one, which takes an hour. ``--only exp_f32,sin_f32`` names functions.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from opkit.compiler.emit.c import functions
from opkit.compiler.run.library import flags

COUNT, ROUNDS = 1 << 16, 61
FLAGS = (*flags(), "-march=native", "-shared", "-fPIC")
OPS = ["exp", "expm1", "log", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"]
OPS += ["exp2", "log2", "log10", "asinh", "acosh", "atanh", "erf", "erfc", "sqrt", "round", "pow", "atan2"]
NEAR = ["sin_near", "cos_near", "tan_near"]  # what compiled graphs try first
BINARY = {"pow", "atan2"}
C = {"f32": "float", "f64": "double"}
TORCH = {"f32": torch.float32, "f64": torch.float64}
INSIDE = {"asin": 1, "acos": 1, "atanh": 1}  # the greatest argument, where it is not 10


def loop(name: str) -> str:
    op, t = name.rsplit("_", 1)
    second = (f"const {C[t]} *z, ", ", z[i]") if op in BINARY else ("", "")
    return (
        f"void run_{name}(const {C[t]} *x, {second[0]}{C[t]} *y, long n) {{\n#pragma omp simd\n"
        f"for (long i = 0; i < n; i++) y[i] = opk_{name}(x[i]{second[1]});\n}}\n"
    )


def compiled(names: list[str], folder: Path) -> ctypes.CDLL:
    (folder / "f.c").write_text(functions.text(names) + "".join(map(loop, names)))
    subprocess.run(["gcc", *FLAGS, "-o", "f.so", "f.c"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "f.so"))


def prepared(library: ctypes.CDLL, name: str, *tensors: torch.Tensor) -> functools.partial[None]:
    """The call with its arguments converted, which takes longer than the call of a fast function."""
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    return functools.partial(getattr(library, f"run_{name}"), *pointers, ctypes.c_long(tensors[0].numel()))


def seconds(work, *arguments, **options) -> float:
    start = time.perf_counter()
    work(*arguments, **options)
    return time.perf_counter() - start


def compare(library: ctypes.CDLL, name: str) -> None:
    op, t = name.replace("_near", "").split("_")
    x = (torch.rand(COUNT, dtype=TORCH[t]) * 2 - 1) * INSIDE.get(op, 10)
    x = x.abs() + 1 if op in ("log", "acosh", "pow", "log1p", "sqrt") else x
    inputs = (x, torch.randn(COUNT, dtype=TORCH[t])) if op in BINARY else (x,)
    out, theirs = torch.empty_like(x), getattr(torch, op)
    run = prepared(library, name, *inputs, out)
    rounds = [(seconds(run), seconds(theirs, *inputs, out=out)) for _ in range(ROUNDS)]
    ours, eager = (statistics.median(r) / COUNT * 1e9 for r in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b in rounds)
    print(f"{name:10s} {ours:8.3f} {eager:8.3f} {ratio:8.2f}", flush=True)


def worst(library: ctypes.CDLL, name: str, stride: int) -> tuple[float, float]:
    """The greatest error, in units in the last place, over every ``stride``-th float32, and where it is."""
    found = (0.0, 0.0)
    for start in range(0, 1 << 32, stride << 20):
        bits = np.arange(start, min(start + (stride << 20), 1 << 32), stride, dtype=np.uint64).astype(np.uint32)
        x = torch.from_numpy(bits.view(np.float32))
        y = torch.empty_like(x)
        prepared(library, name, x, y)()
        off = ulps(y.numpy(), getattr(torch, name.split("_")[0])(x.double()).numpy())
        at = int(off.argmax())
        found = max(found, (float(off[at]), float(x[at])))
    return found


def ulps(y: np.ndarray, exact: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
        off = np.abs(y - exact) / np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - 24, -149))
    off = np.where((y == rounded) & np.isinf(y) | np.isnan(y) & np.isnan(rounded), 0, off)
    return np.where(np.isfinite(off), off, np.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exhaustive", action="store_true")
    parser.add_argument("--stride", type=int, default=0)
    parser.add_argument("--only", default=",".join(f"{op}_{t}" for t in C for op in [*OPS, *NEAR]))
    options = parser.parse_args()
    names = options.only.split(",")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(names, Path(folder))
        print("ns/element     ours    eager    ratio")
        for name in names:
            compare(library, name)
        stride = 1 if options.exhaustive else options.stride
        for name in [n for n in names if stride and n.endswith("f32") and n[:-4] not in {*BINARY, *NEAR}]:
            print("{} {:.3f} ulp at {!r}".format(name, *worst(library, name, stride)), flush=True)


if __name__ == "__main__":
    main()
