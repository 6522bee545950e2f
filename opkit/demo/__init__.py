"""``opkit demo``: a small language model made of opkit operators, trained eagerly and under torch.compile.

The two runs start from the same weights and see the same bytes, so their losses must be the same. That, and that they
fall, is checked: :func:`run` returns only if both hold.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from opkit.demo import corpus
from opkit.demo.model import GPT, Size, build, generate
from opkit.demo.report import DemoReport, draw_losses, write_losses
from opkit.demo.training import Curve, Step, check_agree, check_falls, schedule, train
from opkit.errors import ArgumentError, DemoError

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
    text = corpus.read()
    models = [build(options.size, options.seed, plan.device) for _ in range(2)]
    eager, compiled = _curves(models, _steps_of(text, plan, options), plan.budget, options, console)
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
    return _conclude(report, console)


def _conclude(report: DemoReport, console: Console) -> DemoReport:
    """Write and show ``report`` before judging it, so that a failure can be looked into."""
    write_losses(report)
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


def _steps_of(text: Tensor, plan: _Plan, options: DemoOptions) -> list[Step]:
    length = options.size.context + 1
    data = corpus.batches(text, steps=plan.steps, batch=options.batch, length=length, seed=options.seed)
    return schedule(data.to(plan.device))


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
