"""Take the screenshots of the documentation: ``python docs/screenshots.py FOLDER`` writes PNG files, with Chromium.

The pages are of :func:`opkit.explain`, of :func:`opkit.check`, and of what notebooks show for masks.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import opkit
from opkit import masks, testing

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import MISSING, Browser, browser

DESKTOP, PHONE = 1280, 390


class Block(nn.Module):
    """A layer of a transformer without its attention, and a loss."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = functional.gelu(self.up(y))
        y = torch.softmax(x + self.down(y), -1)
        return y.exp().sum(0).cos().sum()


def explanation(folder: Path) -> Path:
    """Write the page of an explanation with measured times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = opkit.explain(Block(), torch.randn(256, 256))
        found.measure()
    finally:
        torch.set_num_threads(threads)
    return found.to_html(folder / "explain.html")


def check(folder: Path) -> Path:
    """Write the page of a check of an operator with a wrong kernel."""
    op = opkit.custom_op(
        "screenshots::scale", lambda x, by: x * by, mutates_args=(), schema="(Tensor x, float by) -> Tensor"
    )
    op.register_kernel("cpu", lambda x, by: x * by + (x.numel() > 4))
    path = folder / "check.html"
    opkit.check(op, args=(testing.tensor("n m"), 0.5), properties=["numbers", "layout"], max_examples=20).to_html(path)
    opkit.remove("screenshots::scale")
    return path


def pictures(folder: Path) -> Path:
    """Write a page with what a notebook shows for some masks."""
    packed = masks.VarLen(torch.tensor([0, 24, 40, 64]))
    shown = (masks.Causal() & masks.SlidingWindow(8), packed & masks.Causal(), masks.PrefixLM(torch.tensor(12)))
    parts = "".join(f"<div>{mask._repr_html_()}</div>" for mask in shown)
    path = folder / "masks.html"
    grid = '<main style="display: grid; grid-template-columns: repeat(3, 1fr)">'
    path.write_text(f'<!DOCTYPE html><html lang="en"><title>Masks</title>{grid}{parts}</main>', encoding="utf-8")
    return path


@functools.cache
def taken(folder: Path) -> list[Path]:
    """Take the screenshots, once in a process; return none where there is no Chromium."""
    return [] if MISSING else take(folder)


def take(folder: Path) -> list[Path]:
    """Write the screenshots to a folder, and return their paths.

    Raises:
        RuntimeError: there is no Chromium.
    """
    if MISSING:
        raise RuntimeError(MISSING)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as pages, browser() as window:
        explained, checked, shown = (write(Path(pages)) for write in (explanation, check, pictures))
        return [
            _shot(window, explained, folder / "explain.png", DESKTOP),
            _shot(window, explained, folder / "explain-dark.png", DESKTOP, dark=True),
            _shot(window, explained, folder / "explain-phone.png", PHONE),
            _shot(window, checked, folder / "check.png", DESKTOP),
            _shot(window, checked, folder / "check-phone.png", PHONE),
            _shot(window, shown, folder / "masks.png", DESKTOP, height=400),
        ]


def _shot(window: Browser, page: Path, to: Path, width: int, height: int = 900, dark: bool = False) -> Path:
    window.open(page, width, height, dark)
    if page.name == "explain.html":
        window.hover(".line")
        window.run("document.querySelector('h2').scrollIntoView()" if width == DESKTOP else "scrollTo(0, 0)")
    window.screenshot(to)
    return to


if __name__ == "__main__":
    for path in take(Path(sys.argv[1])):
        print(path)
