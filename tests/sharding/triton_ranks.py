"""Run by ``test_processes.py`` in several processes, where Triton interprets: an operator with a Triton kernel on DTensors."""

import processes
import torch
import triton
import triton.language as tl
from ranks import R, check
from torch import Tensor
from torch.distributed.tensor import Shard

import opkit


@opkit.custom_op("ranks::rms_norm_of_triton", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@triton.jit
def _rms_norm(x, weight, out, x_size_m1, eps):
    row, squares = tl.program_id(0) * x_size_m1, 0.0
    for column in range(x_size_m1):
        a = tl.load(x + row + column)
        squares += a * a
    scale = tl.rsqrt(squares / x_size_m1 + eps)
    for column in range(x_size_m1):
        tl.store(out + row + column, tl.load(x + row + column) * scale * tl.load(weight + column))


rms_norm.register_kernel("cuda", opkit.triton_kernel(_rms_norm, grid=lambda x: x.numel // x.shape[-1]), name="triton")


@processes.case
def triton_kernel(mesh):
    for placements in ([Shard(0), R], [Shard(1), R], [Shard(2), Shard(0)], [R, R]):
        check(rms_norm, [(5, 7, 6), (6,)], placements, mesh, kernel="triton")


if __name__ == "__main__":
    processes.main()
