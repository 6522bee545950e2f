"""Launches by hand, several kernels and several operators: what lives how long, and what is refused."""

import copy
import gc
import weakref

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import opkit
from opkit.errors import DeclarationError


@triton.jit
def _copy(x, out, n, flag, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, tl.load(x + at, at < n) * flag, at < n)


def made(**options):
    return opkit.triton_kernel(_copy, **{"grid": 1, "B": 64, "n": lambda x: x.numel, **options})


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_kernels_that_nobody_holds_are_given_back(on_cpu):
    def used():
        kernel = made()
        kernel(x=torch.ones(3), out=torch.ones(3), flag=True)
        return weakref.ref(kernel)

    kernel = used()
    gc.collect()
    assert kernel() is None


@pytest.mark.exhaustive
def test_more_kernels_than_a_process_can_have_at_once(on_cpu):
    on_cpu.fake.library.fake_quiet(1)
    for number in range(1100):
        made()(x=torch.ones(3), out=torch.ones(3), flag=True)
        if number % 200 == 0:
            gc.collect()


def test_what_nothing_asks_for_is_refused(on_cpu):
    with pytest.raises(DeclarationError, match=r"it was launched with nope=, which nothing uses. Its parameters are x"):
        made()(x=torch.ones(3), out=torch.ones(3), flag=True, nope=1)
    with pytest.raises(DeclarationError, match="it was launched with n="):
        made()(x=torch.ones(3), out=torch.ones(3), flag=True, n=3)


def test_a_kernel_can_be_part_of_what_is_copied():
    kernel = made()
    assert copy.deepcopy({"kernel": kernel})["kernel"] is kernel


def test_kinds_of_values_are_launched_apart(on_cpu):
    kernel, x = made(), torch.ones(3)
    for flag in (True, 3, 1, 0.5, None):
        kernel(x=x, out=x, flag=flag)
    kinds = [launch.request.signature["flag"] for launch in on_cpu.launches]
    assert kinds == ["u1", "i32", "constexpr", "fp32", "constexpr"]


def test_one_kernel_for_two_operators_and_by_hand(on_cpu, op):
    kernel = made(flag=1)

    def other(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    first, second = op(like), op(other)
    first.register_kernel("cpu", kernel)
    second.register_kernel("cpu", kernel)
    first(torch.ones(3))
    second(torch.ones(3))
    kernel(x=torch.ones(3), out=torch.ones(3))
    assert len(on_cpu.launches) == 3


def test_several_kernels_of_one_function(on_cpu, op):
    each = op(like)
    for number, conditions in enumerate(
        ({"dtypes": [torch.float32]}, {"dtypes": [torch.bfloat16]}, {"when": lambda x: x.dim() == 3}), 1
    ):
        each.register_kernel("cpu", made(flag=1, grid=number), name=f"k{number}", **conditions)
    calls = [torch.ones(3), torch.ones(3).bfloat16(), torch.ones(1, 1, 3)]
    for x in [*calls, *calls, *calls]:
        each(x)
    assert [launch.grid[0] for launch in on_cpu.launches] == [1, 2, 3] * 3
    with opkit.use_kernel(each, "k2"):
        each(calls[0])
    each(calls[0])
    assert [launch.grid[0] for launch in on_cpu.launches[-2:]] == [2, 1]


def test_a_kernel_that_is_registered_anew_replaces_itself(on_cpu, op):
    each = op(like)
    for number in (1, 3):
        each.register_kernel("cpu", made(flag=1, grid=number))
        for _ in range(3):
            each(torch.ones(3))
    assert [launch.grid[0] for launch in on_cpu.launches] == [1, 1, 1, 3, 3, 3]


def test_a_negated_view_is_read_as_what_it_stands_for(on_cpu, op):
    each = op(like)
    each.register_kernel("cpu", made(flag=1))
    x = torch._neg_view(torch.ones(4))
    for _ in range(4):
        each(x)
    assert all(launch.values["x"] != x.data_ptr() for launch in on_cpu.launches)
