"""All that decides what AOTAutograd makes of a graph of Dynamo's, as text: the graph, its inputs, and torch's state.

The text is the same in every process. A graph of which something cannot be named (functions other than torch's and
opkit's operators, graphs within graphs, symbolic sizes) has none.
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
_TELLING = ("custom", "recompute", "ac_graph_id", "is_wrapped")  # keys of Node.meta that AOTAutograd goes by


class NotCacheable(Exception):
    """There is no such text, or nothing that could be kept under it. The message says why."""


def identity(module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The text.

    Args:
        module: Dynamo's graph.
        inputs: what it will be called with, or tensors like it.

    Raises:
        Unnamed: something has no name.
    """
    if any(True for _ in module.children()):
        raise NotCacheable("it holds other graphs")
    nodes = {node: number for number, node in enumerate(module.graph.nodes)}
    lines = [_node(node, nodes) for node in nodes]
    given = [node for node in nodes if node.op == "placeholder"]
    if len(given) != len(inputs):
        raise NotCacheable("it holds tensors of its own")
    lines += [_input(node, value) for node, value in zip(given, inputs, strict=True)]
    return "\n".join([*lines, repr(shared(inputs)), *_state()])


# ---- the graph -------------------------------------------------------------------------------------------------------


def _node(node: fx.Node, numbers: dict[fx.Node, int]) -> str:
    telling = [key for key in _TELLING if node.meta.get(key)]
    if telling:
        raise NotCacheable(f"{node.name} is marked: {', '.join(telling)}")
    if node.op == "placeholder":
        return "input"
    if node.op not in ("call_function", "call_method", "output"):
        raise NotCacheable(f"{node.name} is a {node.op}")
    target = _called(node.target) if node.op == "call_function" else node.target
    return f"{node.op} {target} {_text(node.args, numbers)} {_text(node.kwargs, numbers)} {origin(node)}"


def _called(target: Any) -> str:
    """What a node calls: a function of torch's by its name, an operator of opkit's by all that decides what it computes."""
    op = registry.find(private.qualified_name(target))
    if op is None:
        return _target(target)
    from opkit.compiler import elementwise_kernels  # it leads to all of lowering, which other graphs need not have

    return f"{target} {op._operator.contract_hash()} {elementwise_kernels.identity(op)}"


@functools.lru_cache(maxsize=1024)
def _target(target: Any) -> str:
    """The name of a function, under which another process finds the same one."""
    if private.is_torchs_own(target):
        return str(target)
    if isinstance(target, types.FunctionType | types.BuiltinFunctionType):
        module = target.__module__ or "torch"
        # most of torch's functions are methods of _VariableFunctionsClass; some of functional's are made by a function
        names = (target.__qualname__.removeprefix("_VariableFunctionsClass."), target.__name__)
        for name in names if module.split(".")[0] in _TORCHS else ():
            if _found(module, name) == target:
                return f"{module}.{name}"
    raise NotCacheable(
        f"it calls {getattr(target, '__qualname__', target)}, which is no function of torch's or operator of opkit's"
    )


def _found(module: str, name: str) -> Any:
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
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise NotCacheable(f"the input {node.name} is a {type(value).__name__}")
    sizes = tuple(node.meta.get("example_value", value).shape)
    if value.layout is not torch.strided or value.device.type != "cpu":
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
    return f"{value.dtype} {sizes} {value.stride()} {value.storage_offset()} {flags}"


def shared(inputs: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """The numbers of tensors that lie in one storage, for each storage in which several do."""
    found: dict[int, list[int]] = {}
    for number, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            found.setdefault(private.storage_address(value), []).append(number)
    found.pop(0, None)  # tensors without elements
    return tuple(tuple(numbers) for numbers in found.values() if len(numbers) > 1)


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
    found = sorted(private.functorch_settings().items())
    strange = [name for name, value in found if not _is_text(value)]
    if strange:
        raise NotCacheable(f"the setting {strange[0]} of functorch's is no plain value")
    return repr(found)


def _is_text(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(map(_is_text, value)))
