"""The ``opkit`` command: ``demo``, ``doctor``, ``new``, ``list``, ``describe``, ``check``, ``build``, ``bridge``, ``tune``,
``explain``, ``trace``, ``cache``, ``bench``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from opkit import errors, terminal
from opkit.cli_bench import bench_app
from opkit.cli_check import check
from opkit.cli_kernels import cache_app, tune
from opkit.cli_new import new
from opkit.cli_packages import bridge, build

if TYPE_CHECKING:
    from opkit.doctor import Finding

app = typer.Typer(
    help="Custom PyTorch operators from one function.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(cache_app, name="cache")
app.add_typer(bench_app, name="bench")
app.command()(check)
app.command()(tune)

_STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}
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
def explain(
    target: Annotated[str, typer.Argument(help="A function or a model in a module, as in my_models:block.")],
    args: Annotated[
        str, typer.Option(help='Its arguments, in Python, where torch is known: "torch.randn(4, 8), dim=0".')
    ] = "",
    html: Annotated[Path | None, typer.Option(help="Write every form in full to this file, for a browser.")] = None,
    time: Annotated[bool, typer.Option("--time", help="Time each kernel and each call, with random inputs.")] = False,
) -> None:
    """Compile with backend="opkit", call it once, and print kernels, calls, what was not fused and why, and memory."""
    with terminal.bad_input(errors.ArgumentError):
        model = _model(target)
        positional, named = _arguments(args)
    from opkit.compiler.explain import explain

    explanation = explain(model, *positional, **named)
    if time:
        explanation.measure()
    terminal.console().print(str(explanation), markup=False, highlight=False, soft_wrap=True)
    if html is not None:
        explanation.to_html(html)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def trace(
    program: Annotated[str, typer.Argument(help="A Python program, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The program's own arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", help="The program is a module, as after python -m.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page to this file.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write every event for ui.perfetto.dev, to a file.json or file.json.gz.")
    ] = None,
) -> None:
    """Run a program, and print which kernels its operators got and why, what calls cost, and what was compiled or recompiled.

    Options of trace stand before the program. The status is 1 if the program fails.
    """
    if not module and not Path(program).is_file():
        terminal.refuse(f"there is no file {program}. Name a Python program, or a module after -m.")
    from opkit import tracing

    found = tracing.trace(program, arguments or (), module=module)
    terminal.console().print(str(found), markup=False, highlight=False, soft_wrap=True)
    if html is not None:
        found.to_html(html)
    if perfetto is not None:
        found.to_perfetto(perfetto)
    raise typer.Exit(1 if found.error else 0)


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
        terminal.check_device(device)
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
    from opkit.sharding.describe import sharding_of

    for part in _describe(op.describe()):
        terminal.console().print(part)
    rules = [_rule(rule) for rule in sharding_of(op)]
    terminal.console().print(
        terminal.table(("sharded size", "origin", "arguments -> results, or the reason for none"), rules)
    )


app.command()(new)
app.command()(build)
app.command()(bridge)


def _model(target: str) -> Any:
    module, _, name = target.partition(":")
    if not name:
        raise errors.ArgumentError(f"{target}: name a function or a model of the module, as in {module}:function.")
    terminal.import_modules([module])
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise errors.ArgumentError(f"{module} has no function or model called {name}.")
    return found


def _arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    def arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    try:
        return eval(f"arguments({text})", {"torch": torch, "arguments": arguments})
    except Exception as error:
        raise errors.ArgumentError(f"--args {text}: {type(error).__name__}: {error}") from error


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
