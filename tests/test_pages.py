"""opkit's HTML pages in a headless browser, on a desktop and a phone: filters, links, marks, the keyboard, contrast."""

import itertools
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
from browser import MISSING, browser

import opkit
from opkit import page
from opkit.bench.figures import Figure, Run
from opkit.bench.figures_page import run_page
from opkit.bench.results_page import results_page
from opkit.contract.report.report import Failure, Passed, Report, Skipped, as_html
from opkit.tracing import OperatorTrace, Trace

in_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)
WIDTHS = (1280, 390)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32)

    def forward(self, x):
        y = torch.nn.functional.gelu(self.up(self.norm(x)))
        y = torch.softmax(y, -1)
        return y.exp().sum(0).cos().sum()


@pytest.fixture(scope="module")
def window():
    with browser() as window:
        yield window


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    return opkit.explain(Block(), torch.randn(4, 16)).to_html(tmp_path_factory.mktemp("explained") / "page.html")


@pytest.fixture(scope="module")
def passport(tmp_path_factory):
    failure = Failure(
        "numbers.reference", "0 is not 1", None, "print(1)\n" * 9, "results are the reference's", "wrong results"
    )
    held = [
        Passed(name, 9, "a rule", examples=("f(float32[1])",))
        for name in ("numbers.nan", "layout.strides", "layout.empty")
    ]
    skipped = [Skipped(name, "there is no fake", "a rule") for name in ("compile.fake", "compile.sizes")]
    path = tmp_path_factory.mktemp("passport") / "page.html"
    reports = [
        Report("demo::a_long_name_of_an_operator", (failure,), tuple(held), tuple(skipped)),
        Report("b", (), (held[0],)),
    ]
    path.write_text(as_html(reports, {"demo::c": "it needs a GPU"}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    common = {"backend": "opkit", "family": "timm", "dtype": "float32", "size": "tiny", "device": "cpu"}
    records = [{**common, "model": name, "status": "failed", "error": "no"} for name in ("alpha", "beta")]
    path = tmp_path_factory.mktemp("results") / "page.html"
    path.write_text(results_page(records), encoding="utf-8")
    return path


def shown(window, selector):
    return window.run(
        "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).map(e => e.textContent)",
        selector,
    )


def check_frame(window, anchors=True):
    assert window.log() == []
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    targets = window.run("return [...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.hash.slice(1))")
    assert bool(targets) == anchors
    assert window.run("return arguments[0].filter(id => !document.getElementById(id))", targets) == []
    levels = window.run("return [...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


@in_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_an_explanation(window, explained, width):
    window.open(explained, width)
    check_frame(window)
    columns = window.run("return new Set([...document.querySelector('.panes').children].map(p => p.offsetLeft)).size")
    assert columns == (3 if width == 1280 else 1)

    window.hover(".line")  # of the layer norm, or of all that is on its line
    keys = window.run("return document.querySelector('.line').dataset.key.split(' ')")
    marked = window.run("return [...document.querySelectorAll('.kernel.marked')].map(e => e.id)")
    assert sorted(marked) == sorted(set(keys))
    assert window.run("return document.querySelectorAll('.steps a.marked').length") == len(keys)

    window.run("document.querySelectorAll('.steps a')[1].focus()")  # by the keyboard, and back to the lines
    window.press("\ue004")  # Tab
    key = window.run("return document.activeElement.dataset.key")
    assert key == window.run("return document.querySelectorAll('.steps a')[2].dataset.key")
    lines = window.run("return [...document.querySelectorAll('.line.marked')].map(e => e.dataset.key)")
    assert lines
    assert all(key in line.split(" ") for line in lines)

    refusals = shown(window, "#graph-0-refusals li")
    assert len(refusals) > 1
    word = refusals[0].split(" ")[0]
    window.type(".filter input", word)
    assert shown(window, "#graph-0-refusals li") == [each for each in refusals if word in each]
    window.type(".filter input", " nothing has this word")
    assert shown(window, "#graph-0-refusals li") == []
    assert shown(window, "output")[0] == f"0 of {len(refusals)}"


@in_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_check(window, passport, width):
    window.open(passport, width)
    check_frame(window)
    assert len(shown(window, "details.held")) == 6
    window.type(".filter input", "LAYOUT holds")
    assert [text.split()[1] for text in shown(window, "details.held")] == ["layout.strides", "layout.empty"]
    assert shown(window, "article") == []
    assert len(shown(window, "h2")) == 2  # of what was not checked, and of the one operator that has such properties
    window.run("document.querySelector('form').reset()")
    window.run(
        "const s = document.querySelector('select'); s.value = 'fails'; s.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert len(shown(window, "article")) == 1
    assert shown(window, "details.held") == []


@in_browser
def test_the_page_of_results(window, results):
    window.open(results, 390)
    assert window.log() == []
    window.type(".filter input", "beta")
    assert [text[:4] for text in shown(window, "tbody tr")] == ["beta"]


@in_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_benchmark(window, tmp_path, width):
    setup = {"machine": "a processor", "opkit": "1", "torch": "2", "device": "cpu", "threads": 1, "quick": False}
    names = ["an operator with a gradient", "a list"]
    times = {"opkit": [1e-6] * 3, "custom_op": [3e-6] * 3}
    path = tmp_path / "page.html"
    path.write_text(run_page(Run(setup, [Figure("dispatch", name, times) for name in names])), encoding="utf-8")
    window.open(path, width)
    check_frame(window, anchors=False)
    assert len(shown(window, "svg circle")) == 2
    window.type(".filter input", "list")
    assert [text[:6] for text in shown(window, "tbody tr")] == ["a list"]


@in_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_trace(window, tmp_path, width):
    softsign = OperatorTrace(
        "demo::softsign", 2, Counter(softsign=2), {"reference": Counter({"softsign is preferred": 2})}
    )
    path = tmp_path / "page.html"
    Trace([softsign], recompiles=["tensor 'x' size mismatch at index 0. expected 4, actual 5"]).to_html(path)
    window.open(path, width)
    check_frame(window, anchors=False)
    assert len(shown(window, "th[scope=row]")) == 3


@in_browser
@pytest.mark.exhaustive
def test_screenshots(tmp_path):
    run = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "screenshots.py"))
    shots = run["take"](tmp_path / "shots")
    assert len(shots) == 6
    assert all(shot.read_bytes().startswith(b"\x89PNG") for shot in shots)


def test_texts_have_contrast():
    """4.5 to 1 is what WCAG asks for; of each theme, on each ground."""
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", theme)) for theme in page.STYLE.split("* {")[0].split("@media"))
    for colors in (light, dark):
        for text in ("ink", "quiet", "good", "bad", "link"):
            for ground in ("ground", "panel", "mark"):
                assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground, colors)


def contrast(first, second):
    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def luminance(color):
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
