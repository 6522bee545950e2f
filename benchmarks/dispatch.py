"""Compare what a call of an opkit operator costs with ``torch.library.custom_op`` on the same function.

One thread, tensors of four elements, annotations checked. Peers are interleaved; each figure is the median of many short
rounds, and the ratio is the median of the rounds' own ratios. Run it with ``python benchmarks/dispatch.py``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import opkit

ROUNDS, CALLS = 61, 400
GOALS = {"no gradient": 0.30, "through torch.ops": 0.45, "by its overload": 0.45, "with gradient": 0.55}


def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """One tensor in, one out."""
    return torch.sin(x)


def three(x: Float[Tensor, "n"], y: Float[Tensor, "n"], z: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Three tensors in, one out, no more work than ``one``."""
    return torch.sin(x)


def one_backward(ctx: Any, grad: Tensor) -> Tensor:
    """A backward that costs nothing; it is never run here."""
    return grad


def three_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As above, for three inputs."""
    return grad, grad, grad


def operators(kernel: bool) -> dict[str, tuple[Any, Any]]:
    """For each function, opkit's operator and torch.library's."""
    made: dict[str, tuple[Any, Any]] = {}
    for function, backward in ((one, one_backward), (three, three_backward)):
        suffix = "kernel" if kernel else "reference"
        ours = opkit.custom_op(f"bench::{function.__name__}_{suffix}", function, mutates_args=())
        plain = _without_jaxtyping(function)
        theirs = torch.library.custom_op(f"bench_peer::{function.__name__}_{suffix}", plain, mutates_args=())
        theirs.register_autograd(backward)
        if kernel:
            ours.register_kernel("cpu")(function)
            ours.register_autograd(backward)
        made[function.__name__] = (ours, theirs)
    return made


def _without_jaxtyping(function: Callable[..., Any]) -> Callable[..., Any]:
    def one_plain(x: Tensor) -> Tensor:
        return torch.sin(x)

    def three_plain(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.sin(x)

    return one_plain if function is one else three_plain


def compare(
    ours: Callable[..., Any], theirs: Callable[..., Any], args: tuple[Tensor, ...]
) -> tuple[float, float, float]:
    """Median microseconds of both and the median ratio."""
    rounds = [(_seconds(ours, args), _seconds(theirs, args)) for _ in range(ROUNDS)]
    return (
        statistics.median(a for a, _ in rounds) * 1e6,
        statistics.median(b for _, b in rounds) * 1e6,
        statistics.median(a / b for a, b in rounds),
    )


def _seconds(function: Callable[..., Any], args: tuple[Tensor, ...]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        function(*args)
    return (time.perf_counter() - start) / CALLS


def import_seconds() -> tuple[float, float]:
    """Median seconds that ``import opkit`` takes after ``import torch``, and that ``import torch`` takes."""
    clock = "time.perf_counter()"
    script = f"import time; a = {clock}; import torch; b = {clock}; import opkit; print({clock} - b, b - a)"
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in range(7)
    ]
    pairs = [tuple(map(float, run.stdout.split())) for run in runs]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def check_seconds(made: dict[str, tuple[Any, Any]]) -> dict[int, float]:
    """Seconds that the annotation check adds to a call whose shapes have passed before: annotated less not annotated."""
    added: dict[int, float] = {}
    for name, function in (("one", one), ("three", three)):
        annotated = made[name][0]
        bare = opkit.custom_op(f"bench::{name}_bare", _without_jaxtyping(function), mutates_args=())
        args = tuple(torch.randn(4) for _ in range(1 if name == "one" else 3))
        rounds = [_seconds(annotated, args) - _seconds(bare, args) for _ in range(ROUNDS)]
        added[len(args)] = statistics.median(rounds)
    return added


def measure(kinds: dict[str, dict[str, tuple[Any, Any]]]) -> list[dict[str, Any]]:
    """Every comparison as a row."""
    rows: list[dict[str, Any]] = []
    for kind, made in kinds.items():
        for name, (ours, theirs) in made.items():
            count = 1 if name == "one" else 3
            plain = tuple(torch.randn(4) for _ in range(count))
            tracked = (torch.randn(4, requires_grad=True), *plain[1:])
            cases = {
                "no gradient": (ours, theirs, plain),
                "through torch.ops": (_through_ops(ours), _through_ops(theirs), plain),
                "by its overload": (_through_ops(ours).default, _through_ops(theirs).default, plain),
                "with gradient": (ours, theirs, tracked),
            }
            for case, (a, b, args) in cases.items():
                mine, peer, ratio = compare(a, b, args)
                rows.append({"op": kind, "tensors": count, "case": case, "opkit_us": round(mine, 2),
                             "custom_op_us": round(peer, 2), "ratio": round(ratio, 3), "goal": GOALS[case]})  # fmt: skip
    return rows


def _through_ops(op: Any) -> Any:
    namespace, name = op._qualname.split("::")
    return getattr(getattr(torch.ops, namespace), name)


def main() -> None:
    """Print the table and one JSON line."""
    torch.set_num_threads(1)
    kinds = {"reference": operators(False), "kernel": operators(True)}
    rows = measure(kinds)
    print(f"{'op':10} {'tensors':>7} {'case':18} {'opkit us':>9} {'custom_op us':>13} {'ratio':>6} {'goal':>5}")
    for row in rows:
        met = "" if row["ratio"] <= row["goal"] else "  short"
        print(f"{row['op']:10} {row['tensors']:7} {row['case']:18} {row['opkit_us']:9.2f} {row['custom_op_us']:13.2f} "
              f"{row['ratio']:6.3f} {row['goal']:5.2f}{met}")  # fmt: skip
    sine = statistics.median(_seconds(torch.sin, (torch.randn(4),)) for _ in range(ROUNDS)) * 1e6
    checks = {count: seconds * 1e6 for count, seconds in check_seconds(kinds["reference"]).items()}
    own, torch_import = import_seconds()
    print(
        f"torch.sin {sine:.2f} us; the check adds {checks[1]:.2f} us (one tensor), {checks[3]:.2f} us (three); goal 0.30"
    )
    print(f"import opkit adds {own:.3f} s to import torch's {torch_import:.2f} s (goal 0.15)")
    print(json.dumps({"rows": rows, "sin_us": round(sine, 2), "check_us": checks, "import_s": round(own, 3)}))


if __name__ == "__main__":
    main()
