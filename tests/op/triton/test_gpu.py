"""Triton kernels on a GPU: numbers, layouts, streams, graphs, errors, and what torch.compile makes of them."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import opkit
from opkit.errors import KernelError

pytestmark = pytest.mark.gpu

_FILE = Path(__file__).parent / "kernels.py"


@pytest.fixture(scope="session")  # a process may come back to this file
def ops():
    spec = importlib.util.spec_from_file_location("triton_gpu_kernels", _FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["triton_gpu_kernels"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def cache(settings, tmp_path):
    """Tuning results stay out of the user's cache."""
    settings(cache_dir=tmp_path)


def launcher(op):
    return next(k.function for k in op._operator.kernels.kernels if k.device == "cuda").launching.launcher


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5, 37), (64, 1024), (1, 1), (0, 8)])
def test_numbers(ops, shape, dtype):
    x, weight = (torch.randn(s, dtype=dtype, device="cuda") for s in (shape, shape[-1:]))
    out = ops.rms_norm(x, weight)
    expected = ops.rms_norm.reference(x.double(), weight.double())
    assert ops.rms_norm.select(x, weight).kernel == "_rms_norm"
    torch.testing.assert_close(out.double(), expected, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)


def test_every_kernel(ops):
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    torch.testing.assert_close(ops.axpy(x, y, 0.5), 0.5 * x + y)
    torch.testing.assert_close(ops.twice(x, y), 3 * x + 2 * y)
    torch.testing.assert_close(ops.total(x), x.sum(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ops.total(x), x.sum(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ops.scaled(x), 2 * x)
    torch.testing.assert_close(ops.scaled(x, y), 2 * x + y)
    z = x.clone()
    ops.add_into(z, y)
    torch.testing.assert_close(z, x + y)


def test_gradients(ops):
    x = torch.randn(8, 37, device="cuda", requires_grad=True)
    weight = torch.randn(37, device="cuda", requires_grad=True)
    ours = torch.autograd.grad(ops.rms_norm(x, weight).square().sum(), [x, weight])
    expected = torch.autograd.grad(ops.rms_norm.reference(x, weight).square().sum(), [x, weight])
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_misaligned_view_gets_a_variant_of_its_own(ops):
    x = torch.randn(4001, device="cuda")
    torch.testing.assert_close(ops.scaled(x[1:]), 2 * x[1:])
    torch.testing.assert_close(ops.scaled(x[:4000]), 2 * x[:4000])


def test_rows_that_lie_apart(ops):
    x, weight = torch.randn(6, 50, device="cuda")[:, :37], torch.randn(37, device="cuda")
    torch.testing.assert_close(ops.rms_norm(x, weight), ops.rms_norm.reference(x, weight), rtol=1e-5, atol=1e-5)
    x = torch.randn(37, 6, device="cuda").t()
    torch.testing.assert_close(ops.rms_norm(x, weight), ops.rms_norm.reference(x, weight), rtol=1e-5, atol=1e-5)


def test_calls_of_one_kind_miss_once(ops):
    x, weight = torch.randn(16, 64, device="cuda"), torch.randn(64, device="cuda")
    ops.rms_norm(x, weight)
    before = launcher(ops.rms_norm).entries
    for _ in range(5):
        ops.rms_norm(torch.randn_like(x), weight)
    assert launcher(ops.rms_norm).entries == before


def test_the_current_stream_is_used(ops):
    x = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x += 1
        out = ops.scaled(x)
    stream.synchronize()
    assert bool((out == 2).all())


def test_a_cuda_graph_replays(ops):
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    ops.scaled(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.scaled(x, y)
    x.fill_(1.0)
    graph.replay()
    torch.testing.assert_close(out, 2 * x + y)


def test_a_kernel_is_loaded_while_a_graph_is_captured(ops):
    x = torch.randn(7, 1031, device="cuda", dtype=torch.float64)
    weight = torch.ones(1031, device="cuda", dtype=torch.float64)
    ops.rms_norm(x[:, :1030], weight[:1030])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.rms_norm(x, weight)
    graph.replay()
    torch.testing.assert_close(out, ops.rms_norm.reference(x, weight), rtol=1e-3, atol=1e-3)


def test_dynamic_shapes_compile_once(ops):
    compiled = torch.compile(lambda x, w: ops.rms_norm(x * 2, w) + 1, dynamic=True, fullgraph=True)
    weight = torch.randn(64, device="cuda")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 16, 33, 128):
            x = torch.randn(rows, 64, device="cuda")
            torch.testing.assert_close(
                compiled(x, weight), ops.rms_norm.reference(x * 2, weight) + 1, rtol=1e-4, atol=1e-4
            )


def test_configs_are_tuned_by_inductor_too(ops):
    compiled = torch.compile(lambda x, y: ops.axpy(x * 2, y, 0.5) + 1, fullgraph=True)
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    torch.testing.assert_close(compiled(x, y), x + y + 1)


def test_several_launches_are_seen_through(ops):
    compiled = torch.compile(lambda x, y: ops.twice(x, y) * 2, fullgraph=True)
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    torch.testing.assert_close(compiled(x, y), 2 * (3 * x + 2 * y))


def test_kernels_with_something_before_their_launch_stay_units(ops):
    compiled = torch.compile(lambda x: ops.total(x * 2) + 1, fullgraph=True)
    x = torch.randn(1000, device="cuda")
    torch.testing.assert_close(compiled(x), (x * 2).sum() + 1, rtol=1e-4, atol=1e-3)


def test_training_compiles(ops):
    compiled = torch.compile(lambda x, w: ops.rms_norm(x, w).square().sum(), fullgraph=True)
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    weight = torch.randn(64, device="cuda", requires_grad=True)
    ours = torch.autograd.grad(compiled(x, weight), [x, weight])
    expected = torch.autograd.grad(ops.rms_norm.reference(x, weight).square().sum(), [x, weight])
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_tensors_beyond_32_bits():
    @triton.jit
    def double(x, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)

    @opkit.custom_op("triton_gpu::double")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op.register_kernel(
        "cuda", opkit.triton_kernel(double, grid=lambda n: triton.cdiv(n, 1024), n=lambda x: x.numel, BLOCK=1024)
    )
    x = torch.ones(2**31 + 5000, dtype=torch.int8, device="cuda")
    x[-1] = 3
    out = op(x)
    assert int(out[-1]) == 6
    assert bool((out[:-1].view(-1)[-4999:] == 2).all())


def test_grids_beyond_the_hardware():
    @triton.jit
    def rows(x, out, n, BLOCK: tl.constexpr):
        row = tl.program_id(1)
        at = tl.arange(0, BLOCK)
        tl.store(out + row * n + at, tl.load(x + row * n + at, at < n) + tl.num_programs(1), at < n)

    @opkit.custom_op("triton_gpu::rows")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + x.shape[0]

    op.register_kernel(
        "cuda", opkit.triton_kernel(rows, grid=lambda x: (1, x.shape[0]), n=lambda x: x.shape[1], BLOCK=16)
    )
    x = torch.randn(200_001, 9, device="cuda")
    torch.testing.assert_close(op(x), x + 200_001)


def test_errors_name_the_operator():
    @triton.jit
    def nothing(x, out, n, BLOCK: tl.constexpr):
        pass

    def broken(n):
        raise ZeroDivisionError("no programs")

    @opkit.custom_op("triton_gpu::broken")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    op.register_kernel("cuda", opkit.triton_kernel(nothing, grid=broken, n=lambda x: x.numel, BLOCK=16))
    with pytest.raises(RuntimeError, match=r"triton_gpu::broken.*grid.*ZeroDivisionError: no programs"):
        op(torch.randn(4, device="cuda"))


def test_a_hook_runs_before_each_launch():
    seen = []

    @triton.jit
    def copy(x, out, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n), at < n)

    @opkit.custom_op("triton_gpu::hooked")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    op.register_kernel(
        "cuda",
        opkit.triton_kernel(
            copy, grid=1, n=lambda x: x.numel, BLOCK=64, pre_hook=lambda arguments: seen.append(arguments["out"].shape)
        ),
    )
    x = torch.randn(50, device="cuda")
    torch.testing.assert_close(op(x), x)
    torch.testing.assert_close(torch.compile(lambda x: op(x) + 1)(x), x + 1)
    assert len(seen) >= 2


def test_tensor_descriptors():
    @triton.jit
    def copy(x_desc, out_desc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
        row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
        out_desc.store([row, column], x_desc.load([row, column]) * 2)

    @opkit.custom_op("triton_gpu::by_descriptor")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    block = (32, 64)
    op.register_kernel(
        "cuda",
        opkit.triton_kernel(
            copy,
            grid=lambda x: (triton.cdiv(x.shape[0], 32), triton.cdiv(x.shape[1], 64)),
            x_desc=opkit.tensor_descriptor("x", block=block),
            out_desc=opkit.tensor_descriptor("out", block=block),
            BLOCK_M=32,
            BLOCK_N=64,
        ),
    )
    for shape in ((64, 128), (100, 200), (33, 72)):
        x = torch.randn(shape, dtype=torch.float16, device="cuda")
        torch.testing.assert_close(op(x), x * 2)
        torch.testing.assert_close(op(x), x * 2)


def test_a_kernel_for_another_architecture_says_so():
    @triton.jit
    def copy(x, out, n, BLOCK: tl.constexpr):
        pass

    @opkit.custom_op("triton_gpu::elsewhere")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    op.register_kernel("cuda", opkit.triton_kernel(copy, grid=1, n=1, BLOCK=64, targets=("gfx942",)))
    with pytest.raises((RuntimeError, KernelError), match="gfx942"):
        op(torch.randn(4, device="cuda"))
