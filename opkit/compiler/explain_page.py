"""This module writes an explanation as an HTML page: steps, kernels and the user's lines side by side, memory, and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from opkit import page
from opkit.compiler.explain_report import HEADINGS, figure_lines, place_text, row, seconds_text, title
from opkit.compiler.explained_graph import GraphExplanation, KernelText, StepText
from opkit.compiler.kernel_figures import KernelFigures

if TYPE_CHECKING:
    from opkit.compiler.explain import Explanation
    from opkit.compiler.step_times import MachinePeaks

_LINE = re.compile(r"(?P<operator>\S+) (?P<file>.+?):(?P<number>\d+): (?P<code>.*)", re.DOTALL)
"""A captured operator with the user's line, as in "aten.exp.default model.py:12: y = x.exp()"."""

_ROW = 56  # pixels: the height of a step, 3.5rem
_MAX_EDGES = 2000


def page_of(explanation: Explanation) -> str:
    """Return the page."""
    graphs = explanation.graphs
    heading = title(graphs)
    body = [f"<h1>{escape(heading)}</h1>", *_table(explanation)]
    for number, graph in enumerate(graphs):
        body += _graph(number, graph, explanation.peaks)
    for number, each in enumerate(explanation.guards):
        body += page.folded(f"Guards of capture {number}", "\n".join(each))
    body += page.listed("Compiled again", explanation.recompiles)
    body += page.listed("Graph breaks", explanation.breaks)
    body += page.listed("Patterns", explanation.patterns)
    return page.document(f"opkit explain: {heading}", body, broad=True)


def _table(explanation: Explanation) -> Iterator[str]:
    headings = "".join(f'<th scope="col">{heading}</th>' for heading in HEADINGS)
    yield f'<div class="wide" tabindex="0"><table><thead><tr>{headings}</tr></thead><tbody>'
    for number, graph in enumerate(explanation.graphs):
        name, *cells = map(escape, row(graph))
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        yield f'<tr><th scope="row"><a href="#graph-{number}">{name}</a></th>{numbers}</tr>'
    yield "</tbody></table></div>"
    if explanation.peaks is not None:
        peaks = explanation.peaks
        rates = f"copied {peaks.bandwidth / 1e9:,.1f} GB/s and computed {peaks.operations / 1e9:,.0f} GFLOP/s"
        dtype = str(peaks.dtype).removeprefix("torch.")
        yield (
            f'<p class="quiet">Each step was timed alone, with random inputs. The machine {rates} in a {dtype} product; '
            "shares are of these, and exceed 100% where data stays in caches.</p>"
        )
    yield from (f'<p class="quiet">Not timed: {escape(reason)}</p>' for reason in explanation.not_measured)


def _graph(number: int, graph: GraphExplanation, peaks: MachinePeaks | None) -> Iterator[str]:
    anchor = f"graph-{number}"
    yield f'<section aria-labelledby="{anchor}">\n<h2 id="{anchor}">{escape(graph.title)}</h2>'
    if graph.reason:
        yield f'<p><span class="bad">runs in eager mode</span> {escape(graph.reason)}</p>'
    if graph.steps:
        keys = [
            f"g{number}-{'s' if s.kernel is None else 'k'}{n if s.kernel is None else s.kernel}"
            for n, s in enumerate(graph.steps)
        ]
        yield '<div class="panes">'
        yield from _pane("Steps", _steps(graph, keys))
        yield from _pane("Kernels and calls", _kernels(graph, keys, peaks))
        yield from _pane("Your lines", _lines(graph, keys))
        yield "</div>"
    yield from _refusals(anchor, graph.refusals)
    yield from _memory(graph)
    yield from page.listed("Kernels side by side", graph.batches)
    yield from page.listed("Kernels that are apart", graph.apart)
    for heading, text in (
        ("Captured graph", graph.captured),
        ("Program", graph.program),
        (f"{graph.language} source", graph.source),
    ):
        yield from page.folded(heading, text)
    yield "</section>"


def _pane(heading: str, content: Iterator[str]) -> Iterator[str]:
    yield f'<section class="pane" tabindex="0" aria-label="{heading}"><h3>{heading}</h3>'
    yield from content
    yield "</section>"


def _color(key: str) -> str:
    """Return the style that gives a kernel or call its color: neighbours differ, and calls are gray."""
    number = int(re.sub(r".*\D", "", key))
    return "--own: #7d8590" if "-s" in key else f"--own: hsl({number * 137 % 360} 65% 50%)"


# ---- steps -----------------------------------------------------------------------------------------------------------


def _steps(graph: GraphExplanation, keys: Sequence[str]) -> Iterator[str]:
    yield '<div class="steps">'
    yield from _edges(graph.steps, keys)
    yield "<ol>"
    slowest = max((step.seconds or 0.0 for step in graph.steps), default=0.0)
    for key, step in zip(keys, graph.steps, strict=True):
        time, share = "", ""
        if step.seconds:
            time, share = (
                f' <span class="quiet">{seconds_text(step.seconds)}</span>',
                f"; --share: {step.seconds / slowest:.0%}",
            )
        name, does = step.name, ", ".join(dict.fromkeys(map(_short, _operators(step))))
        if step.kernel is None:
            name, does = _short(step.name), f"call, writes {', '.join(step.writes)}" if step.writes else "call"
        yield (
            f'<li><a href="#{key}" data-key="{key}" style="{_color(key)}{share}"><span><strong>{escape(name)}</strong>{time}'
            f'</span><span class="quiet" title="{escape(does)}">{escape(does)}</span></a></li>'
        )
    yield "</ol></div>"


def _edges(steps: Sequence[StepText], keys: Sequence[str]) -> Iterator[str]:
    """Yield a curve from each step to those that read what it wrote; the kernels' texts say the same."""
    curves: list[str] = []
    for a, b in _dependencies(steps)[:_MAX_EDGES]:
        begin, end, x = _ROW * a + _ROW // 2, _ROW * b + _ROW // 2, max(-8, 34 - 7 * (b - a))
        curves.append(f'<path data-key="{keys[a]} {keys[b]}" d="M40 {begin} C{x} {begin} {x} {end} 40 {end}"/>')
    height = _ROW * len(steps)
    yield f'<svg width="40" height="{height}" aria-hidden="true">{"".join(curves)}</svg>'


def _dependencies(steps: Sequence[StepText]) -> list[tuple[int, int]]:
    """Return the pairs of a step and a later one that reads what it wrote, or writes to the same buffer."""
    writer: dict[str, int] = {}
    found: dict[tuple[int, int], None] = {}
    for number, step in enumerate(steps):
        used = (*step.reads, *step.writes)
        found |= {(writer[name], number): None for name in used if name in writer}
        writer |= dict.fromkeys(step.writes, number)
    return list(found)


def _operators(step: StepText) -> list[str]:
    return [origin.split(" ", 1)[0] for origin in step.origins]


def _short(operator: str) -> str:
    """Return an operator's name without namespace and overload of torch's.

    >>> _short("aten.mul.Tensor"), _short("demo.scale.default")
    ('mul', 'demo.scale')
    """
    return re.sub(r"^aten\.|\.\w+$", "", operator) if operator.count(".") > 1 else operator


# ---- kernels and calls -----------------------------------------------------------------------------------------------


def _kernels(graph: GraphExplanation, keys: Sequence[str], peaks: MachinePeaks | None) -> Iterator[str]:
    groups: dict[str, list[StepText]] = {}
    for key, step in zip(keys, graph.steps, strict=True):
        groups.setdefault(key, []).append(step)
    for key, same in groups.items():
        step = same[0]
        yield f'<article class="kernel" id="{key}" data-key="{key}" style="{_color(key)}">'
        times = f' <small class="quiet">{len(same)} times</small>' if len(same) > 1 else ""
        yield f'<h4><a href="#{key}">{escape(step.name)}</a>{times}</h4>'
        yield from (f"<p>{escape(line)}</p>" for line in _facts(step, same, peaks))
        if step.reason:
            yield f'<p class="quiet">Called, not compiled: {escape(step.reason)}</p>'
        yield from _buffers("reads", step.reads)
        yield from _buffers("writes", step.writes)
        if step.kernel is not None:
            yield from _texts(graph.kernels[step.kernel], graph)
        yield "</article>"


def _facts(step: StepText, same: Sequence[StepText], peaks: MachinePeaks | None) -> Iterator[str]:
    operators = dict.fromkeys(map(_short, _operators(step)))
    if operators:
        yield f"{'Computes' if step.kernel is not None else 'Part of'} {', '.join(operators)}."
    figures = step.figures
    operations = "" if figures.operations is None else f", {figures.operations:,} FLOPs"
    yield f"Reads {figures.read:,} B, writes {figures.written:,} B{operations}."
    if step.seconds:  # a call may launch nothing on a GPU
        total = sum(each.seconds or 0.0 for each in same)
        together = f" ({seconds_text(total)} together)" if len(same) > 1 else ""
        yield f"{seconds_text(step.seconds)}{together}: {_rates(figures, step.seconds, peaks)}."


def _rates(figures: KernelFigures, seconds: float, peaks: MachinePeaks | None) -> str:
    """Return the rates of a step; shares of the machine's peaks follow."""
    moved = (figures.read + figures.written) / seconds
    parts = [f"{moved / 1e9:,.2f} GB/s" + (f" ({moved / peaks.bandwidth:.0%})" if peaks else "")]
    if figures.operations:
        rate = figures.operations / seconds
        parts.append(f"{rate / 1e9:,.2f} GFLOP/s" + (f" ({rate / peaks.operations:.0%})" if peaks else ""))
    return ", ".join(parts)


def _buffers(verb: str, buffers: Mapping[str, str]) -> Iterator[str]:
    if buffers:
        names = ", ".join(f"<code>{escape(name)}: {escape(kind)}</code>" for name, kind in buffers.items())
        yield f'<p class="quiet">{verb} {names}</p>'


def _texts(kernel: KernelText, graph: GraphExplanation) -> Iterator[str]:
    if kernel.resources is not None:
        yield from (f"<p>{escape(line)}</p>" for line in [*figure_lines(kernel, graph.bandwidth)][1:])
    yield page.code(kernel.source or kernel.text)
    if kernel.source:
        yield from page.folded("Loop nest", kernel.text)


# ---- the user's lines --------------------------------------------------------------------------------------------------


def _lines(graph: GraphExplanation, keys: Sequence[str]) -> Iterator[str]:
    """Yield the lines that operators come from, file by file, each with the kernels and calls that compute it."""
    files: dict[str, dict[tuple[int, str], dict[str, str]]] = {}
    for key, step in zip(keys, graph.steps, strict=True):
        for found in filter(None, map(_LINE.fullmatch, step.origins)):
            line = (int(found["number"]), found["code"])
            files.setdefault(found["file"], {}).setdefault(line, {})[key] = step.name
    for file, lines in files.items():
        yield f"<h4>{escape(file)}</h4><ol>"
        for (number, code), of in sorted(lines.items()):
            names = escape(f"computed by {', '.join(map(_short, of.values()))}")
            dots = "".join(f'<i style="{_color(key)}"></i>' for key in [*of][:8])
            yield f'<li><a class="line" href="#{next(iter(of))}" data-key="{" ".join(of)}" title="{names}">'
            yield f'<span class="quiet">{number}</span><code>{escape(code)}</code>'
            yield f'<span class="dots" aria-hidden="true">{dots}</span></a></li>'
        yield "</ol>"
    if not files:
        yield '<p class="quiet">No line is known.</p>'


# ---- refusals and memory ---------------------------------------------------------------------------------------------


def _refusals(anchor: str, found: Sequence[str]) -> Iterator[str]:
    if not found:
        return
    refusals = dict.fromkeys(found)
    yield f"<h3>Not fused: {len(refusals)}</h3>"
    yield page.filter_form("loops, sum_1...", scope=f"{anchor}-refusals")
    items = "".join(f'<li data-text="{escape(each)}"><code>{escape(each)}</code></li>' for each in refusals)
    yield f'<ul id="{anchor}-refusals">{items}</ul>'


_WIDTH, _HEIGHT, _LEFT = 960, 240, 90


def _memory(graph: GraphExplanation) -> Iterator[str]:
    """Yield a picture of the arena: a rectangle for each buffer, from the first to the last step that needs it."""
    if not graph.arena:
        return
    moments = max(place.last for place in graph.places) + 1
    wide, high = (_WIDTH - _LEFT) / moments, _HEIGHT / graph.arena
    yield f"<h3>Memory over time: {graph.arena:,} bytes between kernels</h3>"
    label = f"Places of {len(graph.places)} buffers over {moments} steps; the list below has the same in words."
    yield (
        f'<div class="wide" tabindex="0" role="region" aria-label="Memory over time"><svg class="memory" role="img" '
        f'aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT + 24}" font-size="12">'
    )
    for number, place in enumerate(graph.places):
        x, y = _LEFT + wide * place.first, _HEIGHT - high * (place.begin + place.nbytes)
        width, height = wide * (place.last + 1 - place.first), high * place.nbytes
        tip = escape(f"{place.buffer}: {place.nbytes:,} bytes, steps {place.first} to {place.last}")
        fill = f"hsl({number * 137 % 360} 60% 72%)"
        yield f'<g><title>{tip}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'
        if height > 14 and width > 7 * len(place.buffer):
            yield f'<text x="{x + 4:.1f}" y="{y + 13:.1f}">{escape(place.buffer)}</text>'
        yield "</g>"
    axis = 'fill="currentColor" style="fill: var(--quiet)"'
    yield f'<text {axis} x="0" y="12">{graph.arena:,} B</text><text {axis} x="0" y="{_HEIGHT}">0</text>'
    yield f'<text {axis} x="{_LEFT}" y="{_HEIGHT + 18}">step 0</text>'
    yield f'<text {axis} x="{_WIDTH}" y="{_HEIGHT + 18}" text-anchor="end">step {moments - 1}</text></svg></div>'
    yield from page.folded(f"Buffers: {len(graph.places)}", "\n".join(map(place_text, graph.places)))
