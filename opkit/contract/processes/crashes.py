"""This module finds calls that end the process or never return, in child processes, and confirms them."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from opkit.contract.processes import child, guarded_memory
from opkit.contract.processes.child import ChildEnded, Worker
from opkit.contract.prop import NotApplicable, Violation
from opkit.contract.subject import CallRefused

if TYPE_CHECKING:
    from opkit.contract.calls.cases import Case
    from opkit.contract.subject import Subject

_PATIENCE = 30.0  # seconds after which a call that computes all the time counts as one that never returns
_SHORT = 0.5  # seconds for a call, once another has not returned
_MAX_HUNG, _MAX_CRASHED = 24, 100  # calls; a still smaller example is not worth more time
_MANY = 30  # calls that reveal damage by one of them


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
        """Call the operator several times.

        Raises:
            Violation: the process ended, or a call did not return.
            CallRefused: the operator raised.
            NotApplicable: calls return in this process, but not in a forked one.
        """
        if str(case) in self._hung:
            raise _never()
        if str(case) in self._crashed:
            raise Violation(self._crashed[str(case)])
        started = time.monotonic()
        try:
            self._worker.check(case, self._seconds)
            self._slowest = max(self._slowest, time.monotonic() - started)
        except ChildEnded as ended:
            self._handle_hang(case, ended) if ended.hung else self._handle_crash(case, ended)

    def _survive(self, case: Case) -> None:
        """Call the operator in the child, read all results, and check the heap."""
        for _ in range(self._calls):
            self._subject.run(case).detached()
        guarded_memory.inspect_heap()

    def _handle_crash(self, case: Case, ended: ChildEnded) -> None:
        if len(self._crashed) < _MAX_CRASHED:
            self._crashed[str(case)] = self._cause(case, ended)
            raise Violation(self._crashed[str(case)]) from ended

    def _cause(self, case: Case, ended: ChildEnded) -> str:
        """Say whether the case alone ends the process, or damage by earlier ones does."""
        if self._worker.count == 1 or (again := self._crash_in_fresh_process(case)):
            return f"the call {ended}"
        self._calls = _MANY  # from now on, each case has to reveal its own damage
        again = self._crash_in_fresh_process(case)
        return f"one of {_MANY} equal calls {again}" if again else f"after other calls, the call {ended}"

    def _crash_in_fresh_process(self, case: Case) -> str:
        try:
            self._worker.check(case, _PATIENCE, fresh=True)
        except ChildEnded as again:
            return str(again)
        except CallRefused:
            return ""
        return ""

    def _handle_hang(self, case: Case, ended: ChildEnded) -> None:
        if len(self._hung) >= _MAX_HUNG:
            return
        if not self._hung:
            self._raise_if_fork_hangs(case, ended)
            self._confirm(case)
        self._hung.add(str(case))
        raise _never() from ended

    def _confirm(self, case: Case) -> None:
        """Return if the call would never return, and raise otherwise; the fork may be at fault, or the kernel slow."""
        try:
            self._worker.check(case, _PATIENCE, fresh=True)
        except ChildEnded as again:
            if not again.hung:
                return
            self._raise_if_fork_hangs(case, again)
            self._seconds = max(_SHORT, 10 * self._slowest)
            return
        self._seconds = _PATIENCE
        raise CallRefused(TimeoutError(f"a call takes more than {child.SECONDS:g} s"))

    def _raise_if_fork_hangs(self, case: Case, ended: ChildEnded) -> None:
        """Raise if a call that only waits in a forked process returns in this one, and still not in a forked one."""
        if ended.busy or self._lost:
            return
        if not _returns_here(self._subject, case):
            self._lost = True  # a thread of this process waits for the call; one is enough
        elif self._waits(case):
            self._subject.notes["hangs in a child"] = True
            raise NotApplicable("a call returns here, but not in a forked process") from ended

    def _waits(self, case: Case) -> bool:
        try:
            self._worker.check(case, child.SECONDS, fresh=True)
        except ChildEnded as ended:
            return ended.hung
        except CallRefused:
            return False
        return False


def _never() -> Violation:
    return Violation(
        f"the call did not return: one was ended after {_PATIENCE:g} s, and others sooner once it was clear"
    )


def _returns_here(subject: Subject, case: Case) -> bool:
    """Return whether a call that only waits in a forked process returns in a thread of this one, which has all threads."""
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
