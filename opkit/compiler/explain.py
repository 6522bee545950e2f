"""This module implements ``opkit.explain``: it shows what ``torch.compile(backend="opkit")`` makes of a model, form by form.

``str()`` of an explanation is a report: a table of the graphs, then the kernels, calls, refusals and memory of each. The HTML
page also has every form in full.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit import page
from opkit.compiler.backend import observer, opkit_backend, pattern_notes
from opkit.compiler.capture import torch_private as private
from opkit.compiler.diagnostics import CompiledGraph
from opkit.compiler.explained_graph import BufferPlace, GraphExplanation, KernelText, explain_graph, with_resources
from opkit.compiler.run.gpu_kernels import GpuKernelsBuild, bandwidth


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
    """

    model: Callable[..., Any]
    graphs: list[GraphExplanation] = dataclasses.field(default_factory=list[GraphExplanation])
    guards: list[list[str]] = dataclasses.field(default_factory=list[list[str]])
    recompiles: list[str] = dataclasses.field(default_factory=list[str])
    breaks: list[str] = dataclasses.field(default_factory=list[str])
    patterns: list[str] = dataclasses.field(default_factory=list[str])
    result: Any = None

    def __post_init__(self) -> None:
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
        else:
            self.graphs.append(explain_graph(compiled))

    def __str__(self) -> str:
        lines = _list_lines("patterns", self.patterns)
        return "\n".join([report(self.graphs, self.guards, self.recompiles, self.breaks), *lines])

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained page: the report, and every graph's forms in full."""
        body = page_body(self.graphs, self.guards, self.recompiles, self.breaks)
        body += _list_html("Patterns", self.patterns)
        written = Path(path)
        written.write_text(page.document(title(self.graphs), body), encoding="utf-8")
        return written

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


# ---- the report ------------------------------------------------------------------------------------------------------

HEADINGS = ("graph", "operators", "kernels", "calls", "not fused", "arena")
_MAX_LINES = 12  # lines of a kind; after them the report says how many more there are


def title(graphs: Sequence[GraphExplanation]) -> str:
    """Return the numbers of graphs, kernels and calls."""
    kernels = sum(graph.launches * graph.count for graph in graphs)
    calls = sum(len(graph.calls) * graph.count for graph in graphs)
    return f"{_count(len(graphs), 'graph')}, {_count(kernels, 'kernel')}, {_count(calls, 'call')} of torch's operators"


def row(graph: GraphExplanation) -> tuple[str, ...]:
    """Return a graph's row of the table."""
    numbers = (graph.nodes, graph.launches, len(graph.calls), len(graph.refusals))
    return (graph.title, *map(str, numbers), f"{graph.arena:,} B")


def report(
    graphs: Sequence[GraphExplanation],
    guards: Sequence[Sequence[str]],
    recompiles: Sequence[str],
    breaks: Sequence[str],
) -> str:
    """Return the whole report."""
    lines = [title(graphs), "", *_table_lines(graphs)]
    for graph in graphs:
        lines += ["", graph.title, *(f"  {line}" for line in _graph_lines(graph))]
    lines += ["", f"guards: {sum(map(len, guards))}"]
    lines += _list_lines("compiled again", recompiles) + _list_lines("graph breaks", breaks)
    return "\n".join(lines)


def _table_lines(graphs: Sequence[GraphExplanation]) -> list[str]:
    rows = [HEADINGS, *map(row, graphs)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADINGS))]
    return ["  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) for r in rows]


def _graph_lines(graph: GraphExplanation) -> Iterator[str]:
    if graph.reason:
        yield f"runs in eager mode: {graph.reason}"
    texts = ["\n      ".join([_kernel_line(k), *figure_lines(k, graph.bandwidth)]) for k in graph.kernels]
    yield from _shortened(texts, "kernels")
    yield from _shortened([f"side by side: {batch}" for batch in graph.batches], "batches")
    yield from _shortened([f"apart: {reason}" for reason in graph.apart], "kernels that are apart")
    yield from _shortened([f"call {call}" for call in graph.calls], "calls")
    yield from _shortened([f"not fused: {refusal}" for refusal in graph.refusals], "refusals")
    yield from _shortened([place_text(place) for place in graph.places], "buffers")


def _kernel_line(kernel: KernelText) -> str:
    times = f" ({kernel.launches} times)" if kernel.launches > 1 else ""
    return f"{kernel.name}{times}: {', '.join(dict.fromkeys(kernel.operators))}"


def figure_lines(kernel: KernelText, bandwidth: float | None) -> Iterator[str]:
    """Yield lines of what a launch moves and computes, what it waits for, and what it takes of the hardware."""
    figures, resources = kernel.figures, kernel.resources
    if figures is not None:
        operations = "" if figures.operations is None else f", {figures.operations:,} floating-point operations"
        yield f"reads {figures.read:,} B, writes {figures.written:,} B{operations}"
    if figures is not None and bandwidth is not None:
        least = f"{figures.seconds(bandwidth) * 1e6:.2f} us at {bandwidth / 1e9:,.0f} GB/s"
        yield f"bound by {figures.bound(bandwidth)}: to move the bytes takes {least}"
    if resources is not None:
        yield (
            f"{_count(resources.threads, 'thread')} of {_count(resources.registers, 'register')}, "
            f"{resources.shared:,} B of shared memory, {resources.spills:,} B spilled"
        )


def place_text(place: BufferPlace) -> str:
    """Return a line that says where a buffer lies."""
    reuses = f", where {', '.join(place.reuses)} was" if place.reuses else ""
    end = place.begin + place.nbytes
    return f"memory {place.begin:,} to {end:,}: {place.buffer}, steps {place.first} to {place.last}{reuses}"


def _shortened(lines: Sequence[str], kind: str) -> list[str]:
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], *([f"... and {more} more {kind}"] if more > 0 else [])]


def _list_lines(heading: str, lines: Sequence[str]) -> list[str]:
    return [f"{heading}:", *(f"  {line}" for line in lines)] if lines else []


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# ---- the HTML page ---------------------------------------------------------------------------------------------------


def page_body(
    graphs: Sequence[GraphExplanation],
    guards: Sequence[Sequence[str]],
    recompiles: Sequence[str],
    breaks: Sequence[str],
) -> list[str]:
    """Return the lines of the page's body."""
    lines = [f"<h1>{escape(title(graphs))}</h1>", *_table_html(graphs)]
    lines += [line for number, graph in enumerate(graphs) for line in _graph_html(number, graph)]
    for number, each in enumerate(guards):
        lines += _folded(f"Guards of capture {number}", "\n".join(each))
    return [*lines, *_list_html("Compiled again", recompiles), *_list_html("Graph breaks", breaks)]


def _table_html(graphs: Sequence[GraphExplanation]) -> Iterator[str]:
    headings = "".join(f'<th scope="col">{heading}</th>' for heading in HEADINGS)
    yield f'<div class="wide"><table><thead><tr>{headings}</tr></thead><tbody>'
    for number, graph in enumerate(graphs):
        name, *cells = map(escape, row(graph))
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        yield f'<tr><th scope="row"><a href="#graph-{number}">{name}</a></th>{numbers}</tr>'
    yield "</tbody></table></div>"


def _graph_html(number: int, graph: GraphExplanation) -> Iterator[str]:
    anchor = f"graph-{number}"
    yield f'<section aria-labelledby="{anchor}">\n<h2 id="{anchor}">{escape(graph.title)}</h2>'
    if graph.reason:
        yield f'<p><span class="bad">runs in eager mode</span> {escape(graph.reason)}</p>'
    for kernel in graph.kernels:
        yield from _kernel_html(kernel, graph)
    yield from _list_html("Kernels side by side", graph.batches)
    yield from _list_html("Kernels that are apart", graph.apart)
    yield from _list_html("Calls of torch's operators", graph.calls)
    yield from _list_html("Not fused", graph.refusals)
    yield from _list_html(f"Memory: {graph.arena:,} bytes", map(place_text, graph.places))
    for heading, text in (
        ("Captured graph", graph.captured),
        ("Program", graph.program),
        (f"{graph.language} source", graph.source),
    ):
        yield from _folded(heading, text)
    yield "</section>"


def _kernel_html(kernel: KernelText, graph: GraphExplanation) -> Iterator[str]:
    times = f' <small class="quiet">{kernel.launches} times</small>' if kernel.launches > 1 else ""
    yield f"<h3>{escape(kernel.name)}{times}</h3>"
    items = "".join(f"<li><code>{escape(origin)}</code></li>" for origin in kernel.origins)
    yield f"<ul>{items}</ul>"
    yield from (f"<p>{escape(line)}</p>" for line in figure_lines(kernel, graph.bandwidth))
    yield from _folded("Loop nest", kernel.text)
    yield from _folded(f"{graph.language} function", kernel.source)


def _folded(heading: str, text: str) -> Iterator[str]:
    if text:
        yield f"<details><summary>{escape(heading)}</summary>"
        yield f'<div class="copied"><pre tabindex="0"><code>{escape(text)}</code></pre></div></details>'


def _list_html(heading: str, texts: Iterable[str]) -> Iterator[str]:
    items = "".join(f"<li><code>{escape(text)}</code></li>" for text in texts)
    if items:
        yield f"<h3>{escape(heading)}</h3>\n<ul>{items}</ul>"
