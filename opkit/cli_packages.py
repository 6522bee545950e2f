"""``opkit build`` and ``opkit bridge``: what is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from opkit import config, errors, terminal
from opkit.kernels.cc.progress import printable

if TYPE_CHECKING:
    from opkit.kernels.aot_package import Library
    from opkit.op.aot.package import BuildReport


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
        list[str] | None,
        typer.Option(
            help="GPU architectures, as in sm_80,sm_90,gfx942; may be repeated. By default a Triton kernel's targets=, or else "
            "sm_80,sm_90,sm_100, and for CUDA each generation. A Triton kernel's examples are compiled with each config."
        ),
    ] = None,
    tuning: Annotated[
        bool, typer.Option(help="Put the tuning results in the cache for the package's Triton kernels into it.")
    ] = True,
    wheel: Annotated[
        Path | None, typer.Option(help="Make a wheel of the package's project too, and write it to this folder.")
    ] = None,
) -> None:
    """Compile every C, C++, CUDA and Triton kernel of a package ahead of time, into the package; build the bridge here too."""
    if wheel is not None and output is not None:
        terminal.refuse("--wheel packs what is in the package, and --output writes elsewhere. Leave out one of them.")
    terminal.import_modules([module])
    from opkit.op.aot import package
    from opkit.op.aot import wheel as wheels

    try:
        if wheel is not None:
            wheels.project_of(package.folder_of(module))  # before anything takes time
        with terminal.bad_input(errors.ArgumentError):
            architectures = terminal.split_at_commas(",".join(arch or ()))
            report = package.build(module, terminal.split_at_commas(isa), output, jobs, programs, architectures, tuning)
            parts = [*_built(report)]
        if wheel is not None:
            made = wheels.build(report.folder, wheel, native=bool(report.libraries))
            parts.append(f"the wheel: {escape(printable(str(made)))}, {terminal.bytes_text(made.stat().st_size)}")
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


def bridge() -> None:
    """Build the bridge to this torch, with which calls of C kernels that need no gradient skip Python."""
    with terminal.bad_input(errors.OpkitError):
        _build_bridge()


def _build_bridge() -> None:
    import torch

    from opkit.op.native.compiled import build_bridge

    text = f"The bridge to torch {torch.__version__} is {build_bridge()}"
    terminal.console().print(escape(text), soft_wrap=True, highlight=False)


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
    return f"{', '.join(listed or ['nothing'])}, {terminal.bytes_text(sum(files.values()))}"


def _binaries(report: BuildReport) -> Iterator[tuple[str, ...]]:
    """Return a row for each Triton kernel and architecture; equal binaries count once."""
    sizes: dict[tuple[str, str], dict[str, int]] = {}
    for each in report.binaries:
        name = f"{each.operator}[{each.kernel}]" if "::" in each.operator else each.kernel  # launched by Python
        key = name, each.form.target
        sizes.setdefault(key, {})[each.file] = each.size
    for (name, target), files in sizes.items():
        yield escape(printable(name)), target, str(len(files)), terminal.bytes_text(sum(files.values()))


def _library(report: BuildReport, library: Library) -> tuple[str, ...]:
    count = report.programs.get((library.operator, library.kernel), 0)
    name = f"{library.operator}[{library.kernel}]"
    isa = ", ".join(library.architectures) or library.isa
    return escape(printable(name)), isa, terminal.bytes_text(library.size), f"{count} programs", library.file
