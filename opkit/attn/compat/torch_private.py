"""This module holds every private torch name that attention uses, as read in torch 2.13.0 and 2.14; 2.11 has the same names."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import _C, _compile
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

sdpa: Callable[..., torch.Tensor] = _C._nn.scaled_dot_product_attention
"""torch's own ``torch.nn.functional.scaled_dot_product_attention``, also where that name was replaced."""


disable_dynamo: Callable[[Any], Any] = _compile._disable_dynamo
"""``torch.compiler.disable`` that imports Dynamo, which takes seconds, at the first call only."""

_KNOWS_MESHES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def while_tracing(function: Any) -> Any:
    """Let Dynamo run a function of constants when it traces a call, as ``torch.compiler.assume_constant_result`` does."""
    function._dynamo_marked_constant = True
    return function


def traced_with_ranks(function: Any) -> Any:
    """Make calls of a function graph breaks where graphs cannot hold what it reads, process groups and this process's rank.

    Dynamo knows meshes and groups from torch 2.14 on; with ``compile_on_one_rank`` other processes run the graph, too.
    """
    untraced = disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args) if not is_dynamo_compiling() or _holds_ranks() else untraced(*args)

    return call


def _holds_ranks() -> bool:
    return _KNOWS_MESHES and not torch.compiler.config.compile_on_one_rank


CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"
"""The module of torch.distributed's context parallelism, in torch 2.11 to 2.14."""


def context_parallel() -> bool:
    """Return whether torch.distributed's context parallelism is on, in which each rank holds a part of the sequences."""
    module: Any = sys.modules.get(CONTEXT_PARALLEL)
    if module is None:
        return False
    handlers = module.DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def is_dtensor(x: object) -> bool:
    """Return whether ``x`` is a ``DTensor``; the module is not imported for it."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def process_group(name: str) -> Any:
    """Return the process group with a name."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    return c10d._resolve_process_group(name)


def recording_again() -> Any:
    """Return a context in which autograd records also within an operator's kernel, which runs below autograd."""
    excluded = _C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradFunctionality", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(_C.DispatchKey, key))
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded)


def set_flex_attention(function: Any) -> None:
    """Put a function in the place of torch's ``flex_attention``, or with None torch's own back; this imports its module."""
    module, own = _flex_attention()
    module.flex_attention = own if function is None else function


@functools.cache
def _flex_attention() -> tuple[Any, Any]:
    """Return the module of torch's ``flex_attention``, and the function, which nothing has replaced yet at the first call."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    return module, module.flex_attention


def is_wrapper(x: torch.Tensor) -> bool:
    """Return whether ``x`` is a traceable wrapper of other tensors: a ``DTensor``, a jagged or a quantised tensor."""
    return type(x) is not torch.Tensor and is_traceable_wrapper_subclass(x)


def with_globals(function: Callable[..., Any], **named: Any) -> Callable[..., Any]:
    """Return a copy of one of torch's functions with some of its module's names replaced, and its own name bound to the copy."""
    scope = {**function.__globals__, **named}
    del scope["__name__"]  # compilers would find the module by it, and the names that are replaced here
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    scope[function.__name__] = copy
    return copy


def causal_bias_of(value: object) -> Any:
    """Return a ``torch.nn.attention.bias.CausalBias``, whose elements were never written, as it is; None for other values.

    For a fake tensor that torch.export made from a ``CausalBias``, return the original.
    """
    if type(value) is torch.Tensor:
        return None
    module: Any = sys.modules.get("torch.nn.attention.bias")  # which takes seconds to import
    original = None if module is None else _original_of(value)
    return original if module is not None and isinstance(original, module.CausalBias) else None


def _original_of(value: Any) -> Any:
    """Return the tensor from which a fake tensor was made, while both live; any other value as it is."""
    if not isinstance(value, FakeTensor):
        return value
    converter: Any = value.fake_mode.fake_tensor_converter.meta_converter
    for original, number in converter.describer.lookup_tensor.items():
        if converter.tensor_memo.get(number) is value:
            return original
    return value
