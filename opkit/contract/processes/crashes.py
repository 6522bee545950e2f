"""Which calls end the process, and which never return: found in child processes, and confirmed."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from opkit.contract.memory import heap
from opkit.contract.processes import child
from opkit.contract.processes.child import ChildEnded, Worker
from opkit.contract.prop import CallRefused, NotApplicable, Violation

if TYPE_CHECKING:
    from opkit.contract.calls.cases import Case
    from opkit.contract.subject import Subject

_PATIENCE = 30.0  # seconds after which a call that computes all the time is taken for one that never returns
_SHORT = 0.5  # seconds for a call, once another has not returned
_MOST_HUNG, _MOST_CRASHED = 24, 100  # calls; a still smaller example is not worth more time
_MANY = 30  # calls that bring to light what one has damaged


class Crashes:
    """One operator's calls in child processes, from case to case."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._calls = 2
        self._seconds = child.SECONDS
        self._slowest = 0.0
        self._lost = False
        self._hung: set[str] = set()
        self._crashed: dict[str, str] = {}
        self._worker = Worker(self._survive)

    def check(self, case: Case) -> None:
        """Call the operator, and again.

        Raises:
            Violation: the process ended, or a call did not return.
            CallRefused: the operator raised.
            NotApplicable: calls return in this process, and not in a forked one.
        """
        if str(case) in self._hung:
            raise _never()
        if str(case) in self._crashed:
            raise Violation(self._crashed[str(case)])
        started = time.monotonic()
        try:
            self._worker.ask(case, self._seconds)
            self._slowest = max(self._slowest, time.monotonic() - started)
        except ChildEnded as ended:
            self._hanging(case, ended) if ended.hung else self._crashing(case, ended)

    def _survive(self, case: Case) -> None:
        """In the child: some calls, all that they return is read, and the heap is still whole."""
        for _ in range(self._calls):
            self._subject.run(case).detached()
        heap.inspect()

    def _crashing(self, case: Case, ended: ChildEnded) -> None:
        if len(self._crashed) < _MOST_CRASHED:
            self._crashed[str(case)] = self._blame(case, ended)
            raise Violation(self._crashed[str(case)]) from ended

    def _blame(self, case: Case, ended: ChildEnded) -> str:
        """Whether the case by itself ends the process, or what earlier ones have damaged."""
        if self._worker.asked == 1 or (again := self._ending(case)):
            return f"the call {ended}"
        self._calls = _MANY  # from now on, each case has to show by itself what it damages
        again = self._ending(case)
        return f"one of {_MANY} equal calls {again}" if again else f"after other calls, the call {ended}"

    def _ending(self, case: Case) -> str:
        try:
            self._worker.ask(case, _PATIENCE, fresh=True)
        except ChildEnded as again:
            return str(again)
        except CallRefused:
            return ""
        return ""

    def _hanging(self, case: Case, ended: ChildEnded) -> None:
        if len(self._hung) >= _MOST_HUNG:
            return
        if not self._hung:
            self._ask_here(case, ended)
            self._confirm(case)
        self._hung.add(str(case))
        raise _never() from ended

    def _confirm(self, case: Case) -> None:
        """Return if the call would never return, and raise otherwise; a fork can be at fault, and a kernel be slow."""
        try:
            self._worker.ask(case, _PATIENCE, fresh=True)
        except ChildEnded as again:
            if not again.hung:
                return
            self._ask_here(case, again)
            self._seconds = max(_SHORT, 10 * self._slowest)
            return
        self._seconds = _PATIENCE
        raise CallRefused(TimeoutError(f"a call takes more than {child.SECONDS:g} s"))

    def _ask_here(self, case: Case, ended: ChildEnded) -> None:
        """Raise if a call that only waits in a forked process returns in this one, and in a forked one not even then."""
        if ended.busy or self._lost:
            return
        if not _returns_here(self._subject, case):
            self._lost = True  # a thread of this process waits for the call; one is enough
        elif self._waits(case):
            self._subject.notes["hangs in a child"] = True
            raise NotApplicable("a call returns here, and does not in a forked process") from ended

    def _waits(self, case: Case) -> bool:
        try:
            self._worker.ask(case, child.SECONDS, fresh=True)
        except ChildEnded as ended:
            return ended.hung
        except CallRefused:
            return False
        return False


def _never() -> Violation:
    return Violation(f"the call did not return: one was given {_PATIENCE:g} s, and others less once it was clear")


def _returns_here(subject: Subject, case: Case) -> bool:
    """Whether a call that only waits in a forked process returns in a thread of this one: it may wait for another thread."""
    done = threading.Event()

    def call() -> None:
        try:
            subject.run(case)
        except CallRefused:
            pass
        finally:
            done.set()

    threading.Thread(target=call, daemon=True).start()
    return done.wait(child.SECONDS)
