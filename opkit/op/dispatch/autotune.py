"""Choose the fastest of several kernels of an operator for a bucket of shapes.

Each kernel is one configuration of :mod:`opkit.kernels.tuning.tuning`, which times them once, records the result and finds it
in later processes. The hash that a result is recorded with covers the kernels and torch's version, and the bucket has the
sizes rounded up to powers of two, so that an edited kernel or another machine is timed afresh.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.kernels.tuning import tuning
from opkit.kernels.tuning.configs import Config
from opkit.kernels.tuning.record_format import Identity
from opkit.op.dispatch.selection import RegisteredKernel
from opkit.op.trace.contract_hash import contract_hash

_RECORDED_AS = "(kernels)"
_REPEATS = 5
_SECONDS = 0.01


def bucket(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the shapes, dtypes and flags of a call with every size rounded up to a power of two.

    >>> bucket([torch.zeros(3, 100), True], {})
    'float32[4x128] True'
    """
    return " ".join(_described(leaf) for leaf in pytree.tree_leaves((tuple(args), kwargs)))


def _described(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return str(leaf) if isinstance(leaf, (bool, str, type(None))) else type(leaf).__name__
    sizes = "x".join(str(1 << max(0, size - 1).bit_length()) for size in leaf.shape)
    return f"{str(leaf.dtype).removeprefix('torch.')}[{sizes}]"


def device_name(device: str) -> str:
    """Return the model of the processor or accelerator of a device type."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{device} {platform.machine()} {os.cpu_count()} threads={torch.get_num_threads()}"


def capturing() -> bool:
    """Return whether a CUDA graph is being captured, when nothing may be timed; False in a forked process, which has no CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def choose(
    operator: str, kernels: Sequence[RegisteredKernel], args: Sequence[Any], kwargs: dict[str, Any], device: str
) -> RegisteredKernel:
    """Return the fastest of ``kernels`` for this call, from the record or by timing them now.

    Raises:
        KernelError: a kernel failed while it was timed, otherwise than for want of memory.
    """
    if len(kernels) == 1:
        return kernels[0]
    by_name = {kernel.name: kernel for kernel in kernels}
    hashed = contract_hash([("torch", torch.__version__), *((kernel.name, kernel.function) for kernel in kernels)])

    def milliseconds(config: Config) -> float:
        kernel = by_name[config.constexprs["kernel"]]
        function: Any = kernel.function
        runnable = function.prepare(args, kwargs) if kernel.native else function
        return 1e3 * measure(runnable, args, kwargs, device)

    choice = tuning.decide(
        Identity(operator, _RECORDED_AS, hashed), [Config({"kernel": name}) for name in by_name], device_name(device),
        bucket(args, kwargs), milliseconds, capturing(),
    )  # fmt: skip
    return by_name[choice.config.constexprs["kernel"]]


def measure(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], device: str) -> float:
    """Return the median seconds of one call, on copies of the arguments, so that the caller's tensors are not written to."""
    copies = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (tuple(args), kwargs))
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def once(calls: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function(*copies[0], **copies[1])
        synchronize()
        return (time.perf_counter() - start) / calls

    with torch.no_grad():
        calls = max(1, int(_SECONDS / max(once(1), once(1), 1e-6)))
        return statistics.median(once(calls) for _ in range(_REPEATS))
