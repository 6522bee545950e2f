"""Masks of the forward kernel for sm_90 that are more than a band."""

import pytest
import torch
from hopper_calls import BF16, CAUSAL, FP16, arguments, compared, filled, on_hopper_with_compiler
from hopper_masks import bools, documents, lengths, shuffled

from opkit.attn import reference
from opkit.attn.gpu.hopper import forward_cuda
from opkit.attn.masks import program as p

SEGMENTS, NEAR = (p.SEGMENTS, 0, 1), (p.BAND, -30, 30)
CASES = {  # the program, its tensors, and the sizes (batch, heads of queries and of keys, queries, keys, head, columns)
    "documents": (SEGMENTS, [documents(2, 700, 5), documents(2, 700, 5)], (2, (4, 2), 700, 700, 128, 128)),
    "documents of whole tiles": (SEGMENTS, [torch.arange(1024).int()[None] // 256] * 2, (2, (4, 2), 1024, 1024, 128, 128)),
    "causal documents": ((*SEGMENTS, *CAUSAL, p.AND), [documents(1, 900, 4)] * 2, (2, (4, 4), 900, 900, 128, 128)),
    "documents of other keys": (SEGMENTS, [documents(2, 300, 5), documents(2, 1000, 5, 3)], (2, (4, 2), 300, 1000, 128, 128)),
    "no order": (SEGMENTS, [shuffled(1, 400), shuffled(1, 500)], (1, (2, 1), 400, 500, 128, 128)),
    "lengths": ((p.LENGTH, 0), [lengths(0, 333, 700)], (3, (4, 2), 300, 700, 128, 128)),
    "causal with lengths": ((p.LENGTH, 0, *CAUSAL, p.AND), [lengths(128, 555)], (2, (4, 2), 600, 600, 128, 128)),
    "two lengths": ((p.LENGTH, 0, p.LENGTH, 1, p.OR), [lengths(50, 500), lengths(300)], (2, (4, 2), 600, 600, 128, 128)),
    "two bands": ((*CAUSAL, *NEAR, p.AND), [], (1, (4, 2), 600, 600, 128, 128)),
    "bools": ((p.DENSE, 0), [bools(2, 1, 300, 500)], (2, (4, 2), 300, 500, 128, 128)),
    "bools of heads": ((p.DENSE, 0), [bools(1, 4, 300, 1)], (2, (4, 2), 300, 500, 128, 128)),
    "not these documents, or near": ((*SEGMENTS, p.NOT, *NEAR, p.OR), [documents(2, 500, 3)] * 2, (2, (4, 2), 500, 500, 64, 64)),
    "a diagonal of each query": ((p.BAND_AT, 0, -20, 20), [shuffled(2, 400) * 100], (2, (2, 2), 400, 600, 128, 128)),
    "seven tensors": (
        (*SEGMENTS, p.SEGMENTS, 2, 3, p.OR, p.SEGMENTS, 4, 5, p.OR, p.BAND_AT, 6, -5, 5, p.OR),
        [documents(1, 300, 3, seed) for seed in range(7)],
        (2, (2, 2), 300, 300, 128, 128),
    ),
    "64": ((*SEGMENTS, *CAUSAL, p.AND), [documents(2, 3000, 4)] * 2, (2, (4, 2), 3000, 3000, 64, 64)),
    "256": (SEGMENTS, [documents(2, 500, 4)] * 2, (2, (4, 2), 500, 500, 256, 256)),
    "192 and 128": (SEGMENTS, [documents(2, 500, 4)] * 2, (2, (4, 2), 500, 500, 192, 128)),
    "nothing is seen": (SEGMENTS, [documents(1, 400, 3), documents(1, 400, 3) + 100], (2, (4, 2), 400, 400, 128, 128)),
}  # fmt: skip


def called(case, dtype=BF16, **what):
    mask, tensors, sizes = CASES[case]
    return arguments(*filled(*sizes, dtype=dtype), mask=mask, masks=[x.cuda() for x in tensors], **what)


class TestNumbers:
    pytestmark = on_hopper_with_compiler

    @pytest.mark.sweep
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    @pytest.mark.parametrize("case", CASES)
    def test_are_the_references(self, case, dtype):
        compared(called(case, dtype))

    @pytest.mark.sweep(keep=["causal with lengths", "bools", "64", "256"])
    @pytest.mark.parametrize("case", CASES)
    def test_with_sinks_and_a_cap(self, case):
        heads = CASES[case][2][1][0]
        compared(called(case, sinks=torch.randn(heads, device="cuda"), softcap=3.0))


class TestOnGpu:
    pytestmark = on_hopper_with_compiler

    @pytest.mark.parametrize("case", ["documents", "causal with lengths", "bools", "256"])
    def test_hidden_keys_and_values_do_not_leak(self, case):
        given = called(case)
        for j in (3, 150, 299):
            given[1][:, :, j], given[2][:, :, j, ::3] = float("nan"), float("inf")
        out, lse = forward_cuda.forward(*given)
        expected, of_rows = reference.attention(*[x.double() if isinstance(x, torch.Tensor) else x for x in given])
        clean = expected.isfinite().all(-1)
        assert 0 < clean.sum() < clean.numel()
        torch.testing.assert_close(out[clean].double(), expected[clean], rtol=1e-2, atol=1e-2)
        assert out[~clean].isnan().any(-1).all()
        torch.testing.assert_close(lse.double(), of_rows, rtol=1e-5, atol=1e-4, equal_nan=True)

    def test_a_graph_reads_what_the_mask_holds_when_it_is_replayed(self):
        given = called("documents")
        forward_cuda.forward(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = forward_cuda.forward(*given)
        for x in given[3]:
            x.copy_(documents(2, 700, 9, seed=5))
        graph.replay()
        torch.cuda.synchronize()
        compared(given, found)
