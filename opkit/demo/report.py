"""What a run of the demo found: shown as a table, kept as JSON, drawn as a PNG."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import opkit
from opkit.demo.training import Curve, differences, tolerance

EARLY = 100  #: steps within which the printed difference is taken
_FLOOR = 1e-8  #: stands for no difference on a logarithmic axis


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of :func:`opkit.demo.run`."""

    device: str
    parameters: int
    tokens_per_step: int
    eager: Curve
    compiled: Curve
    prompt: str
    sample: str
    seconds: float
    folder: Path

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
        return Group(_times(self), _agreement(self), _sample(self), f"Wrote {self.plot_path} and {self.losses_path}")


def _times(report: Report) -> Table:
    table = Table(title=f"{report.parameters:,} parameters on {report.device}, {report.seconds:.0f} s in all")
    for heading in ("", "loss", "first step", "each step", "tokens/s", "training"):
        table.add_column(heading, justify="right" if heading else "left")
    for curve in (report.eager, report.compiled):
        table.add_row(
            curve.name,
            f"{curve.losses[0]:.2f} → {curve.end:.2f}",
            f"{curve.seconds[0]:.2f} s",
            f"{1e3 * curve.step_seconds:.1f} ms",
            f"{report.tokens_per_step / curve.step_seconds:,.0f}",
            f"{sum(curve.seconds):.1f} s",
        )
    return table


def _agreement(report: Report) -> str:
    gaps = differences(report.eager, report.compiled)[:EARLY]
    return (
        f"Over the first {len(gaps)} steps the two losses differ by at most {max(gaps):.1g}; "
        f"float32 rounding accounts for up to {tolerance(len(gaps)):.1g}."
    )


def _sample(report: Report) -> Panel:
    text = Text.assemble((report.prompt, "dim"), (report.sample, "bold"))
    return Panel(text, title="generated (after the dim prompt)", title_align="left")


def write_losses(report: Report) -> None:
    """Write the numbers of ``report`` to its ``losses_path``, as JSON."""
    record = {
        "opkit": opkit.__version__,
        "torch": torch.__version__,
        "device": report.device,
        "parameters": report.parameters,
        "tokens_per_step": report.tokens_per_step,
        "seconds": report.seconds,
        "max_difference": report.max_difference,
        "tolerances": [tolerance(step) for step in range(1, len(report.eager.losses) + 1)],
        "curves": {c.name: {"losses": c.losses, "seconds": c.seconds} for c in (report.eager, report.compiled)},
        "sample": report.sample,
    }
    report.losses_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def draw_losses(report: Report) -> None:
    """Draw the two loss curves, and below them their difference, to the ``plot_path`` of ``report``."""
    from matplotlib.figure import Figure  # imported here: it takes a while, and only this needs it

    figure = Figure(figsize=(8, 6), layout="constrained", dpi=120)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(report.eager.losses) + 1)
    above.plot(steps, report.eager.losses, color="tab:blue", linewidth=4, alpha=0.4, label="eager")
    above.plot(steps, report.compiled.losses, color="tab:red", linewidth=1, label="torch.compile")
    above.set(ylabel="loss (nats per byte)", title="A byte-level GPT of opkit operators on Python's standard library")
    gaps = [max(gap, _FLOOR) for gap in differences(report.eager, report.compiled)]
    below.semilogy(steps, gaps, color="tab:gray", linewidth=1, label="measured")
    below.semilogy(
        steps, [tolerance(step) for step in steps], color="black", linewidth=1, linestyle="--", label="allowed"
    )
    below.set(xlabel="step", ylabel="difference")
    above.legend(loc="upper right")
    below.legend(loc="center right", ncols=2)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(report.plot_path)
