"""This module writes an explanation as a report: a table of the graphs, then the kernels, calls, refusals and memory of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opkit.compiler.explained_graph import BufferPlace, GraphExplanation, KernelText

HEADINGS = ("graph", "operators", "kernels", "calls", "not fused", "arena")
_MAX_LINES = 12  # lines of a kind; after them the report says how many more there are


def title(graphs: Sequence[GraphExplanation]) -> str:
    """Return the numbers of graphs, kernels and calls."""
    kernels = sum(graph.launches for graph in graphs)
    calls = sum(len(graph.calls) for graph in graphs)
    return f"{_count(len(graphs), 'graph')}, {_count(kernels, 'kernel')}, {_count(calls, 'call')} of torch's operators"


def row(graph: GraphExplanation) -> tuple[str, ...]:
    """Return a graph's row of the table."""
    numbers = (graph.nodes, graph.launches, len(graph.calls), len(graph.refusals))
    return (graph.name, *map(str, numbers), f"{graph.arena:,} B")


def report(
    graphs: Sequence[GraphExplanation],
    guards: Sequence[Sequence[str]],
    recompiles: Sequence[str],
    breaks: Sequence[str],
) -> str:
    """Return the whole report."""
    lines = [title(graphs), "", *_table(graphs)]
    for graph in graphs:
        lines += ["", graph.name, *(f"  {line}" for line in _graph(graph))]
    lines += ["", f"guards: {sum(map(len, guards))}"]
    lines += _listed("compiled again", recompiles) + _listed("graph breaks", breaks)
    return "\n".join(lines)


def _table(graphs: Sequence[GraphExplanation]) -> list[str]:
    rows = [HEADINGS, *map(row, graphs)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADINGS))]
    return ["  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) for r in rows]


def _graph(graph: GraphExplanation) -> Iterator[str]:
    if graph.reason:
        yield f"runs in eager mode: {graph.reason}"
    yield from _shortened([_kernel(kernel) for kernel in graph.kernels], "kernels")
    yield from _shortened([f"side by side: {batch}" for batch in graph.batches], "batches")
    yield from _shortened([f"apart: {reason}" for reason in graph.apart], "kernels that are apart")
    yield from _shortened([f"call {call}" for call in graph.calls], "calls")
    yield from _shortened([f"not fused: {refusal}" for refusal in graph.refusals], "refusals")
    yield from _shortened([place_text(place) for place in graph.places], "buffers")


def _kernel(kernel: KernelText) -> str:
    times = f" ({kernel.launches} times)" if kernel.launches > 1 else ""
    return f"{kernel.name}{times}: {', '.join(dict.fromkeys(kernel.operators))}"


def place_text(place: BufferPlace) -> str:
    """Return a line that says where a buffer lies."""
    reuses = f", where {', '.join(place.reuses)} was" if place.reuses else ""
    end = place.begin + place.nbytes
    return f"memory {place.begin:,} to {end:,}: {place.buffer}, steps {place.first} to {place.last}{reuses}"


def _shortened(lines: Sequence[str], kind: str) -> list[str]:
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], *([f"... and {more} more {kind}"] if more > 0 else [])]


def _listed(heading: str, lines: Sequence[str]) -> list[str]:
    return [f"{heading}:", *(f"  {line}" for line in lines)] if lines else []


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
