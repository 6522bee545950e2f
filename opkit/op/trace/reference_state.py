"""What an operator's reference reads beside its arguments, followed from call to call."""

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
    """What an operator's reference reads, from call to call."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        self.changes = 0  # how often a compiled program met other values than the one before
        self._reads: Reads | None = None
        self._last: dict[bool, tuple[Hashable, ...]] = {}
        self._guarded: tuple[Hashable, ...] | None = None
        self._own: dict[tuple[Hashable, ...], tuple[Hashable, ...]] = {}

    def current(self, versions: bool = False) -> tuple[Hashable, ...]:
        """The values that a call would read now; ``versions``: whether writes to a tensor make it another one."""
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
        """The values of which some may decide sizes; empty where none may."""
        values = self.current()
        return values if any(map(decides_sizes, values)) else ()

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """While opkit runs the reference to look at it: what it writes to itself, a cache of its own say, changes nothing."""
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
        """Whether compiled programs had to be made again for other values several times."""
        return self.changes >= _MAX_CHANGES

    def guard(self) -> None:
        """Have the program that torch.compile is making used only while the values are as they are."""
        if not in_guarded_compilation():
            return
        values = self.current(versions=True)
        if values:
            self.changes += self._guarded is not None and values != self._guarded
            self._guarded = values
            add_guard(self._unchanged)

    @functools.cached_property
    def _unchanged(self) -> Callable[[Any, Any], None]:
        """What makes the guard once the program is made: running the reference may have filled a cache of its own."""

        def create(builder: Any, guard: Any) -> None:
            expected = self.current(versions=True)
            text = f"the reference of {self.name} reads what it read when it was compiled"
            add_test(builder, guard, lambda: self.current(versions=True) == expected, text)

        return create
