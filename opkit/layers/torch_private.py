"""Every private torch name that ``opkit.layers`` relies on, as of torch 2.14.1; 2.11 has them too."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import fx
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._higher_order_ops.scan import scan as captured_scan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import SAC_IGNORED_OPS

from opkit.op import torch_compile
from opkit.op.torch_compile import disable_dynamo
from opkit.op.torch_private import functorch_level

__all__ = ["SCAN_HAS_GRADIENTS", "FakeTensorMode", "TorchDispatchMode", "captured_scan", "is_transformed"]

_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

SCAN_HAS_GRADIENTS = _VERSION >= (2, 13)
"""Whether torch's ``scan`` has gradients of all functions: 2.11 refuses some because their results "might be aliasing"."""


def is_ignored(function: Any) -> bool:
    """Return whether a recomputation may call an operator more or less often than the forward: ``detach``, queries of sizes."""
    return function in SAC_IGNORED_OPS


def traced_graph() -> fx.Graph | None:
    """Return the graph that AOTAutograd is tracing, or None."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer.graph  # pyright: ignore[reportAttributeAccessIssue]


def is_functionalizing() -> bool:
    """Return whether AOTAutograd runs a function, to trace it or before."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def storage_address(tensor: torch.Tensor) -> int | None:
    """Return a number that tensors share while they share a storage, also while AOTAutograd traces; None if they have none."""
    if isinstance(tensor, FunctionalTensor):
        tensor = tensor.elem
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of all examples that a tensor within ``vmap`` stands for, and the like."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how a tensor lies in its storage."""
    place = tensor.shape, tensor.stride(), tensor.storage_offset()
    return place, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def with_layout(tensor: torch.Tensor, wanted: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the tensor of a layout of which a tensor is a view; None if that is not known."""
    whole = tensor if tensor._base is None else tensor._base
    if layout(whole) == wanted:
        return whole
    with plainly():  # views made without gradients have no base
        return detached(whole).as_strided(*wanted[0]) if layout(whole)[1:] == wanted[1:] else None


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its history and with its version counter, within a dispatch mode too."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def written(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that a call of an operator writes to."""
    schema = getattr(function, "_schema", None)  # higher-order operators have none
    if schema is None or not schema.is_mutable:
        return []
    given = {**{a.name: v for a, v in zip(schema.arguments, args, strict=False)}, **kwargs}
    writes = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_iter(writes) if isinstance(t, torch.Tensor)]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, as those of an expanded one."""
    return torch._debug_has_internal_overlap(tensor) == 1


def is_torchs(function: Any) -> bool:
    """Return whether an operator is torch's own."""
    return getattr(function, "namespace", "") in ("aten", "prims", "prim")


def draws(function: Any) -> bool:
    """Return whether an operator may draw from a generator of random numbers; those of others do not always say so."""
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()) or not is_torchs(function)


def random_state(results: Any) -> tuple[torch.Tensor, torch.device]:
    """Return the state of the default generator of some results' device, and the device."""
    device = next(t.device for t in tree_iter(results) if isinstance(t, torch.Tensor))
    return (
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    ), device


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of a device's default generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def storage_weakref(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a reference to a tensor's storage that does not keep it alive; ``expired()`` says whether it lives."""
    return StorageWeakRef(tensor.untyped_storage())


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of no subclass and of no transform such as ``vmap``, and has memory."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and not _functorch.is_functorch_wrapped_tensor(tensor)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextlib.contextmanager
def plainly() -> Generator[None]:
    """Run operators without gradients and dispatch modes."""
    with torch.no_grad(), _disable_current_modes():
        yield


def graph_break(function: Any) -> Any:
    """Return a function at whose calls Dynamo ends a graph; what the function calls is captured."""
    return disable_dynamo(function, recursive=False)


def while_tracing(function: Callable[..., None]) -> Callable[..., None]:
    """Let Dynamo run a function of constants and modules when it traces a call; before torch 2.14, leave the call out."""
    if _VERSION >= (2, 14):
        return torch_compile.while_tracing(function)
    return lambda *args: None if torch.compiler.is_compiling() else function(*args)


same_version: Any = torch.autograd._unsafe_preserve_version_counter
"""A context in which writes to a tensor do not count: it has the same values in the end."""


def _is_transformed() -> bool:
    return functorch_level() is not None


is_transformed: Any = torch_compile.while_tracing(_is_transformed)
"""Return whether a transform of torch.func is running; Dynamo calls it while it traces, and guards on transforms itself."""
