"""Track the values that an operator's reference reads in addition to its arguments, from call to call."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Hashable
from typing import Any

from opkit.op.torch_compile import add_guard, add_test, in_guarded_compilation
from opkit.op.trace.reads import Reads
from opkit.op.trace.snapshots import TooLargeError, decides_sizes

_MAX_CHANGES, _MAX_OWN = 4, 64


class ReferenceState:
    """The values that an operator's reference reads, from call to call.

    ``changes`` counts how often a compiled program met other values than the one before.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        self.changes = 0
        self._reads: Reads | None = None
        self._last: dict[bool, tuple[Hashable, ...]] = {}
        self._guarded: tuple[Hashable, ...] | None = None
        self._own: dict[tuple[Hashable, ...], tuple[Hashable, ...]] = {}

    def current(self, versions: bool = False) -> tuple[Hashable, ...]:
        """Return the values that a call would read now; with ``versions``, a tensor that was written to is another value."""
        reads = self._reads
        if reads is not None and not reads.paths:
            return ()
        try:
            values = None if reads is None else reads.values(versions)
        except TooLargeError:
            values = None
        if values is None or values != self._last.get(versions):
            self._reads = reads = Reads(self.function)  # other functions may be called from now on
            self._last[versions] = values = reads.values(versions)
        return self._own.get(values, values)

    def of_sizes(self) -> tuple[Hashable, ...]:
        """Return the values if some of them may decide sizes; else nothing."""
        values = self.current()
        return values if any(map(decides_sizes, values)) else ()

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Ignore what the reference itself writes, such as a cache of its own, while opkit runs it to trace it."""
        before = self.current()
        yield
        after = self.current()
        if after != before:
            if len(self._own) >= _MAX_OWN:
                self._own.clear()
            self._own[after] = before

    @property
    def unknown(self) -> str:
        """The line that reads what cannot be compared from call to call; empty where there is none."""
        self.current()
        return "" if self._reads is None else self._reads.unknown

    @property
    def volatile(self) -> bool:
        """Whether programs were recompiled for other values several times."""
        return self.changes >= _MAX_CHANGES

    def guard(self) -> None:
        """Guard the program that torch.compile is tracing on the present values."""
        if not in_guarded_compilation():
            return
        values = self.current(versions=True)
        if values:
            self.changes += self._guarded is not None and values != self._guarded
            self._guarded = values
            add_guard(self._unchanged)

    @functools.cached_property
    def _unchanged(self) -> Callable[[Any, Any], None]:
        """The function that creates the guard after tracing, because running the reference may have filled its own cache."""

        def create(builder: Any, guard: Any) -> None:
            expected = self.current(versions=True)
            text = f"the reference of {self.name} reads what it read when it was compiled"
            add_test(builder, guard, lambda: self.current(versions=True) == expected, text)

        return create
