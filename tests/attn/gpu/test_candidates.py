"""The tiles that a search tries: which these are, that they compile, and that they compute the same."""

import candidate_kernels
import pytest
import torch
from fake_gpu import CAUSAL, KERNELS, tried

from opkit.attn import gradients, reference
from opkit.attn.gpu import arguments, blocks, kernels, search
from opkit.attn.gpu.decode import decoding, plan
from opkit.attn.masks.program import BIAS_DENSE
from opkit.kernels.triton import binaries, compiling
from opkit.op.triton.building import request_for
from opkit.op.triton.launch import recording
from opkit.testing import Interpreter

# ---- what is tried ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("shared", [65536, 101376, 166912, 232448])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_candidates_begin_with_the_table_s_own_and_have_room(kernel, shared):
    for d in (16, 64, 128, 256, 576):
        for size in (1, 2, 4):
            e = min(d, 512)
            found = blocks.candidates(kernel, d, e, size, shared, 0)
            assert found[0] == blocks.choose(kernel.rules, d, size, 4096, shared, kernel.tensors)
            assert len(set(found)) == len(found) <= blocks.MAX_TRIED
            assert all(blocks.bytes_of(each, d, size, kernel.tensors, 0) <= shared for each in found[1:])
            for rows, keys, warps, stages in found:
                assert rows in (16, 32, 64, 128)  # for 256 Triton 3.7 makes kernels for sm_100 that do nothing
                assert keys in (16, 32, 64, 128)
                assert warps in (4, 8)
                assert 1 <= stages <= 4


def test_candidates_differ_in_each_way_and_spare_registers():
    found = tried(blocks.FORWARD_KERNEL, 128)
    assert found[:3] == [(128, 64, 8, 4), (128, 64, 8, 2), (64, 64, 4, 2)]
    assert {(64, 64, 8, 4), (128, 32, 8, 4), (128, 64, 4, 4), (128, 64, 8, 3)} <= set(found)
    assert (128, 128, 4, 2) not in found  # 256 sums a thread
    assert len(tried(blocks.FORWARD_KERNEL, 64, pair=4)) < len(tried(blocks.FORWARD_KERNEL, 64))


@pytest.mark.sweep
@pytest.mark.parametrize("gpu_of", [(108, 166912), (58, 101376), (304, 65536)], ids=["A100", "L4", "MI300X"])
@pytest.mark.parametrize(
    "shape", [(4, 8, 8192, 128), (64, 8, 8192, 128), (128, 4, 4096, 256), (1, 2, 300, 64)], ids=str
)
def test_changes_of_a_division_have_room(shape, gpu_of):
    device = plan.Device(*gpu_of, False, "tf32x3")
    height, heads, keys, d = shape
    asked = plan.DecodeShape(height, heads, keys, d, d, 2, 2)
    found = [plan.blocks_of(asked, device, change) for change in plan.CHANGES]
    assert found[0] == plan.blocks_of(asked, device)
    assert len(set(found)) >= 3
    for rows, block, stages, warps, splits in found:
        assert rows == found[0].rows
        assert block in (16, 32, 64, 128)
        assert warps in (1, 2, 4, 8)
        assert splits >= 1
        assert stages >= 1
        buffers = stages - (rows <= 32)
        assert buffers <= 1 or rows * d * 2 + buffers * block * 2 * d * 2 <= device.shared


# ---- what candidates compute, and that they compile ------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted():
    with Interpreter("candidate_kernels", candidate_kernels.__file__) as process:
        yield process


def made(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).half() for shape in shapes]


def close(found, exact, bound=4e-3):
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=bound * max(exact.abs().max().item(), 1e-3))


@pytest.mark.emulated
def test_each_candidate_computes_the_same(interpreted):
    q, k, v = made((1, 2, 150, 64), (1, 1, 130, 64), (1, 1, 130, 64))
    exact, exact_lse = reference.attention(*candidate_kernels.call_of(q.double(), k.double(), v.double()))
    for number, _ in enumerate(candidate_kernels.candidates_of(blocks.FORWARD_KERNEL, 64, torch.float16)):
        out, lse = interpreted("candidate_tests::forward", q, k, v, number, kernel="interpreted")
        close(out, exact)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.emulated
def test_each_candidate_computes_the_same_gradients(interpreted):
    gradient, q, k, v = made((1, 2, 150, 64), (1, 2, 150, 64), (1, 1, 130, 64), (1, 1, 130, 64))
    out, lse = reference.attention(*candidate_kernels.call_of(q.double(), k.double(), v.double()))
    given = gradient.double(), q.double(), k.double(), v.double(), out, lse
    exact = gradients.attention_backward(*candidate_kernels.gradient_call_of(*given))
    counts = [len(candidate_kernels.candidates_of(each, 64, torch.float16)) for each in KERNELS[1:3]]
    for number in range(max(counts)):
        args = (gradient, q, k, v, out.half(), lse.float(), number)
        found = interpreted("candidate_tests::backward", *args, kernel="interpreted")
        for mine, right in zip(found, exact, strict=True):
            close(mine, right, 1e-2)


COMPILED = {
    ("sm_80", 166912): (blocks.KEYS_KERNEL, 64),
    ("sm_100", 232448): (blocks.BIAS_KERNEL, 64),
    ("gfx942", 65536): (blocks.FORWARD_KERNEL, 64),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "shared"), COMPILED)
def test_candidates_compile(target, shared, monkeypatch):
    kernel, d = COMPILED[target, shared]
    for size in blocks.candidates(kernel, d, d, 2, shared, 0):
        monkeypatch.setattr(arguments, "tiles_of", lambda *_, size=size: search.Tiles(None, lambda _: size))
        (launch,) = [each for each in _launches(d) if each.bound.kernel.name == kernel.name]
        taken = binaries.resources_of(compiling.build(request_for(launch, None, target)))
        assert taken.shared <= shared
        assert taken.registers >= 64, (size, taken)  # what multiplies has no fewer


def _launches(d):
    """What a causal forward and its backward, with a bias, launch for heads of so many elements."""
    q, lse = torch.empty(2, 4, 1024, d, dtype=torch.bfloat16, device="meta"), torch.empty(2, 4, 1024, device="meta")
    added = [torch.empty(1, 4, 1024, 1024, dtype=torch.bfloat16, device="meta")]
    with recording() as found:
        kernels.forward(q, q, q, [], [], None, None, CAUSAL, [], 0.1, 0.0, 0.0, False)
        kernels.backward(q, None, q, q, q, q, lse, [], [], CAUSAL, [], 0.1, 0.0, False)
        kernels.bias_backward(q, lse, q, q, q, lse, [], added, CAUSAL, [BIAS_DENSE, 0], 0.1, 0.0, [0])
    return found


@pytest.mark.exhaustive
def test_changes_of_a_division_compile(monkeypatch):
    a100 = plan.Device(108, 166912, False, "tf32x3")
    monkeypatch.setattr(decoding, "device_of", lambda index: a100)
    q, k = (torch.empty(1, heads, n, 128, dtype=torch.bfloat16, device="meta") for heads, n in ((32, 1), (8, 8192)))
    found = {}
    for change in plan.CHANGES:
        monkeypatch.setattr(decoding, "blocks_of", lambda shape, gpu, change=change: plan.blocks_of(shape, gpu, change))
        with recording() as launches:
            decoding.decode(q, k, k, [], [], None, None, [], [], 0.1, 0.0, 0.0, False)
        request = request_for(launches[0], None, "sm_80")
        found[str(request)] = request
    assert len(found) > 4
    for request in found.values():
        assert binaries.resources_of(compiling.build(request)).shared <= a100.shared
