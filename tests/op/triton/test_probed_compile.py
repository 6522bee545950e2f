"""What torch.compile sees of a kernel never computes something else than the kernel does."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import opkit


@pytest.fixture
def launches(on_cpu, captured):
    """The launches in the program of a function, as torch has them: the kernel's configs, the grids, the arguments."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    class SeenError(Exception):
        pass

    def run(function, *args):
        seen = []

        def compiler(graph, example):
            seen.append(graph)
            raise SeenError  # there is no GPU to run it

        torch._dynamo.reset()
        with pytest.raises(Exception, match="SeenError"):
            torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*args)
        nodes = [node for node in seen[0].graph.nodes if "triton_kernel_wrapper" in str(node.target)]
        return [
            (kernel_side_table.get_kernel(n.kwargs["kernel_idx"]), n.kwargs["grid"], n.kwargs["kwargs"]) for n in nodes
        ]

    return run


@triton.jit
def _loop(x, out, n, blocks, B: tl.constexpr):
    for i in range(blocks):
        at = i * B + tl.arange(0, B)
        tl.store(out + at, tl.load(x + at, at < n), at < n)


def like(x: Tensor) -> Tensor:
    return x * 2


def test_parameters_that_follow_from_the_config(launches, op):
    made = op(like)
    configs, n = [{"B": 64}, {"B": 128}], lambda x: x.numel
    made.register_kernel(
        "cpu", opkit.triton_kernel(_loop, grid=1, n=n, blocks=lambda n, B: triton.cdiv(n, B), configs=configs)
    )
    assert launches(lambda x: made(x), torch.ones(1000)) == []  # each config would need its own number of blocks


def test_a_constexpr_that_follows_from_the_config(launches, op):
    made = op(like)
    configs, n = [{"num_warps": 4}, {"num_warps": 8}], lambda x: x.numel
    made.register_kernel(
        "cpu", opkit.triton_kernel(_loop, grid=1, n=n, blocks=3, B=lambda num_warps: 32 * num_warps, configs=configs)
    )
    ((kernel, _, _),) = launches(lambda x: made(x), torch.ones(1000))
    assert [(c.num_warps, c.kwargs) for c in kernel.configs] == [(4, {"B": 128}), (8, {"B": 256})]


def test_grids_that_follow_from_an_option(launches, op):
    made = op(like)
    configs, n = [{"num_warps": 4}, {"num_warps": 8}], lambda x: x.numel
    made.register_kernel(
        "cpu", opkit.triton_kernel(_loop, grid=lambda num_warps: num_warps, n=n, blocks=3, B=64, configs=configs)
    )
    ((kernel, grids, _),) = launches(lambda x: made(x), torch.ones(1000))
    assert [c.num_warps for c in kernel.configs] == [4]  # torch knows grids by constexprs alone
    assert grids == [(4, 1, 1)]


@triton.jit
def _outer(a, b, out, n, a_stride_0):
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(out + at, tl.load(a + at * a_stride_0, at < n) * tl.load(b + at, at < n), at < n)


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a[:, None] * b[None, :]


def test_what_32_bits_cannot_index_stays_a_unit(launches, op):
    from torch._subclasses import FakeTensorMode

    made = op(outer)
    made.register_kernel("cpu", opkit.triton_kernel(_outer, grid=1, n=3))
    with FakeTensorMode():
        small, large, apart = torch.empty(3), torch.empty(2**16), torch.empty(2**32)[:: 2**26]
    assert len(launches(lambda a, b: made(a, b), small, small)) == 1
    assert launches(lambda a, b: made(a, b), large, large) == []  # the output is large
    assert launches(lambda a, b: made(a, b), apart, small) == []  # its elements lie far apart
