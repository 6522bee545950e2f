"""The portable kernels, forward and backward, against the formulas in float64."""

import dataclasses
from typing import Any

import pytest
import torch

from opkit.attn import gradients, reference
from opkit.attn.calls import AttentionCall, GradientCall
from opkit.attn.masks import program
from opkit.attn.masks.program import (
    AND,
    BAND,
    BAND_AT,
    BIAS_ALIBI,
    BIAS_DENSE,
    BIAS_REL,
    DENSE,
    LENGTH,
    NOT,
    OR,
    SEGMENTS,
)

FAR = program.UNLIMITED
BOUNDS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def r(*shape):
    return torch.randn(shape)


def numbers(count, of):
    """int32 (1, count): documents of ``of`` tokens."""
    return torch.arange(count).div(of, rounding_mode="floor").int()[None]


@dataclasses.dataclass
class Case:
    """Sizes (batch, heads, key heads, queries, keys, d, d_v) and what else a call has."""

    sizes: tuple[int, ...]
    mask: tuple[int, ...] = ()
    masks: tuple[Any, ...] = ()
    bias: tuple[int, ...] = ()
    biases: tuple[Any, ...] = ()
    sinks: Any = None
    softcap: float = 0.0
    scale: float = 0.3
    dropout_p: float = 0.0
    narrow: bool = False
    inside: bool = False

    def call(self, dtype):
        b, h, hk, n, m, d, dv = self.sizes
        q, k, v = (r(*shape).to(dtype) for shape in ((b, h, n, d), (b, hk, m, d), (b, hk, m, dv)))
        seed = torch.tensor([12345, 2**40 + 678910]) if self.dropout_p else None
        masks, biases = ([make() for make in each] for each in (self.masks, self.biases))
        sinks = None if self.sinks is None else self.sinks()
        return AttentionCall(
            q, k, v, masks, biases, sinks, seed, list(self.mask), list(self.bias), self.scale, self.softcap, self.dropout_p,
            self.inside,
        )  # fmt: skip


CASES = {
    "plain": Case((1, 2, 1, 37, 150, 16, 16)),
    "narrow, heads that are padded": Case((1, 2, 1, 130, 70, 96, 40), narrow=True),
    "a head of two parts": Case((1, 2, 1, 20, 40, 520, 16), scale=0.05, narrow=True),
    "a head of 7 and 3": Case((1, 2, 2, 20, 70, 7, 3)),
    "heads inside": Case((2, 2, 1, 70, 30, 16, 24), inside=True),
    "causal": Case((2, 2, 1, 270, 270, 24, 16), mask=(BAND, -FAR, 0)),
    "rows that see nothing": Case((1, 2, 1, 170, 130, 16, 16), mask=(BAND, -FAR, -40)),
    "window": Case((1, 2, 1, 190, 300, 16, 16), mask=(BAND, -20, 130)),
    "two bands": Case((1, 1, 1, 190, 300, 16, 16), mask=(BAND, -20, FAR, BAND, -50, 90, AND)),
    "lengths": Case((3, 2, 1, 30, 190, 16, 16), mask=(LENGTH, 0), masks=(lambda: torch.tensor([0, 5, 177]).int(),)),
    "causal, lengths": Case(
        (2, 2, 2, 190, 190, 16, 16), mask=(BAND, -FAR, 0, LENGTH, 0, AND), masks=(lambda: torch.tensor([150, 1]).int(),)
    ),
    "documents": Case((2, 4, 2, 300, 300, 16, 16), mask=(SEGMENTS, 0, 0), masks=(lambda: numbers(300, 43),)),
    "causal documents of some length": Case(
        (2, 1, 1, 150, 150, 16, 16),
        mask=(SEGMENTS, 0, 0, BAND, -FAR, 0, AND, LENGTH, 1, AND),
        masks=(lambda: numbers(150, 103), lambda: torch.tensor([140, 0]).int()),
    ),
    "not these documents, or near": Case(
        (2, 2, 1, 300, 280, 16, 16),
        mask=(SEGMENTS, 0, 1, NOT, BAND, -90, 90, AND, BAND, 0, 0, OR),
        masks=(lambda: numbers(300, 100), lambda: numbers(280, 70)),
    ),
    "lengths negated": Case(
        (2, 1, 1, 200, 300, 16, 16), mask=(LENGTH, 0, NOT), masks=(lambda: torch.tensor([250, 0]).int(),)
    ),
    "bools": Case((2, 2, 1, 33, 70, 16, 16), mask=(DENSE, 0), masks=(lambda: torch.rand(2, 1, 33, 70) > 0.5,)),
    "bools in blocks": Case(
        (1, 2, 2, 300, 300, 16, 16),
        mask=(DENSE, 0),
        masks=(lambda: (numbers(300, 100).mT == numbers(300, 100)) & (torch.rand(1, 2, 300, 300) > 0.01),),
    ),
    "bands at offsets": Case(
        (1, 1, 1, 300, 270, 16, 16),
        mask=(BAND_AT, 0, -5, 20, BAND, -160, -150, OR),
        masks=(lambda: torch.arange(300).int()[None] // 3,),
    ),
    "biases": Case(
        (2, 2, 1, 70, 90, 16, 16),
        bias=(BIAS_DENSE, 0, BIAS_ALIBI, 1),
        biases=(lambda: r(1, 2, 70, 90), lambda: torch.rand(1, 2)),
    ),
    "relative positions": Case(
        (1, 2, 1, 150, 96, 16, 16), bias=(BIAS_REL, 0, 1, 8), biases=(lambda: r(1, 2, 150, 12), lambda: r(1, 2, 150, 8))
    ),
    "softcap, sinks, causal": Case(
        (2, 2, 1, 133, 170, 16, 16), mask=(BAND, -FAR, 0), sinks=lambda: r(2), softcap=3.0, scale=2.0
    ),
    "sinks of -inf": Case((1, 2, 1, 20, 30, 16, 16), mask=(BAND, -FAR, -5), sinks=lambda: torch.tensor([-torch.inf, 1])),
    "dropout": Case((2, 2, 1, 70, 90, 16, 16), dropout_p=0.3, mask=(BAND, -FAR, 20)),
    "all dropped": Case((1, 1, 1, 13, 17, 16, 16), dropout_p=1.0),
    "a negative scale": Case((1, 1, 1, 133, 70, 16, 16), scale=-0.5, mask=(BAND, -FAR, 0)),
    "a scale of zero": Case((1, 1, 1, 33, 70, 16, 16), scale=0.0, mask=(BAND, -FAR, 0)),
    "more tensors than slots": Case(
        (1, 1, 1, 40, 50, 16, 16),
        mask=(SEGMENTS, 0, 1, SEGMENTS, 2, 3, OR, SEGMENTS, 4, 5, OR, SEGMENTS, 6, 7, OR),
        masks=tuple((lambda n=n, of=of: numbers(n, of)) for of in (3, 5, 7, 11) for n in (40, 50)),
        bias=(BIAS_ALIBI, 0),
        biases=(lambda: torch.rand(1, 1),),
    ),
}  # fmt: skip


REPRESENTATIVE = (
    "narrow, heads that are padded", "heads inside", "causal documents of some length",
)  # fmt: skip


def close(found, exact, bound):
    size = max(exact.abs().max().item(), 1e-3) if exact.numel() else 1.0
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=bound * size)


def wide(values):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values]


@pytest.mark.sweep(keep=REPRESENTATIVE)
@pytest.mark.parametrize("name", CASES)
def test_of_the_formula(run, name):
    case = CASES[name]
    dtype = run.narrow if case.narrow else torch.float32
    call = case.call(dtype)
    out, lse = run("opkit::attention", *call)
    exact, exact_lse = reference.attention(*wide(call._replace(bias_tensors=wide(call.bias_tensors))))
    assert out.dtype == dtype
    assert (out.transpose(1, 2) if case.inside else out).is_contiguous()
    close(out, exact, BOUNDS[dtype])
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    gradient, of_lse = r(*exact.shape).to(dtype), torch.where(lse.isfinite(), r(*lse.shape), 0.0)
    rest = (call.mask_tensors, call.bias_tensors, call.mask, call.bias, call.scale, call.softcap, call.out_is_bshd)
    given = GradientCall(gradient, of_lse, *call[:3], out, lse, *rest, call.seed, call.dropout_p, call.sinks)
    found = run("opkit::attention_backward", *given)
    precise = GradientCall(*wide(given))._replace(out=exact, lse=exact_lse, bias_tensors=wide(call.bias_tensors))
    expected, delta = gradients.reference_gradients(precise)
    for mine, right in zip(found, (*expected, delta), strict=True):
        close(mine, right, 3 * BOUNDS[dtype])


LEAST = torch.finfo(torch.float32).min
HUGE = {
    "a scale": Case((1, 2, 1, 37, 150, 16, 16), scale=1e10, mask=(BAND, -FAR, 100)),
    "documents, a scale": Case((1, 1, 1, 90, 90, 16, 16), scale=1e4, mask=(SEGMENTS, 0, 0), masks=(lambda: numbers(90, 43),)),
    "biases": Case(
        (1, 2, 1, 40, 70, 16, 16), scale=8.0, bias=(BIAS_DENSE, 0), biases=(lambda: torch.full((1, 2, 40, 70), 1e8),),
        sinks=lambda: torch.tensor([1e8, 0.0]),
    ),
    "the least bias in some rows": Case(
        (1, 1, 1, 40, 70, 16, 16), scale=0.0, bias=(BIAS_DENSE, 0),
        biases=(lambda: torch.zeros(1, 1, 40, 70).masked_fill(torch.arange(40)[:, None] > 15, LEAST),),
    ),
}  # fmt: skip
"""Products of small whole numbers, so that their differences are exact in float32 too."""


@pytest.mark.sweep(keep=[name for name in HUGE if name != "a scale"])
@pytest.mark.parametrize("name", HUGE)
def test_huge_logits(run, name):
    call = HUGE[name].call(torch.float32)
    call = call._replace(**{x: getattr(call, x).mul(2).round() for x in "qkv"})
    out, lse = run("opkit::attention", *call)
    precise = AttentionCall(*wide(call))._replace(bias_tensors=wide(call.bias_tensors))
    exact, exact_lse = reference.attention(*precise)
    close(out, exact, BOUNDS[torch.float32])
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    rest = (call.mask_tensors, call.bias_tensors, call.mask, call.bias, call.scale, 0.0)
    given = GradientCall(r(*out.shape), None, *call[:3], out, lse, *rest, False, None, 0.0, call.sinks)
    found = run("opkit::attention_backward", *given)
    wanted = GradientCall(*wide(given))._replace(out=exact, lse=exact_lse, bias_tensors=precise.bias_tensors)
    expected, delta = gradients.reference_gradients(wanted)
    for mine, right in zip(found, (*expected, delta), strict=True):
        close(mine, right, 3 * BOUNDS[torch.float32])
    if call.bias:
        of_bias = (given.gradient, found[3], *call[:3], lse, *rest, [0], None, 0.0, call.sinks)
        (mine,) = run("opkit::attention_bias_backward", *of_bias)
        (right,) = gradients.attention_bias_backward(wanted.gradient, delta, *precise[:3], exact_lse, *rest[:1],
            precise.bias_tensors, *of_bias[8:])  # fmt: skip
        close(mine, right, 3 * BOUNDS[torch.float32])


def test_without_keys_queries_or_heads(run):
    for q, k in (((1, 2, 3, 4), (1, 1, 0, 4)), ((1, 2, 0, 4), (1, 1, 3, 4)), ((0, 2, 3, 4), (0, 1, 3, 4))):
        sinks = torch.tensor([1.0, 2.0])
        out, lse = run("opkit::attention", r(*q), r(*k), r(*k), [], [], sinks, None, [], [], 1.0, 0.0, 0.0, False)
        assert out.shape == q
        assert not out.any()
        torch.testing.assert_close(lse, sinks[None, :, None].expand(*q[:3]))


@pytest.mark.emulated
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "mask", [[SEGMENTS, 0, 1], [BAND, -FAR, 0], [LENGTH, 2]], ids=["documents", "causal", "lengths"]
)
def test_what_is_hidden_does_not_leak(run, mask):
    """NaN and infinity in hidden keys and values change nothing; a query that sees them gets NaN."""
    n = 200
    tensors = [numbers(n, 100), numbers(n, 100), torch.tensor([150]).int()]
    q, k, v, gradient = (r(1, 1, n, 16) for _ in range(4))
    at = 160
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[..., at, 3], dirty_v[..., at, 5] = torch.nan, torch.inf
    rest = (tensors, [], None, None, mask, [], 0.3, 0.0, 0.0, False)
    out, lse = run("opkit::attention", q, k, v, *rest)
    dirty, dirty_lse = run("opkit::attention", q, dirty_k, dirty_v, *rest)
    seen = program.visible(mask, tensors, program.Grid(n, n, q.device)).expand(1, 1, n, n)[0, 0, :, at]
    assert seen.any() or mask[0] == LENGTH
    torch.testing.assert_close(dirty[0, 0, ~seen], out[0, 0, ~seen])
    torch.testing.assert_close(dirty_lse[0, 0, ~seen], lse[0, 0, ~seen])
    assert not dirty[0, 0, seen].isfinite().all(-1).any()
    gradient[0, 0, seen] = 0.0
    given = (tensors, [], mask, [], 0.3, 0.0, False)
    clean = run("opkit::attention_backward", gradient, None, q, k, v, out, lse, *given)
    mixed_out = torch.where(seen[:, None], out[0, 0], dirty[0, 0])[None, None]
    mixed_lse = torch.where(seen, lse[0, 0], dirty_lse[0, 0])[None, None]
    found = run("opkit::attention_backward", gradient, None, q, dirty_k, dirty_v, mixed_out, mixed_lse, *given)
    torch.testing.assert_close(found[0][0, 0, ~seen], clean[0][0, 0, ~seen])


def test_strides_of_any_kind(run):
    q, k = r(2, 70, 3, 40).transpose(1, 2)[..., 1:17], r(2, 90, 3, 16).transpose(1, 2)
    v = r(2, 1, 20, 90).mT.expand(2, 3, 90, 20)
    rest = ([], [], None, None, [], [], 0.25, 0.0, 0.0, False)
    out, _ = run("opkit::attention", q, k, v, *rest)
    close(out, reference.attention(q.double(), k.double(), v.double(), *rest)[0], BOUNDS[torch.float32])
