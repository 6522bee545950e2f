"""Run one call of a kernel's debug build in a child process, under AddressSanitizer and UndefinedBehaviorSanitizer.

The kernel's generated unit and :func:`main_unit` are linked into one executable with ``-fsanitize=address,undefined``.
The child has neither Python nor torch in it: it reads one file, the call, and writes another, its result; the format of both
is documented in ``include/debug_main.c``. A call is blocks of memory, links (places in blocks that hold the address of
another), and one value for each C parameter, so the child need not know what a tensor is. Each tensor has a block of exactly
its size, so that an access of one element too many is an error.

Leaks are not detected: LeakSanitizer has to ptrace its own process, which containers and debuggers forbid (every run
would then fail), and OpenMP and other libraries cache memory on purpose. Data races are not detected either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from opkit import errors
from opkit.kernels import sanitizer_child as sanitizer_report
from opkit.kernels.sanitizer_child import ChildExit, MemoryBlock

__all__ = ["DebugBuffer", "Result", "TensorValue", "Value", "main_unit", "run"]

_INCLUDE = Path(__file__).parent / "include"


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
    child = sanitizer_report.run_child(command, timeout)
    return child, CallResult(result.read_bytes() if result.exists() else b"", blocks)


# ---- the files of a call ---------------------------------------------------------------------------------------------


_HAS_DATA, _WRITABLE = 1, 2  # flags of a block
_RECORD = struct.Struct("<qqqqii")  # opk_tensor: data, sizes, strides, rank, dtype, device_index
_POINTERS = (0, 8, 16)  # offsets of its first three fields
_WORD_MASK = 2**64 - 1

Target: TypeAlias = tuple[int, int]
"""A block's number, and bytes from its start."""


@dataclasses.dataclass(frozen=True, eq=False)
class DebugBuffer:
    """Memory into which the kernel receives a pointer.

    The same object passed twice is the same memory. A buffer that is not ``writable`` must be unchanged after the call.

    Attributes:
        name: its name in messages.
        data: anything with the buffer protocol, C-contiguous; with ``poison`` only its size counts.
        offset: bytes from its start to where the pointer points.
        writable: the kernel may write to it, and its bytes are returned.
        poison: filled with 0xff (NaN, -1), like memory that is not initialised.
    """

    name: str
    data: bytes | bytearray | memoryview
    offset: int = 0
    writable: bool = False
    poison: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class TensorValue:
    """An ``opk_tensor``; ``buffer`` covers its elements from the lowest address to the highest, and no more."""

    buffer: DebugBuffer
    sizes: Sequence[int]
    strides: Sequence[int]
    dtype: int
    device_index: int = -1


Value: TypeAlias = (
    int
    | float
    | str
    | bytes
    | DebugBuffer
    | TensorValue
    | Sequence[DebugBuffer | None]
    | Sequence[TensorValue | None]
    | None
)
"""A C parameter's value: an int or a float for a scalar of that kind, None for NULL, a string, a pointer, ``opk_tensor*``.

A list of buffers becomes an array of pointers, a list of tensors an array of ``opk_tensor`` (all zeros for None).
"""


@dataclasses.dataclass(frozen=True)
class _Planned:
    label: str
    data: bytes | bytearray | memoryview
    size: int
    writable: bool = False
    poison: bool = False

    @property
    def flags(self) -> int:
        return (0 if self.poison else _HAS_DATA) | (_WRITABLE if self.writable else 0)


class DebugCall:
    """The call of a debug build, with a value (name, value) for each C parameter."""

    def __init__(self, values: Sequence[tuple[str, Value]]) -> None:
        self.nulls = [repr(name) for name, value in values if value is None]
        self._parameters = dict(values)
        self._blocks: list[_Planned] = []
        self._links: list[tuple[int, int, int, int]] = []
        self._known: dict[int, int] = {}  # id(DebugBuffer): block; the parameters keep the buffers alive
        self._values = [self._value(name, value) for name, value in values]

    def __len__(self) -> int:
        return len(self._blocks)

    def _value(self, name: str, value: Value) -> tuple[int, int]:
        match value:
            case None:
                return -1, 0
            case int():
                return -1, value
            case float():
                return -1, struct.unpack("<q", struct.pack("<d", value))[0]
            case str() | bytes():
                text = value.encode() if isinstance(value, str) else value
                return self._add(f"the string {name!r}", text + b"\0"), 0
            case DebugBuffer():
                return self._buffer(value)
            case TensorValue():
                return self._tensors(f"the opk_tensor of {name!r}", {0: value}, 1), 0
            case list() | tuple():
                return self._list(name, value), 0
        raise errors.ArgumentError(f"a debug call: {name!r} cannot be passed to C: {value!r}.")

    def _list(self, name: str, items: Sequence[DebugBuffer | None] | Sequence[TensorValue | None]) -> int:
        buffers = {at: item for at, item in enumerate(items) if isinstance(item, DebugBuffer)}
        tensors = {at: item for at, item in enumerate(items) if isinstance(item, TensorValue)}
        absent = sum(item is None for item in items)
        if len(items) != absent + max(len(buffers), len(tensors)):
            raise errors.ArgumentError(f"a debug call: {name!r} cannot be passed to C: {items!r}.")
        if not buffers:
            return self._tensors(f"the list {name!r}", tensors, len(items))
        targets = {8 * at: self._buffer(buffer) for at, buffer in buffers.items()}
        return self._linked(f"the list {name!r}", bytes(8 * len(items)), targets)

    def _tensors(self, label: str, tensors: Mapping[int, TensorValue], count: int) -> int:
        records, targets = bytearray(count * _RECORD.size), {}
        for at, tensor in tensors.items():
            start = at * _RECORD.size
            _RECORD.pack_into(records, start, 0, 0, 0, len(tensor.sizes), tensor.dtype, tensor.device_index)
            targets |= {start + field: to for field, to in zip(_POINTERS, self._tensor(tensor), strict=True)}
        return self._linked(label, bytes(records), targets)

    def _tensor(self, value: TensorValue) -> tuple[Target, Target, Target]:
        name = repr(value.buffer.name)
        sizes, strides = (struct.pack(f"<{len(numbers)}q", *numbers) for numbers in (value.sizes, value.strides))
        sized, strided = self._add(f"the sizes of {name}", sizes), self._add(f"the strides of {name}", strides)
        return self._buffer(value.buffer), (sized, 0), (strided, 0)

    def _linked(self, label: str, data: bytes, targets: Mapping[int, Target]) -> int:
        block = self._add(label, data)
        self._links += [(block, at, *target) for at, target in targets.items()]
        return block

    def _buffer(self, buffer: DebugBuffer) -> Target:
        if id(buffer) not in self._known:
            view = memoryview(buffer.data)
            if not view.c_contiguous:
                raise errors.ArgumentError(f"a debug call: the memory of {buffer.name!r} is not contiguous.")
            self._known[id(buffer)] = len(self._blocks)
            planned = _Planned(repr(buffer.name), buffer.data, view.nbytes, buffer.writable, buffer.poison)
            self._blocks.append(planned)
        return self._known[id(buffer)], buffer.offset

    def _add(self, label: str, data: bytes) -> int:
        self._blocks.append(_Planned(label, data, len(data)))
        return len(self._blocks) - 1

    def write(self, path: str, instance: int) -> None:
        """Write the file of a call of the kernel's ``instance``."""
        rows = [(block.size, block.flags) for block in self._blocks]
        words = [instance, len(rows), len(self._links), len(self._values)]
        words += [word for table in (rows, self._links, self._values) for row in table for word in row]
        with open(path, "wb") as file:
            file.write(b"OPKCALL1" + struct.pack(f"<{len(words)}Q", *(word & _WORD_MASK for word in words)))
            for block in self._blocks:
                if block.size and not block.poison:
                    file.write(block.data)
                    file.write(bytes(-block.size % 8))

    def placed(self, addresses: Sequence[int]) -> list[MemoryBlock]:
        """Return the blocks with the addresses that the child reported."""
        return [MemoryBlock(block.label, at, block.size) for block, at in zip(self._blocks, addresses, strict=True)]

    def labels(self, numbers: Sequence[int]) -> str:
        """Return the names of some blocks, for a message."""
        return ", ".join(self._blocks[number].label for number in numbers)

    def written(self, result: CallResult) -> dict[str, bytes | list[bytes | None]]:
        """Return the bytes of the writable buffers, by parameter."""
        contents = {number: result.take(block.size) for number, block in enumerate(self._blocks) if block.writable}
        found = {name: self._content(value, contents) for name, value in self._parameters.items()}
        return {name: content for name, content in found.items() if content is not None}

    def _content(self, value: Value, contents: Mapping[int, bytes]) -> bytes | list[bytes | None] | None:
        if isinstance(value, list | tuple):
            items = [self._one_content(item, contents) for item in value]
            return items if any(item is not None for item in items) else None
        return self._one_content(value, contents)

    def _one_content(self, value: object, contents: Mapping[int, bytes]) -> bytes | None:
        buffer = value.buffer if isinstance(value, TensorValue) else value
        return contents.get(self._known[id(buffer)]) if isinstance(buffer, DebugBuffer) else None


class CallResult:
    """The result file of a call with ``blocks`` blocks, read from front to back.

    Attributes:
        addresses: the address of each block in the child; None if it ended before it reported them.
        done: the child ran to its end.
    """

    def __init__(self, data: bytes, blocks: int) -> None:
        self._data, self._at = data, 8
        whole = data.startswith(b"OPKBASE1") and len(data) >= 8 * (blocks + 1)
        self.addresses = self.words(blocks) if whole else None
        self.done = whole and self.take(8) == b"OPKDONE1"

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes, and skip the padding after them."""
        taken = self._data[self._at : self._at + size]
        self._at += size + -size % 8
        return taken

    def words(self, count: int) -> tuple[int, ...]:
        """Return the next ``count`` words."""
        return struct.unpack(f"<{count}q", self.take(8 * count))

    def outcome(self) -> tuple[int, str | None]:
        """Return the kernel's code and message."""
        code, length = self.words(2)
        return code, None if length < 0 else self.take(length).decode(errors="replace")

    def changed(self) -> tuple[int, ...]:
        """Return the numbers of read-only blocks that have changed."""
        (count,) = self.words(1)
        return self.words(count)
