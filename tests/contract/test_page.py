"""The page of a report: everything is on it, nothing is loaded, and no text of the user's is taken for HTML."""

import re
from html.parser import HTMLParser

import pytest
import small_properties as small

import opkit
from opkit.contract.calls.cases import Case
from opkit.contract.report.report import Failure, Passed, Report, Skipped, as_html
from opkit.testing import tensor

_VOID = {"meta", "br", "hr", "img", "input", "link"}


class Parsed(HTMLParser):
    """Elements that are closed in order, with their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
        self.feed(text)
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def text(only, tmp_path):
    opkit.check(small.sin, args=(tensor("n"),), max_examples=20, database=False).to_html(tmp_path / "report.html")
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_everything_is_on_the_page(text):
    shown = Parsed(text).text
    for prop in small.PROPERTIES:
        assert prop.name in shown
        assert prop.rule in shown
        assert prop.defect in shown
    for part in (
        "sin fails: 1 of 3 checked properties, 3 skipped",
        "sin(float32[5])",
        "5 elements\nare more than 4",
        "<strides> differ",
    ):
        assert part in shown
    assert "there is no fake" in shown
    assert "nothing returns" in shown


def test_nothing_is_loaded(text):
    assert not re.search(r"https?:|//|url\(|@import|\bsrc=", text.replace("<!DOCTYPE html>", ""))
    assert not {"link", "img", "iframe"} & {tag for tag, _ in Parsed(text).elements}


def test_text_is_escaped():
    bad = "<script>alert('x')</script>&\"'"
    case = Case((bad,))
    reports = [
        Report(
            bad,
            (Failure(bad, bad, case, bad, bad, bad, operator=bad),),
            (Passed(bad, 1, bad, remarks=(bad,), defect=bad, examples=(bad,), refusals=(bad,)),),
            (Skipped(bad, bad, bad, bad),),
        )
    ] * 2
    parsed = Parsed(as_html(reports, {bad: bad}))
    assert [tag for tag, _ in parsed.elements].count("script") == 1
    assert parsed.text.count(bad) >= 20
    assert bad in {attributes.get("title") for _, attributes in parsed.elements}


def test_links_lead_to_operators():
    elements = Parsed(as_html([Report("a", passed=(Passed("numbers.x", 1),)), Report("b")])).elements
    anchors = [attributes["href"].removeprefix("#") for tag, attributes in elements if tag == "a"]
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert anchors == [each for each in ids if "failure" not in each]
    assert len(ids) == len(set(ids)) == 2


def test_it_is_readable_in_the_dark_and_on_a_phone(text):
    elements = Parsed(text).elements
    assert ("html", {"lang": "en"}) in elements
    assert any(attributes.get("name") == "viewport" for _, attributes in elements)
    assert "prefers-color-scheme: dark" in text
    assert all(attributes.get("scope") for tag, attributes in elements if tag == "th")


def test_titles_say_how_it_went():
    bad = Report("b", (Failure("n.x", "m", None, ""),))
    held = Report("a", passed=(Passed("n.x", 1),), skipped=(Skipped("n.y", "there is no reference"),))
    assert "<h1>a holds: 1 of 2 properties checked, 1 skipped</h1>" in as_html([held])
    assert '<span class="good">holds</span> <span class="quiet">1 of 2 properties checked, 1 skipped</span>' in as_html(
        [held]
    )
    assert "<h1>1 of 2 operators break their contract</h1>" in as_html([Report("a"), bad])
    assert "<h1>2 operators checked</h1>" in as_html([Report("a"), Report("b")])
    assert '<span class="quiet">not checked</span>' in as_html([Report("a")])
    assert as_html([])
