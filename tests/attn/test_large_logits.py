"""Logits up to the largest that float32 has, and rows of which all are huge and nearly equal: results and gradients.

Queries and keys are small whole numbers, so that products are exact in every dtype, and the oracle rounds logits to float32.
"""

from contextlib import nullcontext

import pytest
import torch
from attention_inputs import seen as seen_by

import opkit
from opkit.attn import gradients
from opkit.attn.calls import GradientCall
from opkit.masks import Causal, SlidingWindow

LEAST = torch.finfo(torch.float32).min
FLOATS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def whole(*shape, dtype=torch.float32):
    return torch.randint(-3, 4, shape).to(dtype)


def expected(q, k, v, gradient, bias=None, scale=1.0, seen=None, sinks=None):
    """The result, the log-sum-exp, and the gradients of q, k, v and the bias, in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v) + (() if bias is None else (bias,))]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:3])
    logits = leaves[0] @ keys.mT * scale
    logits = (logits if bias is None else logits + leaves[3]).float().double()
    logits = logits if seen is None else logits.masked_fill(~seen, -torch.inf)
    column = [] if sinks is None else [sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)]
    both = torch.cat([logits, *column], -1)
    out = both.softmax(-1)[..., : logits.shape[-1]] @ values
    return out, both.logsumexp(-1), torch.autograd.grad((out * gradient.double()).sum(), leaves)


def check(q, k, v, bias=None, scale=1.0, mask=None, seen=None, sinks=None, kernel=None):
    gradient = whole(*q.shape[:3], v.shape[3], dtype=q.dtype)
    wanted, wanted_lse, wanted_gradients = expected(q, k, v, gradient, bias, scale, seen, sinks)
    leaves = [x.clone().requires_grad_() for x in (q, k, v) + (() if bias is None else (bias,))]
    added = leaves[3] if bias is not None else None
    how = {"bias": added, "scale": scale, "mask": mask, "sinks": sinks, "kernel": kernel, "return_lse": True}
    forced = opkit.use_kernel(gradients.backward_operator(), kernel) if kernel == "reference" else nullcontext()
    with forced:
        out, lse = opkit.attention(*leaves[:3], **how)
        found = torch.autograd.grad((out * gradient).sum(), leaves)
    close(out, wanted, q.dtype)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(found, wanted_gradients, strict=True):
        if theirs.abs().max() < torch.finfo(q.dtype).max:
            close(mine, theirs, q.dtype)


def close(mine, theirs, dtype):
    size = max(theirs.abs().max().item(), 1.0)
    torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=FLOATS[dtype] * size)


def three(queries, keys, dtype=torch.float32, heads=4, shared=2):
    return (
        whole(2, heads, queries, 16, dtype=dtype),
        whole(2, shared, keys, 16, dtype=dtype),
        whole(2, shared, keys, 8, dtype=dtype),
    )


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_huge_scales(subtests, isa, dtype):
    q, k, v = three(20, 150, dtype)
    causal = torch.ones(20, 150, dtype=torch.bool).tril(130)
    for scale in (1e5, 1e10, 1e35):
        with subtests.test(str(scale)):
            check(q, k, v, scale=scale)
    check(q, k, v, scale=1e20, mask=Causal(align="bottom-right"), seen=causal)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_padded_rows_have_the_least_bias(isa, dtype):
    q, k, v = three(70, 70, dtype, heads=2)
    bias = torch.zeros(2, 1, 70, 70).masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), LEAST)
    bias[1, :, :33] = LEAST
    check(q, k, v, bias, scale=0.25)


def test_a_huge_bias_and_small_differences(subtests, isa):
    q, k, v = three(30, 100, heads=2)
    for size in (1e5, -1e8, 1e20, 3e38):
        with subtests.test(str(size)):
            check(q, k, v, whole(2, 2, 30, 100) * 8 + size)
    window = SlidingWindow(10) & Causal()
    bias = torch.where(torch.arange(30)[:, None] % 3 == 0, 1e8, 0.0) + whole(30, 100)
    check(q, k, v, bias.expand(2, 2, 30, 100).clone(), mask=window, seen=seen_by(window, 2, 2, 30, 100))


def test_the_reference(subtests):
    q, k, v = three(20, 30)
    for size in (1e8, LEAST):
        with subtests.test(str(size)):
            check(q, k, v, torch.full((2, 4, 20, 30), size), kernel="reference")


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", ["tiles", "reference"])
def test_huge_sinks(isa, kernel):
    q, k, v = three(20, 30)
    check(q, k, v, torch.full((2, 4, 20, 30), 1e8), sinks=torch.tensor([1e8, 0.0, -1e8, 2e8]), kernel=kernel)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_decoding(isa, dtype):
    q, k, v = three(1, 700, dtype, heads=8)
    for scale in (1e8, 1e20):
        check(q, k, v, scale=scale, kernel="decode")


def test_dropout_is_of_exact_probabilities():
    q, k, v = (torch.zeros(1, 1, 4, 8) for _ in range(3))
    seed, bias, ones = torch.tensor([1, 2]), torch.full((1, 1, 4, 4), LEAST), torch.ones(1, 1, 4, 8)
    out, lse = torch.ops.opkit.attention(q, k, v + 1, [], [bias], None, seed, [], [0, 0], 1.0, 0.0, 0.5, False)
    call = GradientCall(ones, None, q, k, v, out, lse, [], [bias], [], [0, 0], 1.0, 0.0, False, seed, 0.5)
    of_v = gradients.attention_backward(*call)[2]
    torch.testing.assert_close(of_v.sum(), out.sum())  # of the probabilities that are kept, eight times


def test_merged_parts():
    outs, lse = [torch.full((2, 3), x) for x in (1.0, 3.0)], torch.tensor([1e8, LEAST])
    out, merged = opkit.merge_attention([(each, lse) for each in outs])
    torch.testing.assert_close(out, torch.full((2, 3), 2.0))
    torch.testing.assert_close(merged, lse)


@pytest.mark.parametrize("queries", [1, 70])  # one is decoding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_of_huge_values_are_finite(isa, dtype, queries):
    """The sum of 300 of these values is not."""
    value = torch.finfo(dtype).max / 4
    q, k, v = torch.zeros(1, 2, queries, 64), torch.zeros(1, 1, 300, 64), torch.full((1, 1, 300, 64), value)
    out, lse = opkit.attention(*(x.to(dtype) for x in (q, k, v)), sinks=torch.zeros(2), return_lse=True)
    torch.testing.assert_close(out.double() / value, torch.full_like(out, 300 / 301).double(), rtol=1e-2, atol=0)
    torch.testing.assert_close(lse, torch.full((1, 2, queries), 301.0).log())
