"""Remove masks of ``scaled_dot_product_attention`` that are constants of Dynamo's graph.

While torch traces them, models of ``transformers`` and others compute masks from positions alone, which are all true, or the
lower triangle. torch has fast kernels without a mask, and for the lower triangle (``is_causal``), but not for most masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from opkit.compiler.capture import torch_private as private

_MAX_ELEMENTS = 1 << 28
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_FUNCTIONS = frozenset({
    "add", "sub", "mul", "neg", "le", "lt", "ge", "gt", "eq", "ne", "and_", "or_", "xor", "invert", "getitem", "logical_and",
    "logical_or", "logical_not", "where", "masked_fill", "arange", "ones", "zeros", "full", "new_ones", "new_zeros", "new_full",
    "ones_like", "zeros_like", "full_like", "to", "bool", "type_as", "expand", "unsqueeze", "squeeze", "view", "reshape",
    "unflatten", "flatten", "transpose", "permute", "contiguous", "clone", "tril", "triu", "cumsum", "diff", "cat", "repeat",
    "broadcast_to", "tensor", "sqrt", "rsqrt", "pow", "div", "truediv", "abs", "float", "half", "bfloat16", "double", "type",
    "slice", "gather", "index", "alias", "scalar_tensor", "bitwise_and", "bitwise_or", "bitwise_not",
})  # fmt: skip
"""The names of functions that give the same result each time, and write to nothing."""

_ATTENTION = (torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)

_WRITING = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "iand", "ior", "ixor"})


class Constants:
    """The nodes of Dynamo's graph that no input decides, nor a state of torch's; none if the graph writes to one."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._nodes = _constant_nodes(module)
        self._known: dict[fx.Node, Any] = {}

    def __contains__(self, node: Any) -> bool:
        return node in self._nodes

    def value(self, node: fx.Node) -> torch.Tensor:
        """Compute a constant node."""
        known = self._known
        with private.without_modes(), torch.no_grad():
            for each in _needed(node, known):
                args, kwargs = fx.map_arg((each.args, each.kwargs), known.__getitem__)
                if each.op == "call_method":
                    known[each] = getattr(args[0], str(each.target))(*args[1:], **kwargs)
                else:
                    known[each] = each.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        return known[node]


def remove_constant_masks(module: fx.GraphModule) -> None:
    """Remove the masks of a graph of Dynamo's or of an exported program that are constant, where that changes no result."""
    constants, before = Constants(module), unused(module)
    changed = False
    for node in module.graph.nodes:
        if node.target not in _ATTENTION:
            continue
        arguments = {**dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}
        mask: Any = arguments.get("attn_mask")
        if mask in constants and arguments.get("is_causal", False) is False:
            kind = _kind(constants.value(mask), _example(arguments["query"]).shape[-2])
            if kind is not None:
                node.args, node.kwargs = (), {**arguments, "attn_mask": None, "is_causal": kind == "causal"}
                changed = True
    if changed:
        remove_unused(module, before)


def unused(module: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes whose results nothing uses, such as calls of methods that write to a tensor."""
    return {node for node in module.graph.nodes if not node.users}


def remove_unused(module: fx.GraphModule, before: set[fx.Node]) -> None:
    """Remove what nothing uses any more in a graph of Dynamo's, where it does not write: torch.fx takes methods for pure."""
    module.graph.eliminate_dead_code(lambda node: node in before or node.is_impure() or writes(node))
    module.recompile()


def writes(node: fx.Node) -> bool:
    """Return whether a node writes to a tensor."""
    name = _name(node.target)
    in_place = "out" in node.kwargs or node.kwargs.get("inplace", False) is not False
    return in_place or name in _WRITING or (name.endswith("_") and name not in _FUNCTIONS)


def _constant_nodes(module: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes of ``Constants``."""
    constant: set[fx.Node] = set()
    for node in module.graph.nodes:
        name, value = _name(node.target), _example(node)
        if writes(node) and not constant.isdisjoint(node.all_input_nodes):
            return set()
        fixed = isinstance(value, torch.Tensor) and all(type(n) is int for n in value.shape)
        if name in _FUNCTIONS and not writes(node) and fixed and value.numel() <= _MAX_ELEMENTS:
            constant |= {node} if constant.issuperset(node.all_input_nodes) else set()
    return constant


def _example(node: fx.Node) -> Any:
    """Return the fake tensor of a node in a graph of Dynamo's or of an exported program."""
    return node.meta.get("example_value", node.meta.get("val"))


def _name(target: Any) -> str:
    """Return the name of a function, operator or method; that of an operator's method as in the module ``operator``."""
    target = getattr(target, "overloadpacket", target)
    name = getattr(target, "__name__", str(target))
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return f"{name}_" if name in ("and", "or", "not") else name


def _needed(node: fx.Node, known: dict[fx.Node, Any]) -> list[fx.Node]:
    """Return the nodes that a node is computed from, and itself, in the graph's order, without those that are known."""
    found, left = {node}, [node]
    while left:
        for each in left.pop().all_input_nodes:
            if each not in found and each not in known:
                found.add(each)
                left.append(each)
    return [each for each in node.graph.nodes if each in found]


def _kind(mask: torch.Tensor, queries: int) -> str | None:
    """Return "all" for a mask that allows everything, "causal" for the lower triangle, None for another one.

    Each row of these has keys that are seen, next to which the lowest number gives weights of 0, as -inf does.
    """
    if mask.dtype != torch.bool:
        if not bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all()):
            return None
        mask = mask == 0
    if bool(mask.all()):
        return "all"
    triangle = torch.ones(queries, mask.shape[-1], dtype=torch.bool, device=mask.device).tril()
    return "causal" if mask.shape[-2:] == triangle.shape and bool((mask == triangle).all()) else None
