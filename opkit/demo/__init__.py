"""``opkit demo``: a small language model made of opkit operators, trained eagerly and under torch.compile.

The two runs start from the same weights and see the same bytes, so their losses must be the same. That, and that they
fall, is checked: :func:`run` returns only if both hold. The outcome is reported as a table, as JSON, and as a plot where
matplotlib is installed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

import opkit
from opkit.demo.model import (
    EARLY,
    GPT,
    TOLERANCE,
    TOLERANCE_END,
    Curve,
    Size,
    Step,
    batches,
    build,
    check_agree,
    check_falls,
    differences,
    generate,
    read_text,
    schedule,
    train,
)
from opkit.errors import ArgumentError, DemoError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


__all__ = ["DemoOptions", "DemoReport", "Size", "run"]

BACKENDS = {"cpu": "opkit", "cuda": "inductor"}  #: of torch.compile, by the type of device
STEPS = {"cpu": 150, "cuda": 1000}  #: by the type of device, where the number of steps is left out
SECONDS = 15.0  #: after which eager training ends, where the number of steps is left out; compiled takes as many steps


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """The further settings of :func:`run`.

    Attributes:
        backend: of torch.compile, a name or a function; None: "opkit" on a CPU, and "inductor" on a GPU, where opkit's compiler
            fuses nothing.
        sample: bytes to generate.
    """

    size: Size = dataclasses.field(default_factory=Size)
    batch: int = 4
    seed: int = 0
    backend: Any = None
    sample: int = 200
    temperature: float = 0.7


def run(
    steps: int | None = None,
    device: str | None = None,
    out: Path = Path("opkit-demo"),
    *,
    options: DemoOptions | None = None,
    console: Console | None = None,
) -> DemoReport:
    """Train the demo's model twice, compare the runs, and show and write the outcome.

    Args:
        steps: of training, in each of the two runs; where it is left out, 150 on a CPU and 1000 on a GPU, or
            as many as the eager run takes in 15 seconds.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; a GPU where there is one, if it is left out.
        out: the folder for ``losses.json`` and, where matplotlib is installed, ``losses.png``; created where it is missing.
        options: the model's size and the like.
        console: where to print; standard output where it is left out.

    Raises:
        ArgumentError: ``steps``, ``device`` or ``out`` cannot be used; nothing has been trained or written.
        DemoError: there is no text to train on, torch.compile failed, or the losses did not fall or did not agree.
    """
    began = time.perf_counter()
    options, console = options or DemoOptions(), console or Console()
    plan = _plan(steps, device, out)
    backend = options.backend or BACKENDS[plan.device.type]
    options = dataclasses.replace(options, backend=backend)
    text = read_text()
    models = [build(options.size, options.seed, plan.device) for _ in range(2)]
    data = batches(text, steps=plan.steps, batch=options.batch, length=options.size.context + 1, seed=options.seed)
    eager, compiled = _curves(models, schedule(data.to(plan.device)), plan.budget, options, console)
    prompt = text[: options.size.context]
    report = DemoReport(
        device=_describe(plan.device),
        backend=backend if isinstance(backend, str) else getattr(backend, "__name__", str(backend)),
        parameters=sum(p.numel() for p in models[0].parameters()),
        tokens_per_step=options.batch * options.size.context,
        eager=eager,
        compiled=compiled,
        prompt=_decode(bytes(prompt.tolist())),
        sample=_decode(_generate(models[1], prompt.to(plan.device), options)),
        seconds=time.perf_counter() - began,
        folder=plan.folder,
    )
    write_losses(report)  # before the judgement, so that a failure can be examined
    report = draw_losses(report)
    console.print(report)
    check_agree(report.eager, report.compiled)
    check_falls(report.eager)
    check_falls(report.compiled)
    return report


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The user's settings, once they are checked."""

    steps: int
    budget: float
    device: torch.device
    folder: Path


def _plan(steps: int | None, name: str | None, out: Path) -> _Plan:
    device = _device(name)
    budget = SECONDS if steps is None else math.inf
    return _Plan(_steps(steps, device), budget, device, _folder(out))


def _steps(steps: int | None, device: torch.device) -> int:
    if steps is None:
        return STEPS[device.type]
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError(f"opkit demo: steps is {steps!r}. Give a whole number of at least 1.")
    return steps


def _device(name: str | None) -> torch.device:
    """Return the device called ``name``, once it is checked that it exists."""
    names = ["cpu", "cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    usable = names if torch.cuda.is_available() else ["cpu"]
    if name is None:
        return torch.device("cuda" if "cuda" in usable else "cpu")
    if name not in usable:
        raise ArgumentError(f"opkit demo: device is {name!r}. This machine has: {', '.join(usable)}.")
    return torch.device(name)


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"


def _folder(out: Path) -> Path:
    """Create ``out`` where it is missing, and return it once it is checked that it can be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out
    except OSError as error:
        reason = error.strerror or error
        raise ArgumentError(f"opkit demo: cannot write to out, {str(out)!r}: {reason}. Give another folder.") from error


def _curves(
    models: list[GPT], data: list[Step], budget: float, options: DemoOptions, console: Console
) -> tuple[Curve, Curve]:
    """Train the first of ``models`` eagerly within ``budget`` seconds, and the second as far under torch.compile."""
    with _progress(console) as progress:
        eager = train("eager", models[0], models[0].loss, data, _ticker(progress, "eager", len(data)), budget)
        data = data[: len(eager.losses)]
        progress.update(progress.task_ids[0], total=len(data))
        return eager, _compiled(models[1], data, options, _ticker(progress, "compiled", len(data)))


def _compiled(model: GPT, data: list[Step], options: DemoOptions, ticker: Callable[[float], None]) -> Curve:
    loss = torch.compile(model.loss, fullgraph=True, dynamic=False, backend=options.backend)
    try:
        with warnings.catch_warnings():
            # The two runs are compared in full float32, so Inductor's advice to use TensorFloat32 is not taken.
            warnings.filterwarnings("ignore", message="TensorFloat32")
            return train("compiled", model, loss, data, ticker)
    except Exception as error:
        raise DemoError(
            f"opkit demo: the eager run went through, torch.compile did not: {type(error).__name__} (above). "
            "`opkit doctor` says whether a compiler is missing."
        ) from error


def _progress(console: Console) -> Progress:
    name, loss = TextColumn("{task.description:>8}"), TextColumn("{task.fields[loss]}")
    return Progress(name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), loss, console=console)


def _ticker(progress: Progress, name: str, steps: int) -> Callable[[float], None]:
    """Add a bar called ``name``, and return a function that moves it on by a step and takes the step's loss."""
    task = progress.add_task(name, total=steps, loss="first step")
    return lambda loss: progress.update(task, advance=1, loss=f"loss {loss:.3f}")


def _generate(model: GPT, prompt: Tensor, options: DemoOptions) -> bytes:
    return generate(model, prompt, count=options.sample, temperature=options.temperature, seed=options.seed)


def _decode(text: bytes) -> str:
    """Return ``text`` without characters that control a terminal; an untrained model writes any byte."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text.decode(errors="replace"))


# ---- the report ------------------------------------------------------------------------------------------------------


_FLOOR = 1e-8  #: drawn in place of no difference, on a logarithmic axis


@dataclasses.dataclass(frozen=True)
class DemoReport:
    """The outcome of :func:`opkit.demo.run`."""

    device: str
    backend: str
    parameters: int
    tokens_per_step: int
    eager: Curve
    compiled: Curve
    prompt: str
    sample: str
    seconds: float
    folder: Path
    plotted: bool = False

    @property
    def losses_path(self) -> Path:
        """The numbers, as JSON."""
        return self.folder / "losses.json"

    @property
    def plot_path(self) -> Path:
        """The two loss curves."""
        return self.folder / "losses.png"

    @property
    def max_difference(self) -> float:
        """The largest difference, in nats, between the losses of the two runs at the same step."""
        return max(differences(self.eager, self.compiled))

    def __rich__(self) -> RenderableType:
        return Group(_times(self), _agreement(self), _sample(self), Text(_files(self)))


def _files(report: DemoReport) -> str:
    if report.plotted:
        return f"Wrote {report.plot_path} and {report.losses_path}"
    return f"Wrote {report.losses_path}. The loss curves are not drawn without matplotlib: pip install 'opkit[plot]'"


def _times(report: DemoReport) -> Table:
    table = Table(title=f"{report.parameters:,} parameters on {report.device}, {report.seconds:.0f} s in all")
    for heading in ("", "loss", "first step", "each step", "tokens/s", "training"):
        table.add_column(heading, justify="right" if heading else "left")
    for curve in (report.eager, report.compiled):
        table.add_row(
            curve.name if curve is report.eager else report.backend,
            f"{curve.losses[0]:.2f} → {curve.end:.2f}",
            f"{curve.seconds[0]:.2f} s",
            f"{1e3 * curve.step_seconds:.1f} ms",
            f"{report.tokens_per_step / curve.step_seconds:,.0f}",
            f"{sum(curve.seconds):.1f} s",
        )
    return table


def _agreement(report: DemoReport) -> str:
    gaps = differences(report.eager, report.compiled)[:EARLY]
    return (
        f"Over the first {len(gaps)} steps the two losses differ by at most {max(gaps):.1g} (tolerance {TOLERANCE:g}), "
        f"and their means at the end by {abs(report.eager.end - report.compiled.end):.1g} ({TOLERANCE_END:g})."
    )


def _sample(report: DemoReport) -> Panel:
    text = Text.assemble((report.prompt, "dim"), (report.sample, "bold"))
    return Panel(text, title="generated (after the dim prompt)", title_align="left")


def write_losses(report: DemoReport) -> None:
    """Write the numbers of ``report`` to its ``losses_path``, as JSON."""
    record = {
        "opkit": opkit.__version__,
        "torch": torch.__version__,
        "device": report.device,
        "backend": report.backend,
        "parameters": report.parameters,
        "tokens_per_step": report.tokens_per_step,
        "seconds": report.seconds,
        "max_difference": report.max_difference,
        "tolerance": TOLERANCE,
        "curves": {c.name: {"losses": c.losses, "seconds": c.seconds} for c in (report.eager, report.compiled)},
        "sample": report.sample,
    }
    report.losses_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def draw_losses(report: DemoReport) -> DemoReport:
    """Draw the two loss curves, and below them their difference, to ``plot_path``; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure  # takes a while to import, and only this function needs it
    except ImportError:
        return report
    figure = Figure(figsize=(8, 6), layout="constrained", dpi=120)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    _draw_curves(above, report)
    _draw_differences(below, differences(report.eager, report.compiled))
    for axes in (above, below):
        axes.legend()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(report.plot_path)
    return dataclasses.replace(report, plotted=True)


def _draw_curves(axes: Axes, report: DemoReport) -> None:
    steps = range(1, len(report.eager.losses) + 1)
    axes.plot(steps, report.eager.losses, color="tab:blue", linewidth=4, alpha=0.4, label="eager")
    axes.plot(steps, report.compiled.losses, color="tab:red", linewidth=1, label="torch.compile")
    axes.set(ylabel="loss (nats per byte)", title="A byte-level GPT of opkit operators on Python's standard library")


def _draw_differences(axes: Axes, gaps: tuple[float, ...]) -> None:
    axes.semilogy(range(1, len(gaps) + 1), [max(gap, _FLOOR) for gap in gaps], color="tab:gray", linewidth=1)
    axes.plot((1, min(EARLY, len(gaps))), (TOLERANCE, TOLERANCE), "k--", linewidth=1, label="tolerance")
    axes.set(xlabel="step", ylabel="difference")
