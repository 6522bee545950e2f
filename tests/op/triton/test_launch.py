"""Launches by hand: kernels called on tensors and numbers by name. The driver is a fake."""

import pytest
import torch
import triton
import triton.language as tl

import opkit
from opkit.errors import ArgumentTypeError, DeclarationError, KernelError


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    pass


@triton.jit
def biased(x, bias, out, a, HAS_BIAS: tl.constexpr):
    pass


@triton.jit
def strided(x, out, x_stride_0, out_numel):
    pass


def adding(**options):
    grid = {"grid": lambda n, BLOCK: triton.cdiv(n, BLOCK), "n": lambda out: out.numel}
    return opkit.triton_kernel(add, **{**grid, "BLOCK": 64, **options})


def parameters(row):
    return [int.from_bytes(bytes.fromhex(part), "little") for part in row[-1].split()]


def test_a_launch(device):
    kernel = adding()
    x, y = torch.randn(100), torch.randn(100)
    for _ in range(3):
        out = torch.empty(100)
        kernel(x=x, y=y, out=out)
        torch.testing.assert_close(out, x + y)
    assert device.grids == ["2,1,1"] * 3
    assert len(device.requests) == 1
    assert len(kernel.forms) == 1


def test_sizes_and_strides_follow_from_the_tensors(device):
    kernel = opkit.triton_kernel(strided, grid=1)
    x, out = torch.randn(4, 16)[:, ::2], torch.empty(4, 8)
    kernel(x=x, out=out)
    assert parameters(device.launches[0])[:4] == [x.data_ptr(), out.data_ptr(), 16, 32]


def test_tensors_are_passed_as_they_lie(device):
    kernel = adding()
    x, out = torch.randn(8, 6).t(), torch.empty(6, 8)
    kernel(x=x, y=x, out=out)
    assert parameters(device.launches[0])[0] == x.data_ptr()


def test_what_a_grid_asks_for_is_given_by_name(device):
    kernel = opkit.triton_kernel(strided, grid=lambda batch: batch)
    kernel(x=torch.ones(4), out=torch.empty(4), batch=5)
    assert device.grids == ["5,1,1"]


def test_none_and_numbers(device):
    kernel = opkit.triton_kernel(biased, grid=1, HAS_BIAS=lambda bias: bias is not None)
    x = torch.ones(4)
    kernel(x=x, bias=None, out=x, a=2.5)
    kernel(x=x, bias=x, out=x, a=3.5)
    kernel(x=x, bias=None, out=x, a=4)
    assert [request.signature["bias"] for request in device.requests] == ["constexpr", "*fp32", "constexpr"]
    assert [request.signature["a"] for request in device.requests] == ["fp32", "fp32", "i32"]
    assert [request.constexprs["HAS_BIAS"] for request in device.requests] == [False, True, False]
    assert len(kernel.forms) == 3


def test_a_value_that_is_none_of_these():
    with pytest.raises(
        ArgumentTypeError, match=r"add: the value \[1, 2\] for n is list. A launch takes tensors, numbers"
    ):
        adding()(x=torch.ones(2), y=torch.ones(2), out=torch.ones(2), n=[1, 2])


def test_a_parameter_without_a_value():
    with pytest.raises(DeclarationError, match=r"add, kernel 'add': 'y' stands for nothing"):
        adding()(x=torch.ones(2), out=torch.ones(2))


def test_no_tensor_at_all():
    @triton.jit
    def nothing(n):
        pass

    with pytest.raises(ArgumentTypeError, match="nothing: it was launched without a tensor"):
        opkit.triton_kernel(nothing, grid=1)(n=3)


def test_tensors_that_no_triton_kernel_runs_on():
    with pytest.raises(KernelError, match=r"add: it was launched on cpu tensors. .* in the interpreter on the CPU's"):
        adding()(x=torch.ones(2), y=torch.ones(2), out=torch.ones(2))


def test_a_failure_names_the_kernel(device):
    device.fake.fail("cuLaunchKernel", 1)
    with pytest.raises(RuntimeError, match=r"add .*CUDA_ERROR_INVALID_VALUE"):
        adding()(x=torch.ones(2), y=torch.ones(2), out=torch.ones(2))


def test_a_launch_under_vmap_is_no_silent_nonsense(device):
    kernel = adding()

    def run(x):
        out = torch.empty_like(x)
        kernel(x=x, y=x, out=out)
        return out

    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.vmap(run)(torch.ones(3, 4))
    assert not device.launches
