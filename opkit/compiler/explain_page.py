"""This module writes an explanation as HTML: the table of graphs, and for each its kernels and every form in full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from opkit.compiler import explain_text
from opkit.compiler.explained_graph import GraphExplanation, KernelText


def body(
    graphs: Sequence[GraphExplanation],
    guards: Sequence[Sequence[str]],
    recompiles: Sequence[str],
    breaks: Sequence[str],
) -> list[str]:
    """Return the lines of the page's body."""
    lines = [f"<h1>{escape(explain_text.title(graphs))}</h1>", *_table(graphs)]
    lines += [line for number, graph in enumerate(graphs) for line in _graph(number, graph)]
    for number, each in enumerate(guards):
        lines += _folded(f"Guards of capture {number}", "\n".join(each))
    return [*lines, *_listed("Compiled again", recompiles), *_listed("Graph breaks", breaks)]


def _table(graphs: Sequence[GraphExplanation]) -> Iterator[str]:
    headings = "".join(f'<th scope="col">{heading}</th>' for heading in explain_text.HEADINGS)
    yield f'<div class="wide"><table><thead><tr>{headings}</tr></thead><tbody>'
    for number, graph in enumerate(graphs):
        name, *cells = map(escape, explain_text.row(graph))
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        yield f'<tr><th scope="row"><a href="#graph-{number}">{name}</a></th>{numbers}</tr>'
    yield "</tbody></table></div>"


def _graph(number: int, graph: GraphExplanation) -> Iterator[str]:
    anchor = f"graph-{number}"
    yield f'<section aria-labelledby="{anchor}">\n<h2 id="{anchor}">{escape(graph.name)}</h2>'
    if graph.reason:
        yield f'<p><span class="bad">runs in eager mode</span> {escape(graph.reason)}</p>'
    for kernel in graph.kernels:
        yield from _kernel(kernel)
    yield from _listed("Kernels side by side", graph.batches)
    yield from _listed("Kernels that are apart", graph.apart)
    yield from _listed("Calls of torch's operators", graph.calls)
    yield from _listed("Not fused", graph.refusals)
    yield from _listed(f"Memory: {graph.arena:,} bytes", map(explain_text.place_text, graph.places))
    for heading, text in (("Captured graph", graph.captured), ("Program", graph.program), ("C source", graph.source)):
        yield from _folded(heading, text)
    yield "</section>"


def _kernel(kernel: KernelText) -> Iterator[str]:
    times = f' <small class="quiet">{kernel.launches} times</small>' if kernel.launches > 1 else ""
    yield f"<h3>{escape(kernel.name)}{times}</h3>"
    items = "".join(f"<li><code>{escape(origin)}</code></li>" for origin in kernel.origins)
    yield f"<ul>{items}</ul>"
    yield from _folded("Loop nest", kernel.text)


def _folded(heading: str, text: str) -> Iterator[str]:
    if text:
        yield f"<details><summary>{escape(heading)}</summary>"
        yield f'<div class="copied"><pre tabindex="0"><code>{escape(text)}</code></pre></div></details>'


def _listed(heading: str, texts: Iterable[str]) -> Iterator[str]:
    items = "".join(f"<li><code>{escape(text)}</code></li>" for text in texts)
    if items:
        yield f"<h3>{escape(heading)}</h3>\n<ul>{items}</ul>"
