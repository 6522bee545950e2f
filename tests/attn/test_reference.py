"""The reference: its numbers, its derivatives, rows that see nothing, and what is hidden."""

import math
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import opkit
from opkit.attn import philox, program
from opkit.attn.operator import attention_operator
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

sys.path.insert(0, str(Path(__file__).parent))
from attention_oracle import naive

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(batch, heads, shared, queries, keys, d, d_v, dtype=torch.float64):
    return (
        randn(batch, heads, queries, d, dtype=dtype),
        randn(batch, shared, keys, d, dtype=dtype, seed=1),
        randn(batch, shared, keys, d_v, dtype=dtype, seed=2),
    )


def visible(predicate, queries, keys):
    rows = [[predicate(i, j) for j in range(keys)] for i in range(queries)]
    return torch.tensor(rows, dtype=torch.bool).reshape(queries, keys)


def close(actual, expected, dtype):
    assert actual[0].dtype == dtype
    assert actual[1].dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    wide = min(TOLERANCE[dtype], TOLERANCE[torch.float32])  # the log-sum-exp is never rounded to a narrow dtype
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=wide, atol=wide)


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
    "softcap": {"softcap": 0.8, "mask": Causal()},
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


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name, monkeypatch):
    in_float64(monkeypatch)
    assert gradcheck(finite_lse(differentiated(name)), operands(), check_forward_ad=True)


@pytest.mark.parametrize("name", ["causal", "dead rows", "softcap", "packed"])
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


# ---- rows that see nothing, and what is hidden -----------------------------------------------------------------------


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


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("poisoned", ["k", "v"])
def test_what_later_rows_see_does_not_reach_earlier_ones(poison, poisoned):
    q, k, v = inputs(1, 2, 1, 5, 5, 4, 3)
    before = gradients(q, k, v, slice(0, 3), Causal())
    {"k": k, "v": v}[poisoned][0, 0, 3, 0] = poison
    after = gradients(q, k, v, slice(0, 3), Causal())
    for mine, other in zip(after[:3], before[:3], strict=True):
        torch.testing.assert_close(mine[:, :, :3], other[:, :, :3], rtol=0, atol=0)


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


# ---- dropout ---------------------------------------------------------------------------------------------------------


def philox_words(counter, key):
    """Philox-4x32-10 in Python's integers."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            (second >> 32) ^ counter[1] ^ key[0], second % 2**32, (first >> 32) ^ counter[3] ^ key[1], first % 2**32,
        )  # fmt: skip
        key = ((key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32)
    return counter


def test_random_words_are_those_of_philox():
    rng = random.Random(0)
    for _ in range(20):
        counter, key = [rng.randrange(2**32) for _ in range(4)], [rng.randrange(2**32) for _ in range(2)]
        found = philox.words(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert tuple(map(int, found)) == philox_words(tuple(counter), tuple(key))


def test_philox_has_the_known_answers():
    """From the authors' Random123 library, kat_vectors: philox 4x32 10."""
    ones = (2**32 - 1,) * 4
    expected = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox_words(ones, ones[:2]) == expected
    pi, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox_words(pi, key) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("dropout_p", [0.25, 0.6])
@pytest.mark.parametrize("keys", [1, 4, 7])
def test_dropout_keeps_what_philox_says(dropout_p, keys):
    batch, heads, queries, seed = 2, 2, 3, [2**40 + 7, 2**32 - 1]
    q, k, v = inputs(batch, heads, 1, queries, keys, 4, 4)
    kept = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, kept.shape)).tolist():
        word = philox_words((j // 4, i, b * heads + h, 0), tuple(s % 2**32 for s in seed))[j % 4]
        kept[b, h, i, j] = word / 2**32 >= dropout_p
    assert torch.equal(
        philox.kept(torch.tensor(seed), dropout_p, batch, heads, program.Grid(queries, keys, q.device)), kept
    )
    out = attention_operator()(q, k, v, [], [], None, torch.tensor(seed), [], [], 0.5, 0.0, dropout_p, False)
    close(out, naive(q, k, v, kept=kept, dropout_p=dropout_p), torch.float64)


def test_dropout_of_everything_is_zero_with_zero_gradients():
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 3, 3, 4, 4))
    out = opkit.attention(q, k, v, dropout_p=1.0)
    assert torch.equal(out, torch.zeros_like(out))
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_dropout_is_repeated_by_torch_s_seed_and_drops_its_share():
    q, k = torch.zeros(4, 4, 64, 8), torch.zeros(4, 4, 64, 8)
    v = torch.ones(4, 4, 64, 1)
    torch.manual_seed(5)
    first, second = (opkit.attention(q, k, v, dropout_p=0.3) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(opkit.attention(q, k, v, dropout_p=0.3), first)
    assert not torch.equal(first, second)
    assert first.mean().item() == pytest.approx(1.0, abs=0.02)
