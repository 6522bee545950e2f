"""Triton kernels for JAX's GPUs: what jax_triton is passed, on a machine that needs neither."""

import importlib.machinery
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit import errors
from opkit.jax import triton_kernels

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _affine(x, out, bias, factor, n, x_numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < x_numel
    value = tl.load(x + at, inside) * factor
    if bias is not None:
        value += tl.load(bias + at % n, inside)
    tl.store(out + at, value, inside)


@pytest.fixture(scope="module")
def affine():
    @opkit.custom_op("jaxt::affine")
    def affine(
        x: Float[Tensor, "m n"], bias: Float[Tensor, "n"] | None = None, factor: float = 2.0
    ) -> Float[Tensor, "m n"]:
        return x * factor if bias is None else x * factor + bias

    kernel = opkit.triton_kernel(
        _affine, grid=lambda x_numel, BLOCK: triton.cdiv(x_numel, BLOCK), configs=[{"BLOCK": 8, "num_warps": 1}, {"BLOCK": 16}]
    )  # fmt: skip
    affine.register_kernel("cuda", kernel, name="triton")
    yield affine
    opkit.remove("jaxt::affine")


@pytest.fixture
def gpu(monkeypatch):
    """JAX as on a GPU, and what jax_triton is called with; its results are zeros."""
    calls = []

    def triton_call(*arrays, out_shape, **options):
        calls.append((arrays, out_shape, options))
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    module = types.ModuleType("jax_triton")
    module.__spec__ = importlib.machinery.ModuleSpec("jax_triton", None)
    module.triton_call = triton_call
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    monkeypatch.setattr(triton_kernels, "has_gpu", lambda: True)
    return calls


def _compiled(kernel, signature, constants):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types_of = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, types_of, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.parametrize("with_bias", [True, False])
def test_call_of_jax_triton(affine, gpu, with_bias):
    x, bias = jnp.ones((3, 5)), jnp.ones(5) if with_bias else None
    result = jax.jit(lambda x, bias: opkit.to_jax(affine)(x, bias, 3.0))(x, bias)
    np.testing.assert_array_equal(result, 3 * x + (0 if bias is None else bias))  # by the reference, on this CPU
    ((passed, results, options),) = gpu
    kernel = options.pop("kernel")
    named = dict(zip(kernel.arg_names, [*passed, *results], strict=False))
    assert [named["x"].shape, named["factor"], named["n"], named["x_numel"], named["out"].shape] == [
        (3, 5),
        3.0,
        5,
        15,
        (3, 5),
    ]
    assert ("bias" in named) is with_bias
    constants = {"BLOCK": 8} if with_bias else {"BLOCK": 8, "bias": None}
    assert options == {"grid": (2, 1, 1), "zeroed_outputs": (), "num_warps": 1, **constants}
    assert isinstance(named["factor"], np.float32)
    types_of = {"x": "*fp32", "bias": "*fp32", "factor": "fp32", "n": "i32", "x_numel": "i32", "out": "*fp32"}
    assert "_affine_for_jax" in _compiled(kernel, {name: types_of[name] for name in named}, constants)


def test_without_jax_triton(affine, monkeypatch):
    monkeypatch.setattr(triton_kernels, "has_gpu", lambda: True)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    f, x = opkit.to_jax(affine), jnp.ones((2, 3))
    monkeypatch.setattr(triton_kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(errors.NoCompilerWarning, match="triton is not used.*jax_triton is not installed"):
        np.testing.assert_array_equal(f(x), 2 * x)
    with opkit.use_kernel(affine, "triton"), pytest.raises(errors.KernelError, match="pip install jax-triton"):
        f(x)


def test_forced_on_a_cpu(affine):
    with (
        opkit.use_kernel(affine, "triton"),
        pytest.raises(errors.KernelError, match="which runs on cuda, but the arguments are on"),
    ):
        opkit.to_jax(affine)(torch.ones(2, 3).numpy())
