"""Reports as objects, text, JSON and HTML."""

import json
import re
from html.parser import HTMLParser

import pytest
import small_properties as small
import torch

import opkit
from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.report.report import Failure, Passed, Report, Skipped, as_html, as_json
from opkit.errors import ContractError
from opkit.testing import tensor

CASE = Case((TensorCase((1, 65)), 0.5), (("eps", 1.0),))


@pytest.fixture
def report(only):
    return opkit.check(small.sin, args=(tensor("n"),), max_examples=20, database=False)


def failure(operator):
    return Failure("numbers.reference", "message", CASE, "", operator=operator)


def test_the_example_is_a_call():
    called = {
        "demo::scale": "scale",
        "aten::add.Tensor": "add",
        "test_it.<locals>.wrong": "wrong",
        "test_it.<locals>.<lambda>": "op",
        "": "op",
    }
    calls = {operator: f"{name}(float32[1, 65], 0.5, eps=1.0)" for operator, name in called.items()}
    assert {operator: failure(operator).example for operator in called} == calls


def test_a_person_reads_failures_first(report):
    lines = str(report).splitlines()
    assert lines[0].startswith("sin: fails: 1 of 3 checked properties, 3 skipped (")
    assert lines[1:5] == [
        "FAIL memory.small: The rule of memory.small <holds> & is kept.",
        "  sin(float32[5])",
        "  5 elements",
        "  are more than 4",
    ]
    assert lines[5:] == [
        "held: numbers (2)",
        "remark: numbers.remarks: <strides> differ",
        "skipped: fake.none, fake.neither: there is no fake",
        "skipped: vmap.cannot: nothing returns",
    ]


def test_counts_read_well():
    held = (Passed("numbers.a", 3), Passed("fake.b", 1, cut_short=True))
    assert (
        str(Report("op", passed=held[:1], examples=1))
        == "op: holds: 1 of 1 property checked (1 example, 0.0 s)\nheld: numbers (1)"
    )
    assert str(Report("op", passed=held)).splitlines()[1] == (
        "held: numbers (1), fake (1); 1 of them with fewer examples, because time ran out"
    )
    assert str(Report("op", (failure("op"),))).startswith("op: fails: 1 of 1 checked property (0 examples")


def test_a_verdict_counts_what_was_skipped():
    held, skipped = (Passed("numbers.a", 3), Passed("fake.b", 1)), (Skipped("fake.c", "there is no fake"),)
    assert Report("op", passed=held, skipped=skipped).verdict() == "holds: 2 of 3 properties checked, 1 skipped"
    assert Report("op", skipped=skipped).verdict() == "not checked: 0 of 1 property checked, 1 skipped"
    assert Report("op", (failure("op"),), held, skipped).verdict() == "fails: 1 of 3 checked properties, 1 skipped"


def test_entries_can_be_printed():
    assert (
        str(Passed("numbers.a", 3, refused=2, cut_short=True))
        == "numbers.a: 3 examples, 2 of them refused, out of time"
    )
    assert str(Skipped("numbers.a", "why")) == "numbers.a: why"
    assert "time ran out" in str(Failure("a.b", "m", CASE, "", cut_short=True))


def test_failures_raise(report):
    with pytest.raises(ContractError, match=r"FAIL memory\.small"):
        report.raise_for_failures()
    Report("op").raise_for_failures()


def test_json_is_complete(report, tmp_path):
    report.to_json(tmp_path / "report.json")
    document = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (document["format"], document["ok"], document["torch"]) == (1, False, str(torch.__version__))
    (operator,) = document["operators"]
    assert {key: operator[key] for key in ("name", "ok", "examples", "seed")} == {
        "name": "sin",
        "ok": False,
        "examples": report.examples,
        "seed": 0,
    }
    found = {each["property"]: each for each in operator["properties"]}
    statuses = [each["status"] for each in operator["properties"]]
    assert statuses == ["failed"] + ["passed"] * 2 + ["skipped"] * 3
    assert found["memory.small"]["message"] == "5 elements\nare more than 4"
    assert found["memory.small"]["example"] == "sin(float32[5])"
    assert found["memory.small"]["repro"] == report.failures[0].repro
    assert found["numbers.remarks"]["remarks"] == ["<strides> differ"]
    assert found["fake.none"]["message"] == "there is no fake"
    for each, entry in zip(operator["properties"], [*report.failures, *report.passed, *report.skipped], strict=True):
        assert (each["rule"], each["defect"], each["tried"]) == (entry.rule, entry.defect, entry.tried)
        assert each["seconds"] == pytest.approx(entry.seconds, abs=1e-3)


def test_json_holds_several_operators_and_what_was_left_out():
    document = json.loads(as_json([Report("a"), Report("b", (failure("b"),))], {"c": "no arguments"}))
    assert [(each["name"], each["ok"]) for each in document["operators"]] == [("a", True), ("b", False)]
    assert document["not_checked"] == [{"name": "c", "reason": "no arguments"}]
    assert not document["ok"]


def test_equal_checks_are_equal_but_for_time(only):
    texts = [
        str(opkit.check(small.sin, args=(tensor("n"),), max_examples=20, database=False)).splitlines()[1:]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


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
