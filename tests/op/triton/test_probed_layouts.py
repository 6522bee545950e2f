"""Which tensors are made contiguous: the launcher in C, the same rule in Python, and memory agree."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import opkit
from opkit.op.triton.python import packed


@triton.jit
def _read(x, out, B: tl.constexpr):
    pass


def first(x: Tensor) -> Tensor:
    return x.new_ones(1)


_TOLD = {
    (0,): lambda x_stride_0: 1,
    (-1,): lambda x_stride_m1: 1,
    (-2,): lambda x_stride_m2: 1,
    (0, 1): lambda x_stride_0, x_stride_1: 1,
    (1, -1): lambda x_stride_1, x_stride_m1: 1,
    (0, -2): lambda x_stride_0, x_stride_m2: 1,
    (): lambda x: 1,
}


def tensor(random):
    sizes = [random.choice([1, 1, 2, 3]) for _ in range(random.choice([2, 3, 4]))]
    x = torch.empty([size * random.choice([1, 1, 2]) for size in sizes]).permute(
        random.sample(range(len(sizes)), len(sizes))
    )
    for d in range(x.dim()):
        x = x.narrow(d, 0, min(x.shape[d], random.choice([1, 2, 3])))
        if x.shape[d] == 1 and random.random() < 0.3:
            x = x.expand([3 if e == d else -1 for e in range(x.dim())])
    return x


@pytest.mark.sweep(2)
@pytest.mark.parametrize("told", _TOLD, ids=str)
def test_what_is_told_stays_where_it_lies(on_cpu, op, told):
    made, seeded = op(first), random.Random(str(told))
    made.register_kernel("cpu", opkit.triton_kernel(_read, grid=1, B=_TOLD[told]))
    for x in (tensor(seeded) for _ in range(60)):
        if any(d >= x.dim() for d in told):
            continue
        on_cpu.fake.library.fake_reset()
        made(x)
        stays = on_cpu.launches[0].values["x"] == x.data_ptr()
        assert stays == packed(x, told) == follows(x, told), (x.shape, x.stride())


def follows(x, told):
    """Whether each element lies where its index, the sizes and the told strides say that it lies."""
    free, strides, step = {d % x.dim() for d in told}, [0] * x.dim(), 1
    for d in reversed(range(x.dim())):
        strides[d] = x.stride(d) if d in free else step
        step = strides[d] * x.shape[d]
    index = itertools.product(*(range(size) for size in x.shape))
    return all(sum(i * (s - t) for i, s, t in zip(at, x.stride(), strides, strict=True)) == 0 for at in index)
