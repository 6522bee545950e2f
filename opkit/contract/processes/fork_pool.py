"""This module checks properties in forked processes, in parallel with this one: a crash there ends nothing here.

A forked process computes on one thread (see :mod:`opkit.contract.processes.child`), so properties of threads, and those that
compile, are checked in this process, as are those for which a reference calls autograd where autograd has threads. Each forked
process takes the next property when it has finished one. Before each case it writes the case to shared memory: if the process
ends, the property is checked again, each case in its own process, for a small example.
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

from opkit.contract.calls.cases import Case, NotSerializable, from_json, to_json
from opkit.contract.processes import child
from opkit.contract.processes.child import ChildEnded, ChildProcess, Worker
from opkit.contract.prop import NotApplicable, Property, Remark, Violation
from opkit.contract.search import SearchResult
from opkit.contract.subject import CallRefused, Subject

Check = Callable[[Property, Sequence[Property]], SearchResult]

_MAX_PROCESSES = 4
_PATIENCE = 300.0  # seconds for one case, which may compile
_POLL = 1.0  # seconds between two looks at which case runs
_SIZE = 1 << 16  # bytes of a case's text
_AFTER = "after other calls, "
_DONE = "done"
_NO_AUTOGRAD = "autograd's threading in combination with fork"  # torch's error for a backward in a forked process
_HEAD = struct.Struct(
    "qqq"
)  # how many cases have started, the number of the latest one's property, the length of its text


def forkable(properties: Sequence[Property]) -> list[Property]:
    """Return the properties that forked processes can check: if these cannot run a backward, those without one."""
    if not any(prop.backward for prop in properties) or child.runs_backward():
        return [*properties]
    return [prop for prop in properties if not prop.backward]


class ForkPool:
    """Forked processes that share a list of properties; a process that ends is replaced.

    Args:
        properties: the properties to check, in order.
        check: searches for a case that breaks one; its second argument is the properties that may follow in the same process.

    Attributes:
        left: the properties without a result, in order.
    """

    def __init__(self, properties: Sequence[Property], check: Check) -> None:
        self.left = [*properties]
        self._properties = tuple(properties)
        self._check = check
        self._tickets = _Tickets(len(self._properties))
        self._count = min(_MAX_PROCESSES, len(os.sched_getaffinity(0)), len(self._properties)) if properties else 0
        self._processes = [_PoolProcess(self._serve) for _ in range(self._count)]

    def poll(self, seconds: float = _POLL) -> tuple[Property, SearchResult] | None:
        """Return a property and its result, if one is known within this time."""
        if not self._processes:
            return self._finish(self.left[0], self._check(self.left[0], self.left[1:])) if self.left else None
        process = self._ready_process(seconds)
        if process is None:
            late = next((process for process in self._processes if process.late()), None)
            return self._end_late(late) if late else None
        try:
            message = process.child.answer(_PATIENCE)
        except ChildEnded as ended:
            return self._check_again(process, ended)
        if message == _DONE:
            self._processes.remove(process)
            return None
        number, fields = json.loads(message)
        prop = self._properties[number]
        return self._finish(prop, self._check(prop, ()) if fields is None else _read(fields))

    def _serve(self, latest: _LatestCase, writer: int) -> None:
        while (number := self._tickets.take()) is not None:
            latest.begin(number)
            child.send(writer, json.dumps((number, self._result(number, latest))))
        child.send(writer, _DONE)

    def _result(self, number: int, latest: _LatestCase) -> dict[str, Any] | None:
        """Return a property's result in a form that can be sent, or None if it has to be found again in the parent."""
        prop, rest = self._properties[number], self._properties[number + 1 :: self._count]
        try:
            fields = _written(self._check(dataclasses.replace(prop, check=_recording(prop, latest)), rest))
        except NotSerializable:
            return None
        return None if _NO_AUTOGRAD in json.dumps(fields) else fields

    def _ready_process(self, seconds: float) -> _PoolProcess | None:
        """Return a process that has sent a message, or has ended."""
        ready = next((process for process in self._processes if process.child.ready(0.0)), None)
        if ready is not None or not seconds:
            return ready
        selected = select.select([process.child for process in self._processes], [], [], seconds)[0]
        return next((process for process in self._processes if process.child in selected), None)

    def _end_late(self, process: _PoolProcess) -> tuple[Property, SearchResult]:
        process.child.end()
        prop = self._replace(process)
        return self._finish(prop, SearchResult((), skipped=f"one of its cases did not end within {_PATIENCE:g} s"))

    def _check_again(self, process: _PoolProcess, ended: ChildEnded) -> tuple[Property, SearchResult] | None:
        """Check again, each case in its own process; if none ends by itself, report the case that the process ended on."""
        if not process.latest.started:  # it ended before its first case: the other processes, or this one, do its part
            self._processes.remove(process)
            return None
        prop, case = self._replace(process), process.latest.case()
        result = self._check(dataclasses.replace(prop, check=_isolated(prop)), ())
        if result.failure is None and case is not None:
            message = f"{_AFTER}the check {ended}"
            result = dataclasses.replace(result, skipped="", failure=(case, message))
        return self._finish(prop, result)

    def _replace(self, process: _PoolProcess) -> Property:
        """Fork a process in the place of one that ended, and return the property that it was checking."""
        self._processes[self._processes.index(process)] = _PoolProcess(self._serve)
        return self._properties[process.latest.number]

    def _finish(self, prop: Property, result: SearchResult) -> tuple[Property, SearchResult]:
        self.left.remove(prop)
        return prop, result


class _PoolProcess:
    """One forked process, and the shared memory in which it records its latest case."""

    def __init__(self, serve: Callable[[_LatestCase, int], None]) -> None:
        self.latest = latest = _LatestCase()
        self.child = ChildProcess(lambda _, writer: serve(latest, writer), silent=False)
        self._started, self._since = 0, time.monotonic()

    def late(self) -> bool:
        """Return whether one case has run for too long."""
        if self.latest.started != self._started:
            self._started, self._since = self.latest.started, time.monotonic()
        return time.monotonic() - self._since > _PATIENCE


class _Tickets:
    """The numbers from 0, each of which one process takes: a pipe that all of them read."""

    def __init__(self, count: int) -> None:
        self._reader, writer = os.pipe()
        os.write(writer, bytes(range(count)))
        os.close(writer)
        weakref.finalize(self, os.close, self._reader)

    def take(self) -> int | None:
        """Take the next number; None if all are taken."""
        return next(iter(os.read(self._reader, 1)), None)


class _LatestCase:
    """Memory that both processes share: how many cases have started, and the latest one."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + _SIZE)

    @property
    def started(self) -> int:
        """The number of cases that have started."""
        return _HEAD.unpack_from(self._memory)[0]

    @property
    def number(self) -> int:
        """The number of the property."""
        return _HEAD.unpack_from(self._memory)[1]

    def begin(self, number: int) -> None:
        """Record that this property comes next."""
        _HEAD.pack_into(self._memory, 0, self.started + 1, number, 0)

    def record(self, case: Case) -> None:
        """Record that this case starts now; the text of one that cannot be serialized is empty."""
        try:
            text = to_json(case).encode()
        except NotSerializable:
            text = b""
        text = text if len(text) <= _SIZE else b""
        _HEAD.pack_into(self._memory, 0, self.started + 1, self.number, len(text))
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text

    def case(self) -> Case | None:
        """Return the latest case, or None without its text."""
        length = _HEAD.unpack_from(self._memory)[2]
        return from_json(self._memory[_HEAD.size : _HEAD.size + length].decode()) if length else None


def _recording(prop: Property, latest: _LatestCase) -> Callable[[Subject, Case], None]:
    def check(subject: Subject, case: Case) -> None:
        latest.record(case)
        prop.check(subject, case)

    return check


def _isolated(prop: Property) -> Callable[[Subject, Case], None]:
    workers: list[Worker] = []

    def check(subject: Subject, case: Case) -> None:
        if not workers:
            workers.append(Worker(lambda each: prop.check(subject, each)))
        try:
            workers[0].check(case, _PATIENCE)
        except ChildEnded as ended:
            before = "" if _ends(workers[0], case) else _AFTER
            raise Violation(f"{before}the check {ended}") from ended

    return check


def _ends(worker: Worker, case: Case) -> bool:
    """Return whether the case ends a process that has run no other."""
    try:
        worker.check(case, _PATIENCE, fresh=True)
    except ChildEnded:
        return True
    except (Violation, CallRefused, Remark, NotApplicable, RuntimeError):
        return False
    return False


def _written(result: SearchResult) -> dict[str, Any]:
    fields: dict[str, Any] = {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
    if result.failure is not None:
        fields["failure"] = (to_json(result.failure[0]), result.failure[1])
    return fields


def _read(fields: dict[str, Any]) -> SearchResult:
    failure = fields.pop("failure")
    several = {name: tuple(fields.pop(name)) for name in ("tried", "remarks")}
    refused = tuple((case, why) for case, why in fields.pop("refused"))
    shown = None if failure is None else (from_json(failure[0]), str(failure[1]))
    return SearchResult(**several, refused=refused, failure=shown, **fields)
