"""``opkit bench``: benchmarks that are part of the package: of topics, and of a zoo of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from opkit import errors, terminal

if TYPE_CHECKING:
    from opkit.bench import figures
    from opkit.bench.jobs import Job
    from opkit.bench.results import Record

bench_app = typer.Typer(help="Time opkit next to its peers, and measure models.", no_args_is_help=True)

_STYLES = {"passed": "green", "skipped": "yellow"}


# ---- topics ----------------------------------------------------------------------------------------------------------


@bench_app.command("list")
def list_topics() -> None:
    """List the topics of ``opkit bench run``, with the peers, and what is not installed."""
    from opkit.bench.topics import TOPICS

    rows = [(each.name, each.about, each.peers, ", ".join(each.missing())) for each in TOPICS.values()]
    terminal.console().print(terminal.table(("topic", "what is timed", "compared with", "not installed"), rows))


@bench_app.command()
def run(
    topics: Annotated[list[str] | None, typer.Argument(help="Topics of `opkit bench list`; by default all.")] = None,
    only: Annotated[str, typer.Option(help="Only the cases whose names contain this text.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch; by default torch decides.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, whose times say little.")] = False,
    out: Annotated[Path, typer.Option(help="The file of the run, for `opkit bench compare`.")] = Path(
        "opkit-bench.json"
    ),
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots and a filter to this file.")] = None,
) -> None:
    """Time opkit and its peers in turn, and print how many times as fast opkit is. The status is 1 if a case fails."""
    terminal.check_device(device)
    for option, path in (("--out", out), ("--markdown", markdown), ("--html", html)):
        if path is not None:
            _check_folder(option, path)
    import torch

    from opkit.bench import figures
    from opkit.bench.topics import TOPICS, Setting

    if threads is not None:
        torch.set_num_threads(threads)
    setting, console = Setting(device, quick), terminal.console()
    with terminal.bad_input(errors.ArgumentError):
        cases = figures.chosen(topics or [*TOPICS], setting, only)
    found: list[figures.Figure] = []
    with terminal.progress(console) as progress:
        task = progress.add_task("", total=len(cases))
        for topic, case in cases:
            progress.update(task, description=escape(f"{topic}: {case.name}"))
            found.append(figures.measured(topic, case, setting))
            progress.advance(task)
    finished = figures.Run(figures.setup_of(setting), found)
    finished.write(out)
    for topic, mine in figures.by_topic(found).items():
        columns = figures.headings(mine)
        rows = [tuple(map(escape, figures.row(each, columns))) for each in mine]
        console.print(f"[bold]{topic}[/]", terminal.table(columns, rows), escape(figures.total(mine)), "", sep="\n")
    if markdown is not None:
        markdown.write_text(figures.markdown(finished), encoding="utf-8")
    if html is not None:
        from opkit.bench.figures_page import run_page

        html.write_text(run_page(finished), encoding="utf-8")
    raise typer.Exit(1 if any(each.error for each in found) else 0)


@bench_app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="A file of `opkit bench run`.")],
    new: Annotated[Path, typer.Argument(help="A later one.")],
) -> None:
    """Print what is slower or faster than in an earlier run by more than the noise. The status is 1 if a case is slower or fails.

    Speeds relative to a peer that was timed in turn with opkit are compared, so that a slower machine does not count.
    """
    from opkit.bench import figures

    with terminal.bad_input(errors.ArgumentError):
        found = figures.changes(figures.Run.read(old), figures.Run.read(new))
    marked = [each for each in found if each.verdict]
    headings = ("topic", "case", "compared with", "old", "new", "change", "noise", "")
    console = terminal.console()
    if marked:
        console.print(terminal.table(headings, [_change_row(each) for each in marked]))
    counts = {verdict: sum(each.verdict == verdict for each in found) for verdict in ("slower", "faster", "failed")}
    console.print(f"{len(found)} cases: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}.")
    raise typer.Exit(1 if counts["slower"] or counts["failed"] else 0)


def _change_row(change: figures.Change) -> tuple[str, ...]:
    style = {"slower": "bold red", "failed": "bold red", "faster": "green"}.get(change.verdict, "yellow")
    verdict = f"[{style}]{change.verdict}[/]"
    if change.old is None or change.new is None or change.change is None or change.noise is None:
        return (change.topic, escape(change.case), "-", "-", "-", "-", "-", verdict)
    unit = "x" if change.base else " s"
    numbers = (f"{change.old:.3g}{unit}", f"{change.new:.3g}{unit}", f"{change.change:.2f}x", f"{change.noise:.0%}")
    return (change.topic, escape(change.case), escape(change.base) or "-", *numbers, verdict)


# ---- models ----------------------------------------------------------------------------------------------------------


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
        _compare_models(*compare)
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
    records = _run_models(requested, out, timeout, retry, jobs)
    _print(records)
    if html is not None:
        from opkit.bench.results_page import results_page

        html.write_text(results_page(records), encoding="utf-8")
    raise typer.Exit(1 if any(each["status"] in ("failed", "wrong") for each in records) else 0)


def _check(backends: Sequence[str], device: str, out: Path) -> None:
    """Refuse what would make every process fail."""
    terminal.check_device(device)
    _check_folder("--out", out)
    import torch

    known = ["eager", *torch.compiler.list_backends()]
    for name in backends:
        if name not in known:
            terminal.refuse(f"--backend {name}: torch has no such backend. There are: {', '.join(known)}.")


def _check_folder(option: str, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        terminal.refuse(f"{option} {path}: there is no folder {path.parent}.")


def _split(texts: Sequence[str] | None) -> list[str]:
    return terminal.split_at_commas(",".join(texts or ()))


def _run_models(jobs: Sequence[Job], out: Path, timeout: float, retry: bool, at_once: int) -> list[Record]:
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


def _compare_models(old: Path, new: Path) -> None:
    from opkit.bench import results

    for path in (old, new):
        if not path.is_file():
            terminal.refuse(f"--compare {path}: there is no such file of results.")
    found = results.differences(results.read(old), results.read(new))
    rows = [tuple(map(escape, (each.model, each.backend, each.what, each.old, each.new))) for each in found]
    if rows:
        terminal.console().print(terminal.table(("model", "backend", "what", "old", "new"), rows))
    terminal.console().print(f"{len(found)} difference{'' if len(found) == 1 else 's'}.")
