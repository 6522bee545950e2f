"""Attention to float8 for sm_90a in CUDA C++ compiles as it must where there is nvcc; on such a GPU its numbers are right."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from float8_calls import CALLS, KINDS, compared, given
from hopper_calls import CAUSAL, SHARED, on_hopper_with_nvcc, with_nvcc
from test_hopper_cuda import resources

import opkit
from opkit.attn import api, program
from opkit.attn.gpu.hopper import float8_cuda, forward_cuda, library
from opkit.kernels import compilation
from opkit.masks import Causal


@with_nvcc
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("name", ["forward", "forward_of_lists"])
class TestCompiled:
    def test_without_spills(self, name, dtype, tmp_path, record_property):
        found = resources(name, dtype, tmp_path)
        record_property("resources", str(found))
        found = {kernel: each for kernel, each in found.items() if "attention" in kernel}
        of_all = [(96, 0, 0)] * 2 + [(128, 0, 0)] * 2 + [(168, 0, 0)] * 4
        assert sorted(found.values()) == (of_all if name == "forward" else [(96, 0, 0), (168, 0, 0)])

    def test_a_call_is_laid_out_as_in_the_source(self, name, dtype):
        built = ctypes.CDLL(str(compilation.build(library.request(name, dtype))))
        assert built.hopper_forward_call_bytes() == ctypes.sizeof(forward_cuda.Problem)
        assert built.hopper_forward_shared_bytes() <= SHARED


class TestOnGpu:
    pytestmark = on_hopper_with_nvcc

    @pytest.mark.parametrize("case", CALLS)
    @pytest.mark.parametrize("dtype", KINDS, ids=str)
    def test_are_the_references(self, head, case, dtype):
        sizes, mask, documented = CALLS[case]
        if documented and head == 256:
            pytest.skip("heads of 256 have no segments in CUDA C++")
        call = given(sizes, head, mask, documented, dtype, device="cuda")
        compared(call, float8_cuda.forward(*call), of_logits=1e-2)  # 14 bits of a sum of products are kept

    def test_long_ones(self, head):
        call = given((1, (4, 2), 5000, 3000), head, (*CAUSAL[:2], 500), device="cuda")
        compared(call, float8_cuda.forward(*call), of_logits=1e-2)

    def test_every_number_is_what_it_is(self):
        for dtype in KINDS:
            v = torch.arange(256).to(torch.uint8).view(dtype)
            v = v[v.float().isfinite()].reshape(1, 1, -1, 1).repeat(1, 1, 1, 128).cuda()
            q, ones = torch.zeros(1, 1, v.shape[2], 128).to(dtype).cuda(), [torch.ones(1, 1).cuda()] * 3
            out, _ = float8_cuda.forward(q, q, v, ones, [], [], None, [program.BAND, 0, 0], [], 1.0, 0.0, False)
            assert torch.equal(out, v.to(torch.bfloat16))

    def test_what_is_hidden_does_not_leak(self, head):
        call = given((1, (2, 1), 200, 200), head, CAUSAL, device="cuda")
        clean, _ = float8_cuda.forward(*call)
        call[1].view(torch.uint8)[:, :, 150:] = 0x7F  # NaN
        call[2].view(torch.uint8)[:, :, 120, 3] = 0x7F
        out, _ = float8_cuda.forward(*call)
        torch.testing.assert_close(out[:, :, :120], clean[:, :, :120], rtol=2**-7, atol=2**-8)
        assert out[:, :, 120:, 3].isnan().all()
        assert out[:, :, 150:].isnan().all()

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
