"""The reference: its numbers and its derivatives."""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_oracle import TOLERANCE, close, inputs, naive, randn
from torch.autograd import gradcheck, gradgradcheck

import opkit
from opkit.masks import (
    ALiBi,
    Causal,
    Dense,
    KeyPadding,
    PrefixLM,
    RelativePosition,
    Segments,
    SlidingWindow,
    VarLen,
)


def visible(predicate, queries, keys):
    rows = [[predicate(i, j) for j in range(keys)] for i in range(queries)]
    return torch.tensor(rows, dtype=torch.bool).reshape(queries, keys)


# batch, heads, key heads, queries, keys, d, d_v
SHAPES = (
    (2, 4, 4, 5, 5, 8, 8),
    (1, 4, 2, 3, 9, 7, 5),
    (2, 6, 1, 9, 4, 1, 3),
    (1, 1, 1, 1, 17, 16, 1),
    (0, 2, 2, 3, 3, 4, 4),
    (2, 2, 1, 0, 3, 4, 4),
    (2, 2, 1, 3, 0, 4, 4),
)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_results_are_the_oracle_s(shape, dtype, causal):
    q, k, v = inputs(*shape, dtype=dtype)
    mask, says = (Causal(), visible(lambda i, j: j <= i, *shape[3:5])) if causal else (None, None)
    actual = opkit.attention(q, k, v, mask=mask, return_lse=True)
    close(actual, naive(q, k, v, says), dtype)


def test_every_feature_at_once_is_the_oracle_s():
    batch, heads, queries, keys = 2, 4, 5, 6
    q, k, v = inputs(batch, heads, 2, queries, keys, 7, 3)
    slopes, tensor = randn(heads).abs(), randn(batch, 1, queries, 1, seed=3)
    rel_h, rel_w = randn(batch, heads, queries, 3, seed=4), randn(batch, heads, queries, 2, seed=5)
    says = visible(lambda i, j: i + 1 - 2 <= j <= i + 1, queries, keys)
    distances = torch.tensor([[abs(i + 1.0 - j) for j in range(keys)] for i in range(queries)], dtype=torch.float64)
    alibi = -slopes.float().double()[:, None, None] * distances
    columns = torch.arange(keys)
    rel = rel_h[..., columns // 2] + rel_w[..., columns % 2]
    sinks = randn(heads, seed=6)
    actual = opkit.attention(
        q, k, v, scale=0.3, softcap=1.5, sinks=sinks, return_lse=True,
        mask=Causal("bottom-right") & SlidingWindow(2, align="bottom-right"),
        bias=[ALiBi(slopes), tensor, RelativePosition(rel_h, rel_w)],
    )  # fmt: skip
    expected = naive(q, k, v, says, alibi + tensor + rel, scale=0.3, softcap=1.5, sinks=sinks)
    close(actual, expected, torch.float64)


SDPA = {
    "plain": (None, {}),
    "causal": (Causal(), {"is_causal": True}),
    "scale": (None, {"scale": 0.7}),
    "bool": (lambda t: Dense(t > 0), {"attn_mask": lambda t: t > 0}),
    "additive": (Dense, {"attn_mask": lambda t: t}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", SDPA)
@pytest.mark.parametrize("shared", [4, 2])
def test_results_and_gradients_are_those_of_torch_s(name, shared):
    q, k, v = (x.requires_grad_() for x in inputs(2, 4, shared, 5, 6, 8, 8))
    mask, theirs = SDPA[name]
    tensor = randn(2, 1, 5, 6, seed=9)
    tensor[..., 0] = 1.0  # torch's rows must see something
    theirs = {key: value(tensor) if callable(value) else value for key, value in theirs.items()}
    ours = opkit.attention(
        q, k, v, mask=mask(tensor) if name in ("bool", "additive") else mask, scale=theirs.get("scale")
    )
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **theirs)
    torch.testing.assert_close(ours, expected)
    weight = randn(*ours.shape, seed=7)
    pairs = zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (ours, expected)), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other)


def test_probabilities_are_not_rounded_to_a_narrow_dtype():
    q, k, v = inputs(1, 2, 2, 64, 64, 16, 16, dtype=torch.bfloat16)
    wide = opkit.attention(q.float(), k.float(), v.float(), mask=Causal(), kernel="reference")
    assert torch.equal(opkit.attention(q, k, v, mask=Causal(), kernel="reference"), wide.bfloat16())


def test_large_logits_neither_overflow_nor_lose_their_rows_sum():
    q, k = torch.full((1, 1, 1, 4), 3e3), torch.tensor([3e3, 2.999e3, -3e3])[None, None, :, None].expand(1, 1, 3, 4)
    out, lse = opkit.attention(q, k, torch.ones(1, 1, 3, 2), return_lse=True)
    assert torch.equal(out, torch.ones(1, 1, 1, 2))
    assert lse.item() == pytest.approx(1.8e7)


# ---- derivatives -----------------------------------------------------------------------------------------------------

STARTS, HIDING = torch.tensor([0, 1, 3]), torch.tensor([[[[True, False, True]], [[False, False, False]]]])
CASES = {
    "plain": {},
    "causal": {"mask": Causal()},
    "dead rows": {"mask": Dense(HIDING)},
    "dead rows by bias": {"mask": Dense(torch.where(HIDING, 0.0, -math.inf))},
    "window": {"mask": SlidingWindow(0, 1) | ~Segments(torch.tensor([0, 1, 1]))},
    "padding": {"mask": PrefixLM(torch.tensor([1])) & KeyPadding(torch.tensor([2]))},
    "packed": {"mask": VarLen(STARTS) & Causal("bottom-right")},
    "softcap and dead rows": {"softcap": 0.8, "mask": Dense(HIDING)},
    "dropout": {"dropout_p": 0.4},
}


def differentiated(name):
    """A function of q, k, v, sinks, slopes, rel_h, rel_w, and a dense bias; all that can be differentiated."""
    case = CASES[name]

    def function(q, k, v, sinks, slopes, rel_h, rel_w, bias):
        torch.manual_seed(3)
        given = [ALiBi(slopes), RelativePosition(rel_h, rel_w), bias]
        return opkit.attention(q, k, v, bias=given, sinks=sinks if name != "causal" else None, return_lse=True, **case)

    return function


def operands():
    q, k, v = inputs(1, 2, 1, 3, 3, 2, 1)
    others = (
        randn(2, seed=3),
        randn(2, seed=4).abs(),
        randn(1, 2, 3, 1, seed=5),
        randn(1, 2, 3, 3, seed=6),
        randn(3, 1),
    )
    return tuple(x.requires_grad_() for x in (q, k, v, *others))


def finite_lse(function):
    """``function`` with the rows left out that see nothing, whose log-sum-exp has no finite differences."""

    def call(*args):
        out, lse = function(*args)
        return out, torch.where(lse == -math.inf, 0.0, lse)

    return call


def in_float64(monkeypatch):
    """Slopes stay in float64, of which finite differences can be taken."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.sweep(keep=["softcap and dead rows"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name, monkeypatch):
    in_float64(monkeypatch)
    assert gradcheck(finite_lse(differentiated(name)), operands(), check_forward_ad=True)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["dead rows", "softcap and dead rows", "causal", "packed"])
def test_second_gradients_are_those_of_finite_differences(name, monkeypatch):
    in_float64(monkeypatch)
    assert gradgradcheck(finite_lse(differentiated(name)), operands())


def test_forward_mode_is_the_gradient_s_transpose():
    args = operands()
    tangents = tuple(randn(*x.shape, seed=11 + n) for n, x in enumerate(args))
    function = differentiated("window")
    outputs, pushed = torch.func.jvp(function, tuple(x.detach() for x in args), tangents)
    weights = [randn(*x.shape, seed=20) for x in outputs]
    grads = torch.autograd.grad(function(*args), args, weights)
    forward = sum((x * w).sum() for x, w in zip(pushed, weights, strict=True))
    backward = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    torch.testing.assert_close(forward, backward)


@pytest.mark.sweep
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 2, None)])
@pytest.mark.parametrize("name", ["causal", "dead rows"])
def test_vmap_is_a_loop(in_dims, name):
    stacked = inputs(3, 2, 1, 3, 3, 4, 4)
    args = [x[0:1] if d is None else x.unsqueeze(1).movedim(0, d) for x, d in zip(stacked, in_dims, strict=True)]

    def function(q, k, v):
        return opkit.attention(q, k, v, mask=CASES[name]["mask"], return_lse=True)

    looped = [
        function(*(x if d is None else x.select(d, n) for x, d in zip(args, in_dims, strict=True))) for n in range(3)
    ]
    expected = tuple(map(torch.stack, zip(*looped, strict=True)))
    torch.testing.assert_close(torch.vmap(function, in_dims)(*args), expected)


def test_vmap_over_masks_sinks_and_biases_is_a_loop():
    q, k, v = inputs(2, 2, 1, 3, 4, 4, 4)
    lengths, sinks, bias = torch.tensor([[0, 1], [2, 3], [4, 4]]), randn(3, 2), randn(3, 2, 1, 3, 4)
    starts = torch.tensor([[0, 1, 3], [0, 2, 3], [0, 0, 3]])

    def padded(lengths, bias):
        return opkit.attention(q, k, v, mask=KeyPadding(lengths) & Causal(), bias=bias)

    def sunk(sinks):
        return opkit.attention(q, k, v, sinks=sinks)

    def packed(segments):
        return opkit.attention(q, k, v, mask=Segments(segments, segments[:1].expand(4)))

    for function, args in ((padded, (lengths, bias)), (sunk, (sinks,)), (packed, (starts,))):
        expected = torch.stack([function(*(x[n] for x in args)) for n in range(3)])
        torch.testing.assert_close(torch.vmap(function)(*args), expected)


def test_gradients_of_each_sample_are_those_of_a_loop():
    q, k, v = inputs(3, 2, 1, 4, 4, 4, 4)

    def loss(q, k, v):
        return opkit.attention(q[None], k[None], v[None], mask=Causal()).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v)
    looped = [torch.func.grad(loss, (0, 1, 2))(q[n], k[n], v[n]) for n in range(3)]
    torch.testing.assert_close(mapped, tuple(map(torch.stack, zip(*looped, strict=True))))
