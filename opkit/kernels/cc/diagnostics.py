"""What a compiler said, as the author of a kernel wants to read it: their own lines, and how to see it again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from opkit.errors import CompileError
from opkit.kernels.cc.processes import Outcome
from opkit.kernels.cc.progress import printable

GENERATED = "<opkit>"
"""The file name that generated lines go by."""

_MOST_LINES = 40
_MOST_COLUMNS = 200

_DIRECTIVE = re.compile(r'^[ \t]*#[ \t]*(?:line[ \t]+)?(\d+)(?:[ \t]+"((?:[^"\\]|\\.)*)")?')
_HEAD = re.compile(
    r"^(?P<file>.+?)(?::(?P<line>\d+):(?:(?P<column>\d+):)?|\((?P<nvcc>\d+)\):) (?P<kind>[a-z]+(?: [a-z]+)?(?: #\S+)?): "
)
_TOOL = re.compile(r"^(\S*/)?([\w-]*-)?(ld|ld\.\w+|collect2|cc1|cc1plus|gcc|g\+\+|clang|clang\+\+|nvcc)(-[\d.]+)?: ")
_CONTEXT = re.compile(r"^(In file included from |.*: In |.*: At |\s+from )")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\012", "\r": "\\015"}


def quoted(name: str) -> str:
    r"""A file name as a ``#line`` directive takes it.

    >>> print(quoted('a "b"\n'))
    "a \"b\"\012"
    """
    return '"' + "".join(_ESCAPES.get(each, each) for each in name) + '"'


def _unquoted(text: str) -> str:
    text = re.sub(r"\\([0-7]{1,3})", lambda found: chr(int(found[1], 8)), text)
    return re.sub(r"\\n", "\n", re.sub(r"\\([\\\"])", r"\1", text)) if "\\" in text else text


def source_lines(texts: Iterable[tuple[str, str]]) -> dict[tuple[str, int], str]:
    """Each line of named texts by the file and number that its ``#line`` directives give it."""
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


def failure(
    label: str, outcome: Outcome, again: tuple[str, ...], folder: Path, texts: Sequence[tuple[str, str]]
) -> str:
    """The message of a :class:`~opkit.errors.CompileError`: how it ended, the author's lines, the command."""
    lines = excerpt(outcome.log.replace(f"{folder}/", ""), source_lines(texts))
    lines = [f"{label}: {_ending(outcome)}", *lines, "To see it again:", f"  {shlex.join(again)}"]
    return "\n".join(printable(line.expandtabs(8)) for line in lines)


def error(message: str, log: str, command: tuple[str, ...]) -> CompileError:
    """The exception, with all that the compiler printed in ``log`` and the command that prints it again in ``command``."""
    made = CompileError(message)
    vars(made).update(log=log, command=command)
    return made


def _ending(outcome: Outcome) -> str:
    program = Path(outcome.command[0]).name
    if outcome.status is None:
        return f"{program} was stopped: it had not finished within the time limit (OPKIT_BUILD_TIMEOUT)."
    if outcome.status == 0:
        return f"{program} reported success and wrote no file."
    if outcome.status < 0:
        return f"{program} was ended by signal {-outcome.status}."
    return f"{program} refused the source."


def excerpt(log: str, lines: dict[tuple[str, int], str]) -> list[str]:
    """The errors in the author's own files with the lines they are about; without any, all errors; else all of it."""
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
    """The log cut before each error or warning, with the lines that lead up to it ("In function ...")."""
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
    """Each block once: a kernel is compiled for several dtypes, and says the same of each."""
    first: dict[str, list[str]] = {}
    for block in blocks:
        first.setdefault(_sentence(block), block)
    return first.values()


def _sentence(block: list[str]) -> str:
    """What a block is about: the line with the error, without what leads up to it and follows from it."""
    return next((line for line in block if "error" in _kind(line)), "\n".join(block))


def _with_source(block: list[str], lines: dict[tuple[str, int], str]) -> Iterable[str]:
    """A block with the source line, and a mark under its column, below each line that names one."""
    for line in block:
        yield line
        head = _HEAD.match(line)
        text = None if head is None or head["line"] is None else lines.get((head["file"], int(head["line"])))
        if head is not None and text is not None:
            yield f"{head['line']:>5} | {text.expandtabs(8)}"
            if head["column"] is not None:
                yield f"{'':>5} | {_indent(text, int(head['column']))}^"


def _indent(text: str, column: int) -> str:
    """Blanks as wide as what stands before a column, which compilers count in bytes."""
    before = text.encode("utf-8", "replace")[: column - 1].decode("utf-8", "ignore")
    return " " * len(before.expandtabs(8))


def _shortened(lines: list[str]) -> list[str]:
    cut = [line if len(line) <= _MOST_COLUMNS else line[:_MOST_COLUMNS] + " ..." for line in lines[:_MOST_LINES]]
    rest = len(lines) - len(cut)
    return [*cut, f"... and {rest} more lines; the exception's .log has them all"] if rest else cut
