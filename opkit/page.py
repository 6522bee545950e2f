"""This module has the style and the frame of opkit's HTML pages: one file, which loads nothing, with a copy button."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STYLE = """\
:root { --ground: #fff; --ink: #1b1f24; --quiet: #57606a; --line: #d0d7de; --panel: #f6f8fa; --good: #116329; --bad: #b3261e;
  --link: #0550ae; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171c; --ink: #e6e9ee; --quiet: #9aa5b1; --line: #373e47; --panel: #1e232a; --good: #6fdd8b;
    --bad: #ff9b92; --link: #79b8ff; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }
h3 { font-size: 1.1rem; } h4 { margin: 1rem 0 .25rem; }
h1, h2, h3, code, dt, dd, summary { overflow-wrap: anywhere; }
a { color: var(--link); }
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
"""


def document(title: str, body: Iterable[str]) -> str:
    """Return the page; ``body`` is HTML."""
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
    )
    return head + "\n".join(body) + f"\n</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n"
