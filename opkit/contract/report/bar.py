"""This module shows the progress of a check on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from opkit.contract.report.report import Progress


def silent(prop: str, done: float) -> None:
    """Show nothing."""


@contextlib.contextmanager
def progress_of(wanted: Progress | bool | None, name: str) -> Generator[Progress]:
    """Yield the function to call with a property's name and the share of the work that is done: the user's, a bar, or none."""
    if callable(wanted):
        yield wanted
    elif wanted:
        with bar() as shown:
            yield lambda prop, done: shown(f"{name} {prop}", done)
    else:
        yield silent


@contextlib.contextmanager
def bar() -> Generator[Progress]:
    """Show a bar on stderr with a text and the share of the work that is done; show nothing if stderr is no terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=1.0)
        yield lambda text, done: shown.update(task, completed=done, description=escape(text))
