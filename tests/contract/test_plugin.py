"""One test item for each property, in a pytest of its own."""

import os
from pathlib import Path

import fresh_process
import pytest

from opkit.errors import ArgumentError
from opkit.testing import contract

HERE = str(Path(__file__).parent)

TESTS = f'''
import sys
sys.path.insert(0, {HERE!r})
import pytest
import small_properties as small
from opkit.contract import properties
from opkit.contract.prop import Violation
from opkit.testing import contract, tensor

def dies(subject, case):
    if subject.name == "crashes":
        raise Violation("it ended with signal 11")

properties.PROPERTIES = (small.made("memory.crash", dies, cost=9.0), *small.PROPERTIES)
HOW = dict(args=(tensor("n"),), max_examples=5, database=False)
CALLED = []

def op(x):
    CALLED.append(1)
    return x + 1

test_assigned = contract(op, **HOW)
assert not CALLED

@pytest.fixture
def seen():
    return []

@contract(op, properties=["numbers"], **HOW)
def test_decorated(seen, tmp_path):
    """What the function does is done first."""
    assert tmp_path.exists()
    if seen:
        pytest.fail("no fresh fixture")

@contract(op, exclude=["memory", "vmap"], **HOW)
class TestClass:
    def test_own(self):
        pass

def crashes(x):
    return x

test_crashes = contract(crashes, exclude=["numbers.remarks", "fake", "vmap", "memory.small"], **HOW)

@contract(op, properties=["fake", "numbers.right"], **HOW)
@pytest.mark.skip(reason="not here")
def test_marked():
    raise AssertionError
'''


@pytest.fixture
def run(tmp_path):
    """``run(source, *options)``: what pytest prints of the tests in ``source``, and its status."""

    def pytest_of(source, *options):
        (tmp_path / "test_ops.py").write_text(source, encoding="utf-8")
        arguments = [
            "-m",
            "pytest",
            "--disable-plugin-autoload",
            "-p",
            "no:cacheprovider",
            "--color=no",
            *options,
            "test_ops.py",
        ]
        done = fresh_process.run(arguments, os.environ | {"COLUMNS": "200"}, tmp_path, check=False)
        return done.stdout, done.returncode

    return pytest_of


def test_each_property_is_an_item(run):
    text, status = run(TESTS, "-v", "-rs")
    assert "test_assigned[memory.crash]" in text, text
    outcomes = dict(line.split(" ")[:2] for line in text.splitlines() if line.startswith("test_ops.py::"))
    names = (
        "memory.crash",
        "memory.small",
        "numbers.right",
        "numbers.remarks",
        "fake.none",
        "fake.neither",
        "vmap.cannot",
    )
    assert [outcomes[f"test_ops.py::test_assigned[{name}]"] for name in names] == (
        ["PASSED", "FAILED", "PASSED", "PASSED", "SKIPPED", "SKIPPED", "SKIPPED"]
    )
    assert outcomes["test_ops.py::test_decorated[numbers.right]"] == "PASSED"
    assert outcomes["test_ops.py::TestClass::test_contract[numbers.right]"] == "PASSED"
    assert outcomes["test_ops.py::TestClass::test_own"] == "PASSED"
    assert outcomes["test_ops.py::test_marked[fake.none]"] == "SKIPPED"
    assert outcomes["test_ops.py::test_crashes[memory.crash]"] == "FAILED"
    assert outcomes["test_ops.py::test_crashes[numbers.right]"] == "SKIPPED"
    assert "a call ends the process: see memory.crash" in text
    assert status == 1
    assert "op breaks memory.small: The rule of memory.small" in text
    assert "op(float32[5])" in text
    assert "there is no fake" in text
    assert "Traceback" not in text
    assert "plugin.py:" not in text.split("short test summary")[0]


@pytest.mark.exhaustive
def test_items_are_selected_by_property(run):
    text, status = run(TESTS, "-k", "numbers and assigned")
    assert "2 passed" in text
    assert status == 0


def test_an_unknown_property_is_said_at_once():
    with pytest.raises(ArgumentError, match="no property 'nix'"):
        contract(lambda x: x, properties=["nix"])


def test_opkit_testing_needs_no_pytest():
    program = "import sys; sys.modules['pytest'] = None; import opkit.testing; opkit.testing.contract"
    fresh_process.run(["-c", program])
