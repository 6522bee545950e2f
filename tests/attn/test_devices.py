"""What ``opkit.attention`` promises on every device: the same results, gradients, zeros and errors, by whatever kernel."""

from __future__ import annotations

import pytest
import torch

import opkit
from opkit.errors import OpkitError
from opkit.masks import ALiBi, Causal, Dense, KeyPadding, RelativePosition, Segments, SlidingWindow, VarLen

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # times the greatest element
QUERIES, KEYS, HEAD = 150, 170, 64


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def documents(device, count):
    """Of queries and of keys, which are of so many documents each."""
    return Segments(*((torch.arange(n, device=device) * count // n).int() for n in (QUERIES, KEYS)))


def bools(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.7


CASES = {
    "everything": lambda at: {},
    "causal": lambda at: {"mask": Causal()},
    "bottom-right": lambda at: {"mask": Causal("bottom-right")},
    "window": lambda at: {"mask": SlidingWindow(20, 5)},
    "documents": lambda at: {"mask": documents(at, 4)},
    "causal documents": lambda at: {"mask": Causal() & documents(at, 3)},
    "padding": lambda at: {"mask": KeyPadding(torch.tensor([0, 100], device=at))},
    "bools": lambda at: {"mask": Dense(bools(2, 1, QUERIES, KEYS).to(at))},
    "not documents, or near": lambda at: {"mask": ~documents(at, 2) | SlidingWindow(9, 9)},
    "a cap and a scale": lambda at: {"mask": Causal(), "softcap": 2.0, "scale": 0.3},
    "sinks": lambda at: {"mask": SlidingWindow(30, 0), "sinks": drawn(4, seed=5).float().to(at)},
    "a bias of each logit": lambda at: {"bias": drawn(2, 4, QUERIES, KEYS, seed=6).float().to(at)},
    "a bias of each head and key": lambda at: {"mask": Causal(), "bias": drawn(1, 4, 1, KEYS, seed=6).float().to(at)},
    "slopes": lambda at: {"mask": Causal(), "bias": ALiBi(drawn(4, seed=7).abs().float().to(at))},
    "relative positions": lambda at: {
        "bias": RelativePosition(*(drawn(2, 4, QUERIES, n, seed=n).float().to(at) for n in (10, 17)))
    },
}


def inputs(device, dtype, heads=4, shared=2, head=HEAD, columns=HEAD):
    sizes = (heads, QUERIES, head), (shared, KEYS, head), (shared, KEYS, columns), (heads, QUERIES, columns)
    return [drawn(2, *size, seed=i).to(dtype).to(device) for i, size in enumerate(sizes)]


def with_gradients(q, k, v, gradient, **what):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = opkit.attention(q, k, v, return_lse=True, **what)
    seeds = [gradient, torch.where(lse.isfinite(), torch.ones_like(lse), 0.0)]
    return [out.detach(), lse.detach(), *torch.autograd.grad([out, lse], (q, k, v), seeds)]


def exact(tensors, case):
    """By the reference, in float64, of the very numbers that a kernel gets."""
    return with_gradients(*(x.double().cpu() for x in tensors), **CASES[case]("cpu"), kernel="reference")


def near(found, wanted, dtype):
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine.isinf().cpu(), theirs.isinf())
        mine, theirs = (x.double().cpu().nan_to_num(posinf=0, neginf=0) for x in (mine, theirs))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=BOUNDS[dtype] * max(theirs.abs().max().item(), 0.1))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case, dtype, device):
    tensors = inputs(device, dtype)
    near(with_gradients(*tensors, **CASES[case](device)), exact(tensors, case), dtype)


BIASES = {
    "of each logit": (lambda x: x, (2, 4, QUERIES, KEYS)),
    "of each head, query and key": (lambda x: x, (4, QUERIES, KEYS)),
    "of each key": (lambda x: x, (2, 1, 1, KEYS)),
    "slopes": (ALiBi, (4,)),
    "relative positions": (RelativePosition, (2, 4, QUERIES, 10), (1, 4, QUERIES, 17)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("mask", ["everything", "causal documents"])
@pytest.mark.parametrize("bias", BIASES)
def test_gradients_of_biases(bias, mask, dtype, device):
    make, *shapes = BIASES[bias]
    drawn_ones = [drawn(*shape, seed=9 + i).to(dtype) for i, shape in enumerate(shapes)]

    def found(q, k, v, gradient, device, **what):
        leaves = [
            x.to(device).to(torch.float64 if q.dtype == torch.float64 else dtype).requires_grad_() for x in drawn_ones
        ]
        out = opkit.attention(q, k, v, bias=make(*leaves), **CASES[mask](device), **what)
        return torch.autograd.grad(out, leaves, gradient)

    tensors = inputs(device, dtype)
    wanted = found(*(x.double().cpu() for x in tensors), "cpu", kernel="reference")
    for mine, theirs in zip(found(*tensors, device), wanted, strict=True):
        assert (mine.dtype, mine.shape) == (dtype, theirs.shape)
        bound = 2 * BOUNDS[dtype] * max(theirs.abs().max().item(), 3.0)  # sums of many may cancel
        torch.testing.assert_close(mine.double().cpu(), theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("sizes", [(4, 4, 128, 128), (6, 1, 80, 48), (2, 1, 192, 128), (2, 2, 256, 256)], ids=str)
def test_heads(sizes, device):
    tensors = inputs(device, torch.bfloat16, *sizes)
    near(with_gradients(*tensors, mask=Causal()), exact(tensors, "causal"), torch.bfloat16)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_what_is_hidden_from_all_leaks_nowhere(dtype, device):
    mask = KeyPadding(torch.tensor([60, 100], device=device))
    q, k, v, gradient = inputs(device, dtype)
    clean = with_gradients(q, k, v, gradient, mask=mask)
    k[:, :, 110:], v[:, :, 105:, ::3] = torch.nan, torch.inf
    near(with_gradients(q, k, v, gradient, mask=mask), [x.double().cpu() for x in clean], dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rows_that_see_nothing(dtype, device):
    q, k, v, gradient = inputs(device, dtype)
    out, lse, *gradients = with_gradients(q, k, v, gradient, mask=SlidingWindow(0, 0) & ~SlidingWindow(5, 5))
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    assert all(each.eq(0).all() for each in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(dtype, device):
    q, k, v, _ = inputs(device, dtype)
    k, v = k[:, :, :QUERIES], v[:, :, :QUERIES]
    plain, lse = opkit.attention(q, k, v, mask=Causal(), return_lse=True)
    inside = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = opkit.attention(*inside, mask=Causal(), layout="bshd")
    assert out.is_contiguous()
    torch.testing.assert_close(out.transpose(1, 2), plain, rtol=0, atol=BOUNDS[dtype])
    starts = torch.tensor([0, QUERIES, 2 * QUERIES], dtype=torch.int32, device=device)
    packed = [x.flatten(0, 1) for x in inside]
    out, of_rows = opkit.attention(*packed, mask=VarLen(starts) & Causal(), layout="thd", return_lse=True)
    torch.testing.assert_close(out.unflatten(0, (2, -1)).transpose(1, 2), plain, rtol=0, atol=BOUNDS[dtype])
    torch.testing.assert_close(of_rows.unflatten(1, (2, -1)).transpose(0, 1), lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_keeps_what_its_seed_says(dtype, device):
    tensors = inputs(device, dtype)
    found = []
    for kernel in (None, "reference"):
        torch.manual_seed(3)
        found.append(with_gradients(*tensors, mask=Causal(), dropout_p=0.4, kernel=kernel))
    near(found[0], [x.double().cpu() for x in found[1]], dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("case", ["everything", "causal documents", "padding", "sinks", "slopes"])
def test_float8(case, dtype, device):
    q, k, v, _ = inputs(device, dtype)
    found = opkit.attention(q, k, v, return_lse=True, descales=(0.5, 2.0, 1.5), **CASES[case](device))
    wide = q.double().cpu() * 0.5, k.double().cpu() * 2, v.double().cpu() * 1.5
    expected = opkit.attention(*wide, return_lse=True, kernel="reference", **CASES[case]("cpu"))
    near(found, expected, torch.bfloat16)


@pytest.mark.sweep
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_decoding(queries, dtype, device):
    q, k, v, _ = inputs(device, dtype)
    k, v = (torch.cat([x, x.flip(2)], 2) for x in (k, v))
    mask = Causal("bottom-right")
    found = opkit.attention(q[:, :, :queries], k, v, mask=mask, return_lse=True)
    wide = [x.double().cpu() for x in (q[:, :, :queries], k, v)]
    near(found, opkit.attention(*wide, mask=mask, return_lse=True, kernel="reference"), dtype)


@pytest.mark.parametrize("empty", [(0, 5), (5, 0)])
def test_nothing(empty, device):
    q, k, v, gradient = inputs(device, torch.bfloat16)
    q, k, v, gradient = q[:, :, : empty[0]], k[:, :, : empty[1]], v[:, :, : empty[1]], gradient[:, :, : empty[0]]
    out, lse, *gradients = with_gradients(q, k, v, gradient)
    assert out.shape == (2, 4, empty[0], HEAD)
    assert lse.eq(-torch.inf).all()
    assert all(each.eq(0).all() for each in (out, *gradients))


def test_what_does_not_fit_is_said(device):
    q, k, v, _ = inputs(device, torch.bfloat16)
    with pytest.raises(OpkitError, match=r"opkit.attention: .*v"):
        opkit.attention(q, k, v[:, :, 1:])
    with pytest.raises(OpkitError, match=r"opkit.attention: .*float16"):
        opkit.attention(q, k.half(), v.half())
