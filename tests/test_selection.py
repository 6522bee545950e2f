"""Which cases tests/conftest.py runs, by markers and options."""

import re
import shutil
from pathlib import Path

import fresh_process
import pytest

TESTS = """\
import pytest

@pytest.mark.sweep
@pytest.mark.parametrize("a", ["x", "y", "z"])
@pytest.mark.parametrize("b", [1, 2])
def test_product(a, b): pass

@pytest.mark.sweep(keep=["y"])
@pytest.mark.parametrize("a", ["x", "y"])
def test_named(a): pass

@pytest.mark.sweep(1)
@pytest.mark.parametrize("where", ["here", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_most(where): pass

@pytest.mark.emulated
@pytest.mark.parametrize("where", ["here", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_emulated(where): pass

@pytest.mark.build
def test_build(): pass

def test_plain(): pass
"""
DEFAULT = {"product[1-x]", "product[2-y]", "product[1-z]", "named[y]", "most[here]", "plain"}
LEFT_OUT = {"product[1-y]", "product[2-x]", "product[2-z]", "named[x]", "most[gpu]"}
LEFT_OUT |= {"emulated[here]", "emulated[gpu]", "build"}


COLLECT = """
import sys
import pytest
for options in sys.argv[1:]:
    print(end="\\0")
    pytest.main(["--co", "-q", "--disable-plugin-autoload", "-p", "no:cacheprovider", *options.split()])
"""
RANDOM, ALL, SHARD = "-p randomly", "--exhaustive", "--shard 1/1"
MARKED = {
    "-m build": {"build"},
    "-m gpu": {"most[gpu]", "emulated[gpu]"},
    "-m emulated": {"emulated[here]"},
    "-m exhaustive": {"product[1-y]", "product[2-x]", "product[2-z]", "named[x]"},
}


@pytest.fixture(scope="module")
def selected(tmp_path_factory):
    """The names of the cases that pytest runs, by its options."""
    folder = tmp_path_factory.mktemp("selection")
    shutil.copy(Path(__file__).parent / "conftest.py", folder)
    (folder / "test_made.py").write_text(TESTS)
    markers = ("exhaustive", "emulated", "build", "gpu", "sweep")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n" + "".join(f"    {name}\n" for name in markers))
    options = ("", RANDOM, ALL, SHARD, *MARKED)
    _, *printed = fresh_process.run(["-c", COLLECT, *options], cwd=folder).stdout.split("\0")
    return {each: set(re.findall(r"::test_(\S+)", text)) for each, text in zip(options, printed, strict=True)}


def test_the_default_run_keeps_each_value_and_leaves_out_marked_cases(selected):
    assert selected[""] == DEFAULT


def test_random_order_does_not_change_what_is_kept(selected):
    assert selected[RANDOM] == DEFAULT


def test_all_cases_run_on_demand(selected):
    assert selected[ALL] == DEFAULT | LEFT_OUT


def test_a_marker_selects_its_cases(selected):
    assert {options: selected[options] for options in MARKED} == MARKED


def test_shards_are_all_that_the_default_run_leaves_out(selected):
    assert selected[SHARD] == LEFT_OUT
