"""Strategies for people's own tests: what they draw, and how a failing example reads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.calls.resizing import other_sizes
from opkit.contract.calls.specs import ArgumentSpecs
from opkit.errors import ArgumentError
from opkit.testing import LAYOUTS, calls, layouts, make_tensor, shapes, tensor, tensors

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
    with pytest.raises(ArgumentError, match="sideways"):
        tensors("n", layouts=("sideways",))
