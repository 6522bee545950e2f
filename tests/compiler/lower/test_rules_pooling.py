"""Pooling, its derivatives, and images of other sizes, against eager."""

from __future__ import annotations

import math

import pytest
import torch

from tests.compiler.graphs import check, computes, externs, program_of

aten = torch.ops.aten
NARROW = {"rtol": 3e-2, "atol": 3e-2}

# size, stride, padding, dilation, ceil_mode
MAX_POOLS = {
    "plain": ([2, 2], [], 0, 1, False),
    "overlapping": ([3, 2], [2, 1], [1, 0], 1, False),
    "padded": ([3, 3], [1, 1], 1, 1, False),
    "dilated": ([2, 2], [2, 2], [1, 1], 2, False),
    "ceil": ([3, 3], [2, 2], 1, 1, True),
}
# size, stride, padding, ceil_mode, count_include_pad, divisor_override
AVG_POOLS = {
    "plain": ([2, 2], []),
    "overlapping": ([3, 2], [2, 1], [1, 0]),
    "gaps": ([2, 2], [3, 3]),
    "without padding": ([3, 3], [2, 2], [1, 1], False, False),
    "ceil": ([3, 3], [2, 2], [1, 1], True),
    "ceil without padding": ([3, 3], [2, 2], [1, 1], True, False),
    "divisor": ([2, 3], [1, 2], [1, 1], False, True, 5),
    "large": ([6, 5], [1, 1], [3, 2], False, False),
}


def numbers(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MAX_POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_pool(name, dtype):
    pool = MAX_POOLS[name]
    x = numbers(2, 3, 7, 6, dtype=dtype)
    check(lambda x: aten.max_pool2d_with_indices(x, *pool), x, exact=True)
    check(lambda x: aten.max_pool2d_with_indices(x, *pool)[0], x[0], exact=True)
    _, indices = aten.max_pool2d_with_indices(x, *pool)
    grad = torch.rand(indices.shape).to(dtype)
    backward = aten.max_pool2d_with_indices_backward
    check(lambda g, x, i: backward(g, x, *pool, i), grad, x, indices, **(NARROW if dtype != torch.float32 else {}))


def test_max_pool_of_special_values():
    low = torch.full((1, 1, 4, 4), -math.inf)
    check(lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], 1), low, exact=True)
    low[0, 0, 1, 1] = math.nan
    check(lambda x: aten.max_pool2d_with_indices(x, [2, 2]), low)
    check(lambda x: aten.max_pool2d_with_indices(x, [2, 2]), numbers(0, 2, 4, 4))
    check(lambda x: aten.max_pool2d_with_indices(x, [2, 2], [1, 1], 1), torch.arange(-9, 7).reshape(1, 4, 4))


def test_max_pool_of_channels_last_and_in_other_dimensions():
    x = numbers(2, 3, 6, 6).to(memory_format=torch.channels_last)
    check(lambda x: aten.max_pool2d_with_indices(x, [2, 2]), x, exact=True)
    check(lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], 1), x, exact=True)
    check(lambda x: aten.max_pool3d_with_indices(x, [2, 2, 2], [1, 2, 2], [1, 0, 1]), numbers(2, 3, 4, 4, 5))
    check(lambda x: torch.nn.functional.max_pool1d(x, 3, 2, 1), numbers(2, 3, 8))


def test_max_pool_without_indices_is_one_compute():
    assert len(computes(program_of(lambda x: aten.max_pool2d_with_indices(x, [2, 2])[0], numbers(2, 3, 4, 4)))) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("name", AVG_POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_avg_pool(name, dtype):
    pool = AVG_POOLS[name]
    limits = NARROW if dtype != torch.float32 else {}
    x = numbers(2, 3, 7, 6, dtype=dtype)
    check(lambda x: aten.avg_pool2d(x, *pool), x, **limits)
    grad = torch.rand(aten.avg_pool2d(x, *pool).shape).to(dtype)
    size, step, padding, ceil, with_padding, divisor = [*pool, *([], [0, 0], False, True, None)[len(pool) - 1 :]]
    backward = aten.avg_pool2d_backward
    check(lambda g, x: backward(g, x, size, step, padding, ceil, with_padding, divisor), grad, x, **limits)


def test_avg_pool_in_other_dimensions():
    check(lambda x: aten.avg_pool3d(x, [2, 2, 2], [1, 2, 2], [1, 0, 1]), numbers(2, 3, 4, 4, 5))
    check(lambda x: torch.nn.functional.avg_pool1d(x, 3, 2, 1), numbers(2, 3, 8))
    x = torch.arange(16).reshape(1, 4, 4)
    assert "integers" in externs(program_of(lambda x: aten.avg_pool2d(x, [2, 2]), x))[0]


def test_adaptive_pool():
    x = numbers(2, 3, 6, 4)
    check(lambda x: aten._adaptive_avg_pool2d(x, [3, 2]), x)
    check(lambda x: aten._adaptive_avg_pool2d(x, [1, 1]), x)
    check(lambda g, x: aten._adaptive_avg_pool2d_backward(g, x), numbers(2, 3, 3, 2), x)
    check(lambda x: aten.adaptive_max_pool2d(x, [2, 2]), x, exact=True)
    indices = aten.adaptive_max_pool2d(x, [2, 2])[1]
    check(lambda g, x, i: aten.adaptive_max_pool2d_backward(g, x, i), numbers(2, 3, 2, 2), x, indices)
    assert "different sizes" in externs(program_of(lambda x: aten._adaptive_avg_pool2d(x, [4, 2]), x))[0]


# ---- images of other sizes -------------------------------------------------------------------------------------------


def test_upsample_nearest(subtests):
    def one(sizes):
        x = numbers(2, 3, 4, 5)
        check(lambda x: aten.upsample_nearest2d(x, sizes), x, exact=True)
        check(lambda x: aten.upsample_nearest2d.vec(x, sizes, None), x, exact=True)

    for case in [(8, 10), (12, 15), (4, 5), (2, 5)]:
        with subtests.test(str(case)):
            one(case)


def test_upsample_by_scales():
    check(lambda x: torch.nn.functional.interpolate(x, scale_factor=2), numbers(2, 3, 4, 5), exact=True)
    check(lambda x: torch.nn.functional.interpolate(x, scale_factor=3), numbers(2, 3, 4), exact=True)
    rounded = externs(program_of(lambda x: aten.upsample_nearest1d(x, [7], 3.0), numbers(1, 1, 3)))
    assert "depend on rounding" in rounded[0]


def test_upsample_whatever_the_sizes(subtests):
    def one(size):
        check(lambda x: aten.upsample_nearest1d(x, [3 * size + 1]), numbers(1, 2, size), lowered=False, exact=True)

    for case in range(1, 9):
        with subtests.test(str(case)):
            one(case)


def test_padding_by_what_is_inside():
    x = numbers(2, 3, 4, 5)
    check(lambda x: aten.reflection_pad2d(x, [2, 1, 0, 3]), x, exact=True)
    check(lambda x: aten.replication_pad2d(x, [2, 7, 0, 3]), x, exact=True)
    check(lambda x: aten.reflection_pad1d(x, [1, 2]), x[0], exact=True)
    check(lambda x: aten.replication_pad2d(x, [-1, 2, 1, -2]), x, exact=True)


def test_pixel_shuffle():
    check(lambda x: aten.pixel_shuffle(x, 2), numbers(2, 8, 3, 4), exact=True)
    check(lambda x: aten.pixel_unshuffle(x, 2), numbers(3, 4, 6), exact=True)
