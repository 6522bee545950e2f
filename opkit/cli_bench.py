"""``opkit bench``: benchmarks that are part of the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from opkit import errors, terminal

if TYPE_CHECKING:
    from opkit.bench.jobs import Job
    from opkit.bench.results import Record

bench_app = typer.Typer(help="Measure models.", no_args_is_help=True)

_STYLES = {"passed": "green", "skipped": "yellow"}


@bench_app.callback()
def options() -> None:
    """Measure models."""


@bench_app.command()
def models(
    only: Annotated[
        list[str] | None, typer.Option(help="Models by name; may be repeated, or names with commas.")
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help="Families of models; may be repeated.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="As many models, at even distances in the list.")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Of torch.compile, or eager; may be repeated. By default opkit and inductor."),
    ] = None,
    size: Annotated[
        Literal["tiny", "real"], typer.Option(help="Tiny models, for CPUs, or those that people run.")
    ] = "tiny",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="bfloat16 and float16 run models under autocast, float16 with a GradScaler."),
    ] = "float32",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch; by default torch decides.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for a model and a backend.")] = 900,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes at once, for GPUs: they compile together, and measure times in turn.")
    ] = 1,
    retry: Annotated[bool, typer.Option("--retry", help="Run those again that failed or were wrong.")] = False,
    out: Annotated[Path, typer.Option(help="The file of results; a run goes on with what is missing in it.")] = Path(
        "opkit-models.jsonl"
    ),
    html: Annotated[Path | None, typer.Option(help="Write a page with plots and a filter to this file.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Run nothing; print the differences of two files, old and new.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Run nothing; print the models.")] = False,
) -> None:
    """Compile a zoo of models with random weights; print graph breaks, fallbacks, errors against float64, and times."""
    if compare is not None:
        _compare(*compare)
        return
    from opkit.bench.jobs import Job
    from opkit.bench.measurement import Request
    from opkit.bench.zoo import table

    with terminal.bad_input(errors.ArgumentError):
        chosen = table.chosen(_split(only), _split(family), sample)
    if listing:
        _print_list(chosen)
        return
    backends = _split(backend) or ["opkit", "inductor"]
    _check(backends, device, out)
    requested = [
        Job(each, Request(each.name, name, size, device, dtype, threads)) for each in chosen for name in backends
    ]
    records = _run(requested, out, timeout, retry, jobs)
    _print(records)
    if html is not None:
        from opkit.bench.results_page import results_page

        html.write_text(results_page(records), encoding="utf-8")
    raise typer.Exit(1 if any(each["status"] in ("failed", "wrong") for each in records) else 0)


def _check(backends: Sequence[str], device: str, out: Path) -> None:
    """Refuse what would make every process fail."""
    terminal.check_device(device)
    if not out.absolute().parent.is_dir():
        terminal.refuse(f"--out {out}: there is no folder {out.parent}.")
    import torch

    known = ["eager", *torch.compiler.list_backends()]
    for name in backends:
        if name not in known:
            terminal.refuse(f"--backend {name}: torch has no such backend. There are: {', '.join(known)}.")


def _split(texts: Sequence[str] | None) -> list[str]:
    return terminal.split_at_commas(",".join(texts or ()))


def _run(jobs: Sequence[Job], out: Path, timeout: float, retry: bool, at_once: int) -> list[Record]:
    """Run what is missing in the file, and return the records of all jobs."""
    from opkit.bench import jobs as processes
    from opkit.bench import results

    missing = processes.missing(jobs, results.read(out), retry)
    console = terminal.console()
    if len(missing) < len(jobs):
        console.print(escape(f"{len(jobs) - len(missing)} of {len(jobs)} are in {out}."))
    with terminal.progress(console) as progress:
        task = progress.add_task("models", total=len(missing))

        def finished(job: Job, record: Record) -> None:
            progress.advance(task)
            style = _STYLES.get(record["status"], "bold red")
            progress.console.print(f"[{style}]{record['status']:8}[/] {_title(job)}")

        processes.run(missing, out, timeout, finished, at_once)
    keys = {job.key for job in jobs}
    return [each for each in results.read(out) if results.key_of(each) in keys]


def _title(job: Job) -> str:
    return escape(f"{job.request.model}, {job.request.backend}")


def _print(records: Sequence[Record]) -> None:
    from opkit.bench import results, text

    console = terminal.console()
    console.print(terminal.table(text.HEADINGS, [tuple(map(escape, text.row(each))) for each in records]))
    for line in text.failures(records):
        console.print(escape(line), soft_wrap=True)
    for total in results.totals(records):
        console.print(escape(text.total_line(total)), soft_wrap=True)
    for line in text.peer_lines(records):
        console.print(line, soft_wrap=True)


def _print_list(chosen: Sequence[Any]) -> None:
    rows = [(each.name, each.family, ", ".join(each.packages) or "none", each.substitutes) for each in chosen]
    terminal.console().print(terminal.table(("model", "family", "packages", "stands for"), rows))


def _compare(old: Path, new: Path) -> None:
    from opkit.bench import results

    for path in (old, new):
        if not path.is_file():
            terminal.refuse(f"--compare {path}: there is no such file of results.")
    found = results.differences(results.read(old), results.read(new))
    rows = [tuple(map(escape, (each.model, each.backend, each.what, each.old, each.new))) for each in found]
    if rows:
        terminal.console().print(terminal.table(("model", "backend", "what", "old", "new"), rows))
    terminal.console().print(f"{len(found)} difference{'' if len(found) == 1 else 's'}.")
