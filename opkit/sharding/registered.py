"""Read the strategies that an author registered with :meth:`opkit.CustomOp.register_sharding`."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import RuleError
from opkit.op.core import Operator
from opkit.sharding.strategies import REPLICATE, Placement, ShardingRule, Strategy, partial, replicated, shard

_FORM = "[([output placements], [input placements]), ...]"


def strategies_of(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardingRule:
    """Return the registered rule of a call with schema values.

    Raises:
        RuleError: the function returned something else than ``[([output placements], [input placements]), ...]``.
    """
    positional, named = list(args), dict(kwargs)
    if operator.signature.flattened:
        positional, named = operator.signature.decode(args, kwargs)
    returned: Any = operator.registered.sharding(*positional, **named)  # type: ignore[misc]  # pyright: ignore
    return read(operator.name, operator.schema, returned, list(operator.named_tensors(args, kwargs)))


def read(name: str, schema: Any, returned: Any, tensors: Sequence[tuple[str, torch.Tensor]]) -> ShardingRule:
    """Return the rule that a registered function returned for a call with these tensors.

    Raises:
        RuleError: it has another form.
    """
    try:
        pairs = [(_flat(outputs), _flat(inputs)) for outputs, inputs in returned]
    except (TypeError, ValueError):
        raise _error(name, f"returned {returned!r}") from None
    found = [_strategy(name, schema, outputs, inputs, tensors) for outputs, inputs in pairs]
    results = len(found[0].results) if found else len(schema.returns)
    everything = replicated(len(tensors), results)
    return ShardingRule((*(() if any(s.trivial for s in found) else (everything,)), *found))


def _flat(placements: Any) -> list[Any]:
    if not isinstance(placements, (list, tuple)):
        raise TypeError
    return [each for each in pytree.tree_leaves(list(placements)) if each is not None]


def _strategy(
    name: str, schema: Any, outputs: list[Any], inputs: list[Any], tensors: Sequence[tuple[str, torch.Tensor]]
) -> Strategy:
    if len(inputs) != len(tensors):
        names = ", ".join(argument for argument, _ in tensors)
        raise _error(name, f"returned {len(inputs)} input placements, and the call has {len(tensors)} tensors: {names}")
    count = len(schema.returns)
    lists = any(str(result.type).startswith("List") for result in schema.returns)
    if len(outputs) != count and not lists:
        raise _error(name, f"returned {len(outputs)} output placements, and the operator has {count} results")
    arguments = tuple(
        _placement(name, each, f"the argument {argument}", tensor.ndim)
        for each, (argument, tensor) in zip(inputs, tensors, strict=True)
    )
    results = tuple(_placement(name, each, f"the result {i}", None) for i, each in enumerate(outputs))
    return Strategy(arguments, results, origin="registered")


def _placement(name: str, value: Any, where: str, ndim: int | None) -> Placement:
    if value.__class__.__name__ == "Replicate":
        return REPLICATE
    if value.__class__.__name__ == "Partial" and value.reduce_op in ("sum", "avg", "max", "min"):
        return partial(value.reduce_op)
    if value.__class__.__name__ != "Shard":
        raise _error(name, f"has {value!r} for {where}; placements are Shard, Replicate and Partial")
    dim = value.dim
    if (ndim is None and dim < 0) or (ndim is not None and not -ndim <= dim < ndim):
        expected = "a dimension that is not negative" if ndim is None else f"a dimension of its {ndim}"
        raise _error(name, f"has {value!r} for {where}; expected {expected}")
    return shard(dim % ndim if ndim is not None else dim)


def _error(name: str, what: str) -> RuleError:
    return RuleError(
        f"{name}: the function given to register_sharding {what}. It takes the operator's arguments and returns "
        f"{_FORM}, with one placement for each tensor, those in lists one by one (None for other arguments)."
    )
