"""Run a program and report what its operators did: ``opkit trace``.

The program runs under torch's profiler, which records every operator, and the kernel that each call of opkit's operators gets.
Calls that are profiled do not take the fast path of eager calls, so times of calls are longer than without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import runpy
import statistics
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from opkit import page
from opkit.compiler.backend import observer as graph_observer
from opkit.compiler.capture import torch_private as private
from opkit.compiler.diagnostics import CompiledGraph
from opkit.compiler.ir.program import Extern
from opkit.op.core import Operator
from opkit.op.dispatch import planning

_OWN = "opkit trace"  # the range of the profiler in which this module works; no time of a call


@dataclasses.dataclass
class OperatorTrace:
    """The calls of one operator.

    Attributes:
        name: the operator.
        calls: how many there were.
        kernels: how many calls each kernel got.
        refused: each other kernel with the reasons why calls did not get it.
        seconds: of the processor, of each call.
        dispatch: the part of them that was not spent in the kernel, of each call that went through torch's dispatcher.
        device: seconds of the GPU, of each call.
    """

    name: str
    calls: int = 0
    kernels: Counter[str] = dataclasses.field(default_factory=Counter[str])
    refused: dict[str, Counter[str]] = dataclasses.field(default_factory=dict[str, "Counter[str]"])
    seconds: list[float] = dataclasses.field(default_factory=list[float])
    dispatch: list[float] = dataclasses.field(default_factory=list[float])
    device: list[float] = dataclasses.field(default_factory=list[float])

    def add(self, kernel: Any) -> None:
        """Add the times of a call: the profiler's event of its kernel, whose parent is the operator's, with dispatch."""
        call, seconds = kernel.cpu_parent, 1e-6 * kernel.cpu_time_total
        if call is not None and call.name == self.name:
            own = sum(child.cpu_time_total for child in call.cpu_children if child.name == _OWN)
            self.dispatch.append(1e-6 * (call.cpu_time_total - own) - seconds)
            seconds += self.dispatch[-1]
        self.seconds.append(seconds)
        self.device.append(1e-6 * kernel.device_time_total)


@dataclasses.dataclass
class Trace:
    """What a program did; ``str()`` is a report.

    Attributes:
        operators: opkit's operators, those that took longest first.
        graphs: what ``backend="opkit"`` compiled.
        breaks: the reasons for graph breaks.
        recompiles: the reasons why Dynamo compiled a function again.
        error: how the program failed, or "".
    """

    operators: list[OperatorTrace] = dataclasses.field(default_factory=list[OperatorTrace])
    graphs: list[CompiledGraph] = dataclasses.field(default_factory=list[CompiledGraph])
    breaks: list[str] = dataclasses.field(default_factory=list[str])
    recompiles: list[str] = dataclasses.field(default_factory=list[str])
    error: str = ""
    _profiler: Any = dataclasses.field(default=None, init=False, repr=False)

    def __str__(self) -> str:
        lines: list[str] = []
        for title, columns, rows in self.tables():
            widths = [max(len(row[n]) for row in [columns, *rows]) for n in range(len(columns))]
            lines += [title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in (columns, *rows)), ""]
        return "\n".join(lines[:-1]) if lines else "No operator of opkit was called, and nothing was compiled with it."

    def tables(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """Yield a title, the columns and the rows of each table that is not empty."""
        on_gpu = any(map(any, (each.device for each in self.operators)))
        columns = (
            "operator",
            "calls",
            "kernels",
            "first, us",
            "median, us",
            "dispatch, us",
            *(["GPU, us"] if on_gpu else []),
        )
        rows = [_row(each, on_gpu) for each in self.operators]
        if rows:
            yield "Operators, under the profiler", columns, rows
        refused = [
            (each.name, kernel, str(count), reason)
            for each in self.operators
            for kernel, reasons in each.refused.items()
            for reason, count in reasons.items()
        ]
        if refused:
            yield "Kernels that calls did not get", ("operator", "kernel", "calls", "reason"), refused
        if self.graphs:
            yield (
                "Compiled graphs",
                ("graph", "kernels", "calls of torch", "left to torch"),
                [*map(_graph_row, self.graphs)],
            )
        for title, reasons in (("Graph breaks", self.breaks), ("Recompiles", self.recompiles)):
            if reasons:
                yield title, ("reason",), [(line,) for each in reasons for line in each.strip().splitlines()]

    def to_html(self, path: Path) -> None:
        """Write the report as a page that loads nothing."""
        body = ["<h1>Trace</h1>", f'<p class="bad">{escape(self.error)}</p>' if self.error else ""]
        for title, columns, rows in self.tables():
            body += [f"<h2>{escape(title)}</h2>", f'<div class="wide">{page.table(columns, rows)}</div>']
        path.write_text(page.document("Trace", body), encoding="utf-8")

    def to_perfetto(self, path: Path) -> None:
        """Write every event to a file that https://ui.perfetto.dev and chrome://tracing show; ``.json.gz`` compresses it."""
        self._profiler.export_chrome_trace(str(path))


def _row(each: OperatorTrace, on_gpu: bool) -> tuple[str, ...]:
    kernels = ", ".join(f"{name} ({count})" if len(each.kernels) > 1 else name for name, count in each.kernels.items())
    medians = [each.seconds[:1], each.seconds, each.dispatch, *([each.device] if on_gpu else [])]
    times = (f"{1e6 * statistics.median(found):.1f}" if found else "-" for found in medians)
    return (each.name, str(each.calls), kernels, *times)


def _graph_row(graph: CompiledGraph) -> tuple[str, ...]:
    if graph.schedule is None:
        return (graph.name, "0", "all", graph.reason.strip().splitlines()[0] if graph.reason else "")
    calls = [step for step in graph.schedule.steps if isinstance(step, Extern)]
    reasons = sorted({f"{step.target}: {step.reason}" for step in calls if step.reason})
    return (graph.name, str(len(graph.schedule.steps) - len(calls)), str(len(calls)), "; ".join(reasons) or "-")


class _Messages(logging.Handler):
    """Keeps what a logger writes."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())


def trace(program: str, arguments: Sequence[str] = (), *, module: bool = False) -> Trace:
    """Run a program as ``python program arguments`` does, and return what its operators did.

    Args:
        program: the path of a file, or the name of a module.
        arguments: what follows it on the command line.
        module: whether ``program`` is a module, as after ``python -m``.

    An exception of the program ends it; the trace has what was recorded before, and the error.
    """
    found = Trace()
    selections: dict[str, OperatorTrace] = {}

    def seen(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        with torch.profiler.record_function(_OWN):
            each = selections.setdefault(operator.name, OperatorTrace(operator.name))
            selection = planning.select(operator, args, kwargs)
            each.calls += 1
            each.kernels[selection.kernel] += 1
            for kernel, reason in selection.refused.items():
                each.refused.setdefault(kernel, Counter())[reason] += 1

    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with _observed(found, seen), torch.profiler.profile(activities=activities) as found._profiler:
        _run(found, program, arguments, module)
    found.breaks = private.graph_breaks()
    names = {f"{each.name}[{kernel}]": each for each in selections.values() for kernel in each.kernels}
    for event in found._profiler.events():
        if event.name in names:
            names[event.name].add(event)
    found.operators = sorted(selections.values(), key=lambda each: -sum(each.seconds))
    return found


@contextlib.contextmanager
def _observed(found: Trace, seen: Any) -> Iterator[None]:
    """Add what is compiled, why it is compiled again, and the calls of operators to what is found."""
    logger, handler = logging.getLogger(private.RECOMPILES_LOGGER), _Messages(found.recompiles)
    private.log_recompiles()
    level, propagates, handlers = logger.level, logger.propagate, logger.handlers[:]
    logger.setLevel(logging.DEBUG)
    logger.propagate, logger.handlers = False, [handler]
    token = graph_observer.set(found.graphs.append)
    planning.observers.append(seen)
    try:
        yield
    finally:
        planning.observers.remove(seen)
        graph_observer.reset(token)
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagates, handlers


def _run(found: Trace, program: str, arguments: Sequence[str], module: bool) -> None:
    before, path = sys.argv, sys.path[:]
    sys.argv = [program, *arguments]
    sys.path.insert(0, "" if module else str(Path(program).absolute().parent))
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        found.error = "" if ended.code in (None, 0) else f"SystemExit: {ended.code}"
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    finally:
        sys.argv, sys.path[:] = before, path
