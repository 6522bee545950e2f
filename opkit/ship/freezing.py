"""This module computes beforehand what constant weights decide: constants are folded, and batch norm into what it follows.

On CPUs, weights of products and convolutions are packed for opkit's kernels (``packing.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from opkit.ship import torch_private as private
from opkit.ship.entry import add_constant

aten = torch.ops.aten

_SMALL = 1 << 16  # bytes of a folded constant that may be larger than what it is computed from


def freeze(module: fx.GraphModule) -> None:
    """Fold what is constant in a graph, whose constants are attributes."""
    fold_constants(module)
    if fold_batch_norms(module):
        module.graph.eliminate_dead_code()
    _lay_out_for_gpus(module)
    module.recompile()


def copy_constant_results(module: fx.GraphModule) -> None:
    """Let a graph return copies of constants, which its callers may write to."""
    output = module.graph.output_node()
    for node in [*output.all_input_nodes]:
        tensor = constant_of(node)
        if tensor is not None:
            with module.graph.inserting_before(output):
                copy = module.graph.call_function(aten.clone.default, (node,))
            copy.meta = {"val": tensor}
            output.replace_input_with(node, copy)
    module.recompile()


def constant_of(node: Any) -> torch.Tensor | None:
    """Return the tensor of a constant's node; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = getattr(node.graph.owning_module, str(node.target), None)
    return value if isinstance(value, torch.Tensor) else None


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@torch.no_grad()
def fold_constants(module: fx.GraphModule) -> None:
    """Compute the operators whose operands are constants, unless the result is large and an expansion of them."""
    known = {node: tensor for node in module.graph.nodes if (tensor := constant_of(node)) is not None}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not (private.is_pure(node.target) or node.target is operator.getitem):
            continue
        if any(each not in known for each in node.all_input_nodes) or _has_sizes(node):
            continue
        operands = [known[each] for each in node.all_input_nodes]
        expected = [v for v in _leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
        is_view = private.is_view(node.target) or node.target is operator.getitem
        if not is_view and _nbytes(expected) > max(
            _SMALL, _nbytes([t for t in operands if isinstance(t, torch.Tensor)])
        ):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        known[node] = node.target(*args, **kwargs)
    for node, value in known.items():
        if node.op == "get_attr" or not isinstance(value, torch.Tensor):
            continue
        if any(user not in known for user in node.users):
            node.replace_all_uses_with(add_constant(module, node, value), lambda user: user not in known)
    module.graph.eliminate_dead_code()


def _leaves(value: Any) -> Sequence[Any]:
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list | tuple) else [value]


def _has_sizes(node: fx.Node) -> bool:
    """Return whether a node's result, or a number among its arguments, has a size that may change."""
    numbers = [n for v in _leaves(node.meta.get("val")) if isinstance(v, torch.Tensor) for n in (*v.shape, *v.stride())]
    return any(isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool) for each in numbers)


def _lay_out_for_gpus(module: fx.GraphModule) -> None:
    """Put the channels of convolutions' weights next to each other, as kernels for GPUs read them."""
    for node in module.graph.nodes:
        weight = constant_of(node.args[1]) if node.target is aten.convolution.default and not node.args[6] else None
        if weight is not None and weight.device.type == "cuda" and weight.dim() == 4:
            new = weight.contiguous(memory_format=torch.channels_last)
            node.update_arg(1, add_constant(module, node, new))
    module.graph.eliminate_dead_code()


# ---- batch norm --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fold_batch_norms(module: fx.GraphModule) -> int:
    """Fold batch norms with constant statistics into the convolution or product that they follow; return how many."""
    targets = (aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)
    nodes = [node for node in module.graph.nodes if node.target in targets]
    return sum(_fold_batch_norm(module, node) for node in nodes)


def _fold_batch_norm(module: fx.GraphModule, norm: fx.Node) -> bool:
    x, *statistics, _, eps = norm.args
    users = [user for user in norm.users if user.target is operator.getitem]
    if any(user.args[1] != 0 and user.users for user in users) or not isinstance(x, fx.Node) or len(x.users) != 1:
        return False
    values = [None if each is None else constant_of(each) for each in statistics]
    if any(value is None and each is not None for value, each in zip(values, statistics, strict=True)):
        return False
    weight, bias, mean, var = (None if value is None else value.double() for value in values)
    assert mean is not None
    assert var is not None
    assert isinstance(eps, float)
    scale = torch.rsqrt(var + eps) * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    folded = _scaled(module, x, scale, shift)
    if folded:
        for user in users:
            if user.args[1] == 0:
                user.replace_all_uses_with(x)
    return folded


def _scaled(module: fx.GraphModule, node: fx.Node, scale: torch.Tensor, shift: torch.Tensor) -> bool:
    """Make a convolution or product compute ``scale * result + shift`` for each channel; return False if it is neither."""
    if node.target is aten.convolution.default:
        weight, bias = constant_of(node.args[1]), constant_of(node.args[2])
        transposed, groups = node.args[6], node.args[8]
        if weight is None or (bias is None and node.args[2] is not None) or (transposed and groups != 1):
            return False
        channel = 1 if transposed else 0
        by_channel = scale.reshape([-1 if dim == channel else 1 for dim in range(weight.dim())])
        new_bias = shift if bias is None else bias.double() * scale + shift
        new = [weight.double() * by_channel, new_bias]
        places = (1, 2)
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, weight = constant_of(node.args[0]), constant_of(node.args[2])
        if weight is None or bias is None:
            return False
        new, places = [weight.double() * scale, bias.double() * scale + shift], (2, 0)
    else:
        return False
    for place, value in zip(places, new, strict=True):
        node.update_arg(place, add_constant(module, node, value.to(weight.dtype)))
    return True
