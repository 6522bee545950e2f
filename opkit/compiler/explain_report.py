"""This module writes an explanation as text: a table of the graphs, then the kernels, calls, refusals and memory of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opkit.compiler.explained_graph import BufferPlace, GraphExplanation, KernelText

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
    lines += list_lines("compiled again", recompiles) + list_lines("graph breaks", breaks)
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
    slowest = sorted(graph.steps, key=lambda step: -(step.seconds or 0.0))
    timed = [f"time {seconds_text(step.seconds)}: {step.name}" for step in slowest if step.seconds is not None]
    yield from _shortened(timed, "times")
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


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> seconds_text(0.00123), seconds_text(4.5e-6)
    ('1.23 ms', '4.5 us')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _shortened(lines: Sequence[str], kind: str) -> list[str]:
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], *([f"... and {more} more {kind}"] if more > 0 else [])]


def list_lines(heading: str, lines: Sequence[str]) -> list[str]:
    return [f"{heading}:", *(f"  {line}" for line in lines)] if lines else []


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
