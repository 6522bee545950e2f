"""The private names of torch that packages of AOTInductor need (torch 2.11 to 2.14)."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

C_FUNCTIONS = "aot_inductor.custom_ops_to_c_shims"
"""Inductor's setting: C++ declarations for operators, which models call as C functions."""


def c_functions() -> dict[Any, Sequence[str]]:
    """Return the present value of this setting."""
    from torch._inductor import config  # slow to import

    return dict(config.aot_inductor.custom_ops_to_c_shims)


def operator_name(node: fx.Node) -> str:
    """Return "namespace::name" of the operator that a node calls; "" if it calls none."""
    target: Any = node.target
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def overload(namespace: str, name: str) -> Any:
    """Return the one overload of an operator, the object that traces contain."""
    return getattr(getattr(torch.ops, namespace), name).default


def example_call(node: fx.Node, ones: Sequence[Any] = ()) -> tuple[list[Any], dict[str, Any]]:
    """Return a call like that of a node, with fake tensors whose sizes are numbers: those that the program was exported with.

    Args:
        node: a node of an exported program.
        ones: the symbols that are 1 instead.
    """
    with FakeTensorMode():
        values = pytree.tree_map_only(fx.Node, lambda of: of.meta["val"], (list(node.args), node.kwargs))
        return pytree.tree_map(lambda value: _example(value, ones), values)


def symbols(node: fx.Node) -> list[Any]:
    """Return the symbols of the sizes and numbers that a node takes, which may change."""
    values = pytree.tree_leaves([of.meta["val"] for of in node.all_input_nodes])
    numbers = [n for value in values for n in (value.shape if isinstance(value, torch.Tensor) else [value])]
    found = {symbol for n in numbers if isinstance(n, torch.SymInt) for symbol in n.node.expr.free_symbols}
    return sorted(found, key=str)


def _example(value: Any, ones: Sequence[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        sizes, strides = ([_number(n, ones) for n in of] for of in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return _number(value, ones) if isinstance(value, torch.SymInt) else value


def _number(number: Any, ones: Sequence[Any]) -> int:
    if not isinstance(number, torch.SymInt):
        return int(number)
    environment: Any = number.node.shape_env
    known: Any = getattr(environment, "backed_var_to_val", None)  # torch 2.12 and newer
    known = environment.var_to_val if known is None else known
    lowest = {symbol: int(environment.var_to_range[symbol].lower) for symbol in number.node.expr.free_symbols}
    values = {symbol: 1 if symbol in ones else known.get(symbol, max(low, 2)) for symbol, low in lowest.items()}
    expression: Any = number.node.expr
    return int(expression.xreplace(values))
