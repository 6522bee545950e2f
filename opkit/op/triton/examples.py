"""Example calls of Triton kernels, and what the compiler is asked for when the operator is called like them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opkit.kernels.triton import compiling
from opkit.kernels.triton.configs import Config, prune
from opkit.op import layout, typical_calls
from opkit.op import layout_program as p
from opkit.op.core import Operator
from opkit.op.example_arguments import CallSpec
from opkit.op.triton.arguments import Values
from opkit.op.triton.binding import Bound
from opkit.op.triton.entries import Memory
from opkit.op.triton.evaluation import as_grid, evaluate
from opkit.op.triton.machine import MACHINES
from opkit.op.triton.python import allocated
from opkit.op.triton.variants import Variants, in_pieces

_INT32 = 2**31


def calls_of(operator: Operator, examples: Sequence[Mapping[str, Any]]) -> list[CallSpec]:
    """The calls that the examples name; without any, some that are made up from the operator's annotations.

    Raises:
        ArgumentError: an example cannot be read, or nothing can be made up.
    """
    return typical_calls.given(operator, examples) if examples else typical_calls.made_up(operator)


def configs_of(operator: Operator, bound: Bound, call: CallSpec) -> Sequence[Config | None]:
    """The configs that a call may use; a None of a kernel that has none."""
    if not bound.kernel.configs:
        return (None,)
    _, named = _values(operator, bound, call)
    return prune(bound.kernel.configs, bound.kernel.prune, named)


def request_of(operator: Operator, bound: Bound, call: CallSpec, config: Any, target: str) -> compiling.Request:
    """What the compiler is asked for when the operator is called like an example.

    Raises:
        KernelError: a function that the author gave raised.
    """
    values, named = _values(operator, bound, call)
    named = evaluate(bound.where, bound.formulas, {**named, **({} if config is None else config.values)})
    seen = [_seen(values.of(source)) for source in bound.sources]
    pieces = in_pieces(as_grid(bound.where, named["grid"]))
    return Variants(bound, MACHINES["cuda"]).request(seen, named, target, pieces)


def _values(operator: Operator, bound: Bound, call: CallSpec) -> tuple[Values, dict[str, Any]]:
    args, kwargs = typical_calls.arguments_of(operator, call, "meta")
    operands = layout.operands(operator, args, kwargs)
    values = Values(bound, operands, _outputs(operator, bound, args, kwargs, operands))
    return values, {**values.named(), **bound.constants}


def _outputs(
    operator: Operator, bound: Bound, args: Sequence[Any], kwargs: dict[str, Any], operands: list[Any]
) -> list[Any]:
    new = iter(allocated(operator, layout.layout_of(operator, args, kwargs), args, kwargs))
    return [next(new) if output.alias is None else operands[output.alias] for output in bound.facts.outputs]


def _seen(value: Any) -> Any:
    """A value as the launcher shows it, of a tensor whose memory is aligned as torch allocates it."""
    if isinstance(value, torch.Tensor):
        sizes, strides = tuple(value.shape), tuple(value.stride())
        return Memory(0, p.DTYPES[value.dtype], 0, sizes, strides, _is_large(sizes, strides))
    return value


def _is_large(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) >= _INT32
