"""Make example calls of Triton kernels, and the compile requests of such calls."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opkit.kernels.triton import compiling
from opkit.kernels.tuning.configs import Config, prune
from opkit.op.core import Operator
from opkit.op.examples import typical as typical_calls
from opkit.op.examples.arguments import ExampleCall
from opkit.op.layout import outputs as layout
from opkit.op.layout import program as p
from opkit.op.triton.arguments import Values
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.entries import Memory
from opkit.op.triton.evaluation import as_grid, evaluate
from opkit.op.triton.machine import MACHINES
from opkit.op.triton.python import allocated
from opkit.op.triton.variants import Variants, in_pieces

_INT32 = 2**31


def calls_of(operator: Operator, examples: Sequence[Mapping[str, Any]]) -> list[ExampleCall]:
    """Return the calls that the examples name; without any, some that are made up from the operator's annotations.

    Raises:
        ArgumentError: an example cannot be read, or nothing can be made up.
    """
    return typical_calls.from_examples(operator, examples) if examples else typical_calls.generate(operator)


def values_of(operator: Operator, bound: BoundKernel, call: ExampleCall) -> Values:
    """Return the values of a kernel when the operator is called like an example, with tensors without data."""
    args, kwargs = typical_calls.arguments_of(operator, call, "meta")
    operands = layout.operands(operator, args, kwargs)
    return Values(bound, operands, _outputs(operator, bound, args, kwargs, operands))


def configs_for(values: Values) -> Sequence[Config | None]:
    """Return the configs that a call with these values may use; a None of a kernel that has none."""
    kernel = values.bound.kernel
    return prune(kernel.configs, kernel.prune, _named(values)) if kernel.configs else (None,)


def request_for(values: Values, config: Config | None, target: str) -> compiling.CompileRequest:
    """Return the compile request of a call with these values.

    Raises:
        KernelError: a function that the author gave raised.
    """
    bound = values.bound
    named = evaluate(bound.where, bound.formulas, {**_named(values), **({} if config is None else config.values)})
    seen = [_seen(values.of(source)) for source in bound.sources]
    pieces = in_pieces(as_grid(bound.where, named["grid"]))
    return Variants(bound, MACHINES["cuda"]).request(seen, named, target, pieces)


def configs_of(operator: Operator, bound: BoundKernel, call: ExampleCall) -> Sequence[Config | None]:
    """Return the configs that a call may use; a None of a kernel that has none."""
    return configs_for(values_of(operator, bound, call))


def request_of(
    operator: Operator, bound: BoundKernel, call: ExampleCall, config: Any, target: str
) -> compiling.CompileRequest:
    """Return the compile request of a call of the operator like an example.

    Raises:
        KernelError: a function that the author gave raised.
    """
    return request_for(values_of(operator, bound, call), config, target)


def _named(values: Values) -> dict[str, Any]:
    return {**values.named(), **values.bound.constants}


def _outputs(
    operator: Operator, bound: BoundKernel, args: Sequence[Any], kwargs: dict[str, Any], operands: list[Any]
) -> list[Any]:
    new = iter(allocated(operator, layout.layout_of(operator, args, kwargs), args, kwargs))
    return [next(new) if output.alias is None else operands[output.alias] for output in bound.facts.outputs]


def _seen(value: Any) -> Any:
    """Return a value as the launcher shows it, of a tensor whose memory is aligned as torch allocates it."""
    if isinstance(value, torch.Tensor):
        sizes, strides = tuple(value.shape), tuple(value.stride())
        offset = int(value.storage_offset()) * value.element_size()
        return Memory(offset, p.DTYPES[value.dtype], 0, sizes, strides, _is_large(sizes, strides))
    return value


def _is_large(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) >= _INT32
