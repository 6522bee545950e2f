"""Triton kernels as calls of ``jax_triton``, on NVIDIA GPUs.

``jax_triton`` passes a kernel the arrays and numbers of a call, then its results, then constants by name. opkit's kernels have
their parameters in any order, so a kernel with that order is written around each (:func:`_reordered`).
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from opkit.errors import KernelError, NoCompilerWarning
from opkit.jax import dtypes
from opkit.kernels.tuning.configs import prune
from opkit.op.core import Operator
from opkit.op.dispatch.selection import forced_kernels
from opkit.op.dispatch.verification import bound_arguments
from opkit.op.layout.outputs import operands
from opkit.op.triton.function import TritonFunction
from opkit.op.triton.python import Values, checked, launch_of

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")
_MOST_ELEMENTS = 2**31 - 1  # of a tensor that 32 bits index


def has_gpu() -> bool:
    """Return whether JAX computes on an NVIDIA GPU."""
    return jax.default_backend() == "gpu" and "cuda" in getattr(jax.devices()[0].client, "platform_version", "").lower()


def refusal(function: TritonFunction, tensors: Sequence[torch.Tensor]) -> str:
    """Return why JAX cannot run a kernel; empty if it can."""
    bound = function.bound
    if importlib.util.find_spec("jax_triton") is None:
        return "jax_triton is not installed (pip install jax-triton)"
    if bound.kernel.gluon or bound.kernel.hooked or bound.descriptors:
        return "jax_triton takes no kernels in Gluon, with hooks or with tensor descriptors"
    other = sorted(bound.options - {*_OPTIONS})
    if other:
        return f"jax_triton does not take the option {other[0]}"
    return "it is for tensors of fewer elements" if any(x.numel() > _MOST_ELEMENTS for x in tensors) else ""


def choose(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> TritonFunction | None:
    """Return the Triton kernel that runs a call on JAX's GPU; None: the reference, with a warning if a kernel cannot run.

    Raises:
        KernelError: ``opkit.use_kernel`` forces a kernel that cannot run.
    """
    fitting, _ = operator.kernels.eligible((), bound_arguments(operator, args, kwargs), "cuda", (args, kwargs))
    tensors = [leaf for leaf in pytree.tree_leaves((list(args), kwargs)) if isinstance(leaf, torch.Tensor)]
    for kernel in fitting:
        function: Any = kernel.function
        reason = refusal(function, tensors) if isinstance(function, TritonFunction) else "it is no Triton kernel"
        if not reason:
            return function
        if operator.name in forced_kernels.get():
            raise KernelError(
                f"{operator.name}: opkit.use_kernel forces {kernel.name!r}, which JAX cannot run: {reason}."
            )
        if not isinstance(function, TritonFunction):
            continue
        warnings.warn(
            f"{operator.name}: the kernel {kernel.name} is not used, the reference runs in its place: {reason}.",
            NoCompilerWarning,
            stacklevel=2,
        )
    return None


def call(function: TritonFunction, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any]) -> Any:
    """Return a function of the call's arrays that runs the kernel, with the first config that ``prune`` leaves.

    Args:
        function: the kernel.
        args: the call through the schema, with fake tensors for arrays.
        kwargs: its keyword arguments.
        outputs: tensors like its results, row-major.
    """
    jax_triton: Any = importlib.import_module("jax_triton")
    bound = function.bound
    given = operands(function.operator, args, kwargs)
    values = Values(bound, given, outputs)
    named = {**values.named(), **bound.constants}
    configs = prune(bound.kernel.configs, bound.kernel.prune, named) if bound.kernel.configs else [None]
    launch = checked(values, launch_of(values, configs[0] and configs[0].values))
    results = [jax.ShapeDtypeStruct(tuple(x.shape), dtypes.to_jax(x.dtype)) for x in outputs]
    tensors = [leaf for leaf in pytree.tree_leaves(list(given)) if isinstance(leaf, torch.Tensor)]
    inputs = {id(tensor): number for number, tensor in enumerate(tensors)}
    written = {id(tensor): number for number, tensor in enumerate(outputs)}
    constants = [p.name for p in bound.kernel.parameters if p.constexpr]
    constants += [name for name, value in launch.arguments.items() if value is None and name not in constants]
    taken = [p.name for p in bound.kernel.parameters if p.name not in constants]
    results_of = sorted(
        (written[id(launch.arguments[name])], name) for name in taken if id(launch.arguments[name]) in written
    )
    before = [name for name in taken if name not in {name for _, name in results_of}]
    order = (*before, *[name for _, name in results_of])
    kernel = _reordered(bound.kernel.jit, order, tuple(constants))
    zeroed = tuple(number for number, name in results_of if name in bound.zeroed)
    fixed = {name: launch.arguments[name] for name in constants}

    def run(*arrays: Any) -> list[Any]:
        # Triton takes a Python float as float32, jax_triton as float64
        numbers = [np.float32(v) if isinstance(v, float) else v for v in (launch.arguments[name] for name in before)]
        passed = [arrays[inputs[id(number)]] if id(number) in inputs else number for number in numbers]
        options = {"grid": tuple(launch.grid), "zeroed_outputs": zeroed, **launch.options, **fixed}
        return list(jax_triton.triton_call(*passed, kernel=kernel, out_shape=results, **options))

    return run


@functools.cache
def _reordered(function: Any, order: tuple[str, ...], constants: tuple[str, ...]) -> Any:
    """Return a Triton kernel that calls ``function``, whose parameters are ``order`` and then constants."""
    import triton
    import triton.language as tl

    parameters = ", ".join([*order, *[f"{name}: tl.constexpr" for name in constants]])
    arguments = ", ".join(f"{name}={name}" for name in (*order, *constants))
    text = f"def {function.fn.__name__}_for_jax({parameters}):\n    function({arguments})\n"
    file = f"<opkit, {function.fn.__name__} for JAX, {len(linecache.cache)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # where Triton reads sources
    scope: dict[str, Any] = {"tl": tl, "function": function, "__name__": __name__}
    exec(compile(text, file, "exec"), scope)
    return triton.jit(scope[f"{function.fn.__name__}_for_jax"])
