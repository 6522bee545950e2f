"""Operators on a CUDA device: kernels, gradients, autocast, torch.compile, profiler, CUDA graphs."""

from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit

pytestmark = pytest.mark.gpu
calls = {"cuda": 0, "cpu": 0}


@opkit.custom_op("gpu::rms_norm")
def rms_norm(x: Float[Tensor, "*batch d"], w: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


@opkit.custom_op("gpu::scaled")
def scaled(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    return x.sin() * 2


@scaled.register_kernel("cuda", name="on_cuda")
def _(x: Tensor) -> Tensor:
    calls["cuda"] += 1
    return x.sin().mul_(2)


@scaled.register_kernel("cpu", name="on_cpu")
def _(x: Tensor) -> Tensor:
    calls["cpu"] += 1
    return x.sin().mul_(2)


def test_the_device_chooses_the_kernel() -> None:
    x = torch.randn(4, 8)
    assert scaled.select(x).kernel == "on_cpu"
    assert scaled.select(x.cuda()).kernel == "on_cuda"
    before = dict(calls)
    for _ in range(4):
        torch.testing.assert_close(scaled(x.cuda()).cpu(), scaled(x))
    assert (calls["cuda"] - before["cuda"], calls["cpu"] - before["cpu"]) == (4, 4)


class Scaled(torch.utils.data.Dataset[Tensor]):
    """What a process that loads data computes, on the CPU."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return scaled(torch.full((index + 1,), 0.5))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_cpu_calls_in_processes_forked_after_cuda_was_used() -> None:
    torch.ones(1, device="cuda")
    loader = torch.utils.data.DataLoader(Scaled(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    for index, loaded in enumerate(loader):
        torch.testing.assert_close(loaded, torch.full((index + 1,), 0.5).sin() * 2)


@pytest.mark.parametrize("op", [rms_norm, scaled], ids=["reference", "kernel"])
@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients(op: Any, compiled: bool) -> None:
    args = (torch.randn(8, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64))[: 2 if op is rms_norm else 1]
    cpu = [a.clone().requires_grad_() for a in args]
    gpu = [a.cuda().requires_grad_() for a in args]
    call = torch.compile(lambda *a: op(*a) * 3, fullgraph=True) if compiled else lambda *a: op(*a) * 3
    want, got = op.reference(*cpu) * 3, call(*gpu)
    torch.testing.assert_close(got.cpu(), want)
    for a, b in zip(torch.autograd.grad(got.sum(), gpu), torch.autograd.grad(want.sum(), cpu), strict=True):
        torch.testing.assert_close(a.cpu(), b)


@pytest.mark.parametrize(("policy", "dtype"), [(None, torch.float32), ("low", torch.bfloat16), ("full", torch.float32)])
def test_autocast(policy: str | None, dtype: torch.dtype) -> None:
    def product(x: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        return x @ x

    op = opkit.custom_op(f"gpu::autocast_{policy}", product, autocast=policy)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert op(torch.randn(4, 4, device="cuda")).dtype is dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op(torch.randn(4, 4, device="cuda")).dtype is torch.float32


def test_vmap_in_one_call() -> None:
    before = calls["cuda"]
    x = torch.randn(5, 3, device="cuda")
    torch.testing.assert_close(torch.vmap(scaled)(x), scaled.reference(x))
    assert calls["cuda"] == before + 1


def test_cuda_graph_capture() -> None:
    x = torch.randn(4, 8, device="cuda")
    scaled(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled(x)
    x.fill_(1.0)
    graph.replay()
    torch.testing.assert_close(out, torch.ones_like(x).sin() * 2)


def test_autotune_on_the_device(tmp_path: Any, settings: Any) -> None:
    settings(cache_dir=tmp_path)

    def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    op = opkit.custom_op("gpu::tuned", twice)
    op.register_kernel("cuda", lambda x: x * 2, name="quick", autotune=True)
    op.register_kernel("cuda", lambda x: sum((x.cpu() * 2).cuda() for _ in range(8)) / 8, name="slow", autotune=True)
    x = torch.randn(1 << 16, device="cuda")
    assert op.select(x).kernel == "quick"
    torch.testing.assert_close(op(x), x * 2)


def test_a_kernel_on_the_wrong_device_is_refused() -> None:
    with opkit.use_kernel(scaled, "on_cpu"), pytest.raises(opkit.errors.KernelError, match="runs on cpu"):
        scaled(torch.randn(2, 2, device="cuda"))
