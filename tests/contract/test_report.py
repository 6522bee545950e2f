"""What a report says to people and to programs."""

import json

import pytest
import small_properties as small
import torch

import opkit
from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.report.report import Failure, Passed, Report, Skipped, as_json
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
