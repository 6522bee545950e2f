"""Report the outcome of a run of the demo: as a table, as JSON, and as a plot where matplotlib is installed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import opkit
from opkit.demo.training import EARLY, TOLERANCE, TOLERANCE_END, Curve, differences

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
