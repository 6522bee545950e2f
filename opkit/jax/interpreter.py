"""Run a traced graph of ATen operators on arrays of JAX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx
from torch.fx.node import map_arg

from opkit.errors import ArgumentError, RuleError
from opkit.jax import dtypes
from opkit.jax.arrays import ARRAYS
from opkit.jax.pointwise import POINTWISE
from opkit.jax.torch_private import promoted_dtype
from opkit.jax.windows import WINDOWS
from opkit.op import registry

ROWS: dict[str, Callable[..., Any]] = {**ARRAYS, **POINTWISE, **WINDOWS}
"""The functions of JAX for operators of ATen, by their names without an overload."""

_PLACEMENT = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad", "sparse_grad"}
_CHOOSING = ("where", "masked_fill")  # by a bool tensor, which is not promoted
_ACCUMULATING = ("sum", "prod", "cumsum", "cumprod")  # of integers in int64
_WITH_END = ("slice", "slice_scatter")  # an end of 2**63 - 1 is none
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def name_of(target: Any) -> str:
    """Return the name of an ATen operator without its overload, such as "add"."""
    return str(getattr(getattr(target, "overloadpacket", None), "__name__", ""))


def operator_of(target: Any) -> Any:
    """Return the opkit operator that a graph calls; None if it calls another."""
    namespace = getattr(target, "namespace", "aten")
    return None if namespace in ("aten", "prims") else registry.find(f"{namespace}::{name_of(target)}")


def run(
    module: fx.GraphModule,
    arrays: Sequence[Any],
    name: str,
    call: Callable[[Any, Sequence[Any], dict[str, Any]], Any],
    known: Mapping[fx.Node, Any] | None = None,
) -> list[Any]:
    """Return the graph's results for ``arrays``.

    Args:
        module: the graph; each node has its fake tensors in ``meta["val"]``.
        arrays: one for each placeholder.
        name: the function that the graph is of, for messages.
        call: calls an opkit operator with positional and keyword arguments of its schema.
        known: values of nodes that are not computed again.

    Raises:
        RuleError: there is no function of JAX for one of the graph's operators.
        ArgumentError: the graph has an integer that needs 64 bits, and JAX has none.
    """
    values: dict[fx.Node, Any] = dict(known or {})
    inputs = iter(arrays)

    def value(node: fx.Node) -> Any:
        return values[node]

    for node in module.graph.nodes:
        if node in values:
            continue
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = dtypes.constant(getattr(module, str(node.target)))
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, dict(node.kwargs)), value)
            own = operator_of(node.target)
            values[node] = _call(node, args, dict(kwargs), name) if own is None else call(own, args, kwargs)
        elif node.op == "output":
            return [value(each) for each in node.args[0]]
    raise AssertionError("a graph ends in its output")


def missing(module: fx.GraphModule) -> list[str]:
    """Return the operators of a graph for which there is no function of JAX."""
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return sorted({str(target) for target in called if not _is_known(target)})


def _is_known(target: Any) -> bool:
    return target is operator.getitem or name_of(target) in ROWS or operator_of(target) is not None


def _call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    if node.target is operator.getitem:
        return args[0][args[1]]
    target = name_of(node.target)
    if not dtypes.x64() and any(map(_is_long, args)):
        if target in _COMPARISONS and args[0].dtype.kind in "bui":
            return jnp.full(args[0].shape, _COMPARISONS[target](0, args[1]))  # as for all numbers of 32 bits
        if target not in _WITH_END:
            raise ArgumentError(
                f"{name}: {node.target} computes with an integer that needs 64 bits, and JAX has none by default. Switch them on "
                'at the start of the program: jax.config.update("jax_enable_x64", True).'
            )
    dtype = kwargs.pop("dtype", None)
    kwargs = {key: each for key, each in kwargs.items() if key not in _PLACEMENT}
    if target in POINTWISE:
        args, kwargs = _promoted(node, target, args, kwargs)
    elif dtype is not None and args and isinstance(args[0], jax.Array):
        args = (_converted(args[0], dtype), *args[1:])
    elif target in _ACCUMULATING and args[0].dtype.kind in "bui":
        args = (_converted(args[0], node.meta["val"].dtype), *args[1:])
    try:
        return _as_in_torch(ROWS[target](*args, **kwargs), node.meta["val"])
    except NotImplementedError as error:
        raise RuleError(f"{name}: the function of JAX for {node.target} does not cover {error}.") from None


def _promoted(
    node: fx.Node, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert the tensors among the arguments to the dtype in which torch computes."""
    fakes = [each.meta["val"] if isinstance(each, fx.Node) else each for each in (*node.args, *node.kwargs.values())]
    keeps = target in _CHOOSING
    operands = [x for x in fakes if isinstance(x, (torch.Tensor, int, float, complex))]
    operands = [x for x in operands if not (keeps and isinstance(x, torch.Tensor) and x.dtype == torch.bool)]
    result = node.meta["val"].dtype
    common = promoted_dtype(operands) if operands else result
    if not (common.is_floating_point or common.is_complex) and (result.is_floating_point or result.is_complex):
        common = result  # a function such as sqrt, of integers

    def convert(each: Any) -> Any:
        chooses = keeps and isinstance(each, jax.Array) and each.dtype == bool
        return _converted(each, common) if isinstance(each, jax.Array) and not chooses else each

    return tuple(map(convert, args)), {key: convert(each) for key, each in kwargs.items()}


def _converted(x: Any, dtype: torch.dtype) -> Any:
    target = dtypes.to_jax(dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(target, jnp.complexfloating):
        x = x.real
    return x.astype(target)


def _as_in_torch(result: Any, fake: Any) -> Any:
    """Return results in torch's dtypes, as far as JAX has them."""
    if isinstance(fake, torch.Tensor):
        return _converted(jnp.asarray(result), fake.dtype)
    if isinstance(fake, (list, tuple)):
        pairs = zip(result, fake, strict=True)
        return [None if each is None else _as_in_torch(each, like) for each, like in pairs]
    return result


def _is_long(number: Any) -> bool:
    return type(number) is int and not -(2**31) <= number < 2**31
