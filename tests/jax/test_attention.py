"""``opkit.attention`` as a function of JAX, compared with itself."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_comparison import close, same, to_arrays

import opkit
from opkit import errors
from opkit.masks import ALiBi, Causal, KeyPadding, SlidingWindow

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def inputs(sequence=7, dtype=torch.float32, heads=4, key_heads=2):
    """Queries, keys and values of shared heads, an odd length and different head sizes."""
    shapes = (heads, 8), (key_heads, 8), (key_heads, 6)
    return [torch.randn(2, count, sequence, d).to(dtype) for count, d in shapes]


def padded(q, k, v, lengths):
    return opkit.attention(q, k, v, mask=Causal() & SlidingWindow(3) & KeyPadding(lengths))


def biased(q, k, v, bias, sinks):
    return opkit.attention(q, k, v, bias=bias, sinks=sinks, softcap=3.0, return_lse=True)


def test_causal_windowed_and_padded():
    same(padded, *inputs(), torch.tensor([7, 0]), **CLOSE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sequence", [0, 1, 9])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": Causal() & SlidingWindow(3)},
        {"mask": KeyPadding(torch.tensor([1, 0]))},
        {"bias": ALiBi(torch.tensor([0.5, 0.25, 0.125, 0.0625]))},
        {"scale": 0.3},
    ],
    ids=["plain", "causal", "padded", "alibi", "scale"],
)
def test_options(options, sequence, dtype):
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else CLOSE
    same(opkit.attention, *inputs(sequence, dtype), **options, **near)


@pytest.mark.exhaustive
def test_biases_and_sinks_have_gradients():
    same(biased, *inputs(), torch.randn(4, 7, 7), torch.randn(4), **CLOSE)


def test_half_precision_and_export():
    q, k, v = to_arrays(inputs(5))
    attend = opkit.to_jax(opkit.attention)
    half = attend(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), attend(q, k, v), rtol=5e-2, atol=5e-2)
    assert "stablehlo" in jax.export.export(jax.jit(attend))(q, k, v).mlir_module()


def test_lengths_that_a_mask_holds_may_be_written_to():
    q = jnp.ones((1, 1, 1, 4))
    k = v = jnp.arange(12.0).reshape(1, 1, 3, 4)
    attend, lengths = opkit.to_jax(opkit.attention), torch.tensor([1])
    mask = KeyPadding(lengths)
    first = attend(q, k, v, mask=mask)
    lengths.fill_(3)
    assert not jnp.allclose(first, attend(q, k, v, mask=mask))


@pytest.mark.exhaustive
def test_mapped():
    q, k, v = to_arrays(inputs(5))
    attend = opkit.to_jax(opkit.attention)
    mapped = jax.vmap(lambda q: attend(q, k, v, mask=Causal()))(jnp.stack([q, 2 * q]))
    np.testing.assert_allclose(mapped[1], attend(2 * q, k, v, mask=Causal()), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_gradients_of_gradients():
    tensors = [x.requires_grad_() for x in inputs(4)]
    attend = opkit.to_jax(opkit.attention)
    (first,) = torch.autograd.grad(opkit.attention(*tensors).square().sum(), tensors[0], create_graph=True)
    second = torch.autograd.grad(first.square().sum(), tensors)
    q, k, v = to_arrays(tensors)

    def gradient(q, k, v):
        return jnp.square(jax.grad(lambda q: jnp.square(attend(q, k, v)).sum())(q)).sum()

    close(list(jax.grad(gradient, (0, 1, 2))(q, k, v)), list(second), 1e-4, 1e-4)


def test_refusals():
    q, k, v = to_arrays(inputs())
    with pytest.raises(errors.RuleError, match="attention cannot be a function of JAX: it draws random numbers"):
        opkit.to_jax(opkit.attention)(q, k, v, dropout_p=0.5)
    with pytest.raises(errors.ShapeError, match=r"must agree in sequence: 3 and 7"):
        opkit.to_jax(opkit.attention)(q, k[:, :, :3], v)
