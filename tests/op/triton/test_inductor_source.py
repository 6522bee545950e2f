"""What Inductor leaves out of a kernel that it writes down."""

import types

import pytest
import torch
import torch._inductor.config
import triton
import triton.language as tl
from torch import Tensor

import opkit
from opkit.op.triton.function import left_out

SIZE = tl.constexpr(64)
WHOLE = 2
HALF = 0.5


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def four_times(x):
    return twice(twice(x))


doubled = twice
helpers = types.ModuleType("helpers")
helpers.twice = twice


@triton.jit
def by_name(x, out, n):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, four_times(tl.load(x + at, at < n)) * WHOLE, at < n)


@triton.jit
def by_module(x, out, n):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, helpers.twice(tl.load(x + at, at < n)), at < n)


@triton.jit
def through_another(x):
    return helpers.twice(x)


@triton.jit
def by_two_steps(x, out, n):
    at = tl.arange(0, SIZE)
    tl.store(out + at, through_another(tl.load(x + at, at < n)), at < n)


@triton.jit
def by_another_name(x, out, n):
    at = tl.arange(0, SIZE)
    tl.store(out + at, doubled(tl.load(x + at, at < n)), at < n)


@triton.jit
def with_a_float(x, out, n):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, at < n) * HALF, at < n)


@pytest.mark.parametrize(
    ("kernel", "missing"),
    [
        (by_name, ""),
        (by_module, "helpers"),
        (by_two_steps, "helpers"),
        (by_another_name, "doubled, whose own name is twice"),
        (with_a_float, "HALF"),
    ],
)
def test_what_is_left_out_is_named(kernel, missing):
    assert left_out(kernel.fn) == missing


def copied(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(("kernel", "launches"), [(by_name, 1), (by_module, 0)])
def test_a_kernel_that_inductor_cannot_write_is_a_unit(device, captured, kernel, launches):
    size = {"grid": lambda n: triton.cdiv(n, 64), "n": lambda out: out.numel}
    op = device.define(copied, opkit.triton_kernel(kernel, **size))
    captured.compiled(op)(torch.randn(100))
    assert len(captured.launches) == launches
    assert len(captured.calls_of(op)) == 1 - launches


@triton.jit
def scaled(x, out, n, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * by, at < n)


def times(x: Tensor, by: float) -> Tensor:
    return x * by


@pytest.mark.parametrize(("widens", "launches"), [(True, 0), (False, 1)])
def test_a_float_that_inductor_would_widen_makes_a_unit(device, captured, monkeypatch, widens, launches):
    monkeypatch.setattr(torch._inductor.config, "_use_fp64_for_unbacked_floats", widens, raising=False)
    how = {"grid": lambda n, BLOCK: triton.cdiv(n, BLOCK), "n": lambda out: out.numel, "BLOCK": 64}
    op = device.define(times, opkit.triton_kernel(scaled, **how))
    captured.compiled(lambda x: op(x, 0.5))(torch.randn(100))
    assert len(captured.launches) == launches
    assert len(captured.calls_of(op)) == 1 - launches
