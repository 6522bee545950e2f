"""Calls in a forked child process: one that crashes, aborts, exits or hangs ends the child, and is told as what it is.

The child has everything that the parent has, so an operator of a notebook or of a test function needs no import. Pools of
OpenMP threads, torch's or a kernel's own, do not live through fork: the child computes on one thread. Nor do autograd's, of
which there is one for each GPU: where there are any, no backward runs there.
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

from opkit.contract.calls.cases import Case
from opkit.contract.processes import wire
from opkit.contract.prop import CallRefused, NotApplicable, Remark, Violation

SECONDS = 5.0
"""How long a call may take."""

_BUILDING = 600.0  # seconds more that a call is given while it has a process of its own at work: a compiler
_IDLE = 60.0  # seconds after which a child that is asked nothing ends
_BUSY = (
    0.5  # of its time on a processor: a child that computes hangs by itself, one that waits may wait for a lost thread
)
_ROOM = 1 << 20  # bytes of a pipe
_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)[^/]*\.so")
_FOUND: dict[str, type[Exception]] = {"Violation": Violation, "Remark": Remark, "NotApplicable": NotApplicable}


class ChildEnded(Exception):
    """A child process ended, or had to be ended, before it could say what it found.

    Attributes:
        hung: it was still at it when time ran out.
        busy: and it was computing, not waiting.
    """

    def __init__(self, reason: str, hung: bool = False, busy: bool = False) -> None:
        super().__init__(reason)
        self.hung, self.busy = hung, busy


def available() -> bool:
    """Whether processes can be forked here."""
    return sys.platform == "linux"  # elsewhere, libraries that torch uses do not live through fork


@functools.cache
def runs_backward() -> bool:
    """Whether autograd's backward runs in forked processes. The first one here starts a thread for each GPU, or there is none."""
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
    """A child process that answers one question about many cases; one that ends is forked anew for the next.

    Cases that can be written go through a pipe; for any other, a child of its own is forked.

    Args:
        question: asked in the child, of each case; what it returns is told as text.

    Attributes:
        asked: how many cases the latest child was asked about.
    """

    def __init__(self, question: Callable[[Case], object]) -> None:
        self.question = question
        self._life: ChildProcess | None = None
        self.asked = 0

    def ask(self, case: Case, seconds: float = SECONDS, fresh: bool = False) -> str:
        """What the question returns, as text; ``fresh`` asks a new child, which has answered for no other case.

        Raises:
            ChildEnded: the child crashed, exited, or did not finish within ``seconds``; a compiler that it waits for has longer.
            Violation: so did the question, in the child. The same of ``CallRefused``, ``Remark`` and ``NotApplicable``.
            RuntimeError: the question raised something else.
        """
        self.asked += 1
        if fresh:
            return in_child(lambda: self.question(case), seconds)
        try:
            line = wire.written(case)
        except wire.Unwritten:
            return in_child(lambda: self.question(case), seconds)
        if self._life is None or not self._life.send(line):
            self._life, self.asked = ChildProcess(self._serve), 1
            self._life.send(line)
        try:
            return self._life.answer(seconds)
        except ChildEnded:
            self._life = None
            raise

    def _serve(self, lines: Iterator[str], writer: int) -> None:
        for line in lines:
            case = wire.read(line)
            _say(writer, *_found(lambda: self.question(case)))  # noqa: B023


def in_child(function: Callable[[], object], seconds: float = SECONDS) -> str:
    """Call ``function`` in a child process of its own; see :meth:`Worker.ask`."""
    return ChildProcess(lambda _, writer: _say(writer, *_found(function))).answer(seconds)


class ChildProcess:
    """One child process, from fork to end; it ends with this object at the latest.

    Args:
        serve: what the child does: it is given the lines that are sent to it, and a pipe for what it says.
        silent: whether what it prints is lost.
    """

    def __init__(self, serve: Callable[[Iterator[str], int], None], silent: bool = True) -> None:
        inbox, self._to = os.pipe()
        self._from, outbox = os.pipe()
        _widen(outbox)
        self._child = os.fork()
        if self._child == 0:
            _live(serve, inbox, outbox, silent)
        os.close(inbox)
        os.close(outbox)
        self._held = bytearray()
        self._finish = weakref.finalize(self, _finish, self._child, (self._to, self._from))

    def send(self, line: str) -> bool:
        """Hand a line to the child; whether it is there to read it."""
        try:
            _write(self._to, line)
        except BrokenPipeError:
            return False
        return True

    def fileno(self) -> int:
        """What it says comes from here."""
        return self._from

    def ready(self, seconds: float) -> bool:
        """Whether the child says something, or ends, within this time."""
        return b"\n" in self._held or bool(select.select([self._from], [], [], seconds)[0])

    def end(self) -> None:
        """End it, whatever it is doing."""
        self._finish()

    def answer(self, seconds: float) -> str:
        """What the child says next. See :meth:`Worker.ask`."""
        before = _computed(self._child)
        said = _listen(self._from, self._held, time.monotonic() + seconds)
        until = time.monotonic() + _BUILDING
        while said is None and _has_children(self._child) and time.monotonic() < until:
            said = _listen(self._from, self._held, time.monotonic() + 1.0)
        if said is None:
            busy = _computed(self._child) - before > _BUSY * seconds
            self._finish()
            raise ChildEnded(f"did not return within {seconds:g} s", hung=True, busy=busy)
        if not said.endswith(b"\n"):
            _, status = os.waitpid(self._child, 0)
            self._finish()
            raise ChildEnded(_ending(status))
        return _answer(said)


def _widen(pipe: int) -> None:
    """Make room for many answers that nobody has read yet."""
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _ROOM)


def _finish(child: int, pipes: tuple[int, int]) -> None:
    for pipe in pipes:
        os.close(pipe)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _has_children(child: int) -> bool:
    """Whether the child has started processes that are still there; False where the system does not tell."""
    for path in glob.glob(f"/proc/{child}/task/*/children"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as numbers:
            if numbers.read().strip():
                return True
    return False


def _computed(child: int) -> float:
    """Seconds that the child has had of a processor; 0 where the system does not tell."""
    try:
        with open(f"/proc/{child}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _live(serve: Callable[[Iterator[str], int], None], inbox: int, outbox: int, silent: bool) -> NoReturn:
    """The child's whole life. It leaves nothing behind: no core file, no exit handlers, and no output where it is silent."""
    try:
        _unheard()
        if silent:
            _silence()
        gc.freeze()  # what the parent left is the parent's to collect
        _one_thread()
        serve(_lines(inbox), outbox)
    finally:
        os._exit(0)


def _one_thread() -> None:
    """Have torch and every OpenMP library compute on this thread alone: the pools of the parent are not here."""
    torch.set_num_threads(1)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        paths = {line.split(maxsplit=5)[5].strip() for line in lines if _OPENMP.search(line)}
    for path in paths:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_set_max_active_levels(0)  # whatever a num_threads clause asks for


def _lines(inbox: int) -> Iterator[str]:
    """What the parent sends, line by line, until it has nothing to ask for a while."""
    held = b""
    while True:
        while b"\n" not in held:
            ready, _, _ = select.select([inbox], [], [], _IDLE)
            part = os.read(inbox, 1 << 16) if ready else b""
            if not part:
                return
            held += part
        line, _, held = held.partition(b"\n")
        yield line.decode()


def _unheard() -> None:
    """Signals end it as they would end any process, without a word."""
    import resource  # there is none where processes cannot be forked

    faulthandler.disable()
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _silence() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _found(function: Callable[[], object]) -> tuple[str, str, str]:
    try:
        return "returned", "", str(function())
    except CallRefused as refusal:
        return "CallRefused", type(refusal.error).__name__, str(refusal.error)
    except Exception as error:
        return "raised", type(error).__name__, str(error)
    except BaseException as error:
        return "left", type(error).__name__, str(error)


def say(writer: int, text: str) -> None:
    """Say, in a child, what :meth:`ChildProcess.answer` returns."""
    _say(writer, "returned", "", text)


def _say(writer: int, *words: str) -> None:
    _write(writer, json.dumps(words))


def _write(pipe: int, line: str) -> None:
    text = line.encode() + b"\n"
    while text:
        text = text[os.write(pipe, text) :]


def _listen(reader: int, held: bytearray, deadline: float) -> bytes | None:
    """A line that the child says, or what there is of it when the child ends; None if time runs out first.

    What it says after that line is left in ``held``.
    """
    while b"\n" not in held:
        ready, _, _ = select.select([reader], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return None
        part = os.read(reader, 1 << 16)
        if not part:
            break
        held += part
    line, newline, rest = held.partition(b"\n")
    held[:] = rest
    return bytes(line + newline)


def _answer(said: bytes) -> str:
    kind, name, text = json.loads(said)
    if kind == "returned":
        return text
    if kind == "left":
        raise ChildEnded(f"raised {name}, which ends the program")
    if kind == "CallRefused":
        raise CallRefused(_error(name, text))
    if name in _FOUND:
        raise _FOUND[name](text)
    raise RuntimeError(f"{name}: {text}")


def _error(name: str, text: str) -> Exception:
    """An exception of the name that the child's had; its class may exist in the child alone."""
    return type(name, (Exception,), {})(text)


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        names = {one.value: one.name for one in signal.Signals}
        told = _MEANING.get(number, "")
        return f"ended the process with {names.get(number, f'signal {number}')}{told}"
    return f"ended the process with exit status {os.WEXITSTATUS(status)}"


_MEANING: dict[int, str] = {
    signal.SIGSEGV: " (it read or wrote memory that is not there)",
    signal.SIGBUS: " (it read or wrote memory that is not there)",
    signal.SIGABRT: " (abort: an assertion, an uncaught C++ exception, or damaged memory)",
    signal.SIGFPE: " (an integer division by zero)",
    signal.SIGILL: " (an instruction that this processor does not have)",
}
