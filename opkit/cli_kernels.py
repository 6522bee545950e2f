"""The commands of ``opkit`` about kernels that were built and timed: ``tune`` and ``cache``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from opkit import errors, terminal
from opkit.kernels.cc.progress import printable

if TYPE_CHECKING:
    from opkit.kernels.build_cache import CacheEntry
    from opkit.kernels.tuning.observation import Choice
    from opkit.kernels.tuning.record_format import Identity, Record, TuningEntry
    from opkit.op.aot.tuning import TuningResult
    from opkit.op.examples.arguments import ExampleCall

cache_app = typer.Typer(help="List, check and remove the kernels that were built.", no_args_is_help=True)

_KEY_SHOWN = 12
_AGES = ((86400, "days"), (3600, "h"), (60, "min"))
_HEADINGS = ("operator", "kernel", "device", "bucket", "config", "ms", "date", "stale")
_SOURCES = {"tuned": "tuned", "record": "recorded", "nearest": "not tuned", "first": "not tuned"}


# ---- cache -----------------------------------------------------------------------------------------------------------


@cache_app.command("list")
def cache_list() -> None:
    """List the kernels in the build cache, and say how many Triton kernels are in theirs."""
    from opkit.kernels import build_cache
    from opkit.kernels.triton import stored

    entries = build_cache.entries()
    if entries:
        headings = ("kernel", "size", "age", "compiler", "key")
        terminal.console().print(terminal.table(headings, [_entry(entry) for entry in entries]))
    terminal.console().print(f"{_amount(entries)} in {escape(printable(str(build_cache.root())))}")
    if compiled := stored.binary_files():
        size = terminal.bytes_text(sum(path.stat().st_size for path in compiled))
        terminal.console().print(
            f"{_count(len(compiled), 'Triton kernel')}, {size}, in {escape(printable(str(stored.root())))}"
        )


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove every kernel from the build cache, and those of Triton; they are built again when they are needed.

    The bridge to torch goes too: `opkit bridge` builds it again.
    """
    from opkit.kernels import build_cache
    from opkit.kernels.triton import stored

    entries = build_cache.entries()
    with terminal.bad_input(errors.CacheError):
        removed = build_cache.clear()
        compiled = stored.clear()
    damaged = f", and {removed - len(entries)} damaged" if removed > len(entries) else ""
    terminal.console().print(f"Removed {_amount(entries)}{damaged}, from {escape(printable(str(build_cache.root())))}")
    if compiled:
        terminal.console().print(
            f"Removed {_count(compiled, 'Triton kernel')}, from {escape(printable(str(stored.root())))}"
        )


@cache_app.command("verify")
def cache_verify() -> None:
    """Check every kernel in the build cache against the checksum recorded when it was built."""
    from opkit.kernels import build_cache

    damaged = build_cache.verify()
    rows = [
        (entry.key[:_KEY_SHOWN], escape(printable(entry.label)), escape(printable(what))) for entry, what in damaged
    ]
    if rows:
        terminal.console().print(terminal.table(("key", "kernel", "problem"), rows))
    keys = {entry.key for entry, _ in damaged}
    sound = sum(entry.key not in keys for entry in build_cache.entries())
    fix = "; each is built again when it is needed" if rows else ""
    terminal.console().print(f"sound: {sound}, damaged: {len(rows)}{fix}")
    raise typer.Exit(1 if rows else 0)


def _entry(entry: CacheEntry) -> tuple[str, ...]:
    cells = (entry.label, terminal.bytes_text(entry.size), _age(entry.created), entry.compiler, entry.key[:_KEY_SHOWN])
    return tuple(escape(printable(cell)) for cell in cells)


def _amount(entries: list[CacheEntry]) -> str:
    return f"{_count(len(entries), 'kernel')}, {terminal.bytes_text(sum(entry.size for entry in entries))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _age(created: float) -> str:
    seconds = max(0.0, time.time() - created)
    scale = next(((unit, name) for unit, name in _AGES if seconds >= unit), (1, "s"))
    return f"{seconds // scale[0]:.0f} {scale[1]}"


# ---- tune ------------------------------------------------------------------------------------------------------------


def tune(
    module: Annotated[str | None, typer.Argument(help="The module that defines the operators.")] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this operator; repeatable.")] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="A call to tune for, as in 'demo::rms_norm(x=bf16[8192, 4096], weight=bf16[4096])'; repeatable. By "
            "default the kernels' examples, or calls made up from the annotations."
        ),
    ] = None,
    shapes_file: Annotated[
        Path | None, typer.Option(help='JSON with such calls: {"demo::rms_norm": [{"x": "bf16[8192, 4096]"}]}.')
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print what is recorded, and tune nothing.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write what is recorded to this file, and tune nothing.")] = None,
    import_: Annotated[
        Path | None, typer.Option("--import", help="Copy the results in this file into the cache, and tune nothing.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again what is recorded.")] = False,
) -> None:
    """Time the configurations of Triton kernels on this GPU in advance, and record the fastest."""
    records_only = show or export is not None or import_ is not None
    if records_only and (shapes or shapes_file or force):
        terminal.refuse(
            "--shapes, --shapes-file and --force are for tuning, and --show, --export and --import do not tune."
        )
    terminal.import_modules([module] if module else None)
    with terminal.bad_input(errors.OpkitError):
        if records_only:
            _print_records(show, export, import_, op)
            return
        if module is None:
            terminal.refuse("name the module that defines the operators, as in: opkit tune my_ops")
        calls = [*_calls_to_tune(module, op or (), shapes or (), shapes_file)]
    raise typer.Exit(1 if _run(calls, force) else 0)


def _print_records(show: bool, export: Path | None, import_: Path | None, operators: Sequence[str] | None) -> None:
    from opkit.kernels.tuning import records

    if import_ is not None:
        _print(f"Imported {_count(records.import_from(import_), 'result')} from {import_} into {records.root()}")
    if export is not None:
        _print(f"Wrote {_count(records.export_all(export, operators or None), 'result')} to {export}")
    if show:
        _show([record for record in records.listed() if not operators or record.operator in operators])


def _show(listed: Sequence[Record]) -> None:
    from opkit.kernels.tuning import records
    from opkit.op.aot import tuning

    hashes = tuning.identities()
    rows = [
        _row(record, entry, records.stale(entry, hashes.get((record.operator, record.kernel))))
        for record in listed
        for entry in record.entries
    ]
    if rows:
        terminal.console().print(terminal.table(_HEADINGS, rows))
    _print(f"{_count(len(rows), 'result')} in {records.root()}")


def _row(record: Record, entry: TuningEntry, stale: str) -> tuple[str, ...]:
    time = "" if entry.best.ms is None else f"{entry.best.ms:.4g}"
    date = entry.when.strftime("%Y-%m-%d %H:%M")
    cells = (record.operator, record.kernel, entry.device, entry.bucket, entry.best.label, time, date, stale or "no")
    return tuple(escape(printable(cell)) for cell in cells)


def _print(text: str) -> None:
    terminal.console().print(escape(printable(text)), soft_wrap=True)


def _calls_to_tune(
    module: str, names: Sequence[str], shapes: Iterable[str], file: Path | None
) -> Iterator[ExampleCall]:
    """Yield the calls to tune for.

    Raises:
        OpkitError: there is no GPU, or an operator or file that the user named does not exist.
    """
    from opkit.op import registry
    from opkit.op.aot import tuning
    from opkit.op.examples import arguments as example_arguments
    from opkit.op.examples import calls as example_calls

    tuning.device()
    requested = [example_arguments.parse_call(text) for text in shapes]
    requested += example_arguments.read_file(file) if file is not None else []
    for call in requested:
        example_calls.check(registry.get(call.operator)._operator, call)  # pyright: ignore[reportPrivateUsage]
        if not names or call.operator in names:
            yield call
    for op in () if requested else tuning.operators(module, names):
        try:
            yield from tuning.calls(op)
        except errors.ArgumentError as error:
            if names:
                raise
            typer.echo(f"opkit: left out: {error}", err=True)


def _run(calls: Sequence[ExampleCall], force: bool) -> int:
    """Tune for each call, print a line for each of its kernels, and return how many calls failed."""
    console = terminal.console()
    failed = 0
    with terminal.progress(console) as progress:
        task = progress.add_task("", total=len(calls))
        for call in calls:
            failed += not _tune_call(call, force, progress, task)
            progress.advance(task)
    _print(f"{_count(len(calls) - failed, 'call')} tuned, {failed} failed.")
    return failed


def _tune_call(call: ExampleCall, force: bool, progress: Progress, task: TaskID) -> bool:
    """Tune for one call, and print the result; return False where it failed."""
    from opkit.op.aot import tuning

    def report(identity: Identity, number: int, total: int) -> None:
        progress.update(task, description=escape(f"{identity}: configuration {number + 1} of {total}"))

    progress.update(task, description=escape(printable(str(call))))
    try:
        results = tuning.tune(call, tuning.device(), force, report)
    except Exception as error:  # a kernel can fail in any way, and the other calls must still be tuned
        progress.console.print(
            f"[red]{escape(str(call))}: {type(error).__name__}: {escape(str(error))}", soft_wrap=True
        )
        return False
    for line in _lines(call, results):
        progress.console.print(line, soft_wrap=True)
    return True


def _lines(call: ExampleCall, results: Sequence[TuningResult]) -> Iterator[str]:
    if not results:
        yield f"{escape(printable(str(call)))}: nothing to tune"
    for result in results:
        choice = result.choice
        name = printable(f"{call} [{choice.identity.kernel}]")
        yield f"{escape(name)}: [bold]{escape(choice.config.label)}[/bold]{_measured(choice)}"


def _measured(choice: Choice) -> str:
    if choice.ms is None:
        return f"  ({_SOURCES.get(choice.source, 'its only configuration')})"
    first = choice.ms_of(choice.configs[0]) if choice.configs else None
    against_first = "the first is skipped" if first is None else f"{_times(first, choice.ms)} the first"
    against_slowest = f"{_times(choice.slowest_ms, choice.ms)} the slowest"
    return f"  {choice.ms:.4g} ms, {against_slowest}, {against_first}  ({_SOURCES[choice.source]})"


def _times(other: Any, ms: float) -> str:
    return f"{other / ms:.2f}x" if ms > 0 else "-"
