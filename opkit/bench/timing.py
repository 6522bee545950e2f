"""Run times in turn with eager mode, and peaks of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

SECONDS = 1.0
"""The time that the rounds of one comparison take, about; those of several functions with the first take as much each."""

MAX_ROUNDS, MIN_ROUNDS = 21, 3
_SAMPLE = 0.005  # seconds: shorter calls are repeated, so that a sample is no shorter


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Medians, in seconds, and the median of the rounds' ratios: how many times as fast as eager mode."""

    eager: float
    compiled: float
    ratio: float


def compared(eager: Callable[[], Any], compiled: Callable[[], Any], device: str) -> Comparison:
    """Time two functions in turn; both were called before."""
    return in_turn([eager, compiled], device)[1]


def in_turn(functions: Sequence[Callable[[], Any]], device: str) -> list[Comparison]:
    """Time functions in turn, and compare each with the first, itself included; all were called before."""
    times = rounds(functions, device)
    medians = [statistics.median(each) for each in times]
    ratios = [statistics.median(a / b for a, b in zip(times[0], each, strict=True)) for each in times]
    return [Comparison(medians[0], median, ratio) for median, ratio in zip(medians, ratios, strict=True)]


def rounds(functions: Sequence[Callable[[], Any]], device: str) -> list[tuple[float, ...]]:
    """Time functions in turn, and return the seconds of each, round by round; all were called before."""
    counts = [_count(each, device) for each in functions]
    found: list[list[float]] = []
    begin, seconds = time.perf_counter(), SECONDS * max(1, len(functions) - 1)
    while len(found) < MIN_ROUNDS or (len(found) < MAX_ROUNDS and time.perf_counter() - begin < seconds):
        found.append([_seconds(function, n, device) for function, n in zip(functions, counts, strict=True)])
    return [*zip(*found, strict=True)]


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait until no other process is in such a block of the same file, which exists."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _count(function: Callable[[], Any], device: str) -> int:
    shortest = _seconds(function, 1, device)
    if shortest < 10 * _SAMPLE:  # one that is much longer needs no other
        shortest = min(shortest, *(_seconds(function, 1, device) for _ in range(2)))
    return max(1, math.ceil(_SAMPLE / max(shortest, 1e-7)))


def _seconds(function: Callable[[], Any], count: int, device: str) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        function()
    synchronize(device)
    return (time.perf_counter() - begin) / count


def timed(function: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Return what a function returns, and the seconds that it took."""
    synchronize(device)
    begin = time.perf_counter()
    result = function()
    synchronize(device)
    return result, time.perf_counter() - begin


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(function: Callable[[], Any], device: str) -> int | None:
    """Return the bytes that a call adds to what is allocated, at its peak; None where the system does not say.

    On CPUs it is the growth of the process's resident memory, as Linux reports it: small calls, which reuse memory that the
    allocator did not return, add 0.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is from now on
        before = _resident("VmRSS")
        function()
        return max(0, _resident("VmHWM") - before)
    except (OSError, ValueError):
        return None


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise ValueError(name)
    return int(found[1]) * 1024
