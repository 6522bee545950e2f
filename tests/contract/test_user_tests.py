"""What users' own tests use: pytest items and strategies."""

import os
from pathlib import Path

import fresh_process
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.calls.resizing import other_sizes
from opkit.contract.calls.specs import ArgumentSpecs
from opkit.errors import ArgumentError
from opkit.testing import LAYOUTS, calls, contract, layouts, make_tensor, shapes, tensor, tensors

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


few = settings(max_examples=25, database=None, deadline=None)


@few
@given(tensors("b n", (torch.float32, torch.int64), layouts=LAYOUTS, low=1, high=3))
def test_tensors_keep_to_what_was_asked(x):
    assert x.dim() == 2
    assert x.dtype in (torch.float32, torch.int64)
    assert not x.numel() or (x.abs().min() >= 1 and x.abs().max() <= 3)


@few
@given(calls(tensor("b n"), tensor("n"), st.floats(0, 1), alpha=st.integers(0, 3)))
def test_calls_share_sizes(call):
    assert call.args[0].shape[1] == call.args[1].shape[0]
    assert 0 <= call.args[2] <= 1
    assert call.kwargs["alpha"] <= 3


@few
@given(st.data())
def test_a_tensor_is_laid_anew_with_equal_numbers(data):
    x = data.draw(tensors(shapes("a b")))
    assert torch.equal(data.draw(layouts(x)), x)


def test_a_failing_example_can_be_made_again_from_its_text():
    @few
    @given(tensors("b n", layouts=("contiguous", "transposed")))
    def wrong(x):
        assert x.shape[1] < 5

    with pytest.raises(AssertionError) as caught:
        wrong()
    text = "\n".join(caught.value.__notes__)
    assert "make_tensor(" in text
    assert "layout='contiguous'" in text
    assert make_tensor(shape=(1, 5), layout="contiguous").shape == (1, 5)


def test_a_case_that_holds_lists_is_given_other_sizes():
    spec = ArgumentSpecs((tensor("n"), [tensor("n"), tensor("2*n")], [1, 2]))
    case = Case((TensorCase((3,)), [TensorCase((3,)), TensorCase((6,))], [1, 2]))
    found = other_sizes(spec, case)
    sizes = [[x.shape[0] for x in other.tensors()] for other in found]
    assert sizes
    assert all(n == m and 2 * n == double and n != 3 for n, m, double in sizes)
    assert len({str(each) for each in sizes}) == len(sizes)


def test_an_unknown_layout_is_refused():
    for take in (
        lambda: tensors("n", layouts=("sideways",)),
        lambda: calls(tensor("n"), layouts=("sideways",)),
        lambda: layouts((2, 3), ("sideways",)),
        lambda: make_tensor((2, 3), layout="sideways"),
    ):
        with pytest.raises(ArgumentError, match="sideways"):
            take()
