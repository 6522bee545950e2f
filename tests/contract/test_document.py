"""The tables of docs/contract.md are those of the code."""

from pathlib import Path

import pytest

from opkit.contract import properties
from opkit.contract.report import document

DOCUMENT = Path(__file__).parents[2] / "docs" / "contract.md"


def test_the_tables_are_up_to_date():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert document.written(text) == text, "run: python -m opkit.contract.report.document docs/contract.md"


def test_every_property_says_what_it_is_there_for():
    text = DOCUMENT.read_text(encoding="utf-8")
    for prop in properties.PROPERTIES:
        assert f"| `{prop.name}` | " in text
        assert prop.rule.endswith(".")
        assert prop.defect


def test_a_document_without_marks_is_refused():
    with pytest.raises(ValueError, match="no place"):
        document.written("nothing")
