"""The reference: rows that see nothing, and what is hidden, which leaks into no result and no gradient."""

import math

import pytest
import torch
from attention_oracle import inputs

import opkit
from opkit.masks import Causal, Dense, KeyPadding, Segments


@pytest.mark.sweep
@pytest.mark.parametrize("hides", [Dense(torch.zeros(1, 1, dtype=torch.bool)), Dense(torch.full((1, 1), -math.inf))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_see_nothing_are_zero_with_zero_gradients(hides, dtype):
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 3, 3, 4, 4, dtype=dtype))
    out, lse = opkit.attention(q, k, v, mask=hides, softcap=2.0, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full((1, 2, 3), -math.inf))
    for seed in ((out, torch.ones_like(out)), (lse, torch.ones_like(lse))):
        for gradient in torch.autograd.grad(seed[0], (q, k, v), seed[1], retain_graph=True, materialize_grads=True):
            assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_sink_keeps_rows_alive_that_see_nothing():
    q, k, v = inputs(1, 2, 1, 3, 3, 4, 4)
    sinks = torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)
    out, lse = opkit.attention(q, k, v, mask=KeyPadding(torch.tensor([0])), sinks=sinks, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, sinks[None, :, None].expand(1, 2, 3))
    lse.sum().backward()
    torch.testing.assert_close(sinks.grad, torch.full((2,), 3.0, dtype=torch.float64))


POISON = (math.nan, math.inf, -math.inf)


def gradients(q, k, v, rows, mask, **options):
    """Results and gradients of the rows of queries in ``rows``."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out, lse = opkit.attention(q, k, v, mask=mask, return_lse=True, **options)
    chosen = out[:, :, rows].sum() + lse[:, :, rows].sum()
    return [out[:, :, rows], lse[:, :, rows], *torch.autograd.grad(chosen, (q, k, v))]


@pytest.mark.sweep
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("poisoned", ["k", "v", "both"])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}, {"sinks": torch.zeros(4).double()}, {"dropout_p": 0.5}])
def test_what_is_hidden_from_every_row_leaks_nowhere(poison, poisoned, options):
    q, k, v = inputs(2, 4, 2, 3, 6, 4, 5)
    torch.manual_seed(0)
    expected = gradients(q, k, v, slice(None), KeyPadding(torch.tensor([4, 5])), **options)
    for tensor in {"k": (k,), "v": (v,), "both": (k, v)}[poisoned]:
        tensor[0, :, 4:] = poison
        tensor[1, 0, 5, 1] = poison
    torch.manual_seed(0)
    actual = gradients(q, k, v, slice(None), KeyPadding(torch.tensor([4, 5])), **options)
    for mine, other in zip(actual, expected, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("poisoned", ["k", "v"])
def test_what_later_rows_see_does_not_reach_earlier_ones(poison, poisoned):
    q, k, v = inputs(1, 2, 1, 5, 5, 4, 3)
    before = gradients(q, k, v, slice(0, 3), Causal())
    {"k": k, "v": v}[poisoned][0, 0, 3, 0] = poison
    after = gradients(q, k, v, slice(0, 3), Causal())
    for mine, other in zip(after[:3], before[:3], strict=True):
        torch.testing.assert_close(mine[:, :, :3], other[:, :, :3], rtol=0, atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("poisoned", ["k", "v"])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}, {"sinks": torch.zeros(2).double()}])
def test_one_segment_s_poison_does_not_reach_another_s_gradients(poison, poisoned, options):
    q, k, v = inputs(1, 2, 1, 6, 6, 4, 3)
    ids = torch.tensor([0, 1, 1, 0, 1, 0])
    before = gradients(q, k, v, slice(None), Segments(ids), **options)
    {"k": k, "v": v}[poisoned][0, 0, 2, 1] = poison
    after = gradients(q, k, v, slice(None), Segments(ids), **options)
    for mine, other in zip(after, before, strict=True):
        torch.testing.assert_close(mine[:, :, ids == 0], other[:, :, ids == 0], rtol=0, atol=0)


@pytest.mark.parametrize("poisoned", ["k", "v"])
def test_rows_that_see_a_nan_have_it(poisoned):
    q, k, v = inputs(1, 2, 1, 5, 5, 4, 3)
    {"k": k, "v": v}[poisoned][0, 0, 3, 0] = math.nan
    out = opkit.attention(q, k, v, mask=Causal())
    assert not out[:, :, :3].isnan().any()
    assert out[:, :, 3:].isnan().any(-1).all()


def test_an_infinite_value_is_arithmetic_s_for_the_rows_that_see_it():
    q, k, v = inputs(1, 1, 1, 3, 3, 4, 2)
    v[0, 0, 1, 0] = math.inf
    out = opkit.attention(q, k, v, mask=Causal())[0, 0]
    assert out[0].isfinite().all()
    assert torch.equal(out[1:, 0], torch.tensor([math.inf, math.inf], dtype=torch.float64))
    assert out[1:, 1].isfinite().all()


def test_second_gradients_of_rows_do_not_see_what_is_hidden():
    q, k, v = inputs(1, 1, 1, 3, 4, 2, 2)
    k[0, 0, 3], v[0, 0, 3] = math.nan, math.inf
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = opkit.attention(q, k, v, mask=KeyPadding(torch.tensor([3])))
    first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
    for second in torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v)):
        assert second.isfinite().all()
