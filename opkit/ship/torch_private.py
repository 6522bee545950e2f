"""The private names of torch that export and load need (read in torch 2.11 to 2.14)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx


def composite_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of operators that are defined by others, which AOTAutograd always applies."""
    from torch.export import decomp_utils  # imports Dynamo, which loading a model does not need

    return {op: decomp_utils._get_decomp_for_cia(op) for op in decomp_utils._collect_all_valid_cia_ops()}


def limits(values: Any) -> tuple[int | None, int | None]:
    """Return the least and the largest value of a range of sizes; None for no limit."""
    least, most = (int(v) if v.is_finite and abs(v) < 1 << 62 else None for v in (values.lower, values.upper))
    return least, most


def symbols(value: Any) -> list[str]:
    """Return the names of the sizes that a number is computed from, in order."""
    return sorted(map(str, value.node.expr.free_symbols)) if isinstance(value, torch.SymInt) else []


def fake_mode(module: fx.GraphModule) -> Any:
    """Return the mode of the fake tensors of a graph, or None if it has none."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def is_pure(target: Any) -> bool:
    """Return whether an operator writes to nothing, and returns the same for the same arguments."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def defaults_left_out(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults, other than None, that a call of an operator leaves to its schema."""
    left = [a for a in target._schema.arguments[len(args) :] if a.name not in kwargs and a.has_default_value()]
    return {a.name: a.default_value for a in left if a.default_value is not None}


def is_view(target: Any) -> bool:
    """Return whether an operator returns views of its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target.is_view


def propagate(module: fx.GraphModule) -> None:
    """Compute the fake results of a graph's nodes again, where a layout has changed."""
    mode = fake_mode(module)
    if mode is None:
        return
    known: dict[fx.Node, Any] = {}
    with mode, torch.no_grad():
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "get_attr" and isinstance(value, torch.Tensor):
                known[node] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            elif node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
                # a graph that control flow operators call has no value, and keeps its results' layouts
                known[node] = getattr(module, str(node.target)) if node.op == "get_attr" and value is None else value
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                node.meta["val"] = known[node] = _call(node, args, kwargs)


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    target: Any = node.target
    if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        try:
            return target(*args, **kwargs)
        except (RuntimeError, ValueError):  # the operand's strides are others than when the graph was traced
            target = node.target = torch.ops.aten.reshape.default
    return target(*args, **kwargs)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without holes or overlaps."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


# ---- pytrees ---------------------------------------------------------------------------------------------------------


def is_leaf(spec: Any) -> bool:
    """Return whether a structure is that of one value."""
    return spec.is_leaf()


def children(spec: Any) -> list[Any]:
    """Return the structures of a container's values."""
    return spec.children() if hasattr(spec, "children") else spec.children_specs


def keys(spec: Any) -> list[Any] | None:
    """Return the names of a container's values, or None if they have none."""
    context = spec.context
    if spec.type is collections.defaultdict:
        context = context[1]
    return list(context) if isinstance(context, list | tuple) else None
