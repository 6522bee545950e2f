"""Dtypes of torch and of JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

_NAMES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip
OF_TORCH: dict[torch.dtype, Any] = {getattr(torch, name): jnp.dtype(getattr(jnp, name)) for name in _NAMES}
"""JAX's dtype for each of torch's."""

_OF_JAX = {dtype: each for each, dtype in OF_TORCH.items()}


def x64() -> bool:
    """Return whether JAX has 64-bit types; where it has not, float64 is float32 there and int64 is int32."""
    return bool(jax.config.read("jax_enable_x64"))


def to_jax(dtype: torch.dtype) -> Any:
    """Return the dtype that JAX has for ``dtype`` under its present configuration.

    >>> import torch
    >>> to_jax(torch.bfloat16)
    dtype(bfloat16)
    """
    return jax.dtypes.canonicalize_dtype(OF_TORCH[dtype])


def to_torch(dtype: Any) -> torch.dtype | None:
    """Return torch's dtype for a dtype of JAX; None where torch has none."""
    return _OF_JAX.get(jnp.dtype(dtype))


def constant(tensor: torch.Tensor) -> Any:
    """Return a tensor that a reference holds as an array."""
    tensor = tensor.detach().cpu().contiguous()
    numbers = tensor.view(torch.uint8).numpy() if tensor.ndim else tensor.reshape(1).view(torch.uint8).numpy()
    array = np.frombuffer(numbers.tobytes(), OF_TORCH[tensor.dtype]).reshape(tensor.shape)
    return jnp.asarray(array, to_jax(tensor.dtype))
