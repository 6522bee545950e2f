"""Properties asked in forked processes beside those asked in this one: cores are used, and a crash there ends nothing here.

A forked process computes on one thread (see :mod:`opkit.contract.processes.child`), so what is asked about threads, and what
compiles, is asked in this one. Each process takes the next property when it has answered one. Before each case it writes down
which: where it ends, the property is asked again, each case in a process of its own, for a small example.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import select
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from opkit.contract.calls.cases import Case
from opkit.contract.processes import child, wire
from opkit.contract.processes.child import ChildEnded, ChildProcess, Worker
from opkit.contract.prop import CallRefused, NotApplicable, Property, Remark, Violation
from opkit.contract.search import SearchResult
from opkit.contract.subject import Subject

Ask = Callable[[Property, Sequence[Property]], SearchResult]

_MOST = 4  # processes
_PATIENCE = 300.0  # seconds for one case, which may compile
_LOOK = 1.0  # seconds between two looks at which case is asked
_SIZE = 1 << 16  # bytes of a case's text
_AFTER = "after other calls, "
_DONE = "done"
_HEAD = struct.Struct("qqq")  # how many cases were asked, of which property the latest is, how long its text


def askable(properties: Sequence[Property]) -> list[Property]:
    """Those that forked processes can be asked: where none runs a backward, those that run none."""
    if not any(prop.backward for prop in properties) or child.runs_backward():
        return [*properties]
    return [prop for prop in properties if not prop.backward]


class ForkPool:
    """Forked processes that share out properties; one that ends is forked anew.

    Args:
        properties: what is asked, in order.
        ask: looks for a case that breaks one; it is told which may be asked after it in the same process.

    Attributes:
        left: what has not been answered, in order.
    """

    def __init__(self, properties: Sequence[Property], ask: Ask) -> None:
        self.left = [*properties]
        self._properties = tuple(properties)
        self._ask = ask
        self._tickets = _Tickets(len(self._properties))
        self._count = min(_MOST, len(os.sched_getaffinity(0)), len(self._properties)) if properties else 0
        self._lanes = [_PoolProcess(self._serve) for _ in range(self._count)]

    def poll(self, seconds: float = _LOOK) -> tuple[Property, SearchResult] | None:
        """One of the properties that are left and what was found of it, where that is known within this time."""
        if not self._lanes:
            return self._answered(self.left[0], self._ask(self.left[0], self.left[1:])) if self.left else None
        lane = self._speaking(seconds)
        if lane is None:
            late = next((lane for lane in self._lanes if lane.late()), None)
            return self._stuck(late) if late else None
        try:
            said = lane.life.answer(_PATIENCE)
        except ChildEnded as ended:
            return self._crashed(lane, ended)
        return self._said(lane, said)

    def _serve(self, board: _Board, writer: int) -> None:
        while (number := self._tickets.take()) is not None:
            board.begin(number)
            child.say(writer, json.dumps((number, self._found(number, board))))
        child.say(writer, _DONE)

    def _found(self, number: int, board: _Board) -> dict[str, Any] | None:
        """What is found of a property, to be sent; None where it cannot be sent, and has to be found again."""
        prop, rest = self._properties[number], self._properties[number + 1 :: self._count]
        try:
            return _written(self._ask(dataclasses.replace(prop, check=_noting(prop, board)), rest))
        except wire.Unwritten:
            return None

    def _speaking(self, seconds: float) -> _PoolProcess | None:
        """A process that has said something, or has ended."""
        held = next((lane for lane in self._lanes if lane.life.ready(0.0)), None)
        if held is not None or not seconds:
            return held
        ready = select.select([lane.life for lane in self._lanes], [], [], seconds)[0]
        return next((lane for lane in self._lanes if lane.life in ready), None)

    def _said(self, lane: _PoolProcess, said: str) -> tuple[Property, SearchResult] | None:
        if said == _DONE:
            self._lanes.remove(lane)
            return None
        number, fields = json.loads(said)
        prop = self._properties[number]
        return self._answered(prop, self._ask(prop, ()) if fields is None else _read(fields))

    def _stuck(self, lane: _PoolProcess) -> tuple[Property, SearchResult]:
        lane.life.end()
        prop = self._replaced(lane)
        return self._answered(prop, SearchResult((), skipped=f"one of its cases did not end within {_PATIENCE:g} s"))

    def _crashed(self, lane: _PoolProcess, ended: ChildEnded) -> tuple[Property, SearchResult] | None:
        """Ask again, each case in a child process; where none ends by itself, the case that it ended on is all there is."""
        if not lane.board.asked:  # it ended before it had begun: the others do its part, or this process
            self._lanes.remove(lane)
            return None
        prop, case = self._replaced(lane), lane.board.case()
        found = self._ask(dataclasses.replace(prop, check=_isolated(prop)), ())
        if found.failure is None and case is not None:
            message = f"{_AFTER}what is asked {ended}"
            found = dataclasses.replace(found, skipped="", failure=(case, message))
        return self._answered(prop, found)

    def _replaced(self, lane: _PoolProcess) -> Property:
        """What a process was asking when it ended; another takes its place."""
        self._lanes[self._lanes.index(lane)] = _PoolProcess(self._serve)
        return self._properties[lane.board.number]

    def _answered(self, prop: Property, found: SearchResult) -> tuple[Property, SearchResult]:
        self.left.remove(prop)
        return prop, found


class _PoolProcess:
    """One forked process, and what it writes down."""

    def __init__(self, serve: Callable[[_Board, int], None]) -> None:
        self.board = board = _Board()
        self.life = ChildProcess(lambda _, writer: serve(board, writer), silent=False)
        self._asked, self._since = 0, time.monotonic()

    def late(self) -> bool:
        """Whether it has been at one case for too long."""
        if self.board.asked != self._asked:
            self._asked, self._since = self.board.asked, time.monotonic()
        return time.monotonic() - self._since > _PATIENCE


class _Tickets:
    """The numbers from 0, each of which one process takes: a pipe that all of them read."""

    def __init__(self, count: int) -> None:
        self._reader, writer = os.pipe()
        os.write(writer, bytes(range(count)))
        os.close(writer)
        weakref.finalize(self, os.close, self._reader)

    def take(self) -> int | None:
        """The next, or None where all are taken."""
        return next(iter(os.read(self._reader, 1)), None)


class _Board:
    """Memory of both processes: how many cases were asked, and the latest."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + _SIZE)

    @property
    def asked(self) -> int:
        """How many cases."""
        return _HEAD.unpack_from(self._memory)[0]

    @property
    def number(self) -> int:
        """Of the property."""
        return _HEAD.unpack_from(self._memory)[1]

    def begin(self, number: int) -> None:
        """Write down that this property comes next."""
        _HEAD.pack_into(self._memory, 0, self.asked + 1, number, 0)

    def note(self, case: Case) -> None:
        """Write down that this is asked now; one that cannot be written leaves nothing to read."""
        try:
            text = wire.written(case).encode()
        except wire.Unwritten:
            text = b""
        text = text if len(text) <= _SIZE else b""
        _HEAD.pack_into(self._memory, 0, self.asked + 1, self.number, len(text))
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text

    def case(self) -> Case | None:
        """The latest."""
        length = _HEAD.unpack_from(self._memory)[2]
        return wire.read(self._memory[_HEAD.size : _HEAD.size + length].decode()) if length else None


def _noting(prop: Property, board: _Board) -> Callable[[Subject, Case], None]:
    def check(subject: Subject, case: Case) -> None:
        board.note(case)
        prop.check(subject, case)

    return check


def _isolated(prop: Property) -> Callable[[Subject, Case], None]:
    workers: list[Worker] = []

    def check(subject: Subject, case: Case) -> None:
        if not workers:
            workers.append(Worker(lambda each: prop.check(subject, each)))
        try:
            workers[0].ask(case, _PATIENCE)
        except ChildEnded as ended:
            before = "" if _ends(workers[0], case) else _AFTER
            raise Violation(f"{before}what is asked {ended}") from ended

    return check


def _ends(worker: Worker, case: Case) -> bool:
    """Whether the case ends a process that was asked no other."""
    try:
        worker.ask(case, _PATIENCE, fresh=True)
    except ChildEnded:
        return True
    except (Violation, CallRefused, Remark, NotApplicable, RuntimeError):
        return False
    return False


def _written(found: SearchResult) -> dict[str, Any]:
    fields: dict[str, Any] = {each.name: getattr(found, each.name) for each in dataclasses.fields(found)}
    if found.failure is not None:
        fields["failure"] = (wire.written(found.failure[0]), found.failure[1])
    return fields


def _read(fields: dict[str, Any]) -> SearchResult:
    failure = fields.pop("failure")
    several = {name: tuple(fields.pop(name)) for name in ("tried", "remarks")}
    refused = tuple((case, why) for case, why in fields.pop("refused"))
    shown = None if failure is None else (wire.read(failure[0]), str(failure[1]))
    return SearchResult(**several, refused=refused, failure=shown, **fields)
