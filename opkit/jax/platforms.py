"""Which kernel runs a call on which of JAX's platforms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from opkit.jax import dtypes, kernels, triton_kernels
from opkit.op.core import Operator
from opkit.op.dispatch.selection import REFERENCE, forced_kernels


def kernels_of(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the kernel that runs a call on each of JAX's platforms that has one.

    Raises:
        KernelError: ``opkit.use_kernel`` forces a kernel that JAX cannot run.
    """
    forced = forced_kernels.get().get(operator.name)
    table = operator.kernels
    if forced == REFERENCE or not (table.serves("cpu") or table.serves("cuda")):
        return {}
    device = table.named(forced).device if forced else None
    on_gpu = device != "cpu" and table.serves("cuda") and triton_kernels.has_gpu()
    on_cpu = bool(forced or table.serves("cpu")) and not (on_gpu and device == "cuda")
    triton = triton_kernels.choose(operator, args, kwargs) if on_gpu else None
    native = kernels.choose(operator, args, kwargs) if on_cpu else None
    outputs = kernels.results_of(operator, args, kwargs) if triton or native else None
    if outputs is None:
        return {}
    if not any(x.numel() for x in outputs):
        empty = functools.partial(_empty, [(tuple(x.shape), dtypes.to_jax(x.dtype)) for x in outputs])
        return {platform: empty for platform, kernel in (("cuda", triton), ("cpu", native)) if kernel}
    found = {"cuda": triton and triton_kernels.call(triton, args, kwargs, outputs)}
    found["cpu"] = native and kernels.call(native, args, kwargs, outputs)
    return {platform: run for platform, run in found.items() if run is not None}


def _empty(forms: Sequence[Any], *arrays: Any) -> list[Any]:
    return [jnp.zeros(shape, dtype) for shape, dtype in forms]


def dispatched(by_platform: dict[str, Any], reference: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the kernels for programs that run on their platforms, and the reference for others."""
    if reference is None and len(by_platform) == 1:
        return next(iter(by_platform.values()))
    return lambda *arrays: jax.lax.platform_dependent(*arrays, default=reference, **by_platform)
