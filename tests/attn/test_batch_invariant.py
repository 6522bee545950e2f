"""Bit for bit: what a query gives does not depend on what is computed beside it."""

import json
import os

import fresh_process
import pytest
import torch

import opkit
from opkit.errors import KernelError
from opkit.masks import ALiBi, Causal, KeyPadding, SlidingWindow, VarLen

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCH, HEADS, SHARED, LENGTH = 4, 8, 2, 700


def given(dtype, head=64, length=LENGTH):
    shapes = ((HEADS, length, head), (SHARED, length, head), (SHARED, length, head))
    return [torch.randn(BATCH, *shape).to(dtype) for shape in shapes]


def last(**how):
    return Causal("bottom-right", **how)


@pytest.fixture(params=[1, 3], ids=lambda n: f"{n} threads")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def whole(q, k, v, **how):
    """The result for all at once, on two threads."""
    with opkit.batch_invariant():
        return opkit.attention(q, k, v, mask=Causal(), return_lse=True, **how)


@pytest.mark.sweep
@pytest.mark.parametrize("head", [64, 80])
def test_batches_heads_and_threads(isa, dtype, head, threads):
    q, k, v = given(dtype, head, 300)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    out, lse = whole(q, k, v)
    torch.set_num_threads(before)
    for some in (slice(2, 3), slice(1, 4)):
        found = whole(q[some], k[some], v[some])
        assert torch.equal(found[0], out[some])
        assert torch.equal(found[1], lse[some])
    assert torch.equal(whole(q[:, 4:], k[:, 1:], v[:, 1:])[0], out[:, 4:])


@pytest.mark.sweep
def test_queries_in_chunks_and_one_by_one(isa, dtype):
    q, k, v = given(dtype)
    out, lse = whole(q, k, v)
    for first, end in ((0, 1), (0, 64), (64, 256), (256, 257), (257, 700), (650, 651), (684, 700), (699, 700)):
        rows = slice(first, end)
        with opkit.batch_invariant():
            found = opkit.attention(
                q[:1, :, rows], k[:1, :, :end], v[:1, :, :end], mask=last(), return_lse=True
            )  # fmt: skip
        assert torch.equal(found[0], out[:1, :, rows])
        assert torch.equal(found[1], lse[:1, :, rows])


def test_it_is_needed():
    q, k, v = given(torch.float32)
    out = opkit.attention(q, k, v, mask=Causal())
    assert not torch.equal(opkit.attention(q[:, :, -1:], k, v), out[:, :, -1:])


@pytest.mark.sweep(1)
def test_the_other_arguments(dtype):
    q, k, v = given(dtype)
    how = {"bias": ALiBi(torch.rand(HEADS)), "sinks": torch.randn(HEADS), "softcap": 5.0}
    window = SlidingWindow(100, align="bottom-right")
    with opkit.batch_invariant():
        out = opkit.attention(q, k, v, mask=last() & window, **how)
        found = opkit.attention(q[1:2, :, -3:], k[1:2], v[1:2], mask=last() & window, **how)
        inside = [x[1:2].transpose(1, 2).contiguous() for x in (q, k, v)]
        other = opkit.attention(*inside, mask=last() & window, layout="bshd", **how)
    assert torch.equal(found, out[1:2, :, -3:])
    assert torch.equal(other.transpose(1, 2), out[1:2])


@pytest.mark.sweep(1)
def test_padding_after_and_documents_at_multiples_of_64(dtype):
    q, k, v = given(dtype)
    lengths, starts = torch.tensor([700, 333, 64, 1]), torch.tensor([0, 128, 448, 700])
    with opkit.batch_invariant():
        padded = opkit.attention(q, k, v, mask=Causal() & KeyPadding(lengths))
        packed = opkit.attention(q[:1], k[:1], v[:1], mask=Causal() & VarLen(starts))
        for batch, n in enumerate(lengths.tolist()):
            alone = opkit.attention(*(x[batch : batch + 1, :, :n] for x in (q, k, v)), mask=Causal())
            assert torch.equal(padded[batch : batch + 1, :, :n], alone)
        for first, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
            alone = opkit.attention(*(x[:1, :, first:end] for x in (q, k, v)), mask=Causal())
            assert torch.equal(packed[:, :, first:end], alone)


# ---- pages -----------------------------------------------------------------------------------------------------------


def in_pages(k, v, size=16):
    """Keys and values in pages out of order, and the table."""
    batch, heads, length, _ = k.shape
    each = -(-length // size)
    order = torch.randperm(batch * each)
    table = order.reshape(batch, each)
    pages = []
    for x in (k, v):
        made = torch.full((batch * each, size, heads, x.shape[-1]), float("nan"), dtype=x.dtype)
        padded = torch.nn.functional.pad(x, (0, 0, 0, each * size - length))
        made[order] = padded.transpose(1, 2).reshape(batch * each, size, heads, x.shape[-1])
        pages.append(made)
    return *pages, table


@pytest.mark.sweep
def test_pages_give_what_attention_gives(dtype, threads):
    q, k, v = given(dtype)
    out, lse = whole(q, k, v)
    *pages, table = in_pages(k, v)
    for end in (1, 64, 65, 300, 700):
        for queries in (1, 3, 100):
            if queries > end:
                continue
            lengths = torch.tensor([end] * BATCH)
            asked = q[:, :, end - queries : end].transpose(1, 2)
            with opkit.batch_invariant():
                found, sums = opkit.paged_attention(asked, *pages, table, lengths, return_lse=True)
                alone = opkit.paged_attention(asked[2:3], *pages, table[2:3], lengths[2:3])
            assert torch.equal(found.transpose(1, 2), out[:, :, end - queries : end])
            assert torch.equal(sums.transpose(1, 2), lse[:, :, end - queries : end])
            assert torch.equal(alone, found[2:3])


@pytest.mark.sweep(1)
def test_ragged_queries_and_windows(dtype):
    q, k, v = given(dtype)
    *pages, table = in_pages(k, v)
    lengths, starts = torch.tensor([700, 0, 33, 500]), torch.tensor([0, 5, 5, 6, 106])
    rows = torch.cat([q[0, :, 695:], q[2, :, 32:33], q[3, :, 400:500]], 1).transpose(0, 1)
    sinks = torch.randn(HEADS)
    for how in (
        {},
        {"causal": False},
        {"window": 50},
        {"window": (20, 3), "causal": False},
        {"softcap": 3.0, "sinks": sinks},
    ):
        with opkit.batch_invariant():
            found, lse = opkit.paged_attention(
                rows, *pages, table, lengths, cu_seqlens_q=starts, return_lse=True, **how
            )  # fmt: skip
            alone = opkit.paged_attention(rows[6:].unsqueeze(0), *pages, table[3:], lengths[3:], **how)
        expected, sums = opkit.paged_attention(
            rows, *pages, table, lengths, cu_seqlens_q=starts, return_lse=True, kernel="reference", **how
        )  # fmt: skip
        assert torch.equal(alone[0], found[6:])
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(found, expected, **tolerance)
        torch.testing.assert_close(lse, sums, rtol=1e-3, atol=1e-3)


def test_quantised_pages():
    q, k, v = given(torch.bfloat16)
    scales = [x.abs().amax(-1).float() / 127 for x in (k, v)]
    small = [(x / s.unsqueeze(-1)).round().to(torch.int8) for x, s in zip((k, v), scales, strict=True)]
    # each token is a page
    pages = [x.transpose(1, 2).reshape(-1, 1, SHARED, 64) for x in small]
    how = dict(zip(("k_scale", "v_scale"), (s.transpose(1, 2).reshape(-1, 1, SHARED) for s in scales), strict=True))
    table, lengths = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH), torch.tensor([LENGTH, 300, 65, 1])
    with opkit.batch_invariant():
        found = opkit.paged_attention(q[:, :, 0], *pages, table, lengths, **how)
        alone = opkit.paged_attention(q[1:2, :, 0], *pages, table[1:2], lengths[1:2], **how)
    assert torch.equal(found[1:2], alone)
    expected = opkit.paged_attention(q[:, :, 0], *pages, table, lengths, kernel="reference", **how)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_pages_that_are_not_there():
    pages, q = torch.zeros(2, 4, 1, 8), torch.zeros(1, 1, 8)
    with opkit.batch_invariant():
        with pytest.raises(ValueError, match="a length is 9; it must be from 0 to 8"):
            opkit.paged_attention(q, pages, pages, torch.tensor([[0, 1]]), torch.tensor([9]))
        with pytest.raises(ValueError, match="must be from 0 to 1"):
            opkit.paged_attention(q, pages, pages, torch.tensor([[0, 2]]), torch.tensor([5]))


# ---- the mode --------------------------------------------------------------------------------------------------------


def test_compiled_code_obeys():
    q, k, v = given(torch.float32, length=300)
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v: opkit.attention(q * 1.0, k, v), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        without = compiled(q[:, :, -1:], k, v)
        with opkit.batch_invariant():
            found = compiled(q[:, :, -1:], k, v)
        again = compiled(q[:, :, -1:], k, v)
    assert torch.equal(found, whole(q, k, v)[0][:, :, -1:])
    assert torch.equal(again, without)
    assert not torch.equal(found, without)


def test_gradients_are_there():
    leaves = [x.requires_grad_() for x in given(torch.float32, length=40)]
    found = []
    for mode in (None, "batch_invariant"):
        out = opkit.attention(*leaves, mask=Causal(), kernel=mode)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    torch.testing.assert_close(*found)


def test_calls_that_no_kernel_takes():
    q, pages = torch.randn(1, 2, 5, 8), torch.zeros(2, 4, 2, 8, dtype=torch.float64)
    with opkit.batch_invariant():
        with pytest.raises(KernelError, match=r"no batch-invariant kernel takes q of torch\.float64"):
            opkit.attention(q.double(), q.double(), q.double())
        with pytest.raises(KernelError, match=r"dropout_p=0\.5"):
            opkit.attention(q, q, q, dropout_p=0.5)
        with pytest.raises(KernelError, match=r"paged_attention: no batch-invariant kernel takes q of"):
            opkit.paged_attention(q[:, :, 0].double(), pages, pages, torch.tensor([[0]]), torch.tensor([3]))
    assert opkit.attention(q.double(), q.double(), q.double()).dtype == torch.float64


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("value", "expected"), [("1", [True, "batch_invariant"]), ("0", [False, "tiles"])])
def test_the_environment_s_switch(tmp_path, value, expected):
    program = (
        "import json, torch, opkit; from opkit.attn.api import select; torch.manual_seed(0); from opkit.masks import Causal; "
        "q, k, v = torch.randn(3, 2, 8, 300, 64); out = opkit.attention(q, k, v, mask=Causal()); "
        "print(json.dumps([torch.equal(out[:, :, -1:], opkit.attention(q[:, :, -1:], k, v)), select(q, k, v).kernel]))"
    )
    environment = os.environ | {"OPKIT_BATCH_INVARIANT": value}
    assert json.loads(fresh_process.run(["-c", program], environment, tmp_path).stdout) == expected
