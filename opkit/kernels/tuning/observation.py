"""Observe tuning: within :func:`observed` a thread's kernels choose their configurations again, and each choice is listed."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from opkit.kernels.cc.progress import Progress
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.record_format import Identity, Tried

Report = Callable[[Identity, int, int], None]
"""Called before each measurement with the kernel, the number of those done and of all."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice of a kernel's configuration for one bucket of shapes.

    Attributes:
        config: the configuration.
        source: "only" (the kernel has no other), "record", "tuned" (just now), "package" (the package's record of other
            shapes), "rank" (another process of the job chose it), "nearest" (the record of other shapes) or "first" (nothing
            is known).
        tried: the measurement of each configuration, the fastest first; empty where there is only one, or no record.
        configs: the configurations to choose from, in their author's order.
    """

    identity: Identity
    device: str
    bucket: str
    config: Config
    source: str
    tried: tuple[Tried, ...] = ()
    configs: tuple[Config, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether the choice is final; if not, a later call may choose better."""
        return self.source not in ("nearest", "first")

    @property
    def ms(self) -> float | None:
        """The milliseconds that the configuration took; None where it was not measured."""
        return self.ms_of(self.config)

    def ms_of(self, config: Config) -> float | None:
        """Return the milliseconds that any configuration took; None where it was skipped or not tried."""
        return next((each.ms for each in self.tried if each.key == config.key), None)

    @property
    def slowest_ms(self) -> float | None:
        """The milliseconds of the slowest that ran; None where none was measured."""
        return max((ms for config in self.configs if (ms := self.ms_of(config)) is not None), default=None)


# ---- launchers to clear ----------------------------------------------------------------------------------------------


class Launcher(Protocol):
    """An object that caches choices beyond :func:`opkit.kernels.tuning.tuning.decide`, such as a table of compiled kernels."""

    def clear(self) -> None:
        """Forget them."""


_launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()


def add_launcher(launcher: Launcher) -> None:
    """Clear ``launcher`` whenever choices are to be observed; it may be deleted at any time."""
    _launchers.add(launcher)


def clear_launchers() -> None:
    """Make every kernel choose its configuration again at its next call."""
    for launcher in list(_launchers):
        launcher.clear()


# ---- observers -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Observer:
    """An observer of the choices of a thread."""

    report: Report
    force: bool
    choices: list[Choice] = dataclasses.field(default_factory=list[Choice])

    def measures_again(self, identity: Identity, device: str, bucket: str) -> bool:
        """Return whether to measure although there may be a record: once for each kernel, device and bucket."""
        chosen = ((choice.identity, choice.device, choice.bucket) for choice in self.choices)
        return self.force and (identity, device, bucket) not in chosen


_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("opkit_tuning_observer", default=None)


def observer() -> Observer | None:
    """Return the observer of this thread, if it has one."""
    return _observer.get()


@contextlib.contextmanager
def observed(force: bool = False, report: Report = lambda *_: None) -> Iterator[list[Choice]]:
    """Let the kernels that this thread calls in the block choose their configurations again; return the list of choices.

    Args:
        force: measure again, whatever is recorded.
        report: called before each measurement.
    """
    clear_launchers()
    observer = Observer(report, force)
    token = _observer.set(observer)
    try:
        yield observer.choices
    finally:
        _observer.reset(token)


class Steps:
    """The progress of measuring one kernel, for the thread's observer, or else on stderr."""

    def __init__(self, identity: Identity, bucket: str, total: int) -> None:
        self._identity, self._total, self._text = identity, total, "waiting for another process"
        self._observer = observer()
        self._line = Progress(lambda: f"tuning {identity} for {bucket}: {self._text}")

    def wait(self) -> None:
        """Update the line while another process measures."""
        if self._observer is None:
            self._line.tick()

    def step(self, number: int) -> None:
        """Report a measurement that starts, with the number of those done."""
        self._text = f"configuration {number + 1} of {self._total}"
        if self._observer is None:
            self._line.tick()
        else:
            self._observer.report(self._identity, number, self._total)

    def finish(self) -> None:
        """Finish the line."""
        if self._observer is None:
            self._line.finish()
