"""A function of one item in a forked process of its own, so that one that crashes or hangs costs the others nothing."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn


@dataclasses.dataclass
class _Child:
    item: Any
    pid: int
    pipe: int
    deadline: float
    said: bytes = b""


def each(
    function: Callable[[Any], Any], items: Iterable[Any], jobs: int = 1, seconds: float = 60.0
) -> Iterator[tuple[Any, Any, str]]:
    """``(item, result, how it ended)`` of each item, in the order in which they end.

    Args:
        function: its result is passed back as JSON. It is called in a fork of this process, which should have imported what it
            needs, and have used one thread alone.
        items: what to call it with.
        jobs: how many processes at a time.
        seconds: after which one is ended.

    The result is None where there is none, and how it ended is then "signal 11", "time" or a traceback.
    """
    waiting, living = collections.deque(items), dict[int, _Child]()
    while waiting or living:
        while waiting and len(living) < jobs:
            child = _start(function, waiting.popleft(), seconds)
            living[child.pipe] = child
        ready, _, _ = select.select([*living], [], [], 0.1)
        for pipe in ready:
            said = os.read(pipe, 1 << 16)
            living[pipe].said += said
            if not said or living[pipe].said.endswith(b"\n"):
                yield _ended(living.pop(pipe), "")
        for pipe in [pipe for pipe, child in living.items() if time.monotonic() > child.deadline]:
            yield _ended(living.pop(pipe), "time")


def _start(function: Callable[[Any], Any], item: Any, seconds: float) -> _Child:
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _run(function, item, writes)
    os.close(writes)
    return _Child(item, pid, reads, time.monotonic() + seconds)


def _run(function: Callable[[Any], Any], item: Any, writes: int) -> NoReturn:
    status = 1
    try:
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        said = json.dumps(_result(function, item)).encode() + b"\n"
        while said:
            said = said[os.write(writes, said) :]
        status = 0
    finally:
        os._exit(status)


def _result(function: Callable[[Any], Any], item: Any) -> tuple[Any, str]:
    try:
        return function(item), "returned"
    except Exception:
        return None, traceback.format_exc()


def _ended(child: _Child, why: str) -> tuple[Any, Any, str]:
    os.close(child.pipe)
    whole = child.said.endswith(b"\n")
    if not whole and why:
        os.killpg(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    if whole:
        return child.item, *json.loads(child.said)
    return child.item, None, why or (f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an error")
