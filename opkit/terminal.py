"""Helpers of the commands of ``opkit``: a console, tables, errors, and the import of the modules that a user names."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from opkit import errors

_BAD_INPUT = 2
_PIPE_WIDTH = 160
_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def console() -> Console:
    """Return a console as wide as the terminal, or wide enough for most lines where the output is not a terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def refuse(message: str) -> NoReturn:
    """Print what is wrong with the command line, and exit with the status for bad input."""
    typer.echo(f"opkit: {message}", err=True)
    raise typer.Exit(_BAD_INPUT)


def check_device(device: str | None) -> None:
    """Refuse a device that torch does not know, or that is not there."""
    if device is None:
        return
    import torch

    try:
        parsed = torch.device(device)
        torch.empty(1, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        refuse(f"the device {device!r} cannot be used: {reason}\nUse --device cpu, or leave it out.")
    if parsed.type == "meta":
        refuse("the device 'meta' holds no values. Use --device cpu, or leave it out.")


@contextlib.contextmanager
def bad_input(*mistakes: type[Exception]) -> Iterator[None]:
    """Turn an exception in the block that is one of ``mistakes`` into :func:`refuse`."""
    try:
        yield
    except mistakes as error:
        hint = (
            "\nName the module that defines it with --module." if isinstance(error, errors.UnknownOperatorError) else ""
        )
        refuse(f"{error}{hint}")


def import_modules(modules: list[str] | None) -> None:
    """Import each module, as ``python -m`` would find it: from the working directory too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for module in modules or ():
        try:
            importlib.import_module(module)
        except Exception as error:  # anything can go wrong in a module; the user wants the reason, not our frames
            refuse(f"the module {module!r} cannot be imported: {type(error).__name__}: {error}{_where(error)}")


def _where(error: BaseException) -> str:
    """Return the line of the user's module at which the import failed, if it reached the module."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    outside = [f"{name}:{line}" for name, line in frames if "importlib" not in name and name != __file__]
    return f"\n  at {outside[-1]}" if outside else ""


def split_at_commas(text: str) -> list[str]:
    """Return the names in an option's text, as in "avx2, avx512"."""
    return [name.strip() for name in text.split(",") if name.strip()]


def bytes_text(count: int) -> str:
    """Return a number of bytes in the unit that suits it.

    >>> bytes_text(3 * 2**20)
    '3 MiB'
    """
    scale = next(((unit, name) for unit, name in _SIZES if count >= unit), (1, "B"))
    return f"{count / scale[0]:.4g} {scale[1]}"


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """Return a table without lines."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        result.add_column(heading, overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def progress(console: Console) -> Progress:
    """Return a bar with the number of things that are done; it shows nothing where the output is not a terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
