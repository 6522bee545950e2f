"""Show the progress of a slow build in one line on stderr; a quick one shows nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_DELAY = 1.0
_INTERVAL = 0.2


def printable(text: str) -> str:
    r"""Return ``text`` on one line and without control characters, for a terminal or a table.

    >>> printable("demo::new\nline")
    'demo::new\\nline'
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


class Progress:
    """A line that appears once a build has taken a second.

    On a terminal it is updated as time passes; elsewhere it is written once, at the end.
    """

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._start = time.monotonic()
        self._shown = 0.0

    def tick(self) -> None:
        """Update the line; call it several times a second during the build."""
        now = time.monotonic()
        if now - self._start > _DELAY and now - self._shown > _INTERVAL and _on_terminal():
            self._shown = now
            _write(f"\r{self._line()}")

    def finish(self) -> None:
        """Write the final line; call it once, when the build has succeeded or failed."""
        if time.monotonic() - self._start > _DELAY:
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
    except (OSError, ValueError):  # stderr was closed, which is no reason for a build to fail
        pass
