"""Run the child process of a debug build, and explain its end.

A headline names the tensor and the author's line; the sanitizer's report is shortened.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import cast

_MARK = "\x1f"  # between the parts of a frame: no path has it
FRAME_FORMAT = _MARK.join(("", "%n", "%m", "%f", "%s", "%l", ""))
"""The sanitizers' ``stack_trace_format``: number, module, function, file, line."""

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_BEGINNING = re.compile(r"runtime error: |ERROR: AddressSanitizer|ERROR: UndefinedBehaviorSanitizer")
_END = re.compile(
    r"SUMMARY: |Shadow bytes around|Shadow byte legend|==\d+==ABORTING|(Address|UndefinedBehavior)Sanitizer can not"
)
_KIND = re.compile(r"ERROR: (?:Address|UndefinedBehavior)Sanitizer:? (?:attempting )?([^\s:]+)")
_NOISE = re.compile(
    r"=+$|HINT: this may be a false|\s+\(longjmp and C|.*Sanitizer:DEADLYSIGNAL"
    r"|0x[0-9a-f]+: note: pointer points here|\s+(\^|\?\?|[0-9a-f]{2})\s|\s+\^$"
)
_REGISTERS = re.compile(r"\s*\(?\b(?:at )?pc 0x.*")
_ACCESS = re.compile(r"\b(READ|WRITE) of size (\d+)")
_SIGNALLED = re.compile(r"caused by a (READ|WRITE) memory access")
_REGION = re.compile(r"\d+-byte region \[(0x[0-9a-f]+),")
_BOTTOM = re.compile(r"main$|_start$|__libc_start|start_thread|clone3?$|asan_thread_start|gomp_thread_start")
_SYSTEM = re.compile(r"/usr/|.*/include/c\+\+/|.*/lib(64)?/(gcc|clang|llvm[^/]*)/|.*libsanitizer/")
RED_ZONE = 1024
"""Bytes before and after each tensor that no kernel may access."""
_NULL_PAGE = 1 << 16
_NEAR = 1 << 36  # bytes; a wild index of 32 bits stays within it
_PRINTED_LINES = 5
_FRAMES = 12  # of one stack; a recursion without end has hundreds

_WITHOUT_PLACE = (
    "stack-",
    "dynamic-stack-",
    "global-",
    "ABRT",
    "FPE",
    "ILL",
    "TRAP",
    "allocation-size",
    "calloc-",
    "out-of-",
)
_KINDS = {
    "SEGV": "crashed (SIGSEGV)",
    "BUS": "crashed (SIGBUS)",
    "FPE": "crashed on an arithmetic error (SIGFPE)",
    "ILL": "crashed on an illegal instruction (SIGILL)",
    "ABRT": "aborted (SIGABRT)",
}

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
    "stack_trace_format": f"'{FRAME_FORMAT}'",
    "symbolize": "1",
}
_OPTIONS = {
    "UBSAN_OPTIONS": _COMMON,
    "ASAN_OPTIONS": {
        **_COMMON,
        "detect_leaks": "0",
        "detect_stack_use_after_return": "1",
        "redzone": str(RED_ZONE),  # an index that is off by some hundred elements hits no other tensor
    },
}


def _bytes(count: int) -> str:
    return "1 byte" if count == 1 else f"{count} bytes"


@dataclasses.dataclass(frozen=True)
class MemoryBlock:
    """A block of the child's memory: its name in messages, and its address there."""

    label: str
    address: int
    size: int

    def distance(self, address: int) -> int:
        """Return the bytes from the block to ``address``: 0 inside; an empty block has no inside."""
        return max(self.address - address, address - self.address - self.size + 1, 0)

    def place(self, address: int) -> str:
        """Describe ``address`` relative to the block."""
        offset = address - self.address
        if offset < 0:
            where = f"{_bytes(-offset)} before the start of"
        elif offset < self.size:
            where = f"byte {offset} of"
        else:
            where = f"{_bytes(offset - self.size)} past the end of"
        return f"{where} {self.label}, which has {_bytes(self.size)}"


@dataclasses.dataclass(frozen=True)
class ChildExit:
    """The end of a child process.

    Attributes:
        executable: its path, with no links in it.
        status: 0, its exit status, or minus the signal that ended it.
        late: its time limit in seconds, if it took longer.
        printed: its standard error.
    """

    executable: str
    status: int
    late: float | None
    printed: str

    @property
    def manner(self) -> str:
        """How the child ended, for a message."""
        if self.late is not None:
            return f"did not finish within {self.late:g} s"
        if self.status < 0:
            return f"was ended by the signal {signal.Signals(-self.status).name}"
        return f"ended the process with exit status {self.status}"


@dataclasses.dataclass(frozen=True)
class StackFrame:
    """One line of a stack."""

    module: str
    function: str
    file: str
    line: str

    @property
    def known(self) -> bool:
        """Whether its source file is known."""
        return self.file not in ("", "<null>", "(null)", "??")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" if self.known else f"in {self.function}"


def explain(child: ChildExit, blocks: Sequence[MemoryBlock], nulls: Sequence[str]) -> tuple[str, list[str]]:
    """Return a headline, to follow the kernel's name, and the trimmed report.

    ``nulls`` are the parameters for which NULL was passed.
    """
    before, report = _split(child.printed)
    trimmed, author = _trim(report, child.executable)
    where = f", at {author}" if author else ""
    headline = _headline(child, report, blocks, nulls)
    if before:
        trimmed = ["it printed:", *before[-_PRINTED_LINES:], *trimmed]
    return f"{headline}{where}.", trimmed


def _split(printed: str) -> tuple[list[str], list[str]]:
    """Return the lines that the kernel itself printed, and the relevant lines of the report."""
    lines = [line for line in printed.splitlines() if line.strip() and not _NOISE.match(line)]
    begin = next((at for at, line in enumerate(lines) if _BEGINNING.search(line)), len(lines))
    end = next((at for at, line in enumerate(lines) if at > begin and _END.search(line)), len(lines))
    return lines[:begin], lines[begin:end]


# ---- the headline -----------------------------------------------------------------------------------------------------


def _headline(child: ChildExit, report: Sequence[str], blocks: Sequence[MemoryBlock], nulls: Sequence[str]) -> str:
    if child.late is not None or not report:
        return child.manner
    undefined = report[0].partition("runtime error: ")[2]
    if undefined:
        return f"did something undefined: {undefined}{_pointer(undefined, blocks, nulls)}"
    kind, access, place = _kind(report[0]), _access(report), _address_of(report, blocks, nulls)
    return f"{_KINDS.get(kind, f'misused memory ({kind})')}{access}{place}"


def _kind(header: str) -> str:
    matched = _KIND.search(header)
    return matched.group(1) if matched else "unknown"


def _access(report: Sequence[str]) -> str:
    text = "\n".join(report)
    if sized := _ACCESS.search(text):
        return f": a {sized.group(1).lower()} of {_bytes(int(sized.group(2)))}"
    signalled = _SIGNALLED.search(text)
    return f": a {signalled.group(1).lower()}" if signalled else ""


def _pointer(message: str, blocks: Sequence[MemoryBlock], nulls: Sequence[str]) -> str:
    if "null pointer" in message:
        return _absent(nulls)
    found = _ADDRESS.search(message)
    return _nearest(int(found.group(), 16), blocks, RED_ZONE) if found else ""


def _address_of(report: Sequence[str], blocks: Sequence[MemoryBlock], nulls: Sequence[str]) -> str:
    kind, text = _kind(report[0]), "\n".join(report)
    found = _ADDRESS.search(_REGISTERS.sub("", report[0]))
    if found is None or kind.startswith(_WITHOUT_PLACE) or "high value address" in text:
        return ""
    address, region = int(found.group(), 16), _REGION.search(text)
    if address < _NULL_PAGE:
        return f" at an address next to NULL{_absent(nulls)}"
    if region is None:
        return _nearest(address, blocks)
    return _nearest(address, [block for block in blocks if block.address == int(region.group(1), 16)])


def _absent(nulls: Sequence[str]) -> str:
    return f" (NULL was passed for {', '.join(nulls)})" if nulls else ""


def _nearest(address: int, blocks: Sequence[MemoryBlock], limit: int = _NEAR) -> str:
    nearest = min(blocks, key=lambda block: block.distance(address), default=None)
    if nearest is None or nearest.distance(address) > limit:
        return ""
    return f"{' at' if nearest.distance(address) <= RED_ZONE else '; the nearest tensor:'} {nearest.place(address)}"


# ---- the report -------------------------------------------------------------------------------------------------------


def _trim(report: Sequence[str], executable: str) -> tuple[list[str], StackFrame | None]:
    """Return the report with only the author's part of each stack, and the first frame of the author."""
    trimmed: list[str] = []
    first: StackFrame | None = None
    for lines, frames in _passages(report):
        shown, author = _of_author(frames, executable)
        first = first or author
        trimmed += lines if shown or not frames or not trimmed else lines[:-1]
        trimmed += [f"    {frame}" for frame in shown]
    return trimmed, first


def _passages(report: Sequence[str]) -> Iterator[tuple[list[str], list[StackFrame]]]:
    """Yield lines of text with the stack that follows them."""
    lines: list[str] = []
    frames: list[StackFrame] = []
    for line in report:
        frame = _frame(line)
        if frame is None and frames:
            yield lines, frames
            lines, frames = [], []
        if frame is None:
            lines.append(_REGISTERS.sub("", re.sub(r"^==\d+==", "", line)))
        else:
            frames.append(frame)
    yield lines, frames


def _frame(line: str) -> StackFrame | None:
    parts = line.split(_MARK)
    if len(parts) != 7:
        return None
    module, function, file, number = parts[2:6]
    return StackFrame(module, function, file.removeprefix("./"), number)


def _of_author(frames: Sequence[StackFrame], executable: str) -> tuple[list[StackFrame], StackFrame | None]:
    """Return the frame that the author's innermost one called, if any, and the author's frames; and that innermost one."""
    ours = (
        os.path.basename(each.file) == "debug_main.c" or _BOTTOM.match(each.function) is not None for each in frames
    )
    end = next((at for at, own in enumerate(ours) if own), len(frames))
    authors = [at for at, frame in enumerate(frames[:end]) if _is_author(frame, executable)]
    if not authors:
        return [], None
    called = [authors[0] - 1] if authors[0] else []
    return [frames[at] for at in (*called, *authors)][:_FRAMES], frames[authors[0]]


def _is_author(frame: StackFrame, executable: str) -> bool:
    """Return whether a frame is in the executable and in a known file that is no header of the compiler, as of intrinsics."""
    same = os.path.basename(frame.module) == os.path.basename(executable)
    return same and frame.known and _SYSTEM.match(frame.file) is None


# ---- the process ------------------------------------------------------------------------------------------------------


def run_child(command: list[str], timeout: float) -> ChildExit:
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


def _environment() -> dict[str, str]:
    inherited = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    options = {name: ":".join(f"{key}={value}" for key, value in table.items()) for name, table in _OPTIONS.items()}
    return {**inherited, **options, "LC_ALL": "C"}


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
