"""tolerance: what rounding explains, and what it does not."""

import torch

from opkit.contract.compare.reference import Goal, allowed, wrong


def test_one_rounding_is_allowed_and_a_hundred_are_not():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        own, eps = torch.ones(3, dtype=dtype), torch.finfo(dtype).eps
        near, far = own * (1 + eps), own * (1 + 100 * eps)
        assert not wrong(near, Goal(own, own.double())).any(), dtype
        assert wrong(far, Goal(own, own.double())).all(), dtype


def test_the_references_own_error_counts():
    own = torch.tensor([1.0, 1.001])
    assert allowed(Goal(own, torch.ones(2, dtype=torch.float64)))[1] > 1e-3


def test_nan_and_infinity():
    inf, nan = float("inf"), float("nan")
    own = torch.tensor([nan, inf, 1.0, -inf])
    goal = Goal(own, own.double())
    assert wrong(torch.tensor([0.0, -inf, nan, nan]), goal).all()
    assert not wrong(own, goal).any()


def test_a_result_that_overflows_its_dtype_alone():
    own = torch.tensor([float("inf")], dtype=torch.float16)
    assert not wrong(own, Goal(own, torch.tensor([1e6], dtype=torch.float64))).any()
