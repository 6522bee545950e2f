"""Every private torch name that attention relies on. Read in torch 2.13.0 and 2.14; the same names are in torch 2.11."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

sdpa: Callable[..., torch.Tensor] = _C._nn.scaled_dot_product_attention
"""``torch.nn.functional.scaled_dot_product_attention``, whoever has replaced it there."""


CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"
"""The module of torch.distributed's context parallelism, in torch 2.11 to 2.14."""


def context_parallel() -> bool:
    """Whether torch.distributed now distributes torch's own attention over sequences that ranks have parts of."""
    module: Any = sys.modules.get(CONTEXT_PARALLEL)
    if module is None:
        return False
    handlers = module.DTensor._op_dispatcher._custom_op_handlers
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def is_wrapper(x: torch.Tensor) -> bool:
    """Whether ``x`` is made of other tensors, and says of which: a ``DTensor``, a jagged or a quantised tensor."""
    return type(x) is not torch.Tensor and is_traceable_wrapper_subclass(x)


def with_globals(function: Callable[..., Any], **named: Any) -> Callable[..., Any]:
    """A copy of a function of torch's that finds other things by some names of its module, and itself by its own."""
    scope = {**function.__globals__, **named}
    del scope["__name__"]  # by which compilers would find the module, and what it has by those names
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    scope[function.__name__] = copy
    return copy


def faked(value: Any) -> Any:
    """The tensor of which a fake tensor was made, while both live; anything else as it is."""
    if not isinstance(value, FakeTensor):
        return value
    converter: Any = value.fake_mode.fake_tensor_converter.meta_converter
    for original, number in converter.describer.lookup_tensor.items():
        if converter.tensor_memo.get(number) is value:
            return original
    return value
