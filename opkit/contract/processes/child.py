"""This module makes calls in a forked child process: a call that crashes, aborts, exits or hangs ends the child alone.

The child has everything that the parent has, so an operator of a notebook or of a test function needs no import. Pools of
OpenMP threads, torch's or a kernel's own, do not survive a fork: the child computes on one thread. Autograd's threads, one for
each GPU, do not survive either: where there are any, no backward runs in the child.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import glob
import json
import os
import re
import select
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from opkit.contract.calls.cases import Case, NotSerializable, from_json, to_json
from opkit.contract.prop import NotApplicable, Remark, Violation
from opkit.contract.subject import CallRefused

SECONDS = 5.0
"""The limit for one call."""

_BUILDING = 600.0  # seconds more for a call that waits for a process that it started: a compiler
_IDLE = 60.0  # seconds after which a child without requests ends
_BUSY = (
    0.5  # share of its time on a CPU: a child that computes hangs by itself, one that waits may wait for a lost thread
)
_PIPE_SIZE = 1 << 20  # bytes
_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so")
_OUTCOMES: dict[str, type[Exception]] = {"Violation": Violation, "Remark": Remark, "NotApplicable": NotApplicable}


class ChildEnded(Exception):
    """A child process ended, or had to be ended, before it sent its result.

    Attributes:
        hung: whether it was still running when time ran out.
        busy: whether it was computing then, not waiting.
    """

    def __init__(self, reason: str, hung: bool = False, busy: bool = False) -> None:
        super().__init__(reason)
        self.hung, self.busy = hung, busy


def available() -> bool:
    """Return whether processes can be forked here."""
    return sys.platform == "linux"  # elsewhere, libraries that torch uses do not survive a fork


@functools.cache
def runs_backward() -> bool:
    """Return whether autograd's backward runs in forked processes. One here first starts its thread for each GPU, if any."""
    _backward()
    try:
        in_child(_backward)
    except (ChildEnded, RuntimeError):
        return False
    return True


def _backward() -> None:
    with torch.enable_grad():
        torch.ones((), requires_grad=True).backward()


class Worker:
    """A child process that calls one function on many cases; one that ends is replaced for the next case.

    Cases that can be serialized go through a pipe; any other gets its own child.

    Args:
        function: called in the child, on each case; its result comes back as text.

    Attributes:
        count: the number of cases that the latest child was sent.
    """

    def __init__(self, function: Callable[[Case], object]) -> None:
        self.function = function
        self._child: ChildProcess | None = None
        self.count = 0

    def check(self, case: Case, seconds: float = SECONDS, fresh: bool = False) -> str:
        """Return the function's result as text; ``fresh`` uses a new child, which has run no other case.

        Raises:
            ChildEnded: the child crashed, exited, or did not finish within ``seconds``; a compiler that it waits for has longer.
            Violation: the function raised it. The same applies to ``CallRefused``, ``Remark`` and ``NotApplicable``.
            RuntimeError: the function raised another exception.
        """
        self.count += 1
        if fresh:
            return in_child(lambda: self.function(case), seconds)
        try:
            line = to_json(case)
        except NotSerializable:
            return in_child(lambda: self.function(case), seconds)
        if self._child is None or not self._child.send(line):
            self._child, self.count = ChildProcess(self._serve), 1
            self._child.send(line)
        try:
            return self._child.answer(seconds)
        except ChildEnded:
            self._child = None
            raise

    def _serve(self, lines: Iterator[str], writer: int) -> None:
        for line in lines:
            case = from_json(line)
            _write(writer, json.dumps(_outcome(lambda: self.function(case))))  # noqa: B023


def in_child(function: Callable[[], object], seconds: float = SECONDS) -> str:
    """Call ``function`` in its own child process; see :meth:`Worker.check`."""
    return ChildProcess(lambda _, writer: _write(writer, json.dumps(_outcome(function)))).answer(seconds)


class ChildProcess:
    """One child process, from fork to end; it ends with this object at the latest.

    Args:
        serve: runs in the child; its arguments are the lines that the parent sends, and a pipe for its answers.
        silent: whether the child's output is discarded.
    """

    def __init__(self, serve: Callable[[Iterator[str], int], None], silent: bool = True) -> None:
        inbox, self._to = os.pipe()
        self._from, outbox = os.pipe()
        _widen(outbox)
        self._pid = os.fork()
        if self._pid == 0:
            _run_child(serve, inbox, outbox, silent)
        os.close(inbox)
        os.close(outbox)
        self._buffer = bytearray()
        self._finish = weakref.finalize(self, _finish, self._pid, (self._to, self._from))

    def send(self, line: str) -> bool:
        """Send a line to the child. Return whether it is there to read it."""
        try:
            _write(self._to, line)
        except BrokenPipeError:
            return False
        return True

    def fileno(self) -> int:
        """Return the pipe that answers come from."""
        return self._from

    def ready(self, seconds: float) -> bool:
        """Return whether the child answers, or ends, within this time."""
        return b"\n" in self._buffer or bool(select.select([self._from], [], [], seconds)[0])

    def end(self) -> None:
        """End it, whatever it is doing."""
        self._finish()

    def answer(self, seconds: float) -> str:
        """Return the child's next answer, or raise what it raised; see :meth:`Worker.check`."""
        before = _cpu_seconds(self._pid)
        line = _read_line(self._from, self._buffer, time.monotonic() + seconds)
        until = time.monotonic() + _BUILDING
        while line is None and _has_children(self._pid) and time.monotonic() < until:
            line = _read_line(self._from, self._buffer, time.monotonic() + 1.0)
        if line is None:
            busy = _cpu_seconds(self._pid) - before > _BUSY * seconds
            self._finish()
            raise ChildEnded(f"did not return within {seconds:g} s", hung=True, busy=busy)
        if not line.endswith(b"\n"):
            _, status = os.waitpid(self._pid, 0)
            self._finish()
            raise ChildEnded(_exit_reason(status))
        return _returned_or_raise(line)


def _widen(pipe: int) -> None:
    """Enlarge a pipe for many answers that nobody has read yet."""
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)


def _finish(child: int, pipes: tuple[int, int]) -> None:
    for pipe in pipes:
        os.close(pipe)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _has_children(child: int) -> bool:
    """Return whether the child has started processes that still run; False where the system does not say."""
    for path in glob.glob(f"/proc/{child}/task/*/children"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as numbers:
            if numbers.read().strip():
                return True
    return False


def _cpu_seconds(child: int) -> float:
    """Return the CPU seconds that the child has used; 0 where the system does not say."""
    try:
        with open(f"/proc/{child}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _run_child(serve: Callable[[Iterator[str], int], None], inbox: int, outbox: int, silent: bool) -> NoReturn:
    """Run the child until it exits. It writes no core file, runs no exit handlers, and prints nothing if it is silent."""
    try:
        _reset_signals()
        if silent:
            _discard_output()
        gc.freeze()  # the parent's objects are not collected here
        _one_thread()
        serve(_lines(inbox), outbox)
    finally:
        os._exit(0)


def _one_thread() -> None:
    """Let torch and every OpenMP library compute on this thread alone: the parent's thread pools do not exist here."""
    torch.set_num_threads(1)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        paths = {line.split(maxsplit=5)[5].strip() for line in lines if _OPENMP.search(line)}
    for path in paths:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_set_max_active_levels(0)  # whatever a num_threads clause requests


def _lines(inbox: int) -> Iterator[str]:
    """Yield the parent's lines until it has been idle for a while."""
    buffer = b""
    while True:
        while b"\n" not in buffer:
            ready, _, _ = select.select([inbox], [], [], _IDLE)
            part = os.read(inbox, 1 << 16) if ready else b""
            if not part:
                return
            buffer += part
        line, _, buffer = buffer.partition(b"\n")
        yield line.decode()


def _reset_signals() -> None:
    """Let signals end the process as they end any other, and print nothing."""
    import resource  # it does not exist where processes cannot be forked

    faulthandler.disable()
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _discard_output() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _outcome(function: Callable[[], object]) -> tuple[str, str, str]:
    try:
        return "returned", "", str(function())
    except CallRefused as refusal:
        return "CallRefused", type(refusal.error).__name__, str(refusal.error)
    except Exception as error:
        return "raised", type(error).__name__, str(error)
    except BaseException as error:
        return "left", type(error).__name__, str(error)


def send(writer: int, text: str) -> None:
    """Send a text from a child, which :meth:`ChildProcess.answer` returns."""
    _write(writer, json.dumps(("returned", "", text)))


def _write(pipe: int, line: str) -> None:
    text = line.encode() + b"\n"
    while text:
        text = text[os.write(pipe, text) :]


def _read_line(reader: int, buffer: bytearray, deadline: float) -> bytes | None:
    """Return the child's next line, or the part before the child ended; None if time runs out first.

    The rest stays in ``buffer``.
    """
    while b"\n" not in buffer:
        ready, _, _ = select.select([reader], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return None
        part = os.read(reader, 1 << 16)
        if not part:
            break
        buffer += part
    line, newline, rest = buffer.partition(b"\n")
    buffer[:] = rest
    return bytes(line + newline)


def _returned_or_raise(line: bytes) -> str:
    kind, name, text = json.loads(line)
    if kind == "returned":
        return text
    if kind == "left":
        raise ChildEnded(f"raised {name}, which ends the program")
    if kind == "CallRefused":
        raise CallRefused(type(name, (Exception,), {})(text))  # the exception's own class may exist in the child alone
    if name in _OUTCOMES:
        raise _OUTCOMES[name](text)
    raise RuntimeError(f"{name}: {text}")


def _exit_reason(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        names = {one.value: one.name for one in signal.Signals}
        return f"ended the process with {names.get(number, f'signal {number}')}{_MEANING.get(number, '')}"
    return f"ended the process with exit status {os.WEXITSTATUS(status)}"


_MEANING: dict[int, str] = {
    signal.SIGSEGV: " (it read or wrote memory that is not there)",
    signal.SIGBUS: " (it read or wrote memory that is not there)",
    signal.SIGABRT: " (abort: an assertion, an uncaught C++ exception, or damaged memory)",
    signal.SIGFPE: " (an integer division by zero)",
    signal.SIGILL: " (an instruction that this processor does not have)",
}
