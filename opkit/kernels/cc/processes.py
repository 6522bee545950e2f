"""Run compilers as processes, and turn their output into an error message with the author's own lines.

Several run at once, without shell and input, each with a time limit and stopped at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from opkit.errors import CompileError, ToolchainError
from opkit.kernels.cc import nvrtc
from opkit.kernels.cc.progress import printable

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


# ---- error messages --------------------------------------------------------------------------------------------------


GENERATED = "<opkit>"
"""The file name of generated lines."""

_MAX_LINES = 40
_MAX_COLUMNS = 200

_DIRECTIVE = re.compile(r'^[ \t]*#[ \t]*(?:line[ \t]+)?(\d+)(?:[ \t]+"((?:[^"\\]|\\.)*)")?')
_HEAD = re.compile(
    r"^(?P<file>.+?)(?::(?P<line>\d+):(?:(?P<column>\d+):)?|\((?P<nvcc>\d+)\):) (?P<kind>[a-z]+(?: [a-z]+)?(?: #\S+)?): "
)
_TOOL = re.compile(r"^(\S*/)?([\w-]*-)?(ld|ld\.\w+|collect2|cc1|cc1plus|gcc|g\+\+|clang|clang\+\+|nvcc)(-[\d.]+)?: ")
_CONTEXT = re.compile(r"^(In file included from |.*: In |.*: At |\s+from )")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\012", "\r": "\\015"}


def quoted_file(name: str) -> str:
    r"""Return a file name as a ``#line`` directive takes it.

    >>> print(quoted_file('a "b"\n'))
    "a \"b\"\012"
    """
    return '"' + "".join(_ESCAPES.get(each, each) for each in name) + '"'


def _unquoted(text: str) -> str:
    text = re.sub(r"\\([0-7]{1,3})", lambda found: chr(int(found[1], 8)), text)
    return re.sub(r"\\n", "\n", re.sub(r"\\([\\\"])", r"\1", text)) if "\\" in text else text


def source_lines(texts: Iterable[tuple[str, str]]) -> dict[tuple[str, int], str]:
    """Return each line of named texts by the file and number that its ``#line`` directives set."""
    lines: dict[tuple[str, int], str] = {}
    for name, text in texts:
        file, number = name, 1
        for line in text.split("\n"):
            directive = _DIRECTIVE.match(line)
            if directive is None:
                lines[file, number] = line
                number += 1
            else:
                number = int(directive[1])
                file = file if directive[2] is None else _unquoted(directive[2])
    return lines


def failure_message(
    label: str, outcome: Outcome, again: tuple[str, ...], folder: Path, texts: Sequence[tuple[str, str]]
) -> str:
    """Return the message of a :class:`~opkit.errors.CompileError`: the cause, the author's lines, the command."""
    lines = excerpt(outcome.log.replace(f"{folder}/", ""), source_lines(texts))
    lines = [f"{label}: {_ending(outcome)}", *lines, "To see it again:", f"  {shlex.join(again)}"]
    return "\n".join(printable(line.expandtabs(8)) for line in lines)


def compile_error(message: str, log: str, command: tuple[str, ...]) -> CompileError:
    """Return the exception, with the compiler's whole output as ``log``, and as ``command`` the command that repeats it."""
    exception = CompileError(message)
    vars(exception).update(log=log, command=command)
    return exception


def _ending(outcome: Outcome) -> str:
    program = "NVRTC" if os.fspath(nvrtc.PROGRAM) in outcome.command else Path(outcome.command[0]).name
    if outcome.status is None:
        return f"{program} was stopped: it had not finished within the time limit (OPKIT_BUILD_TIMEOUT)."
    if outcome.status == 0:
        return f"{program} reported success and wrote no file."
    if outcome.status < 0:
        return f"{program} was ended by signal {-outcome.status}."
    return f"{program} refused the source."


def excerpt(log: str, lines: dict[tuple[str, int], str]) -> list[str]:
    """Return the errors in the author's own files with their source lines; if there are none, all errors; else the log."""
    own = {file for file, _ in lines} - {GENERATED}
    for file in own:
        log = log.replace(file, printable(file))
    mention = re.compile("|".join(rf"(?:^|\s){re.escape(printable(file))}[:(]" for file in sorted(own)) or "(?!)")
    errors = [block for block in _blocks(log) if any("error" in _kind(line) or _TOOL.match(line) for line in block)]
    theirs = [block for block in errors if any(mention.search(line) for line in block)]
    chosen = theirs or errors or [log.splitlines()]
    shown = {(printable(file), number): text for (file, number), text in lines.items()}
    return _shortened([line for block in _distinct(chosen) for line in _with_source(block, shown)])


def _blocks(log: str) -> list[list[str]]:
    """Split the log before each error or warning and the lines that introduce it ("In function ...")."""
    blocks: list[list[str]] = [[]]
    for line in log.splitlines():
        starts = _CONTEXT.match(line) or _TOOL.match(line) or _kind(line) not in ("", "note")
        if starts and blocks[-1] and not _CONTEXT.match(blocks[-1][-1]):
            blocks.append([])
        blocks[-1].append(line)
    return blocks


def _kind(line: str) -> str:
    head = _HEAD.match(line)
    return head["kind"] if head is not None else ""


def _distinct(blocks: list[list[str]]) -> Iterable[list[str]]:
    """Return each block once: a kernel that is compiled for several dtypes has the same errors for each."""
    first: dict[str, list[str]] = {}
    for block in blocks:
        error_line = next((line for line in block if "error" in _kind(line)), "\n".join(block))
        first.setdefault(error_line, block)
    return first.values()


def _with_source(block: list[str], lines: dict[tuple[str, int], str]) -> Iterable[str]:
    """Yield a block with the source line, and a mark under its column, below each line that names one."""
    for line in block:
        yield line
        head = _HEAD.match(line)
        text = None if head is None or head["line"] is None else lines.get((head["file"], int(head["line"])))
        if head is not None and text is not None:
            yield f"{head['line']:>5} | {text.expandtabs(8)}"
            if head["column"] is not None:
                yield f"{'':>5} | {_indent(text, int(head['column']))}^"


def _indent(text: str, column: int) -> str:
    """Return blanks as wide as the text before a column, which compilers count in bytes."""
    before = text.encode("utf-8", "replace")[: column - 1].decode("utf-8", "ignore")
    return " " * len(before.expandtabs(8))


def _shortened(lines: list[str]) -> list[str]:
    cut = [line if len(line) <= _MAX_COLUMNS else line[:_MAX_COLUMNS] + " ..." for line in lines[:_MAX_LINES]]
    rest = len(lines) - len(cut)
    return [*cut, f"... and {rest} more lines; the exception's .log has them all"] if rest else cut
