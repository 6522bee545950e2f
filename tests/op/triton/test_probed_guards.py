"""Two calls that need different compiled code never share one."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import opkit
from opkit.kernels.triton import compiling


def scaled(x: Tensor, s: float) -> Tensor:
    return x * s


@triton.jit
def _scaled(x, out, n, s, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * s * SIGN, at < n)


@pytest.fixture
def launched(on_cpu, op):
    """The SIGN that is compiled in, for calls with tensors of some sizes, or with some scalars."""

    def run(sign, calls):
        made = op(scaled)
        made.register_kernel("cpu", opkit.triton_kernel(_scaled, grid=1, n=lambda x: x.numel, SIGN=sign, BLOCK=64))
        for n, s in calls:
            made(torch.ones(n), s)
        return [repr(launch.request.constexprs["SIGN"]) for launch in on_cpu.launches]

    return run


def test_zeros_of_both_signs(launched):
    calls = [(10, 0.0), (10, -0.0), (10, 0.0)]
    assert launched(lambda s: math.copysign(1.0, s), calls) == ["1.0", "-1.0", "1.0"]


def test_floats_themselves(launched):
    floats = [0.0, -0.0, 0.0, math.nan, math.inf, 0.5]
    assert launched(lambda s: s, [(10, s) for s in floats]) == [repr(s) for s in floats]


def test_numbers_of_several_types(launched):
    values = {10: 1, 11: True, 12: 1.0, 13: (1, 2), 14: (True, 2)}
    calls = [(n, 1.0) for n in values]
    assert launched(lambda x: values[x.numel], calls) == [repr(value) for value in values.values()]


def test_lists(launched):
    assert launched(lambda x: [*x.shape], [(5, 1.0), (6, 1.0), (5, 1.0)]) == ["[5]", "[6]", "[5]"]


@triton.jit
def _moded(x, out, n, MODE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n)
    if MODE == "1":
        value = -value
    tl.store(out + at, value, at < n)


def test_texts_and_numbers_that_look_alike():
    signature = {"x": "*fp32", "out": "*fp32", "n": "i32", "MODE": "constexpr", "BLOCK": "constexpr"}
    made = [
        compiling.build(compiling.CompileRequest(_moded, signature, {"MODE": mode, "BLOCK": 32})).image
        for mode in (1, "1")
    ]
    assert made[0] != made[1]


@triton.jit
def _numbers(x, out, brain: tl.bfloat16, half: tl.float16, single, double: tl.float64, whole: tl.uint64):
    tl.store(out, tl.load(x) + brain + half + single + double + whole)


def test_computed_numbers_are_passed_in_their_types(on_cpu, op):
    made = op(scaled)
    numbers = {"brain": 0.5, "half": lambda: 1e9, "single": lambda: 1e300, "double": 1e300, "whole": 2**64 - 1}
    made.register_kernel("cpu", opkit.triton_kernel(_numbers, grid=1, **numbers))
    made(torch.ones(1), 1.0)
    values = on_cpu.launches[0].values
    assert values["brain"] == b"\x00\x3f"
    assert values["half"] == b"\x00\x7c"
    assert values["single"] == math.inf
    assert values["double"] == 1e300
    assert values["whole"] == b"\xff" * 8
