"""What notebooks show: HTML of operators, reports, masks, selections and explanations, and the cell magic ``%%c_kernel``."""

import re
from html.parser import HTMLParser

import pytest
import torch
from browser import MISSING, browser

import opkit
from opkit import masks
from opkit.attn.api import select
from opkit.contract.report.report import Failure, Report
from opkit.errors import ArgumentError, CompileError, UnknownOperatorError

HOSTILE = "<script>alert('x')</script>&\""
TWICE = (
    "void twice(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i] + 1; }"
)


@pytest.fixture
def doubled():
    @opkit.custom_op("notebook::doubled")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        """Return twice <x>."""
        return x * 2

    yield doubled
    opkit.remove("notebook::doubled")


class Tags(HTMLParser):
    """The tags, the attributes and the text of HTML, in which every tag is closed."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.open += [] if tag in ("br", "rect", "meta", "input") else [tag]

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


# ---- HTML ----------------------------------------------------------------------------------------------------------------


def test_an_operator_shows_its_kernels_and_rules(doubled):
    doubled.register_kernel("cpu", lambda x: x + x, name=HOSTILE)
    found = Tags(doubled._repr_html_())
    assert "Return twice <x>." in found.text
    assert HOSTILE in found.text
    assert "double backward" in found.text
    assert "script" not in found.tags
    assert found.tags.count("table") == 2


def test_a_selection_shows_why(doubled):
    doubled.register_kernel("cpu", lambda x: x + x, name=HOSTILE, dtypes=[torch.float64])
    found = Tags(doubled.select(torch.ones(2))._repr_html_())
    assert HOSTILE in found.text
    assert "refused" in found.text
    assert "script" not in found.tags
    q = torch.ones(1, 1, 2, 4)
    assert select(q, q, q).kernel in Tags(select(q, q, q)._repr_html_()).text


def test_a_report_is_a_page_in_a_frame():
    report = Report(HOSTILE, (Failure(HOSTILE, HOSTILE, None, HOSTILE),))
    found = Tags(report._repr_html_())
    assert found.tags == ["iframe"]
    content = dict(found.attributes)["srcdoc"]
    inside = Tags(content)
    assert inside.tags.count("script") == 1
    assert HOSTILE in inside.text


def test_a_long_report_is_its_text():
    report = Report("long", (Failure("n.x", "no", None, "print()\n" * 2**18),))
    assert Tags(report._repr_html_()).tags == ["div", "pre"]


def shares(html):
    """The share of each cell of a picture that has one number of columns."""
    found = Tags(html)
    wide, high = map(int, dict(found.attributes)["viewbox"].split()[2:])
    cells = torch.zeros(high, wide)
    for x, y, width, share in re.findall(
        r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="1" fill-opacity="([\d.]+)"', html
    ):
        cells[int(y), int(x) : int(x) + int(width)] = float(share)
    return cells


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (masks.Causal(), torch.ones(32, 32).tril()),
        (~masks.Causal(), torch.ones(32, 32).triu(1)),
        (masks.Causal("bottom-right").sized(3, 5), torch.ones(3, 5).tril(2)),
        (masks.Dense(torch.eye(5, 7).bool()), torch.eye(5, 7)),
        (masks.Dense(torch.eye(5, 7).log()), torch.eye(5, 7)),
        (masks.Segments(torch.tensor([0, 0, 1])), torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]])),
        (masks.VarLen(torch.tensor([0, 2, 3])) & masks.Causal(), torch.tensor([[1.0, 0, 0], [1, 1, 0], [0, 0, 1]])),
        (masks.Segments(torch.tensor([0, 1]), torch.tensor([1, 1, 0])), torch.tensor([[0.0, 0, 1], [1, 1, 0]])),
    ],
)  # fmt: skip
def test_a_mask_is_a_picture(mask, expected):
    assert torch.equal(shares(mask._repr_html_()), expected)


def test_lengths_leave_room_for_the_keys_beyond_them():
    cells = shares(masks.KeyPadding(torch.tensor([4, 20]))._repr_html_())
    assert torch.equal(cells, (torch.arange(40) < 4).float().expand(40, 40))


def test_a_large_mask_is_sampled():
    html = (masks.Causal() & masks.SlidingWindow(10_000)).sized(100_000, 100_000)._repr_html_()
    cells = shares(html)
    assert cells.shape == (64, 64)
    assert torch.equal(cells.triu(1), torch.zeros(64, 64))
    assert torch.equal(cells[20:].diagonal(18), torch.ones(44))
    assert "about " in html


def test_a_mask_that_cannot_be_evaluated_is_shown_as_text():
    def fails(b, h, q_idx, kv_idx):
        raise RuntimeError(HOSTILE)

    assert masks.MaskFunction(fails)._repr_html_() is None
    assert masks.Causal().sized(0, 3)._repr_html_() is None
    assert masks.KeyPadding(torch.empty(0, dtype=torch.int64))._repr_html_() is None
    html = masks.MaskFunction(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)._repr_html_()
    assert "&lt;lambda&gt;" in html


def test_an_explanation_is_a_page_in_a_frame():
    found = Tags(opkit.explain(lambda x: x.exp() + 1, torch.randn(3))._repr_html_())
    assert found.tags == ["iframe"]
    assert "Your lines" in dict(found.attributes)["srcdoc"]


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_links_work_in_a_frame(tmp_path):
    report = Report("demo::scale", (Failure("n.x", "no", None, "print()\n" * 99),))
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><p>cell</p>{report._repr_html_()}", encoding="utf-8")
    with browser() as window:
        window.open(path, 390)
        window.command("POST", "/frame", id=window.element("iframe"))
        window.click("a")
        assert window.run("return [location.href, document.title]") == [
            "about:srcdoc",
            report.name + " " + report.verdict(),
        ]
        assert window.log() == []


# ---- %%c_kernel ------------------------------------------------------------------------------------------------------------


class Shell:
    """As much of IPython's shell as an extension uses."""

    def __init__(self, **user_ns):
        self.user_ns = user_ns

    def register_magic_function(self, function, magic_kind, magic_name):
        assert (magic_kind, magic_name) == ("cell", "c_kernel")
        self.run = function


@pytest.fixture
def shell(doubled):
    shell = Shell(mine=doubled, other=3)
    opkit.load_ipython_extension(shell)
    return shell


@pytest.mark.parametrize("name", ["notebook::doubled", "mine"])
def test_a_cell_is_a_kernel(shell, doubled, name):
    assert shell.run(f"{name} --dtypes float32,int64 --flags='-O1 -g'", TWICE) is doubled
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 3.0))
    assert doubled(torch.ones(1, dtype=torch.int64)) == 3
    assert doubled(torch.ones(1, dtype=torch.float64)) == 2
    shell.run(name, TWICE.replace("+ 1", "+ 2"))  # the cell runs again, edited
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 4.0))


def test_errors_are_reported_below_the_cell(shell):
    with pytest.raises(CompileError, match=r"<cell of mine>:3"):
        shell.run("mine", "void twice(const T* x, T* out, int64_t x_numel) {\n  nonsense;\n}")
    with pytest.raises(ArgumentError, match=r"unrecognized arguments: --fast"):
        shell.run("mine --fast", TWICE)
    with pytest.raises(ArgumentError, match="required: operator"):
        shell.run("", TWICE)
    with pytest.raises(ArgumentError, match="other is 3"):
        shell.run("other", TWICE)
    with pytest.raises(UnknownOperatorError):
        shell.run("notebook::none", TWICE)


def test_in_ipython(doubled):
    testing = pytest.importorskip("IPython.testing.globalipapp")
    shell = testing.start_ipython()
    shell.display_formatter.active_types = ["text/plain", "text/html"]  # as in a notebook
    shell.run_line_magic("load_ext", "opkit")
    shell.user_ns["mine"] = doubled
    result = shell.run_cell(f"%%c_kernel mine\n{TWICE}")
    assert result.success
    assert result.result is doubled
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 3.0))
    assert "text/html" in shell.display_formatter.format(doubled)[0]
    assert "<svg" in shell.display_formatter.format(masks.Causal())[0]["text/html"]
