"""The private names of torch that calls of compiled graphs need. Importing this module imports neither Dynamo nor sympy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.compiler import _cache
from torch.utils import _python_dispatch

CacheArtifact = _cache.CacheArtifact
"""One entry in the bytes of ``torch.compiler.save_cache_artifacts`` (torch 2.11 to 2.14)."""

register_artifact_type: Callable[[type[CacheArtifact]], type[CacheArtifact]] = _cache.CacheArtifactFactory.register
"""Let torch find a class of artifacts by its ``type()``."""

record_artifact: Callable[[str, str, Any], None] = _cache.CacheArtifactManager.record_artifact
"""Add an artifact, by its type, key and content, to those that will be saved."""

handles_of: Callable[[list[torch.Tensor]], list[Any]] = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors  # pyright: ignore[reportAttributeAccessIssue]
"""Return handles of the C shim, in capsules; the caller must delete each of them."""

tensors_of: Callable[[list[Any]], list[torch.Tensor]] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs  # pyright: ignore[reportAttributeAccessIssue]
"""Return tensors for handles in capsules, and take over the handles."""


def wait_tensor(result: torch.Tensor) -> torch.Tensor:
    """Wait for a result of a functional collective, and return it."""
    return torch.ops._c10d_functional.wait_tensor.default(result)


def raw_stream(device: int) -> int:
    """Return the current stream of a CUDA device (torch 2.11 to 2.14: ``_cuda_getCurrentRawStream``)."""
    return torch._C._cuda_getCurrentRawStream(device)


def release_cublas_workspaces() -> None:
    """Give the workspaces of cuBLAS back to the pools that they are from (torch 2.11 to 2.14); its next calls allocate others.

    Inductor does so around its recordings, and frees what another CUDA graph works in unless that is of the graph's own pool.
    """
    torch._C._cuda_clearCublasWorkspaces()


def is_observed() -> bool:
    """Return whether a profiler or a mode observes the operators that are called.

    AOTAutograd's mode of first calls does not, which looks at custom operators alone: first calls give the bits of later ones.
    """
    profiled = torch._C._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]
    modes = _python_dispatch._get_current_dispatch_mode_stack() if has_dispatch_modes() else ()
    return profiled or any(type(mode).__name__ != "_AnalyzeCustomOpInputOutputMode" for mode in modes)


def has_dispatch_modes() -> bool:
    """Return whether a mode sees the operators that are called."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Leave all modes of dispatch, such as those that trace, while it is entered."""
    return _python_dispatch._disable_current_modes()


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage: of tensors, and of Python objects for it."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_transformed() -> bool:
    """Return whether the caller runs within vmap, grad or another of functorch's transformations."""
    return _functorch.peek_interpreter_stack() is not None


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another one for autograd."""
    return tensor._is_view()


def release_saved_tensors(context: Any) -> None:
    """Release the saved tensors of a backward's context, unless ``retain_graph=True``."""
    context.maybe_clear_saved_tensors()


def no_zeros_for_undifferentiable(context: Any) -> None:
    """Make a backward get None, and not zeros, for results that were marked as not differentiable."""
    context._materialize_non_diff_grads = False


no_autocast: Callable[[], contextlib.AbstractContextManager[None]] = torch._C._DisableAutocast


# ---- operators -------------------------------------------------------------------------------------------------------

_FIXED_NAMESPACES = ("aten", "prims", "prim")


def builtin(overload: Any) -> Callable[..., Any]:
    """Return the builtin function of an OpOverload, which calls the dispatcher."""
    return overload._op


def overloads(packet: Any) -> list[Any]:
    """Return every overload of an operator."""
    return [getattr(packet, name) for name in packet.overloads()]


def schema(overload: Any) -> Any:
    """Return the schema of an OpOverload."""
    return overload._schema


@functools.cache
def out_variant(overload: Any) -> Any:
    """Return the overload of an operator that writes its one result to ``out=``, or None."""
    wanted = [(a.name, str(a.type)) for a in overload._schema.arguments]
    for other in overloads(overload.overloadpacket):
        arguments = other._schema.arguments
        if [a.name for a in arguments if a.is_out] == ["out"]:
            taken = [(a.name, str(a.type)) for a in arguments if not a.is_out]
            if taken == wanted:
                return other
    return None


def is_overload(target: Any) -> bool:
    """Return whether the target of an FX node is an OpOverload."""
    return isinstance(target, torch._ops.OpOverload)


def tags(overload: Any) -> list[torch.Tag]:
    """Return the tags of an OpOverload."""
    return overload.tags


def overload_named(name: str) -> Any:
    """Return the overload with a name such as "aten.add.Tensor".

    Raises:
        AttributeError: there is none.
    """
    namespace, packet, overload = name.split(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def has_operator(name: str) -> bool:
    """Return whether an operator of this name, such as "aten::add", is defined."""
    namespace, packet = name.split("::")
    return hasattr(getattr(torch.ops, namespace), packet)


def qualified_name(target: Any) -> str:
    """ "namespace::name" of the operator that an OpOverload belongs to; "" for anything else."""
    return target._schema.name if is_overload(target) else ""


def overload_name(overload: Any) -> str:
    """Return the name of an OpOverload among those of its operator, such as "default"."""
    return overload._overloadname


def is_torchs_own(target: Any) -> bool:
    """Return whether an FX target is an operator, or a packet of overloads, that torch itself defines."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in _FIXED_NAMESPACES
    return isinstance(target, torch._ops.OpOverloadPacket) and target._qualified_op_name.split("::")[0] in (
        _FIXED_NAMESPACES
    )
