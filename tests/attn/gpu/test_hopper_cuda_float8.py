"""Attention to float8 for sm_90a in CUDA C++, on such a GPU: its numbers are right, and calls get it."""

import pytest
import torch
from float8_calls import CALLS, KINDS, compared, every_number, given, hidden_stays_hidden
from hopper_calls import CAUSAL, on_hopper_with_compiler

import opkit
from opkit.attn import api
from opkit.attn.gpu.hopper import forward_cuda
from opkit.masks import Causal


class TestOnGpu:
    pytestmark = on_hopper_with_compiler

    @pytest.mark.sweep
    @pytest.mark.parametrize("case", CALLS)
    @pytest.mark.parametrize("dtype", KINDS, ids=str)
    def test_are_the_references(self, head, case, dtype):
        sizes, mask, documented = CALLS[case]
        if documented and head == 256:
            pytest.skip("heads of 256 have no segments in CUDA C++")
        call = given(sizes, head, mask, documented, dtype, device="cuda")
        compared(call, forward_cuda.forward_float8(*call), of_logits=1e-2)  # 14 bits of a sum of products are kept

    def test_long_ones(self, head):
        call = given((1, (4, 2), 5000, 3000), head, (*CAUSAL[:2], 500), device="cuda")
        compared(call, forward_cuda.forward_float8(*call), of_logits=1e-2)

    @pytest.mark.parametrize("dtype", KINDS, ids=str)
    def test_every_number_is_what_it_is(self, dtype):
        every_number(dtype, "cuda")

    def test_what_is_hidden_does_not_leak(self, head):
        hidden_stays_hidden(head, "cuda")

    def test_calls_get_it_and_graphs_capture_it(self):
        q, k, v = (torch.randn(1, 2, 2048, 128, device="cuda").to(KINDS[0]) for _ in range(3))
        descales = (0.5, 2.0, torch.tensor([[0.3, 3.0]], device="cuda"))
        assert api.select(q, k, v, mask=Causal(), descales=descales).kernel == "hopper_cuda"
        expected = opkit.attention(q, k, v, mask=Causal(), descales=descales)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = opkit.attention(q, k, v, mask=Causal(), descales=descales)
        graph.replay()
        assert torch.equal(found, expected)
        other = opkit.attention(q, k, v, mask=Causal(), descales=descales, kernel="triton")
        torch.testing.assert_close(found, other, rtol=2**-7, atol=2**-7)
