"""This module implements ``opkit.explain``: it shows what ``torch.compile(backend="opkit")`` makes of a model, form by form.

``str()`` of an explanation is a report: a table of the graphs, then the kernels, calls, refusals and memory of each. The HTML
page also has every form in full.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from opkit import page
from opkit.compiler import explain_page, explain_report
from opkit.compiler.backend import observer, opkit_backend, pattern_notes
from opkit.compiler.capture import torch_private as private
from opkit.compiler.diagnostics import CompiledGraph
from opkit.compiler.explained_graph import GraphExplanation, explain_graph, with_resources, with_seconds
from opkit.compiler.run.gpu_kernels import GpuKernelsBuild, bandwidth

if TYPE_CHECKING:
    from opkit.compiler.step_times import MachinePeaks


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Compile ``model``, call it once with these arguments, and return an explanation of what was compiled.

    If results require grad, their gradients with respect to the arguments and the model's parameters are computed too (no
    ``.grad`` is written), so that the explanation includes the backward. Everything that Dynamo compiled before is dropped, as
    by :func:`torch.compiler.reset`.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Softmax(-1))
    >>> explanation = explain(model, torch.randn(8, 16))
    >>> explanation.kernels
    1
    >>> [kernel.operators for kernel in explanation.graphs[0].kernels]
    [('aten.tanh.default', 'aten._softmax.default')]
    """
    private.reset()
    explanation = Explanation(model)
    explanation.call(*args, **kwargs)
    return explanation


@dataclasses.dataclass
class Explanation:
    """The compiled graphs of a model; ``str()`` is a report, :meth:`to_html` writes it with every form in full.

    Attributes:
        model: the function or module that was compiled.
        graphs: its graphs, in the order in which they were compiled.
        guards: the conditions under which compiled code is used again, a list for each graph that Dynamo captured.
        recompiles: the reasons why Dynamo compiled a function again in :meth:`call`.
        breaks: the reasons for graph breaks.
        patterns: what was written by hand and was replaced, or was kept and why.
        result: the result of the latest call.
        peaks: what the machine can do at most, once :meth:`measure` was called.
        not_measured: the graphs whose steps :meth:`measure` did not time, and why.
    """

    model: Callable[..., Any]
    graphs: list[GraphExplanation] = dataclasses.field(default_factory=list[GraphExplanation])
    guards: list[list[str]] = dataclasses.field(default_factory=list[list[str]])
    recompiles: list[str] = dataclasses.field(default_factory=list[str])
    breaks: list[str] = dataclasses.field(default_factory=list[str])
    patterns: list[str] = dataclasses.field(default_factory=list[str])
    result: Any = None
    peaks: MachinePeaks | None = None
    not_measured: list[str] = dataclasses.field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._records: list[CompiledGraph] = []  # of ``graphs``
        self._compiled = private.watch_compilation(
            self.model, opkit_backend, self.guards.append, self.recompiles.append
        )

    @property
    def kernels(self) -> int:
        """The number of kernel launches of all graphs together."""
        return sum(graph.launches * graph.count for graph in self.graphs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled model again, for example with other sizes, and add what is compiled for that call."""
        tokens = observer.set(self._add_graph), pattern_notes.set(self.patterns)
        try:
            self.result = self._compiled(*args, **kwargs)
            _backward(self.result, _leaves(self.model, (args, kwargs)))
        finally:
            observer.reset(tokens[0])
            pattern_notes.reset(tokens[1])
        self._add_resources()
        self.breaks = private.graph_breaks()
        return self.result

    def _add_graph(self, compiled: CompiledGraph) -> None:
        if compiled.reason and self.graphs and self.graphs[-1].name == compiled.name:  # it failed after planning
            self.graphs[-1] = dataclasses.replace(self.graphs[-1], reason=compiled.reason)
            self._records[-1] = compiled
        else:
            self.graphs.append(explain_graph(compiled))
            self._records.append(compiled)

    def measure(self) -> None:
        """Time each launch and each call of the graphs, with random inputs of the sizes with which they were compiled.

        The times are ``seconds`` of :attr:`GraphExplanation.steps`. A graph for CPUs is compiled again, with a function for
        each launch, so that this takes a few seconds. On a GPU a step's time is that of its kernels in torch's profiler.

        >>> import torch
        >>> explanation = explain(torch.nn.Tanh(), torch.randn(8, 16))
        >>> explanation.measure()
        >>> [step.seconds > 0 for step in explanation.graphs[0].steps]
        [True]
        """
        from opkit.compiler import step_times  # few explanations are timed

        device = next((record.captured.device for record in self._records if record.captured), torch.device("cpu"))
        self.peaks, self.not_measured = step_times.measure_peaks(device), []
        for number, record in enumerate(self._records):
            try:
                seconds = step_times.step_times(record)
            except Exception as error:  # an operator may refuse random inputs, by any error
                self.not_measured.append(f"{record.name}: {error}")
            else:
                self.graphs[number] = with_seconds(self.graphs[number], seconds)

    def __str__(self) -> str:
        lines = explain_report.list_lines("patterns", self.patterns)
        return "\n".join([explain_report.report(self.graphs, self.guards, self.recompiles, self.breaks), *lines])

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained page: the report, and every graph's forms in full."""
        written = Path(path)
        written.write_text(explain_page.page_of(self), encoding="utf-8")
        return written

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the page of :meth:`to_html` in a frame."""
        return page.frame(explain_page.page_of(self), "opkit explain", str(self))

    def _add_resources(self) -> None:
        """Add the resources of kernels for GPUs; the call has compiled them, so that the binaries are on the disk."""
        for number, graph in enumerate(self.graphs):
            if graph.functions and not graph.reason and graph.kernels[0].resources is None:
                device = torch.device(graph.device)
                binaries = GpuKernelsBuild(graph.functions, graph.source, device).binaries()
                self.graphs[number] = with_resources(graph, binaries, bandwidth(device))


# ---- gradients -------------------------------------------------------------------------------------------------------


def _leaves(model: Any, arguments: Any) -> list[torch.Tensor]:
    """Return the tensors to compute gradients for."""
    parameters: Iterable[Any] = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return [t for t in [*pytree.tree_leaves(arguments), *parameters] if isinstance(t, torch.Tensor) and t.requires_grad]


def _backward(result: Any, leaves: Sequence[torch.Tensor]) -> None:
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if outputs and leaves:
        ones = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
