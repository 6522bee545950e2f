"""The decoding kernel on contiguous keys, with every instruction set that runs here, against float64."""

import itertools

import pytest
import torch

from opkit.attn.masks.program import UNLIMITED
from opkit.attn.paged.cpu import decode, takes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # of results


def expected(q, k, v, lower=-UNLIMITED, upper=UNLIMITED, scale=None, softcap=0.0, sinks=None):
    """In float64, by the definition."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    hidden = (distance < lower) | (distance > upper)
    logits = logits.masked_fill(hidden, -torch.inf)
    sink = torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks
    lse = torch.cat([logits, sink.double()[None, :, None, None].expand(*q.shape[:3], 1)], -1).logsumexp(-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).masked_fill(hidden, 0)
    return weights @ v.nan_to_num(0, 0, 0) if bool(hidden.any()) else weights @ v, lse


def check(q, k, v, **options):
    """The error of a result is at most its rounding, that of weights (which may be bf16 where all is), and a part in 2^17."""
    out, lse = decode(q, k, v, **options)
    exact, exact_lse = expected(q, k, v, **options)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    paired = q.dtype == k.dtype == torch.bfloat16
    bound = (ROUNDING[q.dtype] + paired * 2.0**-9 + 2.0**-17) * max(
        1.0, v.double().abs().max().item() if v.numel() else 1
    )
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2.0**-19, atol=2.0**-17)
    return out, lse


def made(batch, heads, kv_heads, queries, keys, d, dv, dtype=torch.float32, kv_dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, queries, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, dv))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q.to(dtype), k.to(kv_dtype or dtype), v.to(kv_dtype or dtype)


SHAPES = [
    (1, 8, 2, 1, 300, 128, 128),
    (2, 3, 3, 1, 1, 1, 1),
    (1, 6, 2, 3, 70, 7, 9),
    (2, 7, 1, 1, 64, 96, 96),
    (1, 4, 1, 4, 513, 80, 33),
    (1, 16, 1, 2, 100, 576, 512),
    (1, 2, 2, 37, 65, 64, 64),
    (1, 32, 8, 1, 1000, 128, 128),
]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_are_those_of_float64(subtests, isa, dtype):
    for shape, kv_dtype in itertools.product(SHAPES, FLOATS):
        with subtests.test(f"{shape}, {kv_dtype}"):
            check(*made(*shape, dtype, kv_dtype))


OPTIONS = [
    {"upper": 200},
    {"lower": -5, "upper": 3},
    {"lower": 100, "upper": 100},
    {"softcap": 1.5},
    {"softcap": 30.0, "scale": 2.0},
    {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    {"upper": 296, "lower": 40, "softcap": 5.0, "sinks": torch.tensor([50.0, -50.0, 0.0, 1.0])},
    {"scale": -0.3},
    {"scale": 0.0},
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bands_caps_and_sinks(subtests, isa, dtype):
    for options in OPTIONS:
        with subtests.test(str(options)):
            check(*made(2, 4, 2, 5, 301, 32, 32, dtype), **options)


def test_queries_that_see_nothing_give_zeros(isa):
    q, k, v = made(1, 2, 1, 4, 100, 16, 16)
    out, lse = check(q, k, v, upper=-2)
    assert not out[:, :, :2].any()
    assert (lse[:, :, :2] == -torch.inf).all()
    out, lse = decode(q, k[:, :, :0], v[:, :, :0])
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_empty_tensors(subtests, isa):
    for shape in ((0, 2, 2, 1, 5, 8, 8), (1, 0, 1, 1, 5, 8, 8), (1, 2, 1, 0, 5, 8, 8), (1, 2, 1, 1, 5, 8, 0)):
        with subtests.test(str(shape)):
            check(*made(*shape))


def test_no_size_of_heads_is_a_sum_of_nothing(isa):
    check(*made(1, 2, 1, 1, 5, 0, 3), scale=1.0)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_hidden_does_not_leak(isa, dtype, bad):
    q, k, v = made(1, 4, 2, 3, 203, 16, 16, dtype)
    for x in (k, v):
        x[:, :, :5], x[:, :, 9::200], x[:, :, 202] = bad, bad, bad
    lower, upper = 12, 199
    out, lse = decode(q, k, v, lower=lower, upper=upper)
    for i in range(3):  # each query sees other keys
        seen = slice(i + lower, min(i + upper + 1, 203))
        alone, alone_lse = expected(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen])
        torch.testing.assert_close(out[:, :, i : i + 1].double(), alone, rtol=0, atol=2e-2, equal_nan=True)
        torch.testing.assert_close(lse[:, :, i : i + 1].double(), alone_lse, rtol=0, atol=1e-4, equal_nan=True)
        assert out[:, :, i].isfinite().all()


def test_nan_that_is_seen_is_not_hidden(isa):
    q, k, v = made(1, 2, 2, 2, 50, 8, 8)
    q[0, 0, 1, 3] = torch.nan
    k[0, 1, 7, 2] = torch.nan
    out, lse = decode(q, k, v)
    assert out[0, 0, 0].isfinite().all()
    assert out[0, 0, 1].isnan().all()
    assert lse[0, 0, 1].isnan()
    assert out[0, 1].isnan().all()
    v[0, 0, 3, 5] = torch.inf
    assert decode(q, k, v)[0][0, 0, 0, 5] == torch.inf


def test_large_logits_do_not_overflow(isa):
    q, k, v = made(1, 2, 1, 1, 300, 16, 16)
    out, lse = decode(q * 1e3, k * 1e3, v)
    exact, exact_lse = expected(q * 1e3, k * 1e3, v)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_are_followed(isa, dtype):
    q, k, v = made(2, 4, 2, 3, 90, 24, 40, dtype)
    plain = decode(q, k, v)
    others = [
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        [x.mT.contiguous().mT for x in (q, k, v)],
        [torch.stack([x, x], -2).flatten(2, 3)[:, :, ::2] for x in (q, k, v)],
        [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)],
    ]
    for tensors in others:
        for one, other in zip(plain, decode(*tensors), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(isa, dtype):
    q, k, v = made(2, 8, 2, 3, 2000, 64, 64, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(decode(q, k, v, lower=-100, upper=1990))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_all_sizes_are_merged(subtests, isa, dtype):
    for queries, keys in ((1, 8193), (1, 20000), (150, 1000), (40, 7000)):
        q, k, v = made(1, 2, 1, queries, keys, 16, 16, dtype)
        k[:, :, 5000:5010] *= 30  # the greatest logits are in one part
        with subtests.test(f"{queries}, {keys}"):
            check(q, k, v, upper=keys - queries)


def test_a_batch_changes_no_bit(isa):
    q, k, v = made(3, 4, 2, 1, 700, 64, 64, torch.bfloat16)
    together = decode(q, k, v)[0]
    assert torch.equal(together, torch.cat([decode(q[i : i + 1], k[i : i + 1], v[i : i + 1])[0] for i in range(3)]))


def test_what_is_taken():
    q, k, v = made(1, 1, 1, 1, 1, 8, 8)
    assert takes(q, k, v)
    assert not takes(q.double(), k.double(), v.double())
    assert not takes(q, k, v.half())
    assert not takes(*made(1, 1, 1, 1, 1, 1025, 8))
    with pytest.raises(ValueError, match="1024"):
        decode(*made(1, 1, 1, 1, 1, 1025, 8))
