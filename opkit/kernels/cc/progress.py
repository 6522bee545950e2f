"""What a person is told of a build that takes its time: one line on stderr, and none of a quick one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_PATIENCE = 1.0
_EVERY = 0.2


def printable(text: str) -> str:
    r"""``text`` on one line and without control characters, as a terminal and a table need it.

    >>> printable("demo::new\nline")
    'demo::new\\nline'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


class Progress:
    """A line that is shown once a build has taken a second.

    On a terminal it is written again as time passes; elsewhere it is written once, at the end.
    """

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._start = time.monotonic()
        self._shown = 0.0

    def tick(self) -> None:
        """Called now and then while the build goes on."""
        now = time.monotonic()
        if now - self._start > _PATIENCE and now - self._shown > _EVERY and _on_terminal():
            self._shown = now
            _write(f"\r{self._line()}")

    def finish(self) -> None:
        """Called once, when the build has ended, well or not."""
        if time.monotonic() - self._start > _PATIENCE:
            _write(f"\r{self._line()}\n" if _on_terminal() else f"{self._line()}\n")

    def _line(self) -> str:
        return f"opkit: {self._text()} ... {time.monotonic() - self._start:.1f} s"


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _write(text: str) -> None:
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody listens any more, which is no reason for a build to fail
        pass
