"""Functions of PyTorch's OpInfo database, wrapped as operators, break no property; all of them: benchmarks/database.py."""

import database
import pytest
import torch
from database_names import EXCLUDED, FINDINGS

from opkit.contract.properties import PROPERTIES

SAMPLE = (  # each of the first is of another kind: several results, lists, views, indices, complex or no floating-point numbers
    "add", "addmm", "cat", "expand", "fft.rfft", "gather", "max.reduction_with_dim", "nn.functional.conv1d",
    "nn.functional.cross_entropy", "nn.functional.layer_norm", "repeat_interleave", "where",
    "abs", "amax", "argmax", "bmm", "clamp", "cumsum", "diff", "einsum", "flip", "floor_divide", "index_add", "index_select",
    "lerp", "linalg.vector_norm", "logsumexp", "masked_fill", "mean", "nn.functional.avg_pool2d", "nn.functional.embedding",
    "nn.functional.gelu", "nn.functional.linear", "nn.functional.prelu", "prod", "softmax", "sort", "stack", "topk", "tril",
    "var_mean",
)  # fmt: skip
GROUPS = ("schema", "numbers", "layout", "fake", "gradients", "transforms")
ASKED = [prop.name for prop in PROPERTIES if prop.group in GROUPS and prop.cost <= 0.01]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_function_of_torchs_breaks_nothing(name):
    report = database.report(name, max_examples=3, properties=ASKED)
    unknown = [failure for failure in report.failures if (name, failure.property) not in FINDINGS]
    assert not unknown, "\n".join(map(str, unknown))
    assert len(report.passed) > 20


def test_most_of_the_database_fits():
    assert len(database.names()) >= 150
    assert not set(EXCLUDED) & set(database.names())


def test_sizes_get_names_where_others_are_taken():
    added, left, right = (each.pattern.text.split() for each in database.entry("addmm").args[:3])
    assert added == [left[0], right[1]]
    assert left[1] == right[0]
    assert len({*added, *left}) == 3


def test_an_index_is_bounded_by_the_size_that_it_is_into():
    _, targets = database.entry("nn.functional.cross_entropy").args
    logits, _ = database.entry("nn.functional.cross_entropy").args
    assert (targets.low, targets.high) == (0, f"{logits.pattern.text.split()[1]}-1")


def test_what_is_returned_shares_no_memory():
    x = torch.ones(2, 3)
    assert database.entry("transpose").function(torch.ones(1, 2, 3), -1, -2)._base is None
    result = database.wrapped("view_as")(torch.ones(5, 5, 5), torch.ones(25, 5))
    assert result.shape == (25, 5)
    assert x.untyped_storage().data_ptr() != database.entry("positive").function(x).untyped_storage().data_ptr()
