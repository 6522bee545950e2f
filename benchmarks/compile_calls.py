"""Measure what a call of a compiled graph costs when the graph computes almost nothing.

Three linear layers of 32 by 32 with ReLU between them, of four rows, on one thread: the forward under ``no_grad``, and a
training step (forward, sum, backward). Eager mode, opkit, Inductor, Inductor with its C++ wrapper, and Dynamo alone with a
backend that returns a constant. All alternate in short rounds; a figure is the thread's own time, the median of
the rounds, and the ratio to eager mode the median of the rounds' own. Run it with ``python benchmarks/compile_calls.py``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from opkit.compiler import graph_cache
from opkit.compiler.backend import opkit_backend
from opkit.compiler.run.runner import Runner

ROUNDS, CALLS, WIDTH, ROWS = 41, 100, 32, 4
Call = Callable[[], Any]


def model() -> nn.Module:
    """The layers, with the same weights each time."""
    torch.manual_seed(0)
    linear = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])


def constant(module: Any, inputs: Sequence[Any]) -> Call:
    """A backend that computes nothing: what is left is Dynamo."""
    result = [torch.zeros(ROWS, WIDTH)]
    return lambda *_: result


COMPILED: dict[str, dict[str, Any]] = {
    "opkit": {"backend": opkit_backend},
    "Inductor": {"backend": "inductor"},
    "Inductor, C++ wrapper": {"backend": "inductor", "options": {"cpp_wrapper": True}},
    "Dynamo alone": {"backend": constant},
}


def forward(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Call:
    """The forward without gradients."""

    def call() -> torch.Tensor:
        with torch.no_grad():
            return run(x)

    return call


def step(run: Callable[[torch.Tensor], torch.Tensor], held: nn.Module, x: torch.Tensor) -> Call:
    """A training step without an optimizer."""
    weights = list(held.parameters())

    def call() -> None:
        run(x).sum().backward()
        for weight in weights:
            weight.grad = None

    return call


def graph(x: torch.Tensor) -> dict[str, Call]:
    """opkit's graph of the forward, without Dynamo: the runner, and the driver's function alone."""
    runners: list[Runner] = []
    original, held = graph_cache.assemble, model().requires_grad_(False)
    graph_cache.assemble = lambda *given: runners.append(original(*given)) or runners[-1]
    try:
        torch.compile(held, backend=opkit_backend)(x)
    finally:
        graph_cache.assemble = original
    (runner,) = runners
    shapes = [tuple(size.constant for size in runner.plan.buffers[str(name)].shape) for name in runner.plan.inputs]
    arguments = [torch.randn(*(size or 0 for size in shape)) for shape in shapes]
    return {"the graph": lambda: runner([*arguments]), "its driver": _driver(runner, arguments)}


def _driver(runner: Runner, arguments: list[torch.Tensor]) -> Call:
    runner([*arguments])
    ((_, frames),) = runner._frames.items()
    (frame,) = frames.values()
    return lambda: frame.run([*arguments])


def parts(x: torch.Tensor) -> dict[str, Call]:
    """The operators of torch in that graph, called from Python."""
    w, out = torch.randn(WIDTH, WIDTH), torch.empty(ROWS, WIDTH)
    return {
        "mm(out=)": lambda: torch.mm(x, w, out=out),
        "empty_strided": lambda: torch.empty_strided((ROWS, WIDTH), (WIDTH, 1), dtype=torch.float32),
        "as_strided": lambda: torch.as_strided(w, (WIDTH, WIDTH), (1, WIDTH), 0),
    }


def measured(calls: dict[str, Call]) -> dict[str, list[float]]:
    """The microseconds of a call, round by round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            times[name].append((time.thread_time() - start) / CALLS * 1e6)
    return times


def table(title: str, times: dict[str, list[float]]) -> dict[str, float]:
    """Print what was measured; the medians."""
    medians = {name: round(statistics.median(found), 2) for name, found in times.items()}
    eager = times.get("eager mode")
    print(f"\n| {title} | us | of eager mode |\n| --- | ---: | ---: |")
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, eager, strict=True)) if eager else None
        print(f"| {name} | {medians[name]:.1f} | {'' if ratio is None else f'{ratio:.2f}'} |")
    return medians


def main() -> None:
    """Measure, and print tables and a line of JSON."""
    torch.set_num_threads(1)
    x = torch.randn(ROWS, WIDTH)
    plain = model()
    forwards, steps = {"eager mode": forward(plain, x)}, {"eager mode": step(plain, plain, x)}
    for name, how in COMPILED.items():
        first, second = model(), model()
        forwards[name] = forward(torch.compile(first, **how), x)
        if name != "Dynamo alone":
            steps[name] = step(torch.compile(second, **how), second, x)
    with torch.no_grad():
        alone = measured(graph(x) | parts(x))
    found = {
        "forward": table("forward", measured(forwards)),
        "step": table("training step", measured(steps)),
        "parts": table("parts of opkit's forward", alone),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
