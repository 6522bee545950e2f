"""``opkit.context_parallel``, and attention of sharded ``DTensor``s: ``cases.py`` holds the checks of several processes."""

from pathlib import Path

import processes
import pytest
import torch

import opkit

processes.need_gloo()

FILE = Path(__file__).with_name("cases.py")
CASES = (
    "masks", "options", "gradients_of_biases", "alibi_of_more_keys_than_queries", "dropout", "autocast",
    "values_that_no_query_sees", "keys_that_no_query_sees_are_not_sent",
    "models_that_call_torchs_attention", "distributed_tensors", "functions", "functions_of_distributed_tensors",
    "keys_divided_among_processes", "pages_divided_among_processes", "bad_calls",
)  # fmt: skip
COMPILED = (
    "compiled_by_heads", "compiled_masks", "compiled_distributed_tensors", "compiled_by_inductor", "compiled_dropout",
    "compiled_contexts", "compiled_pages", "compiled_functions", "functions_with_blocks",
)  # fmt: skip
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


results = processes.fixture(FILE, "test_two_processes")


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_two_processes(name, results):
    assert results[name] == ["", ""], "\n".join(results[name])


@pytest.mark.distributed
@pytest.mark.skipif(OLD, reason="before torch 2.14 such calls are graph breaks")
@pytest.mark.parametrize("name", ["compiled", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in COMPILED)])
def test_compiled_as_one_graph(name, tmp_path):
    (found,) = processes.results_of(FILE, 2, [name], tmp_path).values()
    assert found == ["", ""], "\n".join(found)


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_four_processes(tmp_path):
    found = processes.results_of(FILE, 4, CASES[:-1], tmp_path)
    assert not any(any(each) for each in found.values()), found


def test_a_mesh_is_expected():
    with (
        pytest.raises(opkit.errors.ArgumentTypeError, match="DeviceMesh or a process group, got int"),
        opkit.context_parallel(4),
    ):
        pass
    with (
        pytest.raises(opkit.errors.ArgumentError, match="method='tree' must be"),
        opkit.context_parallel(4, method="tree"),
    ):
        pass
