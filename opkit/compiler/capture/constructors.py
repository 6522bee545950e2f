"""This module moves what a graph of a GPU makes on the CPU to the GPU, if nothing but the GPU uses it.

Models make positions and masks without a device, and copy them to that of their inputs, or index with them::

    positions = torch.arange(n)[:, None] - torch.arange(n)      # on the CPU
    bias = table[positions + n - 1]                             # on the GPU

On the CPU these are calls of torch and a copy in each step, which no CUDA graph records; on the GPU they are formulas of kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from opkit.compiler.capture import torch_private as private

aten = torch.ops.aten
_CONSTRUCTORS = {
    aten.arange, aten.empty, aten.eye, aten.full, aten.linspace, aten.ones, aten.scalar_tensor, aten.tril_indices,
    aten.triu_indices, aten.zeros, torch.ops.prims.iota,
}  # fmt: skip
_COPIES = {aten._to_copy, aten.copy}
_INDEXING = {aten.index, aten._unsafe_index, aten.index_put, aten._unsafe_index_put}
_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


def devices_of(module: fx.GraphModule) -> set[torch.device]:
    """Return the devices of the tensors of a graph, apart from the CPU."""
    values = (each for node in module.graph.nodes for each in tree_leaves(node.meta.get("val")))
    return {each.device for each in values if isinstance(each, torch.Tensor) and each.device.type != "cpu"}


def move_constructors(module: fx.GraphModule) -> None:
    """Give constructors of tensors on the CPU the GPU as their device, with what is computed of them alone."""
    devices = devices_of(module)
    if len(devices) != 1:
        return
    (device,) = devices
    for node in module.graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        _make_number(module, node)
    moved: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        if _is_pure(node) and _has_inputs_in(node, moved):
            moved[node] = None
    while stay := [
        node for node in moved if not (_is_for(node, device, moved) and _has_inputs_in(node, moved))
    ]:  # what stays on the CPU is neither made of what moves, nor are its operands moved
        for node in stay:
            del moved[node]
    for node in moved:
        _move(node, device)
    if moved:
        module.recompile()


def _make_number(module: fx.GraphModule, node: fx.Node) -> None:
    """Make the copy of a constant of one element on the CPU, as ``torch.tensor(64.0)`` is, a constructor."""
    (source,) = node.all_input_nodes
    value = getattr(module, str(source.target), None) if source.op == "get_attr" else None
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu":
        node.target, node.args = aten.full.default, ([], private.number(value))
        node.kwargs = {"dtype": value.dtype, "device": value.device}


def _is_pure(node: fx.Node) -> bool:
    """Return whether a node makes a tensor on the CPU that its arguments alone decide: a constructor, or an operator."""
    value = node.meta.get("val")
    if not isinstance(value, private.FakeTensor) or value.device.type != "cpu" or _packet(node) is None:
        return False
    if node.is_impure() or node.kwargs.get("pin_memory") or torch.Tag.nondeterministic_seeded in _tags(node):
        return False
    return _packet(node) in _CONSTRUCTORS or any(map(_is_tensor, node.all_input_nodes))


def _has_inputs_in(node: fx.Node, moved: dict[fx.Node, None]) -> bool:
    """Return whether the inputs of a node are numbers and what moves."""
    return all(each in moved or isinstance(each.meta.get("val"), _NUMBERS) for each in node.all_input_nodes)


def _is_for(node: fx.Node, device: torch.device, moved: dict[fx.Node, None]) -> bool:
    """Return whether all that use a node move, or are on the GPU and take it from either device."""
    return all(user in moved or _takes(user, node, device) for user in node.users)


def _takes(user: fx.Node, node: fx.Node, device: torch.device) -> bool:
    value, packet = user.meta.get("val"), _packet(user)
    if packet is None or not isinstance(value, torch.Tensor) or value.device != device:
        return False
    is_number = node.meta["val"].dim() == 0
    if packet in _INDEXING:  # the table and the values that are put into it are on the GPU, or numbers
        return node is not user.args[0] and (is_number or node not in user.args[2:])
    return (is_number and torch.Tag.pointwise in _tags(user)) or packet in _COPIES


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _tags(node: fx.Node) -> list[torch.Tag]:
    return node.target.tags  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]


def _move(node: fx.Node, device: torch.device) -> None:
    if "device" in node.kwargs or _packet(node) in _CONSTRUCTORS:
        node.kwargs = {**node.kwargs, "device": device}
    arguments, named = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])  # pyright: ignore
    with node.meta["val"].fake_mode:
        node.meta["val"] = node.target(*arguments, **named)  # pyright: ignore[reportCallIssue]
