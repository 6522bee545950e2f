"""Describe the sharding rule of an operator, for ``opkit describe``: each size, its strategy or the reason for none."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from opkit.errors import ArgumentError
from opkit.op.description import RuleInfo
from opkit.op.examples.calls import arguments_of, generate
from opkit.op.operator import CustomOp
from opkit.sharding.rules import rule_of
from opkit.sharding.strategies import ShardingRule, Strategy


def sharding_of(op: CustomOp[Any, Any]) -> list[RuleInfo]:
    """Return a line for each size and each set of partial arguments, for a call that fits the operator's annotations."""
    operator = op._operator  # pyright: ignore[reportPrivateUsage]
    try:
        example = generate(operator)[-1]
        with FakeTensorMode(allow_non_fake_inputs=True):
            args, kwargs = operator.signature.encode(*arguments_of(operator, example))
    except ArgumentError as error:
        return [RuleInfo("any", "not derivable", f"no example call can be made: {error}")]
    return described(rule_of(operator, args, kwargs))


def described(rule: ShardingRule) -> list[RuleInfo]:
    """Return a line for each strategy that does not replicate all arguments, and for each size that is not offered."""
    offered = [RuleInfo(_what(s), _origin(s), str(s)) for s in rule.strategies if not s.trivial]
    return [*offered, *(RuleInfo(size, "not offered", reason) for size, reason in rule.refused)]


def _what(strategy: Strategy) -> str:
    return strategy.size or ("any" if strategy.origin == "registered" else "none, partial arguments")


def _origin(strategy: Strategy) -> str:
    return "given" if strategy.origin == "registered" else f"derived {strategy.origin}"
