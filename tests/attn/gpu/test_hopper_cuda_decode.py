"""Decoding for sm_90a in CUDA C++: which calls it takes, how it divides them, and on such a GPU its numbers."""

import pytest
import torch
from hopper_calls import (
    BF16,
    CAUSAL,
    FAR,
    FP16,
    arguments,
    bottom_right,
    compared,
    filled,
    on_hopper_with_compiler,
    refuses,
    shaped,
    unlike,
)

from opkit.attn import api
from opkit.attn.calls import AttentionCall
from opkit.attn.gpu.hopper import decode_cuda as decoding
from opkit.attn.gpu.hopper import library
from opkit.attn.masks import program
from opkit.errors import KernelError
from opkit.masks import Causal

SINKS = torch.linspace(-1, 3, 32)


def given(heads=(32, 8), queries=1, keys=4096, head=128, columns=None, dtype=BF16, batch=1, **what):
    return arguments(*shaped(heads, queries, keys, head, columns or head, dtype, batch=batch), **what)


TAKEN = {
    "no mask": lambda: given(),
    "fp16, 64": lambda: given(head=64, dtype=FP16),
    "256": lambda: given(head=256),
    "a query that sees all before it": lambda: given(mask=bottom_right(1, 4096)),
    "a window": lambda: given(mask=(program.BAND, 3000, 4095)),
    "some queries without a mask": lambda: given((8, 2), 4),
    "some queries that see all": lambda: given((8, 2), 4, mask=(program.BAND, -3, 4095)),
    "a head to each": lambda: given((8, 8)),
    "many tiles": lambda: given(batch=100),
    "many heads to one of keys": lambda: given((32, 1), head=64),
    "as many rows of wide heads as are fast in any number of tiles": lambda: given((16, 1), head=256),
    "more rows of wide heads, divided": lambda: given((32, 1), head=256),
    "many rows of few tiles of many keys": lambda: given((64, 1), batch=8, keys=16384),
    "sinks": lambda: given(sinks=SINKS),
}
OTHERS = {
    "few keys": lambda: given(keys=200),
    "many heads of 128 to one of keys": lambda: given((17, 1)),
    "many rows of many tiles": lambda: given((32, 1), batch=32, keys=16384),
    "many rows of wide heads, of many tiles": lambda: given((32, 1), batch=132, head=256),
    "many rows of heads of 64": lambda: given((33, 1), head=64, keys=65536),
    "heads that TMA cannot follow": lambda: (*given()[:1], given()[1].mT.contiguous().mT, *given()[2:]),
}
REFUSED = {
    "many rows": lambda: given((520, 8)),
    "many rows of wide heads": lambda: given((264, 8), head=256),
    "queries that see different keys": lambda: given((8, 2), 4, mask=CAUSAL),
    "queries under a window": lambda: given((8, 2), 4, mask=(program.BAND, -3, 4094)),
    "another head": lambda: given(head=96),
    "other values": lambda: given(columns=64),
    "float32": lambda: given(dtype=torch.float32),
    "a soft cap": lambda: given(softcap=3.0),
    "dropout": lambda: given(dropout_p=0.5),
    "a negative scale": lambda: given(scale=-1.0),
    "lengths": lambda: given(mask=(program.LENGTH, 0), masks=[torch.empty(1, device="meta", dtype=torch.int32)]),
}


@pytest.mark.usefixtures("a_hopper")
class TestTakes:
    def test_few_rows_and_no_others(self):
        calls = TAKEN | OTHERS | REFUSED
        assert [case for case, given in calls.items() if decoding.takes(AttentionCall(*given()))] == [*TAKEN]

    @pytest.mark.usefixtures("batch_invariance")
    def test_none_where_batch_invariance_is_asked_for(self):
        assert not decoding.takes(AttentionCall(*given()))

    def test_none_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(library, "compiler_there", lambda: False)
        assert not decoding.takes(AttentionCall(*given()))


def test_refuses():
    said = r"kernel 'split_cuda' does not take q, k, v of .* force kernel='split'"
    assert not unlike(REFUSED, refuses(decoding.decode, said))


@pytest.mark.usefixtures("batch_invariance")
def test_batch_invariance_is_refused():
    with pytest.raises(KernelError, match="OPKIT_BATCH_INVARIANT is set"):
        decoding.decode(*given())


SEEN = {  # a mask and queries: the first of 100 keys that all see, and how many
    ((), 3): (0, 100),
    (bottom_right(1, 100), 1): (0, 100),
    (CAUSAL, 1): (0, 1),
    ((program.BAND, 90, 95), 1): (90, 6),
    ((program.BAND, 90, 1000), 1): (90, 10),
    ((program.BAND, 100, 200), 1): (100, 0),
    ((program.BAND, -20, -10), 1): (0, 0),
    ((program.BAND, -2, 99), 3): (0, 100),
    ((program.BAND, -1, 99), 3): None,
}


def test_the_keys_that_all_queries_see():
    for (mask, queries), seen in SEEN.items():
        assert decoding._seen(AttentionCall(*given(queries=queries, keys=100, mask=mask))) == seen, (mask, queries)


SPLITS = {1: 128, 8: 16, 44: 3, 66: 2, 67: 2, 109: 2, 110: 1, 132: 1, 133: 1, 999: 1}  # by tiles


def test_how_many_splits_a_tile_has():
    assert {tiles: decoding.splits_of(tiles, 65536, 128, 132) for tiles in SPLITS} == SPLITS
    assert {decoding.splits_of(tiles, 256, 128, 132) for tiles in SPLITS} == {1}


CALLS = {  # (batch, heads of queries and of keys, queries, keys, channels), and what else
    "one split": ((1, (4, 1), 1, 300, 128), {}),
    "splits": ((1, (32, 8), 1, 8192, 128), {}),
    "64": ((2, (16, 4), 1, 5000, 64), {}),
    "256": ((1, (4, 2), 1, 3001, 256), {}),
    "as many splits as there may be": ((1, (8, 1), 1, 65536, 128), {}),
    "a head to each": ((1, (3, 3), 1, 2049, 128), {}),
    "some queries": ((1, (8, 2), 3, 4097, 128), {}),
    "sixteen rows": ((2, (32, 2), 1, 4000, 64), {}),
    "thirty-two rows": ((2, (32, 1), 1, 16384, 128), {}),
    "thirty-two rows of 64": ((2, (16, 1), 2, 4000, 64), {"sinks": torch.linspace(-1, 2, 16)}),
    "seventeen rows": ((1, (34, 2), 1, 5000, 128), {"mask": (program.BAND, 100, 4444)}),
    "sixty-four rows": ((2, (64, 1), 1, 16384, 128), {}),
    "sixty-four rows of one split": ((70, (128, 2), 1, 1000, 128), {}),
    "sixty-four rows of 64": ((2, (16, 1), 4, 4000, 64), {"sinks": torch.linspace(-1, 2, 16)}),
    "thirty-three rows": ((1, (66, 2), 1, 5000, 128), {"mask": (program.BAND, 100, 4444)}),
    "sixteen rows of 256": ((2, (16, 1), 1, 9000, 256), {}),
    "thirty rows of 256": ((2, (30, 1), 1, 9001, 256), {"sinks": torch.linspace(-1, 2, 30)}),
    "thirty-two rows of 256 of one split": ((140, (32, 1), 1, 600, 256), {}),
    "a window": ((1, (4, 1), 1, 9000, 128), {"mask": (program.BAND, 3001, 7777)}),
    "the first keys": ((1, (4, 1), 1, 9000, 128), {"mask": (program.BAND, -FAR, 4321)}),
    "nothing to see": ((1, (4, 2), 1, 500, 128), {"mask": (program.BAND, 500, 900)}),
    "few keys": ((2, (4, 2), 1, 5, 128), {}),
    "many tiles": ((40, (8, 4), 1, 1000, 64), {}),
    "sinks": ((1, (32, 8), 1, 4096, 64), {"sinks": SINKS}),
    "nothing to see but sinks": ((1, (32, 8), 1, 400, 64), {"sinks": SINKS, "mask": (program.BAND, 500, 900)}),
    "heads inside": ((2, (8, 2), 2, 3000, 128), {"out_is_bshd": True}),
    "another scale": ((1, (8, 2), 1, 3000, 128), {"scale": 0.7}),
}


def on_gpu(case, dtype=BF16):
    (batch, heads, queries, keys, head), what = CALLS[case]
    what = what | ({"sinks": what["sinks"].cuda()} if "sinks" in what else {})
    return arguments(*filled(batch, heads, queries, keys, head, head, dtype, what.get("out_is_bshd", False)), **what)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", CALLS)
class TestNumbers:
    pytestmark = on_hopper_with_compiler

    def test_are_the_references(self, case, dtype):
        call = on_gpu(case, dtype)
        found = compared(call, decoding.decode(*call))
        assert all(map(torch.equal, found, decoding.decode(*call)))


class TestOnGpu:
    pytestmark = on_hopper_with_compiler

    def test_what_is_hidden_does_not_leak(self):
        q, k, v = filled(1, (8, 2), 1, 5000, 128, 128)
        k[:, :, :1000], v[:, :, :1000] = float("nan"), float("inf")
        k[:, :, 4000:], v[:, :, 4000:] = float("inf"), float("nan")
        call = arguments(q, k, v, mask=(program.BAND, 1000, 3999))
        compared(call, decoding.decode(*call))
        seen = arguments(q, k[:, :, 1000:4000], v[:, :, 1000:4000])
        assert all(map(torch.equal, decoding.decode(*call), decoding.decode(*seen)))

    def test_strides_that_tma_cannot_follow_are_copied(self):
        q, k, v = filled(2, (8, 2), 1, 3000, 64, 64)
        call = arguments(q, k.mT.contiguous().mT, torch.nn.functional.pad(v, (3, 0))[..., 3:])
        compared(call, decoding.decode(*call))

    def test_streams_do_not_share_what_is_merged(self):
        calls = [on_gpu("splits"), on_gpu("splits")]
        alone = [decoding.decode(*each) for each in calls]
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in calls], []
        for _ in range(20):
            for stream, each in zip(streams, calls, strict=True):
                with torch.cuda.stream(stream):
                    found.append(decoding.decode(*each))
        torch.cuda.synchronize()
        for number, each in enumerate(found):
            assert all(map(torch.equal, alone[number % 2], each))

    def test_it_waits_for_what_came_before(self):
        """Launches begin early: what they read was written by those before them."""
        q, k, v = filled(1, (32, 8), 1, 8192, 128, 128)
        for _ in range(50):
            q, _ = decoding.decode(*arguments(q, k, v))
            k = k + 1 - q.mean(2, keepdim=True)[:, ::4]
        last = arguments(q, k, v)
        found = decoding.decode(*last)
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, decoding.decode(*last)))
        compared(last, found)

    def test_a_graph_holds_a_call(self):
        call = on_gpu("splits")
        decoding.decode(*call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = decoding.decode(*call)
        for _ in range(3):
            call[0].normal_()
            graph.replay()
            assert all(map(torch.equal, found, decoding.decode(*call)))

    def test_calls_get_it(self):
        q, k, v = filled(1, (32, 8), 1, 8192, 128, 128)
        for mask in (None, Causal(align="bottom-right")):
            assert api.select(q, k, v, mask=mask).kernel == decoding.NAME
            assert torch.equal(api.attention(q, k, v, mask=mask), decoding.decode(*arguments(q, k, v))[0])
