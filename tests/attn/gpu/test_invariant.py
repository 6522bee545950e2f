"""Bit for bit: what a query gives does not depend on what is computed beside it."""

import re

import pytest
import torch

pytest.importorskip("triton")
import opkit
from opkit.attn import reference
from opkit.attn.api import lowered
from opkit.attn.gpu import blocks
from opkit.attn.gpu.portable import invariant
from opkit.attn.masks.program import BAND, DENSE, SEGMENTS
from opkit.attn.operator import attention_operator
from opkit.attn.paged import reference as paged_reference
from opkit.attn.paged.api import paged_attention_operator
from opkit.errors import KernelError
from opkit.kernels.triton import compiling
from opkit.masks import ALiBi, Causal, Dense, KeyPadding, Segments, SlidingWindow, VarLen
from opkit.op.forcing import use_kernel
from opkit.op.triton.building import request_for
from opkit.op.triton.launch import recording
from opkit.testing import compile_launches

BATCH, HEADS, SHARED, LENGTH = 3, 4, 2, 300
FAR = 2**62


@pytest.fixture
def interpreted(interpreter):
    """Both operators in Triton's interpreter."""
    return Interpreted(interpreter)


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def ask(request):
    """Runs an operator, given its name and arguments, with the kernel; ``dtypes`` are what it is to be asked for."""
    return OnGpu() if request.param == "gpu" else request.getfixturevalue("interpreted")


@pytest.fixture(
    params=[pytest.param("interpreted", marks=pytest.mark.emulated), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def ask_often(request):
    """The same, for tests of so many calls that the interpreter takes long for them."""
    return OnGpu() if request.param == "gpu" else request.getfixturevalue("interpreted")


class OnGpu:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    def __call__(self, name, *call):
        op = attention_operator() if name == "opkit::attention" else paged_attention_operator()
        there = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.cuda(), call)
        with use_kernel(op, "batch_invariant"):
            return [x.cpu() for x in op(*there)]


class Interpreted:
    dtypes = (torch.float16, torch.float32)

    def __init__(self, process):
        self.process = process

    def __call__(self, name, *call):
        return self.process(name, *call, kernel="batch_invariant_triton")


def attention(ask, q, k, v, *, mask=None, bias=None, softcap=None, sinks=None, layout="bhsd"):
    """The result and the log-sum-exp, as opkit.attention calls the operator."""
    return ask("opkit::attention", *lowered(q, k, v, mask, bias, None, softcap, sinks, 0.0, layout))


def given(dtype, head=64, length=LENGTH, batch=BATCH):
    shapes = ((HEADS, length, head), (SHARED, length, head), (SHARED, length, head))
    return [torch.randn(batch, *shape).to(dtype) for shape in shapes]


def last():
    return Causal("bottom-right")


def same(found, expected):
    return all(torch.equal(mine, right) for mine, right in zip(found, expected, strict=True))


def rows(x, some):
    return [each[some] for each in x]


@pytest.mark.emulated
@pytest.mark.sweep(1)
@pytest.mark.parametrize("head", [80, 64])
def test_batches_and_heads(ask, head):
    for dtype in ask.dtypes:
        q, k, v = given(dtype, head, 70)
        whole = attention(ask, q, k, v, mask=Causal())
        some = slice(1, 2)
        assert same(attention(ask, q[some], k[some], v[some], mask=Causal()), rows(whole, some))
        some = (slice(None), slice(2, 4))
        assert same(attention(ask, q[some], k[:, 1:], v[:, 1:], mask=Causal()), rows(whole, some))


def test_queries_in_chunks_and_one_by_one(ask_often):
    for dtype in ask_often.dtypes:
        q, k, v = given(dtype, batch=1)
        whole = attention(ask_often, q, k, v, mask=Causal())
        for first, end in ((0, 1), (0, 64), (64, 250), (256, 257), (257, 300), (299, 300)):
            chunk = q[:, :, first:end], k[:, :, :end], v[:, :, :end]
            found = attention(ask_often, *chunk, mask=last())
            assert same(found, rows(whole, (slice(None), slice(None), slice(first, end))))
        found = attention(ask_often, q[:, :, -1:], k, v)  # without a mask
        assert same(found, rows(whole, (slice(None), slice(None), slice(-1, None))))


def test_the_other_arguments(ask_often):
    for dtype in ask_often.dtypes:
        q, k, v = given(dtype, length=200)
        how = {"bias": ALiBi(torch.rand(HEADS)), "sinks": torch.randn(HEADS), "softcap": 5.0}
        how["mask"] = last() & SlidingWindow(70, align="bottom-right")
        whole = attention(ask_often, q, k, v, **how)
        found = attention(ask_often, q[1:2, :, -3:], k[1:2], v[1:2], **how)
        assert same(found, rows(whole, (slice(1, 2), slice(None), slice(-3, None))))
        inside = [x[1:2].transpose(1, 2).contiguous() for x in (q, k, v)]
        assert same(attention(ask_often, *inside, layout="bshd", **how), rows(whole, slice(1, 2)))
        others = [x[1:2].mT.contiguous().mT for x in (q, k, v)]
        assert same(attention(ask_often, *others, **how), rows(whole, slice(1, 2)))


def test_masks_of_all_kinds_of_the_same_keys(ask_often):
    """Padding after, packed documents at multiples of 64, and bools: as each sequence alone."""
    for dtype in ask_often.dtypes:
        q, k, v = given(dtype)
        lengths, starts = torch.tensor([300, 133, 64]), torch.tensor([0, 128, 192, 300])
        padded = attention(ask_often, q, k, v, mask=Causal() & KeyPadding(lengths))
        for batch, n in enumerate(lengths.tolist()):
            alone = attention(ask_often, *(x[batch : batch + 1, :, :n] for x in (q, k, v)), mask=Causal())
            assert same(rows(padded, (slice(batch, batch + 1), slice(None), slice(0, n))), alone)
        one = [x[:1] for x in (q, k, v)]
        packed = attention(ask_often, *one, mask=Causal() & VarLen(starts))
        for first, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
            alone = attention(ask_often, *(x[:, :, first:end] for x in one), mask=Causal())
            assert same(rows(packed, (slice(None), slice(None), slice(first, end))), alone)
        causal = attention(ask_often, *one, mask=Causal())
        bools = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        assert same(attention(ask_often, *one, mask=Dense(bools)), causal)
        assert same(attention(ask_often, *one, mask=Causal() & Segments(torch.zeros(LENGTH).int())), causal)


def test_sums_of_many_small_probabilities(ask_often):
    """One key has nearly all of the weight, first or last; the others, 2**-24 each, are summed up all the same."""
    keys = 500
    for dtype in ask_often.dtypes:
        for first in (True, False):
            q, k, v = torch.ones(1, 1, 1, 16), torch.zeros(1, 1, keys, 16), torch.ones(1, 1, keys, 16)
            k[:, :, 0 if first else keys - 1] = 24 * 0.6931471805599453 / 4
            rest = ([], [], None, None, [], [], 1.0, 0.0, 0.0, False)
            call = (*(x.to(dtype) for x in (q, k / 4, v)), *rest)
            out, lse = ask_often("opkit::attention", *call)
            _, exact = reference.attention(*(x.double() for x in call[:3]), *rest)
            top = (call[0].double() * call[1].double()).sum(-1).max()
            assert ((lse.double() - exact).abs() < 1e-6 * top).all()
            close = 1e-4 if isinstance(ask_often, OnGpu) else 1e-5  # tensor cores drop what is small beside a sum
            rtol = close if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(out, torch.ones_like(out), rtol=rtol, atol=0)


@pytest.mark.emulated
def test_what_is_seen_and_not_a_number(ask):
    for dtype in ask.dtypes:
        q, k, v = given(dtype, length=70)
        k[0, :, 5] = torch.nan
        out, lse = attention(ask, q, k, v, mask=Causal())
        assert lse[0, :, :5].isfinite().all()
        assert lse[0, :, 5:].isnan().all()
        assert out[0, :, 5:].isnan().all()
        assert lse[1:].isfinite().all()


def test_near_the_reference(ask):
    for dtype in ask.dtypes:
        q, k, v = given(dtype, 72, 100, batch=1)
        call = lowered(q, k, v, last() & SlidingWindow(30), torch.randn(HEADS, 1, 100), None, 3.0, None, 0.0, "bhsd")
        out, lse = ask("opkit::attention", *call)
        exact, sums = reference.attention(*(x.double() for x in call[:3]), *call[3:])
        bound = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound * exact.abs().max().item())
        torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)


# ---- pages -----------------------------------------------------------------------------------------------------------


def in_pages(k, v, size=16):
    """Keys and values in pages out of order, and the table."""
    batch, heads, length, _ = k.shape
    each = -(-length // size)
    order = torch.randperm(batch * each)
    pages = []
    for x in (k, v):
        made = torch.full((batch * each, size, heads, x.shape[-1]), float("nan")).to(x.dtype)
        padded = torch.nn.functional.pad(x, (0, 0, 0, each * size - length))
        made[order] = padded.transpose(1, 2).reshape(batch * each, size, heads, x.shape[-1])
        pages.append(made)
    return *pages, order.reshape(batch, each)


def paged_call(q, pages, table, lengths, starts, lower=-(2**62), upper=0, softcap=0.0, sinks=None, scales=(None, None)):
    return q, *pages, table, lengths, starts, lower, upper, q.shape[-1] ** -0.5, softcap, sinks, *scales, [], [], [], []


@pytest.mark.sweep(1)
@pytest.mark.parametrize("size", [5, 16])
def test_pages_give_what_attention_gives(ask_often, size):
    for dtype in ask_often.dtypes:
        q, k, v = given(dtype)
        out, lse = attention(ask_often, q, k, v, mask=Causal())
        *pages, table = in_pages(k, v, size)
        for end, queries in ((1, 1), (65, 1), (300, 1), (300, 3), (299, 100)):
            lengths, starts = torch.tensor([end] * BATCH), torch.arange(BATCH + 1) * queries
            asked = q[:, :, end - queries : end].transpose(1, 2).flatten(0, 1)
            found, sums = ask_often("opkit::paged_attention", *paged_call(asked, pages, table, lengths, starts))
            some = slice(end - queries, end)
            assert torch.equal(found.unflatten(0, (BATCH, queries)).transpose(1, 2), out[:, :, some])
            assert torch.equal(sums.unflatten(0, (BATCH, queries)).transpose(1, 2), lse[:, :, some])


def test_ragged_queries_and_windows(ask_often):
    for dtype in ask_often.dtypes:
        q, k, v = given(dtype)
        *pages, table = in_pages(k, v)
        lengths, starts = torch.tensor([300, 0, 233]), torch.tensor([0, 5, 5, 105])
        asked = torch.cat([q[0, :, 295:], q[2, :, 133:233]], 1).transpose(0, 1)
        sinks = torch.randn(HEADS)
        for how in ({}, {"upper": 2**62}, {"lower": -49}, {"lower": -20, "upper": 3}, {"softcap": 3.0, "sinks": sinks}):
            call = paged_call(asked, pages, table, lengths, starts, **how)
            found, lse = ask_often("opkit::paged_attention", *call)
            alone, _ = ask_often(
                "opkit::paged_attention",
                *paged_call(asked[5:], pages, table[2:], lengths[2:], torch.tensor([0, 100]), **how),
            )
            assert torch.equal(alone, found[5:])
            clean = [x.nan_to_num().double() for x in pages]
            exact, sums = paged_reference.paged_attention(asked.double(), *clean, *call[3:])
            bound = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]
            torch.testing.assert_close(found.double(), exact, rtol=0, atol=bound * exact.abs().max().item())
            torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-4)


@pytest.mark.emulated
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_pages(ask, stored):
    q, k, v = given(torch.float32, length=150)
    most = 127 if stored == torch.int8 else 448
    scales = [x.abs().amax(-1) / most for x in (k, v)]
    small = [(x / s.unsqueeze(-1)) for x, s in zip((k, v), scales, strict=True)]
    small = [x.round().to(torch.int8) if stored == torch.int8 else x.to(stored) for x in small]
    pages = [x.transpose(1, 2).reshape(-1, 1, SHARED, 64) for x in small]  # each token is a page
    factors = [s.transpose(1, 2).reshape(-1, 1, SHARED) for s in scales]
    table, lengths = torch.arange(BATCH * 150).reshape(BATCH, 150), torch.tensor([150, 100, 1])
    asked = q[:, :, 0].to(ask.dtypes[0])
    found, _ = ask(
        "opkit::paged_attention", *paged_call(asked, pages, table, lengths, torch.arange(BATCH + 1), scales=factors)
    )
    call = paged_call(asked[1:2], pages, table[1:2], lengths[1:2], torch.tensor([0, 1]), scales=factors)
    alone, _ = ask("opkit::paged_attention", *call)
    assert torch.equal(alone, found[1:2])
    exact, _ = paged_reference.paged_attention(*call)
    torch.testing.assert_close(alone, exact, rtol=1e-2, atol=2e-3)


# ---- which tiles, and the mode ---------------------------------------------------------------------------------------


def test_tiles_follow_from_heads_and_dtypes_alone():
    for head in (1, 64, 128, 200, 256, 576):
        for size in (2, 4):
            for memory in (65536, 101376, 232448):
                found = blocks.invariant(head, size, memory)
                assert 64 % found.keys == 0
                other = blocks.invariant(head, size, memory, pair=12)
                assert other._replace(stages=0) == found._replace(stages=0)


@pytest.mark.parametrize("operator", [attention_operator, paged_attention_operator])
def test_no_other_kernel_for_gpus_is_asked_before_it(operator):
    """With OPKIT_BATCH_INVARIANT=1 it takes, or refuses, every call."""
    kernels = [each for each in operator()._operator.kernels.kernels if each.device == "cuda"]
    (mine,) = (each for each in kernels if each.name == "batch_invariant")
    assert mine.when is not None
    assert mine.predicate_names == ()
    assert all(each.priority < mine.priority for each in kernels if each is not mine)


def test_what_is_not_taken():
    q = torch.randn(1, 2, 5, 8)
    call = lowered(q.double(), q.double(), q.double(), None, None, None, None, None, 0.0, "bhsd")
    with pytest.raises(KernelError, match=r"no batch-invariant kernel for GPUs takes q of torch\.float64"):
        invariant.forward(*call)
    with pytest.raises(KernelError, match=r"dropout_p=0\.5"):
        invariant.forward(*lowered(q, q, q, None, None, None, None, None, 0.5, "bhsd"))
    pages = torch.zeros(2, 4, 2, 8).double()
    starts = torch.tensor([0, 1])
    with pytest.raises(KernelError, match="paged_attention: no batch-invariant kernel for GPUs takes q of"):
        invariant.paged(*paged_call(q[:, :, 0].double(), (pages, pages), torch.tensor([[0]]), starts[1:], starts))


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


SHARED_MEMORY = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_compiles(monkeypatch, target):
    monkeypatch.setattr(blocks, "shared_memory", lambda device: SHARED_MEMORY[target])
    q, k, documents = meta(2, 4, 1024, 128), meta(2, 2, 1024, 128), meta(1, 1024, dtype=torch.int32)
    dense = q, k, k, [documents], [], None, None, [4, 0, 0, 3, -(2**62), 0, 0], [], 0.1, 0.0, 0.0, False
    pages, table = meta(64, 16, 2, 128), meta(2, 32, dtype=torch.int32)
    paged = paged_call(meta(2, 4, 128), (pages, pages), table, meta(2, dtype=torch.int32), meta(3, dtype=torch.int32))
    for launch in (lambda: invariant.forward(*dense), lambda: invariant.paged(*paged)):
        report = compile_launches(launch, [target])
        report.raise_for_failures()
        assert all(row.shared <= SHARED_MEMORY[target] for row in report.rows)


def forms():
    """Launches whose bits are to be the same: of masks of several kinds, of lengths that 16 divides and others, of pages."""
    for keys in (300, 1024):
        q, k, documents = meta(2, 4, keys, 64), meta(2, 2, keys, 64), meta(1, keys, dtype=torch.int32)
        bools = meta(1, 1, keys, keys, dtype=torch.bool)
        for tensors, mask in (([], []), ([], [BAND, -FAR, 0]), ([documents], [SEGMENTS, 0, 0]), ([bools], [DENSE, 0])):
            yield invariant.forward, (q, k, k, tensors, [], None, None, mask, [], 0.1, 0.0, 0.0, False)
    pages, table = meta(64, 16, 2, 64), meta(2, 32, dtype=torch.int32)
    integers = (meta(n, dtype=torch.int32) for n in (2, 3))
    yield invariant.paged, paged_call(meta(2, 4, 64), (pages, pages), table, *integers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_all_forms_multiply_by_the_same_instruction(monkeypatch, target):
    monkeypatch.setattr(blocks, "shared_memory", lambda device: SHARED_MEMORY[target])
    found = []
    for function, call in forms():
        with recording() as launches:
            function(*call)
        text = compiling.lowered(request_for(launches[-1], None, target)).asm["ptx"]
        found.append(set(re.findall(r"mma\S*\.m\d+n\d+k\d+\S*bf16\S*", text)))
    assert len(found) == 9
    assert len(found[0]) == 1
    assert all(each == found[0] for each in found)


@pytest.mark.gpu
def test_the_context_on_a_gpu():
    """Decoding from a cache, contiguous or in pages, gives the bits of the prefill; without it, it does not."""
    q, k, v = (x.cuda() for x in given(torch.bfloat16, 128, 2000))
    *pages, table = (x.cuda() for x in in_pages(k.cpu(), v.cpu()))
    lengths = torch.tensor([2000] * BATCH, device="cuda")
    with opkit.batch_invariant():
        whole = opkit.attention(q, k, v, mask=Causal())
        token = opkit.attention(q[1:2, :, -1:], k[1:2], v[1:2])
        found = opkit.paged_attention(q[:, :, -1], *pages, table, lengths)
    assert torch.equal(token, whole[1:2, :, -1:])
    assert torch.equal(found, whole[:, :, -1])
    assert not torch.equal(opkit.attention(q[1:2, :, -1:], k[1:2], v[1:2]), token)
