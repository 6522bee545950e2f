"""The reference in float64, and the tolerances that are derived from it."""

import torch

from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.compare.reference import Goal, allowed, expected, wrong
from opkit.contract.subject import subject_of
from opkit.testing import tensor


def _found(reference, dtype=torch.bfloat16, **how):
    case = Case((TensorCase((33,), dtype, **how),))
    return expected(subject_of(reference, args=(tensor("n"),), reference=reference), case), case


def test_casts_are_promoted():
    references = {
        "to": lambda x: (x.float() / 3).to(x.dtype),
        "its own": lambda x: x.bfloat16() / 3,
        "half": lambda x: (x / 3).half(),
        "a factory": lambda x: torch.zeros(33, dtype=torch.bfloat16) + x / 3,
        "copy_": lambda x: torch.empty_like(x, dtype=torch.float16).copy_(x) / torch.tensor(3.0),
    }
    for name, reference in references.items():
        found, case = _found(reference)
        assert found.exact is not None, name
        third = case.make().args[0].double() / 3
        torch.testing.assert_close(found.exact.results[0], third, rtol=1e-15, atol=0, msg=name)


def test_integers_stay():
    found, _ = _found(lambda x: (x.argmax(), x > 0, x.long()))
    assert found.exact is not None
    assert [leaf.dtype for leaf in found.exact.results] == [torch.int64, torch.bool, torch.int64]


def test_what_looks_into_bits_falls_back():
    found, _ = _found(lambda x: x.view(torch.int16))
    assert found.exact is None
    assert "bits" in found.why


def test_only_what_rounds_is_disturbed():
    found, _ = _found(lambda x: (x.round().clamp(-2, 2), x / 3), torch.float32, fill="halves")
    exact, moved = found.exact, found.disturbed(0)
    assert exact is not None
    assert moved is not None
    assert torch.equal(exact.results[0], moved.results[0])
    assert not torch.equal(exact.results[1], moved.results[1])


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
