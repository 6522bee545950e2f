"""One case of benchmarks/compile_cuda.py, in a process of its own: a model, a dtype and a mode, for all contenders."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import logging
import math
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from compile_backends import DYNAMO, EAGER, compiled
from compile_models import Task, task
from compile_parts import dtype_of, graphs, interleaved, seconds
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

OURS = "opkit"
CONTENDERS: dict[str, dict[str, Any]] = {
    EAGER: {"name": EAGER},
    "inductor": {"name": "inductor"},
    "reduce-overhead": {"name": "inductor", "mode": "reduce-overhead"},
    "max-autotune": {"name": "inductor", "mode": "max-autotune-no-cudagraphs"},
    OURS: {"name": OURS},
}
"""The arguments of :func:`compile_backends.compiled` for each contender."""

FIRST = 3  # calls that compile and record
BUDGET = 20.0  # seconds that the rounds of a case may take
MIN_ROUNDS = 5

Row = dict[str, Any]


def measure(
    model: str, dtype: str, mode: str, contenders: list[str], rounds: int, small: bool, device: str, lock: str = ""
) -> Iterator[Row]:
    """Return what is known of a case, again after each part of it.

    ``lock`` names a file whose lock cases share while they compile; each holds it alone for its rounds.
    """
    held = open(lock or os.devnull)  # noqa: SIM115  held until the process ends
    if lock:
        fcntl.flock(held, fcntl.LOCK_SH)
    made, is_gpu = task(model, mode, dtype_of(dtype), small=small, device=device), device != "cpu"
    for module in made.module.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    found: dict[str, Row] = {name: {} for name in contenders}
    row: Row = {
        "model": model, "dtype": dtype, "mode": mode, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if is_gpu else "cpu", "contenders": found,
    }  # fmt: skip
    exact = None
    try:
        exact = _exact(made)
        made.step(
            compiled(DYNAMO, made.module)
        )()  # so that the first contender does not pay for reading the model's code
    except Exception as error:
        row["failed"] = f"before the contenders: {_last_line(error)}"
    steps = {}
    for name, values in found.items():
        try:
            _warm_up(name, device)
            step = _waiting(made.step(compiled(function=made.module, **CONTENDERS[name])), is_gpu)
            values |= _first(step, made, name, is_gpu)
            values |= _errors(_results(step, made), exact) if exact else {}
            steps[name] = _guarded(step, values)
        except Exception as error:
            values["failed"] = _last_line(error)
        made.module.zero_grad(set_to_none=True)
        yield row
    del exact
    if lock:
        fcntl.flock(held, fcntl.LOCK_EX)
        for values in found.values():
            values.pop("first", None)  # other cases were compiled at the same time
    steady = sum(found[name]["steady"] for name in steps)
    count = max(MIN_ROUNDS, min(rounds, int(BUDGET / max(steady, 1e-9))))
    for name, times in interleaved(steps, count).items():
        if "failed" not in found[name]:
            found[name]["ms"] = [1e3 * each for each in times]
    yield row


def _exact(made: Task) -> list[Tensor]:
    """Return eager's results in a wider dtype, of the same weights and inputs."""
    wide = torch.float64 if next(made.module.parameters()).dtype == torch.float32 else torch.float32
    inputs = {key: value.to(wide) if value.is_floating_point() else value for key, value in made.inputs.items()}
    exact = Task(copy.deepcopy(made.module).to(wide), inputs, made.training)
    found = _results(exact.step(), exact)
    del exact
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _results(step: Callable[[], Tensor], made: Task) -> list[Tensor]:
    """Return the logits, or the loss and the gradients, of a step."""
    found = [step().detach().clone()]
    return found + [p.grad.clone() for p in made.module.parameters() if p.grad is not None]


def _errors(found: list[Tensor], exact: list[Tensor]) -> Row:
    pairs = [(a.to(b.dtype), b) for a, b in zip(found, exact, strict=True)]
    differences = [float((a - b).norm()) for a, b in pairs]
    norms = [float(b.norm()) for _, b in pairs]
    errors = {"error": differences[0] / norms[0]}
    if len(pairs) > 1:
        least = math.hypot(*norms[1:]) / 1000
        relative = [d / max(n, least) for d, n in zip(differences[1:], norms[1:], strict=True)]
        errors["gradients"] = max(relative, key=lambda each: (each != each, each))  # a NaN is the largest
    return errors


def _warm_up(name: str, device: str) -> None:
    """Compile a small function, and import what that needs."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    compiled(function=lambda x: torch.softmax(x * 2, -1).sum(), **CONTENDERS[name])(x).backward()


def _waiting(step: Callable[[], Tensor], is_gpu: bool) -> Callable[[], Tensor]:
    def run() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        found = step()
        if is_gpu:
            torch.cuda.synchronize()
        return found

    return run


def _guarded(step: Callable[[], Tensor], values: Row) -> Callable[[], None]:
    """Return a step that, once it fails, records this in ``values`` and does nothing any more."""

    def run() -> None:
        if "failed" not in values:
            try:
                step()
            except Exception as error:
                values["failed"] = _last_line(error)

    return run


def _first(step: Callable[[], Tensor], made: Task, name: str, is_gpu: bool) -> Row:
    """Measure the first calls, a later one, its memory, and what was compiled, with empty caches."""
    from torch._inductor.utils import fresh_cache

    FakeTensorMode.cache_clear()
    log, compiled_graphs = _FallbackLog(), []
    before = torch.cuda.memory_allocated() if is_gpu else 0
    with fresh_cache(delete=False), log, _observed(compiled_graphs):
        counters.clear()
        first = sum(seconds(step) for _ in range(FIRST))
        steady = statistics.median(seconds(step) for _ in range(FIRST))
    values: Row = {"steady": steady, "graphs": graphs(), "breaks": sum(counters["graph_break"].values())}
    if name != EAGER:
        values["first"] = first - FIRST * steady
    if is_gpu and name != "reduce-overhead":
        torch.cuda.reset_peak_memory_stats()
        step()
        values["gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    if name == OURS:
        values |= _counts(compiled_graphs) | {"fallbacks": len(log.reasons), "reasons": log.reasons[:5]}
    return values


class _FallbackLog(logging.Handler):
    """The messages of opkit's compiler about what it leaves to torch, while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "in eager mode" in text or "torch runs it" in text:
            self.reasons.append(text[:300])

    def __enter__(self) -> None:
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        logging.captureWarnings(False)


@contextlib.contextmanager
def _observed(compiled_graphs: list[Any]) -> Iterator[None]:
    """Collect the graphs that opkit compiles."""
    from opkit.compiler.backend import observer

    token = observer.set(compiled_graphs.append)
    try:
        yield
    finally:
        observer.reset(token)


def _counts(compiled_graphs: list[Any]) -> Row:
    from opkit.compiler.ir.kernel import KernelLaunch

    steps = [step for graph in compiled_graphs if graph.schedule for step in graph.schedule.steps]
    kernels = sum(isinstance(step, KernelLaunch) for step in steps)
    return {"kernels": kernels, "calls": len(steps) - kernels}


def _last_line(error: BaseException) -> str:
    while cause := getattr(error, "inner_exception", None) or error.__cause__:  # Dynamo's own lines are advice
        error = cause
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next((line for line in reversed(lines) if line.strip()), "no message").strip()[:300]


def child(question: str) -> None:
    """Measure a case; write what is known to a file, again and again."""
    name, how = json.loads(question)
    file = Path(name)
    for row in measure(**how):
        written = file.with_suffix(".new")
        written.write_text(json.dumps(row), encoding="utf-8")
        written.replace(file)  # never half of it, also if the process is stopped here


if __name__ == "__main__":
    child(sys.argv[1])
