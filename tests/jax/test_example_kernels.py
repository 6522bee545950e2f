"""The ten operators of examples/kernels as functions of JAX, with their registered gradients."""

import jax
import jax.numpy as jnp
import pytest
import torch
from jax_comparison import same

import opkit

pytest.importorskip("triton")
import row_kernels as rows  # which puts the examples on the path
import token_kernels as tokens

import dropout  # isort: skip
import quantize  # isort: skip

CASES = {**rows.CASES, **tokens.CASES}
SHAPES = {**{name: [(3, 5), (2, 3, 64), (0, 8)] for name in rows.CASES}, **tokens.SHAPES}
FORWARD = (
    "rms_norm", "add_rms_norm", "layer_norm", "softmax", "swiglu", "rotary", "cross_entropy", "linear_cross_entropy",
    "router 2 of all",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def check(name, shape, dtype=torch.float32):
    case = CASES[name]
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    constants = 2 if name == "rotary" else None  # its angles take no gradient
    same(case.op, *case.arguments(shape, dtype), gradient="backward" not in name, of=constants, **near)


@pytest.mark.sweep(keep=["rms_norm", "swiglu", "rotary", "cross_entropy", "router 2 of all"])
@pytest.mark.parametrize("name", FORWARD)
def test_numbers_and_gradients(name):
    check(name, SHAPES[name][1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_all_of_them(name, dtype):
    for shape in SHAPES[name]:
        if torch.Size(shape).numel() < 10_000:
            check(name, shape, dtype)


@pytest.mark.exhaustive
def test_dropout_needs_64_bits():
    x = torch.randn(3, 8)
    with jax.enable_x64(True):
        same(dropout.dropout, x, 0.5, 2**40 + 7)


@pytest.mark.parametrize("quantizer", [quantize.quantize_int8, quantize.quantize_fp8], ids=["int8", "float8"])
def test_quantizers(quantizer):
    same(quantizer, torch.randn(3, 8), gradient=False)
    quantized, scale = quantizer(torch.randn(3, 8))
    same(quantize.dequantize, quantized, scale, torch.bfloat16, gradient=False, rtol=1e-2)


def test_arrays_of_numpy_and_of_half_precision():
    result = opkit.to_jax(CASES["softmax"].op)(jnp.ones((2, 4), jnp.bfloat16))
    assert result.dtype == jnp.bfloat16
    assert (result == 0.25).all()
