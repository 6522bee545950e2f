"""Latent attention on sm_90: it compiles as it must here, and its numbers are right where there is such a GPU."""

import re

import pytest
import torch

pytest.importorskip("triton")
from hopper_calls import SHARED, assembled, compared, on_hopper, refuses, unlike
from paged_calls import Cache, expected

import opkit
from opkit.attn.calls import AttentionCall
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.decode import plan as decode_plan
from opkit.attn.gpu.decode.paged import paged as split_paged
from opkit.attn.gpu.hopper import mla as mla
from opkit.attn.gpu.hopper import mla_paged as mla_paged
from opkit.attn.gpu.portable import forward as portable
from opkit.attn.masks import program
from opkit.attn.operator import attention_operator
from opkit.errors import KernelError
from opkit.op.triton.building import request_for
from opkit.op.triton.launch import recording
from opkit.testing import compile_launches

FAR = program.UNLIMITED
BF16, FP16 = torch.bfloat16, torch.float16
LENGTH, SINKS = (program.LENGTH, 0), object()
BOTH = (program.BAND, -FAR, 600, program.LENGTH, 0, program.AND)


def arguments(
    batch=2, heads=128, kv_heads=1, queries=1, keys=1000, d=576, *, mask=(), lengths=None, sinks=None, softcap=0.0,
    dtype=BF16, device="meta", out_is_bshd=False, latent=None, scale=None,
):  # fmt: skip
    """The operator's arguments: random numbers, unless on the device "meta"."""
    torch.manual_seed(0)
    new = torch.empty if device == "meta" else torch.randn
    q = new(batch, heads, queries, d, dtype=dtype, device=device)
    k = new(batch, kv_heads, keys, d, dtype=dtype, device=device) if latent is None else latent
    sinks = new(heads, device=device) if sinks is SINKS else sinks
    tensors = [] if lengths is None else [torch.tensor(lengths, dtype=torch.int32, device=device)]
    scale = d**-0.5 if scale is None else scale
    return q, k, k[..., :512], tensors, [], sinks, None, list(mask), [], scale, softcap, 0.0, out_is_bshd


def pages(batch=64, queries=64, heads=128, page=64, most=128, d=576, dtype=BF16):
    """The arguments of ``opkit::paged_attention``, without numbers."""
    k = torch.empty(1000, page, 1, d, dtype=dtype, device="meta")
    table, lengths, starts = (
        torch.empty(n, dtype=torch.int32, device="meta") for n in ((batch, most), batch, batch + 1)
    )
    q = torch.empty(queries, heads, d, dtype=dtype, device="meta")
    return q, k, k[..., :512], table, lengths, starts, -FAR, 0, d**-0.5, 0.0, None, None, None, [], [], [], []


# ---- compiled --------------------------------------------------------------------------------------------------------

COMPILED = {  # a call, and how many kernels it launches
    "one split": (lambda: mla.forward(*arguments(64, keys=8192)), 1),
    "splits, lengths": (lambda: mla.forward(*arguments(4, keys=8192, mask=LENGTH, lengths=[5] * 4)), 2),
    "sinks, capped, float16": (lambda: mla.forward(*arguments(64, sinks=SINKS, softcap=30.0, dtype=FP16)), 1),
    "pages": (lambda: mla_paged.paged(*pages()), 1),
    "pages, splits": (lambda: mla_paged.paged(*pages(2, 4, page=128)), 2),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", COMPILED)
def test_compiles_without_spills(case, tmp_path, record_property):
    run, launches = COMPILED[case]
    with recording() as found:
        run()
    report = compile_launches(run, ["sm_90"])
    report.raise_for_failures()
    row = report.rows[0]
    record_property("resources", f"{row.registers} registers, {row.shared} bytes shared, {row.spills} bytes spilled")
    assert len(report.rows) == launches
    assert (row.kernel, row.registers, row.spills) == ("mla", 168, 0)
    assert row.shared <= SHARED
    said = assembled(request_for(found[0], None, "sm_90"), tmp_path)
    assert re.findall(r"\((C75\d\d)\)", said) == [], said  # a product that waits for the one before it
    assert "0 bytes spill stores, 0 bytes spill loads" in said


# ---- what it takes ---------------------------------------------------------------------------------------------------


def test_masks():
    far = decoding.FAR
    assert mla.seen([]) == (-far, far, None)
    assert mla.seen([program.BAND, -5, 2]) == (-5, 2, None)
    assert mla.seen([program.LENGTH, 1]) == (-far, far, 1)
    assert mla.seen(list(BOTH)) == mla.seen([*LENGTH, program.BAND, -FAR, 600, program.AND]) == (-far, 600, 0)
    for other in (
        [program.BAND, 0, 1, program.NOT],
        [*LENGTH, *LENGTH, program.AND],
        [program.DENSE, 0],
        [program.BAND, 0],
    ):
        assert mla.seen(other) is None
    assert mla.seen([program.BAND, 0, 1, program.BAND, 0, 1, program.AND]) is None
    assert mla.seen([program.BAND, 0, 1, program.LENGTH, 0, program.OR]) is None


REFUSED = {
    "float32": lambda: arguments(dtype=torch.float32),
    "channels that TMA cannot follow": lambda: arguments(d=575),
    "more channels": lambda: arguments(d=584),
    "as many values": lambda: arguments(d=512),
    "heads that 64 does not divide, of two queries": lambda: arguments(heads=96, queries=2),
    "heads that 64 does not divide, of two heads of keys": lambda: arguments(heads=96, kv_heads=2),
    "a mask": lambda: arguments(mask=(program.DENSE, 0)),
    "lengths of another batch": lambda: arguments(mask=LENGTH, lengths=[1, 2, 3]),
    "a negative scale": lambda: arguments(scale=-1.0),
    "no keys": lambda: arguments(keys=0),
}


def test_refuses():
    assert not unlike(REFUSED, refuses(mla.forward, r"kernel 'mla' does not take q, k, v of .* Leave the choice"))


PAGES_REFUSED = {
    "float32": lambda: pages(dtype=torch.float32),
    "pages of 16": lambda: pages(page=16),
    "32 heads": lambda: pages(heads=32),
    "a window": lambda: (*pages()[:6], -5, *pages()[7:]),
    "scales": lambda: (*pages()[:11], torch.empty(1000, 64, 1, device="meta"), *pages()[12:]),
    "many sequences": lambda: pages(2000),
    "a function": lambda: (*pages()[:15], [program.FUNCTION], []),
}


def test_refuses_pages():
    said = r"kernel 'mla' does not take q, k_pages, v_pages of .* Leave the choice"
    assert not unlike(PAGES_REFUSED, refuses(mla_paged.paged, said))


@pytest.mark.usefixtures("batch_invariance")
def test_batch_invariance_is_refused():
    for call in (lambda: mla.forward(*arguments()), lambda: mla_paged.paged(*pages())):
        with pytest.raises(KernelError, match="OPKIT_BATCH_INVARIANT is set"):
            call()


def chosen(call, monkeypatch):
    """Whether a call would be for the kernel on an H200."""
    monkeypatch.setattr(mla, "on_hopper", lambda q: True)
    return mla.takes(call)


def test_takes(monkeypatch):
    assert not mla.takes(AttentionCall(*arguments()))  # there is no such GPU
    assert chosen(AttentionCall(*arguments()), monkeypatch)
    assert chosen(AttentionCall(*arguments(queries=4, mask=BOTH, lengths=[4, 5])), monkeypatch)
    assert not chosen(AttentionCall(*arguments(heads=32)), monkeypatch)
    assert not chosen(AttentionCall(*arguments(keys=100)), monkeypatch)
    assert not chosen(AttentionCall(*arguments(queries=500)), monkeypatch)


@pytest.mark.parametrize("few", [True, False])
def test_values_elsewhere_are_for_the_other_kernels(few, monkeypatch):
    given = list(arguments(1, queries=1 if few else 500, device="cpu"))
    given[2] = _elsewhere(given[2])
    monkeypatch.setattr(decoding.decode, "prepare", lambda *given: lambda *_: "split")
    monkeypatch.setattr(portable, "prepare_forward", lambda call: lambda *_: "triton")
    assert mla.forward(*given) == ("split" if few else "triton")


def _elsewhere(v):
    """Values of the same strides at another address."""
    return torch.randn(*v.shape[:3], 576, dtype=v.dtype, device=v.device)[..., :512]


def test_pages_of_values_elsewhere_are_for_the_other_kernel(monkeypatch):
    monkeypatch.setattr(split_paged, "prepare", lambda *given: lambda *_: "split")
    given = [x if not isinstance(x, torch.Tensor) else torch.zeros_like(x, device="cpu") for x in pages(2, 2)]
    given[2] = torch.zeros_like(given[1])[..., :512]
    assert mla_paged.paged(*given) == "split"


# ---- numbers ---------------------------------------------------------------------------------------------------------

CALLS = {
    "a pair of blocks": {"keys": 128},
    "one key": {"keys": 1},
    "one block": {"keys": 64},
    "a block and a key": {"keys": 65},
    "splits": {"keys": 8192},
    "one split": {"batch": 3, "keys": 300},
    "lengths": {"batch": 3, "keys": 700, "mask": LENGTH, "lengths": [0, 700, 123]},
    "one length for all": {"batch": 3, "keys": 700, "mask": LENGTH, "lengths": [321]},
    "a band and lengths": {"batch": 3, "queries": 4, "keys": 700, "mask": BOTH, "lengths": [0, 700, 123]},
    "a window": {"queries": 2, "keys": 700, "mask": (program.BAND, 300, 500)},
    "nothing seen": {"queries": 2, "keys": 700, "mask": (program.BAND, -FAR, -2)},
    "64 heads": {"heads": 64},
    "40 heads": {"heads": 40},
    "200 heads": {"heads": 200},
    "two heads of keys": {"kv_heads": 2},
    "sinks, capped": {"sinks": SINKS, "softcap": 3.0},
    "sinks, one split": {"batch": 3, "keys": 300, "sinks": SINKS},
    "520 channels": {"d": 520},
    "heads inside": {"queries": 3, "out_is_bshd": True},
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", CALLS)
class TestNumbers:
    pytestmark = on_hopper

    def test_are_the_references(self, case, dtype):
        given = arguments(dtype=dtype, device="cuda", **CALLS[case])
        found = compared(given, mla.forward(*given))
        assert all(map(torch.equal, found, mla.forward(*given)))


class TestOnGpu:
    pytestmark = on_hopper

    def test_hidden_keys_do_not_leak(self):
        latent = torch.randn(3, 1, 700, 576, device="cuda", dtype=BF16)
        lengths = [5, 640, 333]
        for b, length in enumerate(lengths):
            latent[b, :, length:] = torch.nan
        for batch in ({}, {"queries": 2}):
            given = arguments(3, mask=LENGTH, lengths=lengths, latent=latent, device="cuda", **batch)
            compared(given, mla.forward(*given))

    def test_queries_that_tma_cannot_follow_are_copied(self):
        q, *rest = arguments(device="cuda", queries=2)
        expected = mla.forward(q, *rest)
        odd = torch.randn(2, 128, 2, 577, device="cuda", dtype=BF16)[..., 1:].copy_(q)
        assert all(map(torch.equal, expected, mla.forward(odd, *rest)))
        turned = q.transpose(1, 2).contiguous().transpose(1, 2)
        assert all(map(torch.equal, expected, mla.forward(turned, *rest)))

    def test_it_is_chosen_and_leaves_values_elsewhere_to_others(self):
        op = attention_operator()
        given = list(arguments(device="cuda", mask=LENGTH, lengths=[1000, 77]))
        assert all(map(torch.equal, op(*given), mla.forward(*given)))
        with opkit.use_kernel(op, "mla"):
            op(*given)
            given[2] = _elsewhere(given[2])
            compared(given, op(*given))
        given[7], given[3] = [], []
        compared(given, mla.forward(*given))

    def test_a_graph_can_be_captured(self):
        given = arguments(device="cuda", keys=4096)
        expected = mla.forward(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = mla.forward(*given)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, expected, found))

    @pytest.mark.sweep
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    @pytest.mark.parametrize(
        ("lengths", "starts", "heads", "page"),
        [
            ([700, 64, 1, 129], [0, 1, 2, 3, 4], 128, 64),
            ([700, 0, 300], [0, 3, 3, 5], 64, 64),
            ([1000] * 40, [*range(41)], 128, 128),
            ([5000, 77], [0, 2, 3], 128, 256),
        ],
    )
    def test_pages(self, lengths, starts, heads, page, dtype):
        cache = Cache(lengths, page, 1, 576, dtype=dtype)
        q = cache.queries(starts[-1], heads, dtype)
        exact, exact_lse = expected(_latent(cache), q, starts, scale=0.04)
        call = [x.cuda() if isinstance(x, torch.Tensor) else x for x in cache.call(q, starts, scale=0.04)]
        call[2] = call[1][..., :512]
        out, lse = mla_paged.paged(*call)
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(out.cpu().double(), exact, rtol=rounding, atol=1.5 * rounding)
        torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-5, atol=1e-4)


def _latent(cache):
    """The values are the first 512 columns of the keys."""
    cache.v, cache.v_exact = cache.k[..., :512], cache.k_exact[..., :512]
    return cache


def test_divisions():
    """There is work for the whole GPU, and one split where tiles fill it."""
    assert decode_plan.splits_of(128, 132, 64) == 1
    assert decode_plan.splits_of(2, 132, 128) == 64
