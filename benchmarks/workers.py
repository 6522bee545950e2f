"""Processes that take cases one after another; one that crashes, hangs or loses its CUDA context is replaced.

They are spawned, not forked: reading torch's operator database starts CUDA, and a fork of a process that has cannot use it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

Report = Callable[[Any], None]

_START_SECONDS = (
    120.0  # what a new process may take longer than others for its first report: it imports torch and tests
)
_CONTEXT = multiprocessing.get_context("spawn")
_DONE, _LOST, _FAILED = "done", "lost", "failed"


class LostDeviceError(BaseException):
    """The device refuses all work of this process, as after an assertion in a kernel. No test framework should catch it."""


def check_device(device: str) -> None:
    """Wait for the device.

    Raises:
        LostDeviceError: it takes no more work from this process.
    """
    if is_lost(device):
        raise LostDeviceError


def is_lost(device: str) -> bool:
    """Return whether the device takes no more work from this process."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


@dataclasses.dataclass
class _Worker:
    process: SpawnProcess
    item: Any
    deadline: float


def run(
    call: Callable[[Any, Report], None],
    items: Iterable[Any],
    device: str,
    jobs: int = 1,
    seconds: float = float("inf"),
    case_seconds: float = 60.0,
) -> Iterator[tuple[Any, Any, str]]:
    """Call ``call(item, report)`` for each item, and yield ``(item, report, "")`` for each call of ``report``.

    A process that ends otherwise yields ``(item, None, why)``: "time", an exit code, or a traceback.

    Args:
        call: a function of a module, or a ``functools.partial`` of one.
        items: what to call it with; they can be pickled.
        device: "cpu" or "cuda"; a process whose device is lost when an item ends is replaced.
        jobs: how many processes at a time.
        seconds: after which all end, with cases that are not run.
        case_seconds: how long a process may be silent.
    """
    waiting, living, end = iter(items), dict[Connection, _Worker](), time.monotonic() + seconds
    missing = object()
    item = next(waiting, missing)
    try:
        while (item is not missing or living) and time.monotonic() < end:
            while item is not missing and len(living) < jobs:
                pipe, process = _start(call, device)
                pipe.send(item)
                living[pipe] = _Worker(process, item, time.monotonic() + case_seconds + _START_SECONDS)
                item = next(waiting, missing)
            for pipe in wait(list(living), timeout=0.2):
                assert isinstance(pipe, Connection)
                worker = living[pipe]
                try:
                    how, said = pipe.recv()
                except (EOFError, OSError):
                    _end(pipe, living)
                    yield worker.item, None, f"exit code {worker.process.exitcode}"
                    continue
                worker.deadline = time.monotonic() + case_seconds
                if how == _DONE and item is not missing:
                    pipe.send(item)
                    worker.item, item = item, next(waiting, missing)
                elif how:
                    _end(pipe, living)
                if how in ("", _FAILED):
                    yield (worker.item, said, "") if not how else (worker.item, None, said)
            for pipe, worker in [*living.items()]:
                if time.monotonic() > worker.deadline:
                    _end(pipe, living)
                    yield worker.item, None, "time"
    finally:
        for pipe in [*living]:
            _end(pipe, living)


def _start(call: Callable[[Any, Report], None], device: str) -> tuple[Connection, SpawnProcess]:
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_work, args=(call, there, device), daemon=True)
    process.start()
    there.close()
    return here, process


def _end(pipe: Connection, living: dict[Connection, _Worker]) -> None:
    worker = living.pop(pipe)
    pipe.close()
    worker.process.kill()
    worker.process.join()


def _work(call: Callable[[Any, Report], None], pipe: Connection, device: str) -> None:
    _silence()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    while True:
        try:
            call(pipe.recv(), lambda said: pipe.send(("", said)))
            check_device(device)
        except LostDeviceError:
            pipe.send((_LOST, None))
            os._exit(1)  # destructors of CUDA objects would fail
        except Exception:
            pipe.send((_FAILED, traceback.format_exc()))
            os._exit(1)
        pipe.send((_DONE, None))


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
