"""An operator in JAX: its reference under jit, vmap and grad, and its C kernel on JAX's CPU.

It needs JAX (``pip install 'opkit[jax]'``)::

    python examples/jax_function.py
"""

import jax
import jax.numpy as jnp
import torch
from jaxtyping import Float
from torch import Tensor

import opkit


@opkit.custom_op("example::soft_threshold")
def soft_threshold(x: Float[Tensor, "*batch d"], threshold: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
    """Move every element towards zero by its column's threshold, and no further (Donoho, 1995)."""
    return torch.sign(x) * torch.relu(x.abs() - threshold)


KERNEL = opkit.c_kernel(
    """
    void soft_threshold(const T* x, const T* threshold, T* out, int64_t batch, int64_t d) {
        for (int64_t i = 0; i < batch; i++)
            for (int64_t j = 0; j < d; j++) {
                const T a = x[i * d + j], t = threshold[j];
                out[i * d + j] = a > t ? a - t : a < -t ? a + t : 0;
            }
    }
    """
)


def main() -> None:
    """Compare the function with the formula in JAX, before and after the kernel is registered."""
    shrink = opkit.to_jax(soft_threshold)
    x, threshold = jax.random.normal(jax.random.key(0), (8, 5)), jnp.full(5, 0.5)
    expected = jnp.sign(x) * jax.nn.relu(jnp.abs(x) - threshold)
    assert jnp.allclose(jax.jit(shrink)(x, threshold), expected)

    soft_threshold.register_kernel("cpu", KERNEL)
    shrink = opkit.to_jax(soft_threshold)  # anew, since jax.jit keeps what it traced of the function before
    program = jax.jit(shrink).lower(x, threshold).as_text()
    assert "custom_call @example.soft_threshold" in program
    assert jnp.allclose(jax.jit(shrink)(x, threshold), expected)
    assert jnp.allclose(jax.vmap(shrink, (0, None))(x, threshold), expected)

    loss = jax.jit(jax.value_and_grad(lambda threshold: jnp.square(shrink(x, threshold) - x).mean()))
    for _ in range(20):
        value, gradient = loss(threshold)
        threshold = threshold - gradient
    print(f"the loss after 20 steps is {value:.4f}")
    assert value < loss(jnp.full(5, 0.5))[0]


if __name__ == "__main__":
    main()
