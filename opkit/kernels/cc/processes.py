"""Run compilers as processes: several at once, without shell and input, each with a time limit and stopped at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from opkit.errors import ToolchainError

_POLL_SECONDS = 0.1  # seconds between looks at the clock while compilers run
_FALLBACK_POLL_SECONDS = 0.002  # the same where the system does not report the end of a process


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one command: its exit status (minus a signal's number), or None if it was stopped; and its output."""

    command: tuple[str, ...]
    status: int | None
    log: str


class _Running:
    """A command that runs in its own process group."""

    def __init__(self, command: tuple[str, ...], directory: Path, log: Path, seconds: float) -> None:
        self.command, self.log, self.deadline = command, log, time.monotonic() + seconds
        with open(log, "wb") as output:
            self.process = _start(command, directory, output.fileno())
        self.handle = _handle(self.process.pid)

    def status(self) -> int | None:
        return self.process.poll()

    def outcome(self, status: int | None) -> Outcome:
        return Outcome(self.command, status, self.log.read_bytes().decode("utf-8", "replace"))

    def close(self) -> None:
        """Stop the whole group if it has not ended, and release its handle."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


def _handle(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _start(command: tuple[str, ...], directory: Path, output: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=_environment(),
            process_group=0,
        )
    except OSError as error:
        if not directory.exists():  # someone cleared the cache
            raise
        raise ToolchainError(f"{command[0]} cannot be started: {error.strerror or error}.") from error


def _environment() -> dict[str, str]:
    """Return this process's environment, in the C locale, with the compiler's temporary files next to its input.

    TMPDIR is ".": nvcc puts it into shell commands, which could misread the name of a folder.
    """
    return os.environ | {"LC_ALL": "C", "LANGUAGE": "C", "TMPDIR": ".", "GCC_COLORS": ""}


def run(
    commands: Sequence[tuple[str, ...]], directory: Path, jobs: int, seconds: float, tick: Callable[[], None]
) -> list[Outcome]:
    """Run commands in ``directory``, at most ``jobs`` at a time, each for at most ``seconds``.

    After the first failure none is started, and the running ones are stopped. ``tick`` is called several times a second.

    Raises:
        ToolchainError: a program cannot be started.
    """
    waiting, running, ended = list(enumerate(commands)), [], []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, command = waiting.pop(0)
                running.append(_Running(command, directory, directory / f"log{number}.txt", seconds))
            _wait(running)
            ended += _collect(running)
            if any(outcome.status != 0 for outcome in ended):
                break
            tick()
    finally:
        for each in running:
            each.close()
    return ended


def _collect(running: list[_Running]) -> list[Outcome]:
    """Remove the commands that have ended or exceeded their time, and return their outcomes."""
    ended = []
    for each in list(running):
        status = each.status()
        if status is None and time.monotonic() < each.deadline:
            continue
        running.remove(each)
        each.close()
        ended.append(each.outcome(status))
    return ended


def _wait(running: list[_Running]) -> None:
    """Wait until one of them ends, a deadline passes, or ``_POLL_SECONDS`` are over."""
    soonest = min(each.deadline for each in running) - time.monotonic()
    handles = [each.handle for each in running if each.handle is not None]
    if len(handles) < len(running):
        time.sleep(_FALLBACK_POLL_SECONDS)
        return
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    poll.poll(1000 * max(0.0, min(_POLL_SECONDS, soonest)))
