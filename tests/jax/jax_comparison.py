"""Compare functions of torch with what ``opkit.to_jax`` makes of them, in results and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

import opkit


def to_array(value: Any) -> Any:
    """Return JAX's array of a tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    name = str(value.dtype).removeprefix("torch.")
    if name.startswith(("bfloat16", "float8")):
        return jnp.asarray(value.detach().float().numpy(), name)
    return jnp.asarray(value.detach().numpy(force=True))


def to_arrays(values: Any) -> Any:
    return pytree.tree_map(to_array, values)


def close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Check arrays against tensors, in a structure: shapes, dtypes but for 64 bits, and numbers."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for number, (array, tensor) in enumerate(pairs):
        if not isinstance(tensor, torch.Tensor):
            assert array == tensor
            continue
        assert isinstance(array, jax.Array)
        assert array.dtype == to_array(tensor).dtype, number
        assert array.shape == tuple(tensor.shape), number
        narrow = tensor.is_floating_point() and tensor.dtype.itemsize < 4
        wide = tensor.detach().float() if narrow else tensor.detach()
        numbers = np.asarray(array.astype(jnp.float32) if narrow else array)
        np.testing.assert_allclose(numbers, wide.numpy(force=True), rtol, atol, err_msg=f"result {number}")


def _seeds(results: Any) -> list[Any]:
    """Return a gradient for each floating tensor of the results, and None for the others."""
    leaves = pytree.tree_leaves(results)
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(leaf.shape, generator=generator).to(leaf.dtype) if leaf.is_floating_point() else None
        for leaf in leaves
    ]


def same(
    function: Any, *args: Any, rtol: float = 1e-5, atol: float = 1e-6, gradient: bool = True, jit: bool = True,
    of: int | None = None, **kwargs: Any,
) -> None:  # fmt: skip
    """Check results, and the gradients of all floating arguments, or of the first ``of`` of them."""
    leaves, spec = pytree.tree_flatten(args)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()][:of]
    tracked = list(leaves)
    for i in at:
        tracked[i] = leaves[i].detach().requires_grad_(gradient)
    expected = function(*pytree.tree_unflatten(tracked, spec), **kwargs)
    ours = opkit.to_jax(function)
    arrays = [to_array(leaf) for leaf in leaves]

    def flat(*changed: Any) -> list[Any]:
        values = list(arrays)
        for i, array in zip(at, changed, strict=True):
            values[i] = array
        return pytree.tree_leaves(ours(*pytree.tree_unflatten(values, spec), **kwargs))

    chosen = [arrays[i] for i in at]
    if not gradient:
        close((jax.jit(flat) if jit else flat)(*chosen), pytree.tree_leaves(expected), rtol, atol)
        return
    seeds = _seeds(expected)

    def both(*changed: Any) -> tuple[Any, Any]:
        results, pull = jax.vjp(flat, *changed)
        zeros = [np.zeros(r.shape, jax.dtypes.float0) for r in results]
        return results, pull([z if s is None else to_array(s) for s, z in zip(seeds, zeros, strict=True)])

    found, gradients = (jax.jit(both) if jit else both)(*chosen)
    close(found, pytree.tree_leaves(expected), rtol, atol)
    used = [
        (r, s) for r, s in zip(pytree.tree_leaves(expected), seeds, strict=True) if s is not None and r.requires_grad
    ]
    wanted = [tracked[i] for i in at]
    if used:
        theirs = torch.autograd.grad([r for r, _ in used], wanted, [s for _, s in used], allow_unused=True)
        theirs = [torch.zeros_like(w) if g is None else g for g, w in zip(theirs, wanted, strict=True)]
        close(list(gradients), theirs, rtol * 10, atol * 10)
