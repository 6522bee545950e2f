"""This module has the style, the script and the frame of opkit's HTML pages: one file, which loads nothing.

The script adds copy buttons, filters lists, and marks what belongs together in panes that are side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

STYLE = """\
:root { --ground: #fff; --ink: #1b1f24; --quiet: #57606a; --line: #d0d7de; --panel: #f6f8fa; --good: #116329; --bad: #b3261e;
  --link: #0550ae;
  --mark: #fff2c2; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171c; --ink: #e6e9ee; --quiet: #9aa5b1; --line: #373e47; --panel: #1e232a; --good: #6fdd8b;
    --bad: #ff9b92; --link: #79b8ff;
    --mark: #3d3310; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; } main.broad { max-width: 110rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }
h3 { font-size: 1.1rem; } h4 { margin: 1rem 0 .25rem; }
h1, h2, h3, code, dt, dd, summary { overflow-wrap: anywhere; }
a { color: var(--link); }
:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
[hidden] { display: none !important; }
small, .quiet { color: var(--quiet); font-weight: normal; font-size: .9rem; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; } th, td { padding: .3rem .8rem .3rem 0; text-align: left; font-weight: normal; }
thead th { color: var(--quiet); } tbody tr { border-top: 1px solid var(--line); }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.failure { border-left: 4px solid var(--bad); padding-left: 1rem; margin: 1.5rem 0; }
.label { margin: .75rem 0 .25rem; color: var(--quiet); font-size: .9rem; }
pre { background: var(--panel); padding: .75rem; margin: .25rem 0; overflow-x: auto; white-space: pre-wrap; }
pre, code { font-family: ui-monospace, monospace; font-size: .9rem; }
.copied { position: relative; } .copied pre { white-space: pre; padding-top: 2.5rem; }
.copied button { position: absolute; top: .4rem; right: .4rem; font: inherit; font-size: .85rem; }
summary { cursor: pointer; padding: .2rem 0; }
.held > :not(summary) { margin-left: 1.2rem; }
dt { margin-top: .6rem; } dd { margin-left: 1.2rem; color: var(--quiet); }
.filter { display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: center; margin: .75rem 0; }
.filter input, .filter select { font: inherit; max-width: 100%; color: inherit; background: var(--panel);
  border: 1px solid var(--quiet); border-radius: 4px; padding: .15rem .4rem; }
"""

PANES_STYLE = """\
.panes { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 4fr) minmax(0, 3fr); gap: 1rem; }
.pane { position: relative; border: 1px solid var(--line); border-radius: 6px; padding: 0 .75rem .75rem; overflow: auto;
  max-height: 85vh; }
.pane h3 { position: sticky; top: 0; z-index: 1; background: var(--ground); margin: 0 -.75rem; padding: .5rem .75rem; }
.pane ol, .pane ul { list-style: none; margin: 0; padding: 0; }
.steps { position: relative; } .steps svg { position: absolute; left: 0; top: 0; }
.steps li { height: 3.5rem; margin-left: 2.5rem !important; display: flex; }
.steps a { flex: 1; min-width: 0; margin: .15rem 0; padding: .15rem .5rem; color: inherit; text-decoration: none;
  border-left: 5px solid var(--own); background: var(--panel); line-height: 1.4; }
.steps a > span { display: block; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.steps a::after { content: ""; display: block; height: 3px; width: var(--share, 0); background: var(--link); }
.steps path { fill: none; stroke: var(--quiet); opacity: .6; }
.steps path.marked { stroke: var(--link); stroke-width: 2.5; opacity: 1; }
.kernel { border-left: 5px solid var(--own); padding: .1rem .75rem .5rem; margin: .5rem 0; }
.kernel h4 { margin: .25rem 0; } .kernel p, .kernel ul { margin: .2rem 0; } .kernel pre { white-space: pre; max-height: 24rem; }
.line { display: flex; gap: .6rem; color: inherit; text-decoration: none; padding: .15rem .4rem; }
.line code { flex: 1; white-space: pre-wrap; }
.dots { display: flex; gap: 2px; min-width: 1.2rem; flex-wrap: wrap; align-content: center; }
.dots i { width: 8px; height: 14px; background: var(--own); }
a.marked, .kernel.marked { background: var(--mark); }
.memory { min-width: 60rem; width: 100%; height: auto; } .memory rect { stroke: var(--ground); } .memory text { fill: #000; }
@media (max-width: 60rem) { .panes { grid-template-columns: minmax(0, 1fr); } .pane { max-height: 70vh; } }
"""

SCRIPT = """\
for (const box of document.querySelectorAll(".copied")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.onclick = async () => {
    await navigator.clipboard.writeText(box.querySelector("code").textContent);
    button.textContent = "Copied";
  };
  if (navigator.clipboard) box.prepend(button);
}

for (const link of document.querySelectorAll('a[href^="#"]')) link.addEventListener("click", (event) => {
  if (location.protocol !== "about:") return;
  event.preventDefault(); /* in a notebook's frame, the address would be the notebook's */
  document.getElementById(link.hash.slice(1)).scrollIntoView();
});

for (const form of document.querySelectorAll(".filter")) {
  const scope = document.getElementById(form.dataset.scope) ?? document.querySelector("main");
  const parts = [...scope.querySelectorAll("[data-text]")];
  form.onsubmit = (event) => event.preventDefault();
  form.oninput = () => {
    const words = form.querySelector("input").value.toLowerCase().split(/\\s+/).filter(Boolean);
    const status = form.querySelector("select")?.value;
    for (const part of parts) {
      const text = part.dataset.text.toLowerCase();
      const fits = words.every((word) => text.includes(word)) && (!status || status === part.dataset.status);
      part.toggleAttribute("hidden", !fits);
    }
    for (const group of scope.querySelectorAll("[data-group]"))
      group.hidden = !group.querySelector("[data-text]:not([hidden])");
    const rows = parts.filter((part) => part instanceof HTMLElement);
    form.querySelector("output").value = `${rows.filter((part) => !part.hidden).length} of ${rows.length}`;
  };
}

for (const panes of document.querySelectorAll(".panes")) {
  const parts = [...panes.querySelectorAll("[data-key]")];
  const mark = (from) => {
    if (!from) return;
    const keys = from.dataset.key.split(" ");
    for (const part of parts) {
      const related = part.dataset.key.split(" ").some((key) => keys.includes(key));
      const elsewhere = part.tagName === "path" || part.closest(".pane") !== from.closest(".pane");
      part.classList.toggle("marked", part === from || (related && elsewhere));
    }
    for (const pane of panes.children) {
      const first = pane.querySelector("a.marked, .kernel.marked");
      if (!first || pane.contains(from)) continue;
      const [inside, outside] = [first.getBoundingClientRect(), pane.getBoundingClientRect()];
      if (inside.top < outside.top + 48 || inside.top > outside.bottom - 48) pane.scrollTop += inside.top - outside.top - 56;
    }
  };
  for (const name of ["mouseover", "focusin"]) panes.addEventListener(name, (event) => mark(event.target.closest("[data-key]")));
}
"""


def filter_form(placeholder: str, statuses: Sequence[str] = (), scope: str = "") -> str:
    """Return a form that hides the elements with ``data-text`` which do not match.

    Args:
        placeholder: an example of what to type: words, all of which must be in ``data-text``.
        statuses: the values of ``data-status`` to choose from.
        scope: the id of the element that they are in; by default the page.
    """
    options = "".join(f'<option value="{escape(each)}">{escape(each)}</option>' for each in statuses)
    status = f'<label>Status <select><option value="">all</option>{options}</select></label> ' if statuses else ""
    return (
        f'<form class="filter" role="search" data-scope="{escape(scope)}"><label>Filter <input type="search" '
        f'placeholder="{escape(placeholder)}"></label> {status}<output class="quiet"></output></form>'
    )


def folded(heading: str, text: str) -> Iterator[str]:
    """Yield a heading that unfolds a text, with a copy button; nothing if the text is empty."""
    if text:
        yield f"<details><summary>{escape(heading)}</summary>{code(text)}</details>"


def code(text: str) -> str:
    """Return a text in a box that scrolls, with a copy button."""
    return f'<div class="copied"><pre tabindex="0"><code>{escape(text)}</code></pre></div>'


def listed(heading: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield a heading of the third level and a list of texts; nothing if there are none."""
    items = "".join(f"<li><code>{escape(text)}</code></li>" for text in texts)
    if items:
        yield f"<h3>{escape(heading)}</h3>\n<ul>{items}</ul>"


def document(title: str, body: Iterable[str], broad: bool = False) -> str:
    """Return the page; ``body`` is HTML. A broad one has panes, and is as wide as the window."""
    style, main = (STYLE + PANES_STYLE, '<main class="broad">') if broad else (STYLE, "<main>")
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{main}\n"
    )
    return head + "\n".join(body) + f"\n</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"


# ---- parts of notebooks ------------------------------------------------------------------------------------------------

_MAX_FRAME = 2**21  # characters of a page that a notebook stores


def fragment(*parts: str) -> str:
    """Return parts of HTML as what a notebook shows below a cell, in its own colors."""
    return f'<div style="overflow-x: auto">{"".join(parts)}</div>'


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of texts; the first cell of a row is its heading."""
    style = 'style="text-align: left; padding: .2em .8em .2em 0"'
    lines = ["".join(f'<th scope="col" {style}>{escape(each)}</th>' for each in headings)]
    for first, *cells in rows:
        others = "".join(f"<td {style}>{escape(each)}</td>" for each in cells)
        lines.append(f'<th scope="row" {style}>{escape(first)}</th>{others}')
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def frame(content: str, title: str, text: str) -> str:
    """Return a page in a frame for a notebook, in which it has its own style and script; the text in place of a very long one."""
    if len(content) > _MAX_FRAME:
        return fragment(f"<pre>{escape(text)}</pre>")
    return (
        f'<iframe title="{escape(title)}" srcdoc="{escape(content)}" sandbox="allow-scripts" allow="clipboard-write" '
        'style="width: 100%; height: 40rem; border: 1px solid"></iframe>'
    )
