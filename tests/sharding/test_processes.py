"""Operators on DTensors in several processes: the numbers of ``ranks.py`` are those of whole tensors."""

from pathlib import Path

import processes
import pytest

FILE = Path(__file__).with_name("ranks.py")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, ["one_dimension", "writes_lists_and_optional_arguments"]),
        pytest.param(4, ["two_dimensions"], marks=pytest.mark.exhaustive),
    ],
)
def test_results_and_gradients_are_those_of_whole_tensors(tmp_path, world, cases):
    found = processes.results_of(FILE, world, cases, tmp_path)
    assert found == {name: [""] * world for name in cases}, str(found)


@pytest.mark.distributed
def test_a_triton_kernel(tmp_path):
    pytest.importorskip("triton")
    file = FILE.with_name("triton_ranks.py")
    found = processes.results_of(file, 2, ["triton_kernel"], tmp_path, TRITON_INTERPRET="1")
    assert found == {"triton_kernel": ["", ""]}, str(found)
