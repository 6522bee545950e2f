"""How eager calls run that record gradients: the kernel within an autograd node, which is decided once for each plan."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkit.op.core import Operator
from opkit.op.dispatch.planning import Plan
from opkit.op.dispatch.selection import REFERENCE
from opkit.op.rules.autograd import Call, GivenRule, apply, restore
from opkit.op.rules.listed import counts_of, spreads, wholes


def make_training(operator: Operator, plan: Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """How calls of these shapes run when gradients are recorded, on ordinary tensors in eager mode."""
    if plan.kernel == REFERENCE and operator.self_differentiating(args, kwargs):
        return lambda *args, **kwargs: plan.run(*args, **kwargs)
    rule = operator.rule(args, kwargs)
    if isinstance(rule, GivenRule) and (setup := _simple_setup(operator, rule, args, kwargs)) is not None:
        return _simple_training(operator, plan, rule, args, setup)
    trim = _trailing_defaults(operator) if isinstance(rule, GivenRule) else []
    counts, function = counts_of(args), operator.autograd_function
    spread = spreads(counts)

    def train(*args: Any, **kwargs: Any) -> Any:
        if trim:
            args = _trimmed(args, trim)
        call = Call(plan.run, rule, kwargs, True, counts and counts[: len(args)], spread)
        return restore(call, apply(function, call, args))

    return train


def _simple_setup(
    operator: Operator, rule: GivenRule, args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """The rule's ``setup_context``, if autograd nodes can take arguments and results of such calls as they are."""
    listed = spreads(counts_of(args)) or any(str(r.type).startswith("List") for r in operator.schema.returns)
    if listed or not all(parameter.required for parameter in operator.signature.parameters):
        return None
    return rule.setup_of(args, kwargs)


def _simple_training(
    operator: Operator, plan: Plan, rule: GivenRule, args: Sequence[Any], setup: Callable[..., Any]
) -> Callable[..., Any]:
    """As :func:`make_training`, by one :class:`Call` for all calls."""
    counts = counts_of(args)
    call = Call(plan.run, rule, {}, True, counts, setup=setup, whole=wholes(counts))
    record = operator.autograd_function.apply

    def train(*args: Any) -> Any:
        call.run = plan.run  # which the first call settles
        return record(*args, call)

    return train


def _trailing_defaults(operator: Operator) -> list[Any]:
    # the dispatcher drops trailing arguments that equal their defaults, and the author's rule may count on it
    return [] if operator.signature.flattened else [
        p.default for p in operator.signature.parameters if not p.keyword_only
    ]  # fmt: skip


def _trimmed(args: tuple[Any, ...], defaults: list[Any]) -> tuple[Any, ...]:
    count = len(args)
    while count:
        value, default = args[count - 1], defaults[count - 1]
        if value is not default and (
            isinstance(value, torch.Tensor) or type(value) is not type(default) or value != default
        ):
            break
        count -= 1
    return args[:count]
