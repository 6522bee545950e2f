"""``opkit.attention`` in float8."""

import pytest
import torch

import opkit
from opkit.attn import api
from opkit.attn.float8 import attention_float8_operator
from opkit.errors import ArgumentError, ArgumentTypeError, ShapeError
from opkit.masks import Causal, KeyPadding
from opkit.testing import tensor

KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]


def inputs(dtype=KINDS[0], heads=4, shared=2):
    torch.manual_seed(0)
    return [torch.randn(2, h, 9, 16).to(dtype) for h in (heads, shared, shared)]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_it_is_attention_to_what_the_numbers_stand_for(dtype):
    q, k, v = inputs(dtype)
    descales = (0.5, torch.tensor([2.0, 3.0]), torch.rand(2, 2))
    out, lse = opkit.attention(q, k, v, mask=Causal(), descales=descales, return_lse=True)
    by = [torch.as_tensor(x).expand(2, 2)[:, :, None, None] for x in descales]
    wide = [x.float() * y.repeat_interleave(x.shape[1] // 2, 1) for x, y in zip((q, k, v), by, strict=True)]
    expected, of_rows = opkit.attention(*wide, mask=Causal(), return_lse=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(lse, of_rows)


def test_without_descales_they_are_ones():
    q, k, v = inputs()
    assert torch.equal(opkit.attention(q, k, v), opkit.attention(q, k, v, descales=(1, 1.0, torch.ones(()))))


def test_layouts():
    q, k, v = inputs()
    plain = opkit.attention(q, k, v, mask=Causal())
    inside = opkit.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=Causal(), layout="bshd")
    assert inside.is_contiguous()
    assert torch.equal(inside.transpose(1, 2), plain)


def test_autocast_leaves_it_as_it_is():
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            opkit.attention(q, k, v, descales=(2.0, 1.0, 1.0)), opkit.attention(q, k, v, descales=(2.0, 1.0, 1.0))
        )
    assert opkit.attention(q, k, v).dtype == torch.bfloat16


def test_select_and_force():
    q, k, v = inputs()
    assert api.select(q, k, v).operator == "opkit::attention_float8"
    assert torch.equal(opkit.attention(q, k, v, kernel="reference"), opkit.attention(q, k, v))


def test_it_is_compiled_and_exported():
    q, k, v = inputs()
    mask = KeyPadding(torch.tensor([4, 9]))
    expected = opkit.attention(q, k, v, mask=mask)
    found = torch.compile(lambda *x: opkit.attention(*x, mask=mask), backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(found, expected)


WRONG = {
    "descales of another dtype": (lambda q: (q.float(),) * 3, {"descales": (1, 1, 1)}, ArgumentError, "is for float8"),
    "dropout": (lambda q: (q,) * 3, {"dropout_p": 0.1}, ArgumentError, "no dropout in torch.float8_e4m3fn"),
    "two descales": (lambda q: (q,) * 3, {"descales": (1, 1)}, ArgumentTypeError, "must be three"),
    "a word": (lambda q: (q,) * 3, {"descales": (1, "x", 1)}, ArgumentTypeError, "descale of k must be a number"),
    "a shape": (lambda q: (q,) * 3, {"descales": (1, 1, torch.ones(3))}, ShapeError, r"of v of shape \(3,\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_said(case):
    tensors, what, error, said = WRONG[case]
    with pytest.raises(error, match=said):
        opkit.attention(*tensors(inputs()[0]), **what)


def test_there_are_no_gradients():
    q, k, v = inputs()
    q.requires_grad_()
    with pytest.raises(ArgumentError, match="no gradients"):
        opkit.attention(q, k, v)
    with torch.no_grad():
        assert not opkit.attention(q, k, v).requires_grad


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", ["schema", "fake", "memory", "behaviour"])
def test_the_operator_keeps_its_contract(group):
    args = (
        *(tensor(shape, torch.float8_e4m3fn) for shape in ("b 2*g s d", "b g t d", "b g t e")),
        [tensor("b g", torch.float32)] * 3, [], [], None, (), (), 0.5, 0.0, False,
    )  # fmt: skip
    report = opkit.check(attention_float8_operator(), args=args, max_examples=3, database=False, properties=[group])
    report.raise_for_failures()
    asked = {"fake": {"fake.shapes", "fake.strides"}, "schema": {"schema.alias"}}
    assert {each.property for each in report.passed} >= asked.get(group, set())
