"""Measure a model in one process of benchmarks/compile.py. Each function takes and returns plain values."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from compile_backends import compiled
from compile_models import MODELS, Task, task
from torch import Tensor

_LATER = 3  # calls after the first, whose median is the steady call
_WARM = 2  # calls of each before the rounds


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch calls ``name``."""
    return getattr(torch, name)


def first(
    model: str, mode: str, dtype: str, backend: str, small: bool = False, layers: int | None = None
) -> dict[str, Any]:
    """Seconds by which the first compiled call is longer than a later one; an eager call came before, and warmed the rest."""
    made = task(model, mode, dtype_of(dtype), small=small, layers=layers)
    made.step()()
    start = time.perf_counter()
    step = made.step(compiled(backend, made.module))
    step()
    whole = time.perf_counter() - start
    steady = statistics.median(seconds(step) for _ in range(_LATER))
    return {"seconds": whole - steady, "steady": steady, "graphs": graphs()}


def graphs() -> int:
    """How many graphs Dynamo gave to its backends in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def seconds(step: Callable[[], Any]) -> float:
    """What one call takes; with one thread without what other processes of the machine take."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    step()
    return clock() - start


def run(
    model: str, mode: str, dtype: str, backends: Sequence[str], rounds: int, small: bool = False
) -> dict[str, list[float]]:
    """Seconds of a call in each round, for each backend. All share one module; who goes first changes from round to round."""
    made = task(model, mode, dtype_of(dtype), small=small)
    return interleaved({name: made.step(compiled(name, made.module)) for name in backends}, rounds)


def interleaved(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round."""
    for step in steps.values():
        for _ in range(_WARM):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = [*steps]
    for number in range(rounds):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            found[name].append(seconds(steps[name]))
    return found


def memory(model: str, mode: str, dtype: str, backend: str, small: bool = False) -> dict[str, float]:
    """Peak memory of a step, in MiB, beyond weights and code.

    It is the process's resident peak while it steps (the kernel's own mark, set back before), less what is resident when the
    compiled model has been dropped: tensors, arenas, scratch and what a compiler keeps from one call to the next all count,
    whoever allocated them, and what compiling itself took does not.
    """
    made = task(model, mode, dtype_of(dtype), small=small)
    step = made.step(compiled(backend, made.module))
    for _ in range(_WARM):
        step()
    _trim()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(_LATER):
        step()
    peak = _status("VmHWM")
    del step
    made.module.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    _trim()
    return {"peak": peak - _status("VmRSS"), "tensors": _tensors(made, backend)}


def _trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def _tensors(made: Task, backend: str) -> float:
    """Peak of what torch's allocator holds during a step, in MiB, beyond what it held before: arenas of others do not count."""
    step = made.step(compiled(backend, made.module))
    for _ in range(_WARM):
        step()
    made.module.zero_grad(set_to_none=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    held = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 2**20


def numbers(model: str, dtype: str, backends: Sequence[str], small: bool = False) -> dict[str, dict[str, float]]:
    """Errors of the loss, and of all gradients together, relative to eager float64; without dropout, on a batch of two."""
    shape = (2, 32 if small else MODELS[model].length)
    exact = _gradients(task(model, "gradients", torch.float64, small=small, shape=shape), "eager")
    found = {}
    for name in backends:
        made = task(model, "gradients", dtype_of(dtype), small=small, shape=shape)
        loss, *rest = (_error(a, b) for a, b in zip(_gradients(made, name), exact, strict=True))
        found[name] = {"loss": loss, "gradients": rest[0]}
        torch._dynamo.reset()
    return found


def _gradients(made: Task, backend: str) -> tuple[Tensor, Tensor]:
    loss = made.step(compiled(backend, made.module))()
    grads = [p.grad.double().flatten() for p in made.module.parameters() if p.grad is not None]
    return loss.double(), torch.cat(grads)


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
