"""The ``opkit`` command: ``demo``, ``doctor``, ``list``, ``describe``, ``check``, ``build``, ``bridge``, ``tune``, ``explain``,
``cache``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from opkit import config, errors, terminal
from opkit.cli_check import check
from opkit.cli_explain import explain
from opkit.cli_tune import tune
from opkit.kernels.cc.progress import printable

if TYPE_CHECKING:
    from opkit.doctor import Finding
    from opkit.kernels.aot_package import Library
    from opkit.kernels.build_cache import CacheEntry
    from opkit.op.aot.package import BuildReport

app = typer.Typer(
    help="Custom PyTorch operators from one function.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

cache_app = typer.Typer(help="List, check and remove the kernels that were built.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.command()(check)
app.command()(tune)
app.command()(explain)

_STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}
_KEY_SHOWN = 12
_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_AGES = ((86400, "days"), (3600, "h"), (60, "min"))
_ORIGINS = {"derived": "green", "given": "cyan", "not derivable": "yellow"}

Modules = Annotated[
    list[str] | None,
    typer.Option("--module", "-m", help="Import this module first, so that its operators are registered; repeatable."),
]


def main() -> None:
    """Run the command line in ``sys.argv``."""
    app(prog_name="opkit")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"opkit {version('opkit')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print opkit's version.")
    ] = False,
) -> None:
    """Define the options that may stand before a command."""


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(help="Training steps of each run.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU where there is one.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder that the loss curves are written to.")] = Path("opkit-demo"),
    backend: Annotated[
        Literal["opkit", "inductor"] | None,
        typer.Option(help="Of torch.compile; by default opkit on a CPU, and inductor on a GPU."),
    ] = None,
) -> None:
    """Train a small language model, made of opkit operators, on Python's own source; eager, then compiled."""
    with terminal.bad_input(errors.OpkitError):
        _check_device(device)
        _check_folder(out)
        from opkit import demo as program

        program.run(steps, device, out, options=program.DemoOptions(backend=backend))


@app.command()
def doctor() -> None:
    """Print versions, compilers, CPU features, GPUs and cache folders, and how to fix what is missing."""
    from opkit.doctor import examine

    findings = examine()
    console = terminal.console()
    for section in dict.fromkeys(finding.section for finding in findings):
        console.print(_section(section, [finding for finding in findings if finding.section == section]))
    missing = [finding for finding in findings if finding.status == "missing"]
    verdict = f"[bold red]Missing: {len(missing)}" if missing else "[green]Nothing that opkit needs is missing."
    console.print(verdict)
    raise typer.Exit(1 if missing else 0)


@app.command("list")
def list_operators(module: Modules = None) -> None:
    """List the operators that are registered."""
    terminal.import_modules(module)
    import opkit

    operators = opkit.operators()
    if not operators:
        terminal.console().print(
            "No operators are registered. Name the module that defines them: opkit list --module my_ops"
        )
        return
    terminal.console().print(
        terminal.table(("operator", "kernels", "schema"), [_row(op.describe()) for op in operators])
    )


@app.command()
def describe(name: Annotated[str, typer.Argument(help="namespace::operator")], module: Modules = None) -> None:
    """Print an operator's schema, its kernels, and where each of its rules comes from."""
    terminal.import_modules(module)
    import opkit

    with terminal.bad_input(errors.UnknownOperatorError):
        op = opkit.get(name)
    for part in _describe(op.describe()):
        terminal.console().print(part)


@app.command()
def build(
    module: Annotated[str, typer.Argument(help="The module that defines the operators, or a package that imports it.")],
    isa: Annotated[
        str, typer.Option(help="Instruction sets, as in baseline,avx2,avx512; for kernels that do not name theirs.")
    ] = "",
    output: Annotated[
        Path | None, typer.Option(help="The folder to write to; by default _opkit in the package.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="How many compilers run at once.")] = None,
    programs: Annotated[
        bool, typer.Option("--programs", help="Work out output sizes, for use without Python; takes a second each.")
    ] = False,
    arch: Annotated[
        str,
        typer.Option(
            help="GPU architectures for Triton kernels, as in sm_80,sm_90,gfx942; by default the kernel's targets=, or else "
            "sm_80,sm_90,sm_100. Each example of a kernel is compiled with each config."
        ),
    ] = "",
    tuning: Annotated[
        bool, typer.Option(help="Put the tuning results in the cache for the package's Triton kernels into it.")
    ] = True,
) -> None:
    """Compile every C, C++, CUDA and Triton kernel of a package ahead of time, into the package; build the bridge here too."""
    terminal.import_modules([module])
    from opkit.op.aot import package

    try:
        with terminal.bad_input(errors.ArgumentError):
            report = package.build(
                module, _split_at_commas(isa), output, jobs, programs, _split_at_commas(arch), tuning
            )
            parts = [*_built(report)]
    except errors.PackageError as error:
        typer.echo(f"opkit: {error}", err=True)
        raise typer.Exit(1) from None
    for part in parts:
        terminal.console().print(part)
    if config.get().bridge:
        try:
            _build_bridge()
        except errors.OpkitError as error:  # the package is complete without it
            typer.echo(f"opkit: the bridge was not built, so calls here go through Python: {error}", err=True)


@app.command()
def bridge() -> None:
    """Build the bridge to this torch, with which calls of C kernels that need no gradient skip Python."""
    with terminal.bad_input(errors.OpkitError):
        _build_bridge()


def _build_bridge() -> None:
    from opkit.kernels import bridge as bridges
    from opkit.op.torch_private import torch_paths

    paths = torch_paths()
    path = bridges.build(paths)
    terminal.console().print(escape(f"The bridge to torch {paths.version} is {path}"), soft_wrap=True, highlight=False)


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
        size = _bytes(sum(path.stat().st_size for path in compiled))
        terminal.console().print(f"{_triton(len(compiled))}, {size}, in {escape(printable(str(stored.root())))}")


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
        terminal.console().print(f"Removed {_triton(compiled)}, from {escape(printable(str(stored.root())))}")


def _triton(count: int) -> str:
    return f"{count} Triton kernel{'' if count == 1 else 's'}"


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


def _split_at_commas(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _built(report: BuildReport) -> Iterator[Table | str]:
    from opkit.kernels.aot_package import runtime_library

    if report.libraries or not report.binaries:
        headings = ("kernel", "isa", "size", "output sizes", "file")
        yield terminal.table(headings, [_library(report, library) for library in report.libraries])
    if report.binaries:
        yield terminal.table(("Triton kernel", "architecture", "binaries", "size"), list(_binaries(report)))
    for reason in report.left_out:
        yield f"[yellow]left out:[/yellow] {escape(reason)}"
    for reason in report.python_only:
        yield f"[yellow]for Python alone:[/yellow] {escape(reason)}"
    yield f"{_total(report)} in {escape(printable(str(report.folder)))}"
    if report.libraries:
        yield f"the runtime for programs without Python: {escape(str(runtime_library()))}"


def _total(report: BuildReport) -> str:
    files = {each.file: each.size for each in (*report.libraries, *report.binaries)}
    counts = (
        (len(report.libraries), "library", "libraries"),
        (len(files) - len(report.libraries), "Triton binary", "Triton binaries"),
        (report.tuned, "tuning result", "tuning results"),
    )
    listed = [f"{count} {one if count == 1 else more}" for count, one, more in counts if count]
    return f"{', '.join(listed or ['nothing'])}, {_bytes(sum(files.values()))}"


def _binaries(report: BuildReport) -> Iterator[tuple[str, ...]]:
    """Return a row for each Triton kernel and architecture; equal binaries count once."""
    sizes: dict[tuple[str, str], dict[str, int]] = {}
    for each in report.binaries:
        name = f"{each.operator}[{each.kernel}]" if "::" in each.operator else each.kernel  # launched by Python
        key = name, each.form.target
        sizes.setdefault(key, {})[each.file] = each.size
    for (name, target), files in sizes.items():
        yield escape(printable(name)), target, str(len(files)), _bytes(sum(files.values()))


def _library(report: BuildReport, library: Library) -> tuple[str, ...]:
    count = report.programs.get((library.operator, library.kernel), 0)
    name = f"{library.operator}[{library.kernel}]"
    return escape(printable(name)), library.isa, _bytes(library.size), f"{count} programs", library.file


def _entry(entry: CacheEntry) -> tuple[str, ...]:
    cells = (entry.label, _bytes(entry.size), _age(entry.created), entry.compiler, entry.key[:_KEY_SHOWN])
    return tuple(escape(printable(cell)) for cell in cells)


def _amount(entries: list[CacheEntry]) -> str:
    kernels = "1 kernel" if len(entries) == 1 else f"{len(entries)} kernels"
    return f"{kernels}, {_bytes(sum(entry.size for entry in entries))}"


def _bytes(count: int) -> str:
    scale = next(((unit, name) for unit, name in _SIZES if count >= unit), (1, "B"))
    return f"{count / scale[0]:.4g} {scale[1]}"


def _age(created: float) -> str:
    seconds = max(0.0, time.time() - created)
    scale = next(((unit, name) for unit, name in _AGES if seconds >= unit), (1, "s"))
    return f"{seconds // scale[0]:.0f} {scale[1]}"


def _check_device(device: str | None) -> None:
    if device is None:
        return
    import torch

    try:
        parsed = torch.device(device)
        torch.empty(1, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        terminal.refuse(f"the device {device!r} cannot be used: {reason}\nUse --device cpu, or leave it out.")
    if parsed.type == "meta":
        terminal.refuse("the device 'meta' holds no values. Use --device cpu, or leave it out.")


def _check_folder(out: Path) -> None:
    existing = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not existing.is_dir():
        terminal.refuse(f"--out {out}: {existing} is a file. Name a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        terminal.refuse(f"--out {out}: {existing} cannot be written to. Name another folder.")


def _row(description: Any) -> tuple[str, str, str]:
    kernels = ", ".join(f"{kernel.name} ({kernel.device})" for kernel in description.kernels)
    return escape(description.name), escape(kernels or "the reference"), escape(description.schema)


def _section(section: str, findings: list[Finding]) -> Table:
    table = terminal.table((section, "", ""), [])
    for finding in findings:
        fix = f"\n-> {finding.fix}" if finding.fix else ""
        mark = f"[{_STYLES[finding.status]}]{finding.status}"
        table.add_row(f"  {escape(finding.name)}", mark, escape(finding.value + fix))
    return table


def _describe(description: Any) -> Iterator[Table | str]:
    yield f"[bold]{escape(description.name)}[/bold]  {escape(description.schema)}"
    if description.doc:
        yield escape(description.doc.strip().splitlines()[0])
    mutates = ", ".join(description.mutates) or "nothing"
    facts = [
        ("reference", description.reference),
        ("mutates", f"{mutates} ({description.mutation_origin})"),
        ("tags", ", ".join(description.tags) or "none"),
        ("contract", description.contract_hash),
    ]
    yield terminal.table(("fact", ""), [(name, escape(value)) for name, value in facts])
    yield terminal.table(
        ("kernel", "device", "dtypes", "priority", "when", "enabled"), [_kernel(k) for k in description.kernels]
    )
    yield terminal.table(("rule", "origin", ""), [_rule(rule) for rule in description.rules])


def _kernel(kernel: Any) -> tuple[str, ...]:
    dtypes = "any" if not kernel.dtypes else ", ".join(str(dtype) for dtype in kernel.dtypes)
    cells = (kernel.name, kernel.device, dtypes, kernel.priority, kernel.condition or "always", kernel.enabled)
    return tuple(escape("yes" if cell is True else "no" if cell is False else str(cell)) for cell in cells)


def _rule(rule: Any) -> tuple[str, str, str]:
    style = _ORIGINS.get(rule.origin, "white")
    return escape(rule.rule), f"[{style}]{escape(rule.origin)}", escape(rule.detail)
