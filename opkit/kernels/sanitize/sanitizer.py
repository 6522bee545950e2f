"""Run one call of a kernel's debug build in a child process, under AddressSanitizer and UndefinedBehaviorSanitizer.

The kernel's generated unit and :func:`main_unit` are linked into one executable with ``-fsanitize=address,undefined``.
The child has neither Python nor torch in it: it reads one file, the call, and writes another, its result. Each
tensor has a block of memory of exactly its size, so that an access of one element too many is an error.

Leaks are not detected: LeakSanitizer has to ptrace its own process, which containers and debuggers forbid (every run
would then fail), and OpenMP and other libraries cache memory on purpose. Data races are not detected either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, cast

from opkit import errors
from opkit.kernels.sanitize import report as sanitizer_report
from opkit.kernels.sanitize.call import CallResult, DebugBuffer, DebugCall, TensorValue, Value
from opkit.kernels.sanitize.report import ChildExit

__all__ = ["DebugBuffer", "Result", "TensorValue", "Value", "main_unit", "run"]

_INCLUDE = Path(__file__).parents[1] / "include"
# Variables that the child inherits; llvm-symbolizer is found in PATH.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "OMP_NUM_THREADS")
_LOG_BYTES = 1 << 18  # bytes of the beginning, and of the end, of a child's output that are stored
_GRACE = 5.0  # seconds in which a child that took too long can print its stack

_COMMON = {
    "allow_addr2line": "1",
    "color": "never",
    "exitcode": "99",
    "handle_abort": "1",
    "handle_sigfpe": "1",
    "handle_sigill": "1",
    "handle_sigtrap": "1",
    "print_stacktrace": "1",
    "stack_trace_format": f"'{sanitizer_report.FRAME_FORMAT}'",
    "symbolize": "1",
}
_OPTIONS = {
    "UBSAN_OPTIONS": _COMMON,
    "ASAN_OPTIONS": {
        **_COMMON,
        "detect_leaks": "0",
        "detect_stack_use_after_return": "1",
        "redzone": str(sanitizer_report.RED_ZONE),  # an index that is off by some hundred elements hits no other tensor
    },
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a call without errors.

    Attributes:
        code: the value that the kernel returned.
        message: the message of ``opk_fail``, with file and line; else the text that it returned; else None.
        written: the bytes of the writable buffers by parameter; for a list, one entry an element (None: not writable).
    """

    code: int
    message: str | None
    written: dict[str, bytes | list[bytes | None]]


@functools.cache
def main_unit() -> str:
    """Return the C text of the program around the kernel: the other unit of the executable."""
    before, after = (_INCLUDE / "debug_main.c").read_text(encoding="utf-8").split('#include "opkit.h"\n')
    header = (_INCLUDE / "opkit.h").read_text(encoding="utf-8")
    resumed = before.count("\n") + 2
    return f'#line 1 "debug_main.c"\n{before}#line 1 "opkit.h"\n{header}#line {resumed} "debug_main.c"\n{after}'


def run(
    executable: Path,
    *,
    operator: str,
    kernel: str,
    instance: int,
    values: Sequence[tuple[str, Value]],
    described: str,
    timeout: float = 60.0,
) -> Result:
    """Call the kernel's ``instance`` in a child process, with a value (name, value) for each C parameter.

    ``described`` describes the operator's arguments in messages.

    Raises:
        SanitizerError: the kernel misused memory, did something undefined, crashed, wrote to read-only memory, or
            did not finish in ``timeout`` seconds.
        ToolchainError: the executable does not start.
    """
    call, subject = DebugCall(values), f"{operator}: kernel {kernel!r}"
    with tempfile.TemporaryDirectory(prefix="opkit-debug-") as folder, _quotable(executable) as program:
        paths = [str(Path(folder, "call")), str(Path(folder, "result"))]
        call.write(paths[0], instance)
        child, result = _start([program, *paths], len(call), timeout)
    if result.addresses is None:
        raise errors.ToolchainError(_not_started(subject, child))
    return _outcome(call, result, child, subject, f"It was called with {described}")


def _outcome(call: DebugCall, result: CallResult, child: ChildExit, subject: str, called: str) -> Result:
    if child.status != 0 or not result.done:
        _refuse(subject, called, *sanitizer_report.explain(child, call.placed(result.addresses or ()), call.nulls))
    code, message = result.outcome()
    changed = result.changed()
    if changed:
        _refuse(subject, called, f"wrote to {call.labels(changed)}, which the operator does not say it writes to.")
    if child.printed:
        sys.stderr.write(child.printed)
    return Result(code, message, call.written(result))


def _refuse(subject: str, called: str, headline: str, report: Sequence[str] = ()) -> NoReturn:
    lines = [f"{subject} {headline}", called]
    if report:
        lines += ["The report of the debug build:", *(f"  {line}" for line in report)]
    raise errors.SanitizerError("\n".join(lines))


def _not_started(subject: str, child: ChildExit) -> str:
    return (
        f"{subject}: its debug build does not start here. Check that the compiler's sanitizer libraries (libasan, libubsan) "
        f"are installed, or build the kernel without debug=True. It {child.manner} and printed: {child.printed.strip()!r}"
    )


@contextlib.contextmanager
def _quotable(executable: Path) -> Iterator[str]:
    """Yield the executable's path, or that of a copy: clang's symbolizer hangs on a path with a quote in it."""
    path = os.path.realpath(executable)
    if not any(character in path for character in '"\r\n'):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="opkit-debug-", dir="/tmp") as folder:
        yield shutil.copy(path, os.path.join(folder, "program"))


def _start(command: list[str], blocks: int, timeout: float) -> tuple[ChildExit, CallResult]:
    """Run the child; if it does not reach ``main``, once more without random addresses.

    The sanitizers of older compilers cannot start where Linux randomises 32 bits of an address, as newer ones do.
    """
    child, result = _attempt(command, blocks, timeout)
    setarch = shutil.which("setarch")
    if result.addresses is not None or setarch is None:
        return child, result
    fixed = _attempt([setarch, platform.machine(), "--addr-no-randomize", *command], blocks, timeout)
    return (child, result) if fixed[1].addresses is None else fixed


def _attempt(command: list[str], blocks: int, timeout: float) -> tuple[ChildExit, CallResult]:
    result = Path(command[-1])
    result.unlink(missing_ok=True)
    child = _supervise(command, timeout)
    return child, CallResult(result.read_bytes() if result.exists() else b"", blocks)


def _environment() -> dict[str, str]:
    inherited = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    options = {name: ":".join(f"{key}={value}" for key, value in table.items()) for name, table in _OPTIONS.items()}
    return {**inherited, **options, "LC_ALL": "C"}


def _supervise(command: list[str], timeout: float) -> ChildExit:
    """Run the child on the parent's standard output, so that a kernel's printf is visible; collect its standard error."""
    printed = bytearray()
    executable = command[-3]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environment())
    except OSError as error:
        return ChildExit(executable, 127, None, str(error))
    with process:
        reader = threading.Thread(target=_collect, args=(cast(io.BufferedReader, process.stderr), printed), daemon=True)
        reader.start()
        late = _wait(process, timeout)
        reader.join()
    return ChildExit(executable, process.returncode, timeout if late else None, printed.decode(errors="replace"))


def _wait(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Return whether it took too long. It is then aborted, so that the sanitizer prints its stack, and killed."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        return True
    except BaseException:  # Control-C: the child must not outlive this process
        process.kill()
        raise
    return False


def _collect(stream: io.BufferedReader, printed: bytearray) -> None:
    while chunk := stream.read1(_LOG_BYTES):
        printed += chunk
        if len(printed) > 3 * _LOG_BYTES:
            del printed[_LOG_BYTES : len(printed) - _LOG_BYTES]
