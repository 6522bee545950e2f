"""layout: planted defects that each property must catch, right operators that it must pass."""

import pytest
import torch

from opkit.testing import tensor

_ROWS = (tensor("b d"),)
_BOTH = (tensor("n"), tensor("n"))


def _read(strides, offset=None):
    """Doubles a tensor of which it believes the given strides."""

    def op(x):
        start = x.storage_offset() if offset is None else offset
        return torch.as_strided(x, x.shape, strides(x), start) * 2

    return op


def _dense(x):
    return torch.empty(x.shape).stride()


def _rows(x):
    return (x.shape[-1], x.stride(-1)) if x.stride(-1) == 1 else x.stride()


def test_strides_that_are_taken_for_granted(fails, holds):
    failure = fails("layout.strides", _read(_dense), args=_ROWS)
    assert failure.case.tensors()[0].layout in ("transposed", "strided")
    holds("layout.strides", lambda x: x * 2, args=_ROWS)


def test_views(fails, holds):
    assert fails("layout.views", _read(torch.Tensor.stride, 0), args=_ROWS).case.tensors()[0].layout != "contiguous"
    assert fails("layout.views", _read(_rows), args=_ROWS).case.tensors()[0].layout == "padded"
    holds("layout.views", lambda x: x * 2, args=_ROWS)


def test_expanded(fails, holds):
    def wrong(x):
        return x * 3 if 0 in x.stride() and x.numel() > 1 else x * 2

    fails("layout.expanded", wrong, args=_ROWS)
    holds("layout.expanded", lambda x: x * 2, args=_ROWS)


def test_the_same_tensor_twice(fails, holds):
    def wrong(a, b):
        return a * 2 + 1 if a.data_ptr() == b.data_ptr() else a + b

    failure = fails("layout.same_tensor", wrong, args=_BOTH)
    assert failure.args[0].shape == (1,)
    holds("layout.same_tensor", torch.add, args=_BOTH)


def test_one_storage(fails, holds):
    def wrong(a, b):
        apart = a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
        return a + b if apart else a + a

    fails("layout.shared_storage", wrong, args=_BOTH)
    holds("layout.shared_storage", torch.add, args=_BOTH)


@pytest.mark.parametrize("rule", ["strides", "views", "expanded"])
def test_refusals_writes_and_sums_hold(holds, asked, rule):
    def choosy(x):
        if not x.is_contiguous():
            raise ValueError("contiguous arguments only")
        return x * 2

    assert not asked(f"layout.{rule}", choosy, args=_ROWS).failures
    floats = tensor("b d", (torch.float32, torch.bfloat16, torch.float16))
    holds(f"layout.{rule}", lambda x: x.softmax(-1), args=(floats,), max_examples=20)
    holds(f"layout.{rule}", lambda x, y: x.add_(y), args=(tensor("b d"), tensor("b d")), max_examples=20)


def test_an_operator_that_is_random_is_not_asked(asked):
    report = asked("layout.strides", lambda x: x + torch.rand(()), args=_ROWS)
    assert "other results" in report.skipped[0].reason
