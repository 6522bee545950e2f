"""exact: references run in float64, whatever they say."""

import torch

from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.compare.reference import expected
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
