"""Decoding from pages for sm_90a in CUDA C++: which calls it takes, and on such a GPU its numbers."""

import pytest
import torch
from hopper_calls import BF16, FP16, on_hopper_with_compiler, refuses, unlike
from paged_calls import UNLIMITED, Cache, of_pages

from opkit.attn.calls import PagedCall
from opkit.attn.gpu.hopper import decode_cuda, library
from opkit.attn.gpu.hopper import decode_cuda as decoding
from opkit.attn.masks import program
from opkit.attn.paged.api import paged_attention_operator


def given(
    tokens=4, heads=32, kv_heads=8, head=128, columns=None, page=16, width=256, sequences=4, dtype=BF16, of_pages=None, **what
):  # fmt: skip
    """A call's arguments without numbers."""

    def empty(*sizes, dtype=dtype):
        return torch.empty(sizes, dtype=dtype, device="meta")

    pages = [empty(300, page, kv_heads, size, dtype=of_pages or dtype) for size in (head, columns or head)]
    table, lengths, starts = (
        empty(*sizes, dtype=torch.int32) for sizes in ((sequences, width), (sequences,), (sequences + 1,))
    )
    named = {"lower": -UNLIMITED, "upper": 0, "scale": 0.1, "softcap": 0.0, "sinks": None, "k": None, "v": None}
    named |= {"mask_tensors": [], "bias_tensors": [], "mask": [], "bias": []} | what
    return (empty(tokens, heads, head), *pages, table, lengths, starts, *named.values())


TAKEN = {
    "pages of 16": lambda: given(),
    "pages of 48": lambda: given(page=48),
    "fp16, 64": lambda: given(head=64, dtype=FP16),
    "256, a window": lambda: given(head=256, lower=-1000),
    "one sequence": lambda: given(tokens=1, sequences=1),
    "fewer queries than sequences": lambda: given(tokens=3),
    "sinks": lambda: given(sinks=torch.empty(32, device="meta")),
    "many tiles": lambda: given(tokens=100, sequences=100),
    "sixty-four heads to one of keys": lambda: given(heads=512),
    "thirty-two wide heads to one of keys": lambda: given(heads=256, head=256),
}
OTHERS = {
    "more queries than sequences": lambda: given(tokens=5),
    "few keys": lambda: given(width=15),
}
REFUSED = {
    "pages of 8": lambda: given(page=8),
    "another head": lambda: given(head=96),
    "other values": lambda: given(columns=64),
    "many heads to one of keys": lambda: given(heads=520),
    "many wide heads to one of keys": lambda: given(heads=264, head=256),
    "float32": lambda: given(dtype=torch.float32),
    "int8": lambda: given(of_pages=torch.int8),
    "a soft cap": lambda: given(softcap=3.0),
    "a negative scale": lambda: given(scale=-1.0),
    "scales": lambda: given(k=torch.empty(300, 16, 8, device="meta")),
    "many sequences": lambda: given(sequences=1025),
    "a function": lambda: given(mask=[program.FUNCTION]),
}


@pytest.mark.usefixtures("a_hopper")
class TestTakes:
    def test_few_queries_and_no_others(self):
        calls = TAKEN | OTHERS | REFUSED
        assert [case for case, given in calls.items() if decoding.takes_pages(PagedCall(*given()))] == [*TAKEN]

    @pytest.mark.usefixtures("batch_invariance")
    def test_none_where_batch_invariance_is_asked_for(self):
        assert not decoding.takes_pages(PagedCall(*given()))

    def test_none_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(library, "compiler_there", lambda: False)
        assert not decoding.takes_pages(PagedCall(*given()))


def test_refuses():
    said = r"kernel 'split_cuda' does not take q, k_pages, v_pages of .* kernel='split'"
    assert not unlike(REFUSED, refuses(decoding.paged, said))


CALLS = {  # lengths, starts, the size of pages, heads of queries and of keys, and what else
    "one": ([5000], [0, 1], 16, (32, 8), {}),
    "ragged": ([5000, 1, 0, 333, 9000], [0, 1, 2, 2, 3, 4], 16, (16, 4), {}),
    "pages of 64": ([5000, 777], [0, 1, 2], 64, (4, 1), {}),
    "pages of 48": ([5000, 777], [0, 1, 2], 48, (4, 1), {}),
    "ragged queries": ([3000, 40], [0, 3, 4], 16, (8, 2), {}),
    "a window": ([3000, 4000], [0, 1, 2], 16, (8, 2), {"lower": -1023}),
    "sinks": ([3000, 0, 400], [0, 1, 2, 3], 16, (8, 2), {"sinks": torch.linspace(-1, 2, 8)}),
    "many heads to one of keys": ([5000, 1, 777], [0, 1, 2, 3], 16, (31, 1), {}),
    "more heads to one of keys": ([5000, 1, 777], [0, 1, 2, 3], 16, (63, 1), {}),
    "more, in a window of pages of 48": ([3000, 4000], [0, 1, 2], 48, (40, 1), {"lower": -1023}),
    "more, undivided": ([300, 5] * 70, list(range(141)), 16, (40, 1), {}),
    "as many tiles as the GPU has multiprocessors": ([300] * 16, list(range(17)), 16, (32, 8), {}),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "head"), [(BF16, 128), (FP16, 64), (BF16, 256)])
@pytest.mark.parametrize("case", CALLS)
class TestNumbers:
    pytestmark = on_hopper_with_compiler

    def test_are_those_of_float64(self, case, dtype, head):
        lengths, starts, page, heads, what = CALLS[case]
        if heads[0] // heads[1] > decode_cuda.MOST_ROWS[head]:
            pytest.skip("wide heads have 32 rows")
        cache = Cache(lengths, page, heads[1], head, dtype=dtype)
        q, what = cache.queries(starts[-1], heads[0], dtype), what | {"scale": head**-0.5}
        call = [x.cuda() if isinstance(x, torch.Tensor) else x for x in cache.call(q, starts, **what)]
        found, again = decoding.paged(*call), decoding.paged(*call)
        assert all(map(torch.equal, found, again))
        of_pages([x.cpu() for x in found], cache, q, starts, **what)


class TestOnGpu:
    pytestmark = on_hopper_with_compiler

    def test_a_graph_serves_other_lengths(self):
        cache = Cache([5000, 3000], 16, 8, 128, dtype=BF16)
        q = cache.queries(2, 32, BF16)
        call = [x.cuda() if isinstance(x, torch.Tensor) else x for x in cache.call(q, [0, 1, 2])]
        decoding.paged(*call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = decoding.paged(*call)
        for lengths in ([17, 2999], [4000, 0], [1, 1]):
            call[4].copy_(torch.tensor(lengths))
            graph.replay()
            assert all(map(torch.equal, found, decoding.paged(*call)))

    def test_calls_get_it(self):
        cache = Cache([5000, 3000], 16, 8, 128, dtype=BF16)
        q = cache.queries(2, 32, BF16)
        call = [x.cuda() if isinstance(x, torch.Tensor) else x for x in cache.call(q, [0, 1, 2])]
        operator = paged_attention_operator()
        assert operator.select(*call).kernel == decoding.NAME
        assert all(map(torch.equal, operator(*call), decoding.paged(*call)))
