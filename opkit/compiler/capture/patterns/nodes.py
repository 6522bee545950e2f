"""Reading and writing nodes of Dynamo's graphs, whose targets are torch's functions and methods of tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from opkit.compiler.capture.attention_masks import writes

OPERATIONS = {
    "product": ("matmul", "bmm"),
    "product plus": ("baddbmm",),
    "einsum": ("einsum",),
    "multiply": ("mul", "multiply", "imul", "mul_", "multiply_"),
    "divide": ("div", "divide", "true_divide", "truediv", "itruediv", "div_", "divide_"),
    "add": ("add", "iadd", "add_"),
    "subtract": ("sub", "subtract", "isub", "sub_", "subtract_"),
    "fill": ("masked_fill", "masked_fill_"),
    "where": ("where",),
    "cast": ("to", "float", "double", "half", "bfloat16", "type", "type_as"),
    "copy": ("contiguous", "clone"),
    "view": ("view", "reshape", "flatten", "unflatten"),
    "transpose": ("transpose", "permute", "swapaxes", "swapdims"),
    "linear": ("linear",),
    "softmax": ("softmax",),
    "dropout": ("dropout",),
    "cross-entropy": ("cross_entropy",),
}
"""The names of the functions and methods that are one operation."""

_OPERATION_OF: dict[Any, str] = {
    each: operation
    for operation, names in OPERATIONS.items()
    for name in names
    for each in (name, *(getattr(owner, name, None) for owner in (operator, torch, F)))
}


class Kept(Exception):
    """A pattern was found, and stays as it is for this reason."""


def operation(node: Any) -> str:
    """Return the operation of a node, or "" if it has no row in ``OPERATIONS``."""
    is_call = isinstance(node, fx.Node) and node.op in ("call_function", "call_method")
    return _OPERATION_OF.get(node.target, "") if is_call else ""


def arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """Return the arguments of a node by their names."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def example(node: Any) -> torch.Tensor | None:
    """Return the fake tensor that Dynamo has for a node; None if it is not a tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def tensor(node: Any) -> torch.Tensor:
    """Return the fake tensor of a node that is a tensor."""
    value = example(node)
    assert value is not None, node
    return value


def check_uses(nodes: Sequence[fx.Node]) -> None:
    """Check that the nodes of a pattern, in the graph's order, may be replaced by one in the place of the last.

    Raises:
        Kept: one of them is used elsewhere, or something is written in between.
    """
    pattern = {*nodes}
    for node in nodes[:-1]:
        for user in node.users:
            if user not in pattern:
                raise Kept(f"{node.name} is used by {user.name} too")
    every = list(nodes[0].graph.nodes)
    for node in every[every.index(nodes[0]) : every.index(nodes[-1])]:
        if node not in pattern and (writes(node) or (node.op != "placeholder" and node.is_impure())):
            raise Kept(f"{node.name} changes a tensor or a state in between")


def replace_nodes(nodes: Sequence[fx.Node], new: fx.Node) -> None:
    """Put another node in the place of the last node of a pattern, and erase the pattern."""
    nodes[-1].replace_all_uses_with(new)
    for node in reversed(nodes):
        node.graph.erase_node(node)


def insert(before: fx.Node, function: Callable[..., Any], *args: Any) -> fx.Node:
    """Insert the calls that ``function`` makes with its arguments, in which nodes are tensors, and return its result's node."""
    graph = before.graph
    known = set(graph.nodes)
    tracer = GraphAppendingTracer(graph)
    proxy: Any = lambda node: fx.Proxy(node, tracer)  # noqa: E731
    with graph.inserting_before(before):
        result = function(*fx.map_arg(args, proxy))
    for node in [node for node in graph.nodes if node not in known]:
        node.meta = {**before.meta, "example_value": _example_of_call(node)}
    return result.node


def _example_of_call(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["example_value"])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
