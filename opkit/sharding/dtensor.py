"""Give DTensor the strategies of an operator: those of one mesh dimension, combined over all dimensions of the mesh.

DTensor calls :func:`strategies` where it has not seen a call's sizes and placements before; see :mod:`opkit.sharding.activation`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from opkit.errors import RuleError
from opkit.op.core import Operator
from opkit.op.torch_private import library_utils, no_modes
from opkit.sharding import torch_private as private
from opkit.sharding.rules import rule_of
from opkit.sharding.strategies import Placement, ShardingRule, Strategy

_TORCH_PLACEMENTS = {"replicate": lambda _: private.Replicate(), "shard": lambda p: private.Shard(p.dim)}


def strategies(operator: Operator, schema: Any) -> Any:
    """Return the strategies of one call on its mesh, in DTensor's form.

    Raises:
        NotImplementedError: nothing is known about the operator.
        RuleError: no strategy leaves the arguments where they are that cannot move.
    """
    inputs = [*private.strategies_in(schema.args_schema), *private.strategies_in(schema.kwargs_schema)]
    with no_modes(), FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = _tensors(schema.args_schema), {k: _tensors(v) for k, v in schema.kwargs_schema.items()}
    rule = rule_of(operator, args, kwargs)
    if not rule.strategies:
        raise NotImplementedError(f"Operator {operator.name} does not have a sharding strategy: {_reasons(rule)}")
    mesh = schema.get_mesh_from_args()
    pinned = list(_pinned(operator, schema))
    found = [
        _spec(operator, mesh, combination, inputs)
        for combination in itertools.product(rule.strategies, repeat=mesh.ndim)
        if _fits(mesh, combination, inputs, pinned)
    ]
    if not found:
        raise RuleError(_unmovable(operator, rule, inputs, pinned))
    return private.OpStrategy(found)


def _tensors(value: Any) -> Any:
    if isinstance(value, private.OpStrategy):
        return private.tensor_like(value)
    return [_tensors(item) for item in private.children(value)] if private.is_list(value) else value


def _reasons(rule: ShardingRule) -> str:
    return "; ".join(f"{size}: {reason}" for size, reason in rule.refused)


def _pinned(operator: Operator, schema: Any) -> Iterator[bool]:
    """Yield for each tensor whether it must stay as it is: a write needs the original, and DTensor moves no keyword argument."""
    positions, _ = library_utils.mutated_args_kwargs(operator.schema)
    for i, value in enumerate(schema.args_schema):
        yield from (i in positions for _ in private.strategies_in(value))
    yield from (True for _ in private.strategies_in(schema.kwargs_schema))


def _fits(mesh: Any, combination: Sequence[Strategy], inputs: Sequence[Any], pinned: Sequence[bool]) -> bool:
    results = zip(*(strategy.results for strategy in combination), strict=True)
    return all(map(_one_reduction, results)) and all(
        _one_reduction(placements)
        and (not stays or torch_placements(placements) == _current(each).placements)
        and _shardable(mesh, combination, placements, _current(each))
        for each, stays, placements in zip(
            inputs, pinned, zip(*(strategy.arguments for strategy in combination), strict=True), strict=True
        )
    )


def _one_reduction(placements: Sequence[Placement]) -> bool:
    return len({placement.reduction for placement in placements if placement.kind == "partial"}) <= 1


def _shardable(mesh: Any, combination: Sequence[Strategy], placements: Sequence[Placement], spec: Any) -> bool:
    """Return whether a tensor has enough rows for the pieces, equally many where the strategy demands it."""
    for dim in {placement.dim for placement in placements if placement.kind == "shard"}:
        over = [i for i, placement in enumerate(placements) if placement.kind == "shard" and placement.dim == dim]
        counts, size = [mesh.size(i) for i in over], spec.tensor_meta.shape[dim]
        if any(combination[i].even for i in over) and size % functools.reduce(int.__mul__, counts) != 0:
            return False
        whole = any(p.reduction in ("max", "min") for i in over for p in combination[i].results)
        as_it_is = torch_placements(placements) == spec.placements and not whole
        if not as_it_is and (size < functools.reduce(int.__mul__, counts) or (whole and _smallest(size, counts) < 1)):
            return False
    return True


def _smallest(size: Any, counts: Sequence[int]) -> Any:
    for count in counts:
        size = size - -(-size // count) * (count - 1)
    return size


def _current(strategy: Any) -> Any:
    return strategy.strategies[0].output_spec


def torch_placements(placements: Sequence[Placement]) -> tuple[Any, ...]:
    """Return placements as torch has them."""
    return tuple(
        private.Partial(p.reduction) if p.kind == "partial" else _TORCH_PLACEMENTS[p.kind](p) for p in placements
    )


def _spec(operator: Operator, mesh: Any, combination: Sequence[Strategy], inputs: Sequence[Any]) -> Any:
    arguments = [
        private.DTensorSpec(mesh, torch_placements(placements), tensor_meta=_current(each).tensor_meta)
        for each, placements in zip(inputs, zip(*(s.arguments for s in combination), strict=True), strict=True)
    ]
    results = [
        private.DTensorSpec(mesh, torch_placements(placements))
        for placements in zip(*(s.results for s in combination), strict=True)
    ]
    returns = [str(result.type) for result in operator.schema.returns]
    outputs: Any = tuple(results) if returns != ["Tensor"] else results[0]
    costs = [private.redistribute_costs(each, spec) for each, spec in zip(inputs, arguments, strict=True)]
    return private.OpSpec(output_specs=outputs if returns else None, input_specs=arguments, redistribute_cost=costs)


def _unmovable(operator: Operator, rule: ShardingRule, inputs: Sequence[Any], pinned: Sequence[bool]) -> str:
    placed = ", ".join(str(_current(each).placements) for each in inputs)
    stays = ", ".join(str(i) for i, pin in enumerate(pinned) if pin)
    offered = "; ".join(str(strategy) for strategy in rule.strategies)
    return (
        f"{operator.name}: no sharding strategy fits the placements of its tensors, {placed}. The tensors {stays} are written to "
        f"and not moved. On each mesh dimension it takes one of: {offered}. Redistribute them first."
    )
