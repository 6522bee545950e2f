"""The group ``sharding``: the strategies with which DTensor splits a call, run on pieces in this process."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opkit.contract.calls.cases import Call, Case
from opkit.contract.calls.resizing import drawn_above_one
from opkit.contract.calls.specs import Drawing
from opkit.contract.prop import NotApplicable, Property, Violation
from opkit.contract.subject import Subject
from opkit.contract.traced import derivatives as d
from opkit.sharding import pieces, registered, rules
from opkit.sharding.strategies import REPLICATE, Placement, ShardingRule, Strategy

_DTENSOR = "torch.distributed.tensor"
_FACTOR = 8.0  # of the tolerance: sums over pieces round otherwise than the whole sum


def _chunks(count: int, size: int) -> list[int]:
    """Return the sizes of a dimension's pieces as DTensor cuts them."""
    each = -(-size // count)
    return [max(0, min(each, size - each * i)) for i in range(count)]


def _first_alone(size: int) -> list[int]:
    return [min(size, 1), max(size - 1, 0)]


_CUTS: tuple[pieces.Cut, ...] = (functools.partial(_chunks, 2), functools.partial(_chunks, 3), _first_alone)


# ---- rules -----------------------------------------------------------------------------------------------------------


def _no_rule(subject: Subject) -> str:
    if subject.operator is None and _registered_with_torch(subject) is None:
        return "DTensor has no strategy for it that was registered with register_sharding"
    return ""


def _registered_with_torch(subject: Subject) -> Callable[..., Any] | None:
    """Return the function that torch's own ``register_sharding`` was given for an operator that opkit did not define."""
    if subject.overload is None or _DTENSOR not in sys.modules:
        return None
    from opkit.sharding import torch_private

    return torch_private.registered_function(subject.overload)


def _rule(subject: Subject, call: Call) -> ShardingRule:
    if subject.operator is not None:
        operator = subject.operator._operator
        return rules.rule_of(operator, *operator.signature.encode(call.args, call.kwargs))
    function: Any = _registered_with_torch(subject)
    named = [(f"tensor {i}", tensor) for i, tensor in enumerate(pieces.tensors_in((call.args, call.kwargs)))]
    return registered.read(subject.name, subject.schema, function(*call.args, **call.kwargs), named)


def _strategies(subject: Subject, case: Case) -> list[Strategy]:
    rule = _rule(subject, case.make(subject.device))
    found = [strategy for strategy in rule.strategies if not strategy.trivial]
    if not found:
        reasons = "; ".join(f"{size}: {reason}" for size, reason in rule.refused)
        raise NotApplicable(f"no argument may be sharded ({reasons or 'no strategy shards one'})")
    return found


def _cuts(strategy: Strategy, tensors: Sequence[torch.Tensor]) -> Iterator[pieces.Cut]:
    """Yield the ways of cutting a call's tensors: no piece is empty, and all are equal where the strategy demands it."""
    sizes = [t.shape[p.dim] for t, p in zip(tensors, strategy.arguments, strict=True) if p.kind == "shard"]
    for cut in _CUTS:
        parts = [cut(size) for size in sizes]
        even = strategy.even or any(placement.reduction == "avg" for placement in strategy.results)
        if all(min(part) > 0 and (not even or min(part) == max(part)) for part in parts):
            yield cut


# ---- results -----------------------------------------------------------------------------------------------------------


def _results(subject: Subject, case: Case) -> None:
    for strategy in _strategies(subject, case):
        tensors = pieces.tensors_in(_arguments(case.make(subject.device)))
        for cut in _cuts(strategy, tensors):
            _compare_results(subject, case, strategy, cut)


def _arguments(call: Call) -> Any:
    return call.args, call.kwargs


def _split(case: Case, strategy: Strategy, cut: pieces.Cut, device: str) -> Iterator[list[torch.Tensor]]:
    """Return the arguments of each device."""
    tensors = pieces.tensors_in(_arguments(case.make(device)))
    generator = torch.Generator().manual_seed(0)
    parts = [pieces.split(t, p, cut, generator) for t, p in zip(tensors, strategy.arguments, strict=True)]
    return map(list, zip(*parts, strict=True))


def _called(subject: Subject, call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    args, kwargs = pieces.with_tensors(_arguments(call), tensors)
    return pieces.tensors_in(subject.call(Call(args, kwargs)).returned)


def _compare_results(subject: Subject, case: Case, strategy: Strategy, cut: pieces.Cut) -> None:
    call = case.make(subject.device)
    whole = pieces.tensors_in(_arguments(call))
    wanted = _called(subject, call, whole)
    devices = list(_split(case, strategy, cut, subject.device))
    found = [_called(subject, call, tensors) for tensors in devices]
    _check_count(strategy, wanted)
    for i, (placement, want) in enumerate(zip(strategy.results, wanted, strict=True)):
        _compare(strategy, f"result {i}", placement, [results[i] for results in found], want)
    for i, (placement, want) in enumerate(zip(strategy.arguments, whole, strict=True)):
        if not subject.functional:
            _compare(strategy, f"tensor {i} after the call", placement, [tensors[i] for tensors in devices], want)


def _check_count(strategy: Strategy, wanted: Sequence[torch.Tensor]) -> None:
    if len(strategy.results) != len(wanted):
        raise Violation(
            f"the strategy {strategy} has {len(strategy.results)} results, and the operator returns {len(wanted)}"
        )


def _compare(strategy: Strategy, what: str, placement: Placement, parts: list[torch.Tensor], wanted: Any) -> None:
    scale = d.magnitude(parts)
    joined = parts if placement == REPLICATE else [_joined(strategy, what, placement, parts)]
    for got in joined:
        if wrong := d.mismatch(got, wanted, scale, factor=_FACTOR):
            raise Violation(
                f"the strategy {strategy} ({_origin(strategy)}) is wrong: {what}, put together from {len(parts)} pieces as "
                f"{placement}, is not that of the whole call: {wrong}"
            )


def _joined(strategy: Strategy, what: str, placement: Placement, parts: list[torch.Tensor]) -> torch.Tensor:
    try:
        return pieces.join(parts, placement)
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise Violation(
            f"the strategy {strategy} ({_origin(strategy)}) is wrong: {what} has the shapes {shapes} on pieces, which do not go "
            f"together as {placement}: {error}"
        ) from error


def _origin(strategy: Strategy) -> str:
    return strategy.origin if strategy.origin == "registered" else f"derived {strategy.origin}"


# ---- gradients ---------------------------------------------------------------------------------------------------------


def _gradients(subject: Subject, case: Case) -> None:
    numbers = d.candidates(subject, case)
    checked = False
    for strategy in _strategies(subject, case):
        tensors = pieces.tensors_in(_arguments(case.make(subject.device)))
        if len(tensors) != len(case.tensors()):
            raise NotApplicable("tensors among its arguments are constants")
        for cut in _cuts(strategy, tensors):
            checked |= _compare_gradients(subject, case, strategy, cut, numbers)
    if not checked:
        raise NotApplicable("no strategy has gradients that can be computed on pieces")


def _compare_gradients(
    subject: Subject, case: Case, strategy: Strategy, cut: pieces.Cut, numbers: Sequence[int]
) -> bool:
    """Compare the gradients of one strategy, and return whether it has any that can be computed on pieces."""
    call = case.make(subject.device)
    whole, outputs = _recorded(subject, call, pieces.tensors_in(_arguments(call)), numbers)
    flags = [output.requires_grad for output in outputs]
    _check_count(strategy, outputs)
    backward = strategy.backward(flags)
    if backward is None or not any(flags):
        return False
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs if o.requires_grad]
    seeds = [pieces.split(g, p, cut) for g, p in zip(incoming, backward.arguments, strict=True)]
    wanted = _pulled_back(strategy, whole, outputs, incoming)
    found: list[list[torch.Tensor]] = []
    for device, tensors in enumerate(_split(case, strategy, cut, subject.device)):
        local, results = _recorded(subject, call, tensors, numbers)
        found.append(_pulled_back(strategy, local, results, [seed[device] for seed in seeds]))
    for number, want, *parts in zip(numbers, wanted, *found, strict=True):
        _compare(strategy, f"the gradient of tensor {number}", backward.results[number], parts, want)
    return True


def _recorded(
    subject: Subject, call: Call, tensors: Sequence[torch.Tensor], numbers: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    leaves = [tensor.detach().requires_grad_(i in numbers) for i, tensor in enumerate(tensors)]
    return [leaves[number] for number in numbers], _called(subject, call, leaves)


def _pulled_back(
    strategy: Strategy, leaves: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    differentiable = [output for output in outputs if output.requires_grad]
    if [output.shape for output in differentiable] != [seed.shape for seed in seeds]:
        raise Violation(f"the strategy {strategy} ({_origin(strategy)}) is wrong: results on pieces have other shapes")
    gradients: Any = torch.autograd.grad(differentiable, list(leaves), list(seeds), allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]


def _no_gradients(subject: Subject) -> str:
    if not subject.functional:
        return "it writes to its arguments"
    return _no_rule(subject) or d.no_candidates(subject)


def _property(name: str, **row: Any) -> Property:
    defaults: dict[str, Any] = {
        "cases": drawn_above_one(Drawing(largest=7, elements=256)),
        "share": 0.4,
        "cost": 0.05,
        "least": 8,
    }
    return Property(name, **{**defaults, **row})


PROPERTIES = (
    _property(
        "sharding.results",
        rule="On pieces of its arguments the operator computes what DTensor puts together to the results of the whole call.",
        defect="a size sharded that the operator reduces over, or a sum of pieces taken for their maximum",
        check=_results,
        skip=_no_rule,
    ),
    _property(
        "sharding.gradients",
        rule="The gradients on pieces, put together, are those of the whole call.",
        defect="a backward that reads all rows, such as a mean; the gradient of a replicated weight taken from one device",
        check=_gradients,
        skip=_no_gradients,
        backward=True,
    ),
)
"""The properties of this module."""
