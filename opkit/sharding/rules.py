"""The sharding rule of a call: registered with ``register_sharding``, else derived from the reference, and cached."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.trace.reference_trace import concrete
from opkit.sharding.derivation import derive, size_names
from opkit.sharding.propagation import RandomNumbers, Refused
from opkit.sharding.registered import strategies_of
from opkit.sharding.strategies import ShardingRule, replicated

EVERY_SIZE = "every size"
"""What a rule refuses where its reason is not about one size."""


def rule_of(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardingRule:
    """Return the rule of a call with schema values, of whose tensors only sizes, strides, dtypes and devices are read.

    Raises:
        RuleError: what ``register_sharding`` was given returns something else than strategies.
    """
    args, kwargs = private.library_utils.fill_defaults(operator.schema, args, kwargs)
    if operator.registered.sharding is not None:
        return strategies_of(operator, args, kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    key = (operator.state.current(), *map(_form, leaves))
    exact = (key, *[tuple(map(concrete, leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)])
    cache = operator.sharding_rules
    if key not in cache and exact not in cache:
        rule, general = _derived(operator, args, kwargs)
        cache[key if general else exact] = rule
    return cache[key] if key in cache else cache[exact]


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), concrete(leaf)
    return leaf.ndim, leaf.dtype, leaf.device.type, tuple(min(concrete(size), 2) for size in leaf.shape)


def _derived(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[ShardingRule, bool]:
    try:
        if operator.state.unknown:
            raise Refused(f"its reference reads what may change from call to call: {operator.state.unknown}")
        if not operator.transparent(args, kwargs):
            raise Refused(f"its reference leaves torch: {operator.known_trace(args, kwargs).opaque}")
        with private.no_modes(), operator.state.running():
            return derive(operator.reference, args, kwargs, size_names(operator.signature, args, kwargs))
    except RandomNumbers as reason:
        return ShardingRule((), ((EVERY_SIZE, str(reason)),)), True
    except Refused as reason:
        return _replicated(operator, args, kwargs, str(reason)), False


def _replicated(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], reason: str) -> ShardingRule:
    """Return the rule of an operator of which nothing is known: copies of the arguments give copies of the results."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    results = [str(result.type) for result in operator.schema.returns]
    lists = [kind for kind in results if kind.startswith("List")]
    found = () if lists else (replicated(len(tensors), results.count("Tensor")),)
    return ShardingRule(found, ((EVERY_SIZE, reason),))
