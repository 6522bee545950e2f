"""Run by ``test_processes.py`` in several processes: operators on DTensors against the same calls on whole tensors."""

import contextlib

import processes
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import opkit

R = Replicate()


@opkit.custom_op("ranks::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


rms_norm.register_kernel("cpu", opkit.c_kernel("""
    void rms_norm(const T* x, const T* weight, double eps, T* out, int64_t x_numel, int64_t weight_numel) {
        for (int64_t row = 0; row < x_numel / weight_numel; row++) {
            double sum = 0;
            for (int64_t i = 0; i < weight_numel; i++) sum += x[row * weight_numel + i] * x[row * weight_numel + i];
            double scale = 1 / __builtin_sqrt(sum / weight_numel + eps);
            for (int64_t i = 0, at = row * weight_numel; i < weight_numel; i++, at++) out[at] = x[at] * scale * weight[i];
        }
    }
""", dtypes=[torch.float64]))  # fmt: skip


@opkit.custom_op("ranks::gate", mutates_args=())
def gate(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x) * y


@opkit.custom_op("ranks::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


@opkit.custom_op("ranks::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@opkit.custom_op("ranks::total", mutates_args=())
def total(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(0)


@opkit.custom_op("ranks::largest", mutates_args=())
def largest(x: Tensor) -> Tensor:
    return x.amax(0)


@opkit.custom_op("ranks::mean", mutates_args=())
def mean(x: Tensor) -> Tensor:
    return x.mean(0)


@opkit.custom_op("ranks::two", mutates_args=())
def two(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x * weight, weight * 2


@opkit.custom_op("ranks::scaled", mutates_args=())
def scaled(xs: list[Tensor], weight: Tensor | None = None) -> list[Tensor]:
    return [x * 2 if weight is None else x * weight for x in xs]


@opkit.custom_op("ranks::cumsum", mutates_args=())
def cumsum(x: Tensor) -> Tensor:
    return x.cumsum(0)


@opkit.custom_op("ranks::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


@opkit.custom_op("ranks::scale", mutates_args=("x",))
def scale(x: Tensor, by: Tensor) -> None:
    x.mul_(by)


@gate.register_kernel("cpu")
def _(x, y):
    return torch.from_numpy(1 / (1 + torch.exp(-x).numpy())) * y  # Python that DTensors could not run


CALLS = [
    (rms_norm, [(7, 6), (6,)], [[Shard(0), R], [Shard(1), R], [Shard(0), Shard(0)], [R, R]]),
    (rms_norm, [(5, 7, 6), (6,)], [[Shard(0), R], [Shard(1), R], [Shard(2), Shard(0)]]),
    (gate, [(9, 5), (5,)], [[Shard(0), R], [Shard(1), Shard(0)], [Shard(0), Shard(0)]]),
    (linear, [(5, 6), (7, 6)], [[Shard(0), R], [R, Shard(0)], [Shard(1), Shard(1)], [Shard(0), Shard(0)]]),
    (softmax, [(5, 6)], [[Shard(0)], [Shard(1)]]),
    (total, [(7, 5), (5,)], [[Shard(0), R], [Shard(1), Shard(0)]]),
    (largest, [(7, 5)], [[Shard(0)], [Shard(1)]]),
    (mean, [(8, 5)], [[Shard(0)], [Shard(1)]]),
    (mean, [(7, 5)], [[Shard(0)]]),
    (two, [(7, 5), (5,)], [[Shard(0), R], [Shard(1), Shard(0)]]),
    (cumsum, [(7, 5)], [[Shard(0)], [Shard(1)]]),
    (swiglu, [(7, 8)], [[Shard(0)], [Shard(1)]]),
]


def whole(value):
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in value]


def results(op, tensors, parts):
    """Return the results and gradients of a call, once with all results used and once with the first alone."""
    found = []
    for used in (slice(None), slice(1)):
        leaves = [each.detach().requires_grad_() for each in parts]
        output = op(*leaves)
        outputs = list(output) if isinstance(output, (tuple, list)) else [output]
        loss = sum((each.square() * 3 + each).sum() for each in outputs[used])
        (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).backward()
        found += [
            *outputs,
            *[torch.zeros_like(t) if leaf.grad is None else leaf.grad for leaf, t in zip(leaves, tensors, strict=True)],
        ]
    return [each.detach() for each in whole(found)]


def check(op, sizes, placements, mesh, kernel=None):
    """Compare a call on DTensors, by a kernel of this name, with that on whole tensors, then by the reference."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    with opkit.use_kernel(op, "reference") if kernel else contextlib.nullcontext():
        wanted = results(op, tensors, tensors)
    parts = [distribute_tensor(t, mesh, [p] * mesh.ndim) for t, p in zip(tensors, placements, strict=True)]
    with opkit.use_kernel(op, kernel) if kernel else contextlib.nullcontext():
        found = results(op, tensors, parts)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, msg=f"{op.name} {placements} {mesh}: {got} is not {want}")


@processes.case
def one_dimension(mesh):
    for op, sizes, every in CALLS:
        for placements in every:
            check(op, sizes, placements, mesh)


@processes.case
def two_dimensions(mesh):
    grid = DeviceMesh("cpu", torch.arange(mesh.size()).reshape(2, -1))
    for op, sizes, every in CALLS:
        for placements in every:
            check(op, sizes, placements, grid)


@processes.case
def writes_lists_and_optional_arguments(mesh):
    x, by = torch.randn(7, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    dist.broadcast(x, 0), dist.broadcast(by, 0)
    placed = distribute_tensor(x, mesh, [Shard(0)])
    scale(placed, distribute_tensor(by, mesh, [R]))
    torch.testing.assert_close(placed.full_tensor(), x * by)
    ones = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, by)]
    for got, want in zip(whole(scaled(ones)), scaled([x, by]), strict=True):
        torch.testing.assert_close(got, want)
    (got,), (want,) = whole(scaled([placed], distribute_tensor(by, mesh, [Shard(0)]))), scaled([x * by], by)
    torch.testing.assert_close(got, want)


if __name__ == "__main__":
    processes.main()
