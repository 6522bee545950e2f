"""Operators with Triton kernels that the tests run in the interpreter, trace and compile."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit


@triton.jit
def _rms_norm(x_ptr, weight, out, x_stride_m2, d, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride_m2 + at, at < d, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, 0) / d + eps)
    w = tl.load(weight + at, at < d, other=0.0).to(tl.float32)
    tl.store(out + row * d + at, x * scale * w, at < d)


@opkit.custom_op("triton_tests::rms_norm")
def rms_norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (x.float() * scale * weight.float()).to(x.dtype)


rms_norm.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _rms_norm,
        grid=lambda batch: (batch,),
        BLOCK=lambda d: triton.next_power_of_2(d),
        num_warps=4,
        examples=[{"x": "bf16[64, 1024]", "weight": "bf16[1024]"}],
    ),
)


@opkit.custom_op("triton_tests::bare")
def bare(x: Tensor) -> Tensor:
    return x + 1


@triton.jit
def _axpy(x, y, out, a, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, a * tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


axpy_kernel = opkit.triton_kernel(
    _axpy, grid=lambda n, BLOCK: triton.cdiv(n, BLOCK), n=lambda out: out.numel, BLOCK=128
)


@opkit.custom_op("triton_tests::axpy")
def axpy(x: Tensor, y: Tensor, a: float) -> Tensor:
    return a * x + y


axpy.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _axpy,
        grid=lambda n, BLOCK: triton.cdiv(n, BLOCK),
        n=lambda out: out.numel,
        configs=[{"BLOCK": 64, "num_warps": 2}, triton.Config({"BLOCK": 128}, num_warps=4)],
    ),
)


@opkit.custom_op("triton_tests::twice")
def twice(x: Tensor, y: Tensor) -> Tensor:
    return 3 * x + 2 * y


@twice.register_kernel(("cpu", "cuda"), traceable=True)
def _two_launches(x: Tensor, y: Tensor) -> Tensor:
    first, second = torch.empty_like(x), torch.empty_like(x)
    axpy_kernel(x=x, y=y, out=first, a=1.0)
    axpy_kernel(x=x, y=first, out=second, a=1.0)
    axpy_kernel(x=x, y=second, out=first, a=1.0)
    return first + y


@triton.jit
def _add_into(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@opkit.custom_op("triton_tests::add_into", mutates_args=("x",))
def add_into(x: Tensor, y: Tensor) -> None:
    x += y


add_into.register_kernel(
    "cuda", opkit.triton_kernel(_add_into, grid=lambda n: triton.cdiv(n, 64), n=lambda x: x.numel, BLOCK=64)
)


@triton.jit
def _total(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + at, at < n, other=0.0), 0))


@opkit.custom_op("triton_tests::total")
def total(x: Tensor) -> Tensor:
    return x.sum()


total.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _total, grid=lambda n: triton.cdiv(n, 64), n=lambda x: x.numel, BLOCK=64, reset_to_zero=("out",)
    ),
)


@triton.jit
def _scaled(x, bias, out, n, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n) * 2
    if HAS_BIAS:
        value += tl.load(bias + at, at < n)
    tl.store(out + at, value, at < n)


@opkit.custom_op("triton_tests::scaled")
def scaled(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x * 2 if bias is None else x * 2 + bias


scaled.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _scaled,
        grid=lambda n: triton.cdiv(n, 64),
        n=lambda x: x.numel,
        HAS_BIAS=lambda bias: bias is not None,
        BLOCK=64,
    ),
)


@triton.jit
def _converted(x, out, n, dtype: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n).to(dtype), at < n)


@opkit.custom_op("triton_tests::converted")
def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


converted.register_kernel(
    "cuda", opkit.triton_kernel(_converted, grid=lambda n: triton.cdiv(n, 64), n=lambda x: x.numel, BLOCK=64)
)
