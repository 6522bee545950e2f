"""``opkit tune``: the configurations of Triton kernels are timed in advance, shown, and taken to other machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from opkit import errors, terminal
from opkit.kernels.cc.progress import printable

if TYPE_CHECKING:
    from opkit.kernels.tuning.observation import Choice
    from opkit.kernels.tuning.record_format import Identity, Record, TuningEntry
    from opkit.op.aot.tuning import TuningResult
    from opkit.op.examples.arguments import ExampleCall

_HEADINGS = ("operator", "kernel", "device", "bucket", "config", "ms", "date", "stale")
_SOURCES = {"tuned": "tuned", "record": "recorded", "nearest": "not tuned", "first": "not tuned"}


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
        Path | None, typer.Option("--import", help="Take over the results in this file, and tune nothing.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Time again what is recorded.")] = False,
) -> None:
    """Time the configurations of Triton kernels on this GPU in advance, and keep the fastest."""
    keeping = show or export is not None or import_ is not None
    if keeping and (shapes or shapes_file or force):
        terminal.refuse(
            "--shapes, --shapes-file and --force are for tuning, and --show, --export and --import do not tune."
        )
    terminal.import_modules([module] if module else None)
    with terminal.bad_input(errors.OpkitError):
        if keeping:
            _keep(show, export, import_, op)
            return
        if module is None:
            terminal.refuse("name the module that defines the operators, as in: opkit tune my_ops")
        planned = [*_planned(module, op or (), shapes or (), shapes_file)]
    raise typer.Exit(1 if _run(planned, force) else 0)


# ---- what is recorded ------------------------------------------------------------------------------------------------


def _keep(show: bool, export: Path | None, import_: Path | None, operators: Sequence[str] | None) -> None:
    from opkit.kernels.tuning import records

    if import_ is not None:
        _say(f"Took {_results(records.import_from(import_))} from {import_} into {records.root()}")
    if export is not None:
        _say(f"Wrote {_results(records.export_all(export, operators or None))} to {export}")
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
    _say(f"{_results(len(rows))} in {records.root()}")


def _row(record: Record, entry: TuningEntry, stale: str) -> tuple[str, ...]:
    time = "" if entry.best.ms is None else f"{entry.best.ms:.4g}"
    date = entry.when.strftime("%Y-%m-%d %H:%M")
    cells = (record.operator, record.kernel, entry.device, entry.bucket, entry.best.label, time, date, stale or "no")
    return tuple(escape(printable(cell)) for cell in cells)


def _results(count: int) -> str:
    return "1 result" if count == 1 else f"{count} results"


def _say(text: str) -> None:
    terminal.console().print(escape(printable(text)), soft_wrap=True)


# ---- tuning ----------------------------------------------------------------------------------------------------------


def _planned(module: str, names: Sequence[str], shapes: Iterable[str], file: Path | None) -> Iterator[ExampleCall]:
    """The calls to tune for.

    Raises:
        OpkitError: there is no GPU, or what the user asked for is not there.
    """
    from opkit.op import registry
    from opkit.op.aot import tuning
    from opkit.op.examples import arguments as example_arguments
    from opkit.op.examples import calls as example_calls

    tuning.device()
    given = [example_arguments.parse_call(text) for text in shapes]
    given += example_arguments.read_file(file) if file is not None else []
    for call in given:
        example_calls.check(registry.get(call.operator)._operator, call)  # pyright: ignore[reportPrivateUsage]
        if not names or call.operator in names:
            yield call
    for op in () if given else tuning.operators(module, names):
        try:
            yield from tuning.calls(op)
        except errors.ArgumentError as error:
            if names:
                raise
            typer.echo(f"opkit: left out: {error}", err=True)


def _run(planned: Sequence[ExampleCall], force: bool) -> int:
    """Tune for each call, with a line for each kernel in it; how many calls failed."""
    console = terminal.console()
    failed = 0
    with _progress(console) as progress:
        task = progress.add_task("", total=len(planned))
        for call in planned:
            failed += not _tuned(call, force, progress, task)
            progress.advance(task)
    _say(f"{_calls(len(planned) - failed)} tuned, {failed} failed.")
    return failed


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _tuned(call: ExampleCall, force: bool, progress: Progress, task: TaskID) -> bool:
    from opkit.op.aot import tuning

    def report(identity: Identity, number: int, total: int) -> None:
        progress.update(task, description=escape(f"{identity}: configuration {number + 1} of {total}"))

    progress.update(task, description=escape(printable(str(call))))
    try:
        results = tuning.tune(call, tuning.device(), force, report)
    except Exception as error:  # a kernel can fail in any way, and the other calls are to be tuned nevertheless
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


def _calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"
