"""This module prepares the graphs that control flow operators call: their bodies, which are programs of their own in a file.

A body is called with the last argument of its operator as its last inputs, such as the operands of ``cond``.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from opkit.ship import torch_private as private
from opkit.ship.entry import add_constant
from opkit.ship.freezing import constant_of


def bodies(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the graphs that a graph calls, each once."""
    found = [_body(node) for node in module.graph.nodes]
    return list({id(each): each for each in found if each is not None}.values())


def prepare_bodies(module: fx.GraphModule) -> None:
    """Give the bodies of a graph the constants that they read, and all sizes of their inputs.

    A body of several calls stays as it is: it gets both from its caller.
    """
    calls = {node: [body for each in node.all_input_nodes if (body := _body(each))] for node in module.graph.nodes}
    count = collections.Counter(id(body) for called in calls.values() for body in called)
    for node, called in calls.items():
        if called and all(count[id(body)] == 1 for body in called) and isinstance(node.args[-1], list | tuple):
            _add_constants(node, called)
            _add_sizes(module, node, called)
            for body in called:
                body.recompile()
    module.graph.eliminate_dead_code()
    module.recompile()


def _body(node: fx.Node) -> fx.GraphModule | None:
    value = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return value if isinstance(value, fx.GraphModule) else None


def inputs(module: fx.GraphModule) -> list[fx.Node]:
    """Return the inputs of a graph."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _add_constants(node: fx.Node, called: Sequence[fx.GraphModule]) -> None:
    operands: Any = node.args[-1]
    tensors = [constant_of(each) for each in operands]
    for body in called:
        for place, tensor in zip(inputs(body)[-len(operands) :], tensors, strict=bool(operands)):
            if tensor is not None:
                place.replace_all_uses_with(add_constant(body, _first_step(body), tensor))
                body.graph.erase_node(place)
    kept = tuple(each for each, tensor in zip(operands, tensors, strict=True) if tensor is None)
    node.args = (*node.args[:-1], kept)


def _first_step(module: fx.GraphModule) -> fx.Node:
    return next(node for node in module.graph.nodes if node.op != "placeholder")


def _add_sizes(module: fx.GraphModule, node: fx.Node, called: Sequence[fx.GraphModule]) -> None:
    """Pass the sizes that bodies need, such as n where an input has 2 * n rows, and that no input of theirs has."""
    missing: dict[str, None] = {}
    for body in called:
        values = [value for each in inputs(body) for value in _numbers(each)]
        alone = {str(value) for value in values}
        needed = (name for value in values for name in private.symbols(value))
        missing |= dict.fromkeys(name for name in needed if name not in alone)
    for name in missing:
        source = _size(module, name, node)
        if source is None:
            continue
        node.args = (*node.args[:-1], (*node.args[-1], source))  # pyright: ignore
        for body in called:
            with body.graph.inserting_before(_first_step(body)):
                body.graph.placeholder(f"size_{name}").meta = {"val": source.meta["val"]}


def _size(module: fx.GraphModule, name: str, before: fx.Node) -> fx.Node | None:
    """Return a node for a size by its name, which an input of a graph has."""
    for each in inputs(module):
        for dim, value in enumerate(_numbers(each)):
            if str(value) == name and isinstance(each.meta["val"], torch.SymInt):
                return each
            if str(value) == name and dim < each.meta["val"].dim():
                with module.graph.inserting_before(before):
                    size = module.graph.call_function(torch.ops.aten.sym_size.int, (each, dim))
                size.meta = {"val": value}
                return size
    return None


def _numbers(node: fx.Node) -> Sequence[Any]:
    """Return the sizes and strides of a node's tensor that may change, or the size that it is."""
    value = node.meta.get("val")
    return (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
