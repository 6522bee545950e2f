"""Attention as models write it, and the function that replaces it in Dynamo's graphs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opkit
from opkit.compiler.capture.attention_masks import remove_constant_masks
from opkit.compiler.capture.patterns.table import replace_patterns
from tests.compiler.capture.pattern_calls import D, N, calls, causal, notes_and_graph, padding, plain, qkv, r

# ---- as models write it ----------------------------------------------------------------------------------------------


def bert(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    weights = nn.functional.softmax(scores + (1.0 - mask.to(q.dtype)) * torch.finfo(q.dtype).min, dim=-1)
    out = torch.matmul(F.dropout(weights, 0.1, training=False), v)
    return out.permute(0, 2, 1, 3).contiguous().view(q.shape[0], q.shape[2], -1)


def gpt2(q, k, v):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device)
    least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
    scores = torch.where(causal()[None, None], scores.to(scores.dtype), least)
    return (F.softmax(scores, dim=-1).type(v.dtype) @ v).transpose(1, 2)


def nano_gpt(q, k, v, buffer):
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(buffer[:, :, :N, :N] == 0, float("-inf"))
    return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(q.shape[0], N, -1)


def annotated(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    return torch.matmul(scores.masked_fill(mask == 0, -1e9).softmax(dim=-1), v)


def t5(q, k, v, bias):
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += bias
    weights = F.softmax(scores.float() if q.dtype != torch.float64 else scores, dim=-1).type_as(scores)
    return torch.matmul(weights, v)


def einsum(q, k, v, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q * D**-0.5, k)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


def opt(q, k, v, mask):
    """Heads are merged for the products, and masks are added where they are not."""
    batch, n, *_ = q.shape
    q, k, v = (x.reshape(batch * n, -1, D) for x in (q * D**-0.5, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(batch, n, N, N) + mask
    weights = F.softmax(scores.view(batch * n, N, N), dim=-1)
    return torch.bmm(weights, v).view(batch, n, N, D).transpose(1, 2).reshape(batch, N, -1)


def bloom(q, k, v, alibi):
    batch, n, *_ = q.shape
    q, k, v = (x.reshape(batch * n, -1, D) for x in (q, k, v))
    scores = alibi.baddbmm(q, k.mT, beta=1.0, alpha=D**-0.5).view(batch, n, N, N)
    return torch.bmm(scores.softmax(-1).view(batch * n, N, N), v)


def diffusers(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    empty = torch.empty(q.shape[0], N, N, dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=0.25)
    return torch.bmm(scores.softmax(dim=-1).to(q.dtype), v)


def alibi(q, k, v):
    slopes = torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None]
    positions = torch.arange(N)
    scores = q @ k.mT * 0.25 + slopes * (positions - positions[:, None])
    return torch.softmax(scores + torch.full((N, N), -torch.inf, dtype=q.dtype).triu(1), -1) @ v


def scaled_after(q, k, v, mask):
    return torch.softmax((q @ k.mT - mask) * 0.5, -1) @ v


SPELLINGS = {
    "BERT": (bert, lambda: [padding(3, N)]),
    "GPT-2": (gpt2, list),
    "nanoGPT": (nano_gpt, lambda: [causal()[None, None].to(torch.float64)]),
    "masked_fill": (annotated, lambda: [padding(3, N)]),
    "T5": (t5, lambda: [r(1, 2, N, N)]),
    "einsum": (einsum, lambda: [padding(3, N)]),
    "OPT": (opt, lambda: [torch.zeros(2, 1, N, N).double().masked_fill(~causal(), -torch.inf)]),
    "Bloom": (bloom, lambda: [r(4, 1, N)]),
    "baddbmm": (diffusers, list),
    "ALiBi": (alibi, list),
    "scaled after the mask": (scaled_after, lambda: [r(2, 1, 1, N)]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_is_replaced(name):
    function, more = SPELLINGS[name]
    torch.manual_seed(0)
    notes, nodes = notes_and_graph(function, *(x.requires_grad_() for x in qkv()), *more())
    assert [note.split(" at ")[0] for note in notes] == ["replaced attention"]
    assert len(calls(nodes)) == 1
    names = {str(node.target) for node in nodes}
    assert not any("softmax" in each or "baddbmm" in each or "iadd" in each for each in names)


@pytest.mark.sweep(keep=["BERT", "GPT-2", "T5", "einsum", "OPT"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SPELLINGS)
def test_compiled_results_and_gradients(name, dtype):
    function, more = SPELLINGS[name]
    torch.manual_seed(0)
    args = [x.requires_grad_() for x in qkv(dtype)]
    rest = [x.to(dtype) if x.is_floating_point() else x for x in more()]
    torch._dynamo.reset()
    found = torch.compile(function, backend="opkit", options={"strict": True})(*args, *rest)
    expected = function(*args, *rest)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, equal_nan=True)
    weights = torch.randn_like(expected)
    gradients, others = (torch.autograd.grad(out, args, weights) for out in (found, expected))
    torch.testing.assert_close(gradients, others, equal_nan=True)


def test_causal_masks_become_is_causal():

    found = []

    def backend(module, _):
        replace_patterns(module)
        remove_constant_masks(module)
        found.extend(calls(module.graph.nodes))
        return module.forward

    torch._dynamo.reset()
    torch.compile(gpt2, backend=backend)(*qkv())
    (call,) = found
    assert call.kwargs["is_causal"]
    assert call.kwargs["attn_mask"] is None
    assert call.kwargs["scale"] == 0.25


def test_autocast():
    def cast(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.softmax(q @ k.mT * 0.25, -1) @ v

    torch.manual_seed(0)
    args = qkv(torch.float32)
    torch._dynamo.reset()
    explanation = opkit.explain(cast, *args)
    assert explanation.patterns == ["replaced attention at softmax"]
    assert explanation.result.dtype == torch.bfloat16
    torch.testing.assert_close(explanation.result.float(), plain(args[0] * 0.25, *args[1:]), atol=0.02, rtol=0.02)


def test_a_float32_mask_of_narrow_floats():
    def masked(q, k, v, bias, seen):
        return torch.softmax((q @ k.mT * 0.25 + bias).masked_fill(~seen, -1e9), -1).to(v.dtype) @ v

    torch.manual_seed(0)
    args = [*qkv(torch.bfloat16), r(2, N, N, dtype=torch.float32), padding(0, 9)]
    explanation = opkit.explain(masked, *args)
    assert explanation.patterns == ["kept attention at softmax: the sum of the masks is as large as the scores"]
    explanation = opkit.explain(masked, *args[:3], args[3][:1, :1], args[4])
    assert explanation.patterns == ["replaced attention at softmax"]
    exact = masked(*(x.double() for x in args[:3]), args[3][:1, :1], args[4])
    torch.testing.assert_close(explanation.result.double(), exact, atol=0.02, rtol=0.02)


def test_changing_sizes():
    found = torch.compile(plain, backend="opkit", options={"strict": True}, dynamic=True)
    for keys in (300, 280):
        args = [x[:, :, :keys] for x in [r(2, 2, 300, D) for _ in range(3)]]
        torch.testing.assert_close(found(*args), plain(*args))


def test_checkpointed_attention():
    from torch.utils.checkpoint import checkpoint

    def saved(q, k, v):
        return checkpoint(plain, q, k, v, use_reentrant=False)

    args = [x.requires_grad_() for x in qkv()]
    explanation = opkit.explain(saved, *args)
    assert explanation.patterns == ["replaced attention at softmax"]
    found = torch.compile(saved, backend="opkit", options={"strict": True})(*args)
    gradients = [torch.autograd.grad(out.square().sum(), args) for out in (found, plain(*args))]
    torch.testing.assert_close(*gradients)


def test_other_ways_to_call_the_functions():
    def keywords(q, k, v, mask):
        scores = torch.add(input=torch.matmul(q, k.mT), other=torch.mul(input=mask, other=2.0))
        return torch.matmul(torch.softmax(input=scores, dim=3), v)

    def swapped(q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = torch.einsum("bkhd,bqhd->bhqk", k, q).multiply_(0.5)
        scores = torch.where(mask > 0, torch.tensor(-1e9, dtype=q.dtype), scores)
        return torch.einsum("bkhd,bhqk->bhqd", v, nn.Softmax(dim=-1)(scores))

    for function in (keywords, swapped):
        notes, nodes = notes_and_graph(function, *qkv(), r(1, 1, N, 1))
        assert len(calls(nodes)) == 1, notes


# ---- rows that are masked throughout ---------------------------------------------------------------------------------


def with_gradients(function, *args, **options):
    args = [x.clone().requires_grad_(x.dim() == 4 and x.shape[-1] == D) for x in args]
    torch._dynamo.reset()
    call = torch.compile(function, backend="opkit", options={"strict": True}) if options.pop("compiled") else function
    out = call(*args)
    return out, torch.autograd.grad(out.square().sum(), args[:3])


def test_large_numbers_give_the_mean_of_the_values():
    torch.manual_seed(0)
    args = [*qkv(torch.float32), padding(0, 9)]
    found, expected = (with_gradients(annotated, *args, compiled=each) for each in (True, False))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[0][0], args[2][0].mean(1, keepdim=True).expand_as(found[0][0]))
    found, expected = (with_gradients(bert, *args, compiled=each) for each in (True, False))
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][2], expected[1][2])
    for a, b in zip(
        found[1][:2], expected[1][:2], strict=True
    ):  # by hand, rounding lets gradients of these rows through
        assert not a[0].any()
        torch.testing.assert_close(a[1], b[1])


INFINITE = {
    "nanoGPT": (nano_gpt, lambda: causal().tril(-1)[None, None].to(torch.float32)),
    "T5": (t5, lambda: torch.where(padding(0, 9), 0.0, -torch.inf)),
    "einsum": (einsum, lambda: padding(0, 9)),
}


@pytest.mark.sweep(keep=["nanoGPT", "T5"])
@pytest.mark.parametrize("name", INFINITE)
def test_minus_infinity_gives_nan(name):
    function, mask = INFINITE[name]
    torch.manual_seed(0)
    args = [*qkv(torch.float32), mask()]
    found, expected = (with_gradients(function, *args, compiled=each) for each in (True, False))
    assert expected[0].isnan().any()
    torch.testing.assert_close((found[0], found[1][2]), (expected[0], expected[1][2]), equal_nan=True)
