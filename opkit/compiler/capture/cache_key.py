"""This module writes everything that decides what AOTAutograd makes of a graph of Dynamo's as text, for the key of the cache.

The text contains the graph, its inputs and torch's state, and is the same in every process. A graph with something that has no
stable name (functions other than torch's and opkit's operators, graphs within graphs, symbolic sizes) has no key.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.conversion import origin
from opkit.op import registry

_PLAIN = (type(None), bool, int, float, complex, str, type(Ellipsis))
_BY_NAME = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_TORCHS = ("torch", "_operator", "math", "builtins")
_PATTERNS = (
    "opkit.compiler.capture.patterns."  # functions in the place of what models write; keys contain opkit's sources
)
_UNCACHEABLE_META = ("custom", "recompute", "ac_graph_id", "is_wrapped")  # keys of Node.meta that AOTAutograd reads


class NotCacheable(Exception):
    """A graph has no key, or cannot be cached under one. The message says why."""


def key_text(module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return the text of the key.

    Args:
        module: Dynamo's graph.
        inputs: the inputs it will be called with, or tensors like them.

    Raises:
        NotCacheable: something has no stable name.
    """
    if any(True for _ in module.children()):
        raise NotCacheable("it holds other graphs")
    nodes = {node: number for number, node in enumerate(module.graph.nodes)}
    lines = [_node(node, nodes) for node in nodes]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise NotCacheable("it holds tensors of its own")
    lines += [_input(node, value) for node, value in zip(placeholders, inputs, strict=True)]
    return "\n".join([*lines, repr(shared(inputs)), *_state()])


# ---- the graph -------------------------------------------------------------------------------------------------------


def _node(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    marks = [key for key in _UNCACHEABLE_META if node.meta.get(key)]
    if marks:
        raise NotCacheable(f"{node.name} is marked: {', '.join(marks)}")
    if isinstance(node.meta.get("example_value"), torch.SymFloat):
        raise NotCacheable(f"{node.name} is a float that may change, and guards on it are not stored")
    if node.op == "placeholder":
        return "input"
    if node.op not in ("call_function", "call_method", "output"):
        raise NotCacheable(f"{node.name} is a {node.op}")
    target = _called(node.target) if node.op == "call_function" else node.target
    return f"{node.op} {target} {_text(node.args, numbers)} {_text(node.kwargs, numbers)} {origin(node)}"


def _called(target: Any) -> str:
    """Return the text of a node's target: a torch function's name, or everything that decides what an opkit operator computes."""
    op = registry.find(private.qualified_name(target))
    if op is None:
        return _target(target)
    from opkit.compiler import user_lowerings  # it imports all of lowering, which other graphs do not need

    return f"{target} {op._operator.contract_hash()} {user_lowerings.elementwise_identity(op)}"


@functools.lru_cache(maxsize=1024)
def _target(target: Any) -> str:
    """Return the name of a function under which another process finds the same one."""
    if private.is_torchs_own(target):
        return str(target)
    if isinstance(target, types.FunctionType | types.BuiltinFunctionType):
        module = target.__module__ or "torch"
        # most of torch's functions are methods of _VariableFunctionsClass; some of functional's are made by a function
        names = (target.__qualname__.removeprefix("_VariableFunctionsClass."), target.__name__)
        for name in names if module.split(".")[0] in _TORCHS or module.startswith(_PATTERNS) else ():
            if _lookup(module, name) == target:
                return f"{module}.{name}"
    raise NotCacheable(
        f"it calls {getattr(target, '__qualname__', target)}, which is no function of torch's or operator of opkit's"
    )


def _lookup(module: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None


def _text(value: Any, numbers: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if type(value) in _PLAIN or isinstance(value, _BY_NAME):
        return repr(value)
    if type(value) in (tuple, list, torch.Size) or isinstance(value, list):
        return f"{type(value).__name__}({', '.join(_text(each, numbers) for each in value)})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{key!r}: {_text(each, numbers)}' for key, each in value.items())})"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), numbers)}"
    raise NotCacheable(f"an argument is a {type(value).__name__}")


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _input(node: fx.Node, value: Any) -> str:
    if type(value) not in (torch.Tensor, torch.nn.Parameter, private.FakeTensor):
        raise NotCacheable(f"the input {node.name} is a {type(value).__name__}")
    sizes = tuple(node.meta.get("example_value", value).shape)
    if value.layout is not torch.strided or value.device.type not in ("cpu", "cuda"):
        raise NotCacheable(f"the input {node.name} is {value.layout} on {value.device}")
    if not all(type(size) is int for size in sizes):
        raise NotCacheable(f"the input {node.name} has sizes that may change")
    flags = (
        value.requires_grad,
        value.is_leaf,
        value.is_conj(),
        value.is_neg(),
        value.is_inference(),
        type(value).__name__,
    )
    return f"{value.device} {value.dtype} {sizes} {value.stride()} {value.storage_offset()} {flags}"


def shared(inputs: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the tensors in each storage that several tensors share."""
    groups: dict[int, list[int]] = {}
    for number, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            groups.setdefault(private.storage_address(value), []).append(number)
    groups.pop(0, None)  # tensors without elements
    return tuple(tuple(numbers) for numbers in groups.values() if len(numbers) > 1)


# ---- torch's state ---------------------------------------------------------------------------------------------------


def _state() -> list[str]:
    if private.modes() or private.compiles_backwards():
        raise NotCacheable("a mode is entered, or backward passes are traced")
    flags = [
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
        torch.get_default_dtype(), torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    ]  # fmt: skip
    autocast = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    ]
    return [repr(flags), repr(autocast), repr(torch.is_autocast_cache_enabled()), _settings()]


def _settings() -> str:
    settings = sorted(private.functorch_settings().items())
    unstorable = [name for name, value in settings if not _is_text(value)]
    if unstorable:
        raise NotCacheable(f"the setting {unstorable[0]} of functorch's is no plain value")
    return repr(settings)


def _is_text(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(map(_is_text, value)))
