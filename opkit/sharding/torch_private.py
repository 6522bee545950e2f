"""Every private name of torch.distributed.tensor that opkit relies on; importing this module imports DTensor, and no more.

It is imported at the end of torch.distributed.tensor's own import, which may be in the middle of another module's of torch.

The names are those of torch 2.14; 2.11 and 2.13 have them too unless the line says otherwise.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor as DTensor
from torch.distributed.tensor import Partial as Partial
from torch.distributed.tensor import Replicate as Replicate
from torch.distributed.tensor import Shard as Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec as OpSpec
from torch.distributed.tensor._op_schema import OpStrategy as OpStrategy
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo, TupleStrategy


def register(overload: Any, strategy: Callable[[Any], OpStrategy]) -> None:
    """Give DTensor the function that returns an operator's strategies; all its arguments are part of DTensor's cache keys."""
    named = [argument.name for argument in overload._schema.arguments if argument.kwarg_only]
    info = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=named or None, needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(overload, strategy, info)


def registered_function(overload: Any) -> Callable[..., Any] | None:
    """Return the function that torch's ``register_sharding`` was given for an operator."""
    strategy = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.get(overload)
    inner = getattr(strategy, "func", None)  # of functools.partial
    is_experimental = getattr(inner, "__module__", "").endswith("experimental._register_sharding")
    return strategy.args[0] if isinstance(strategy, functools.partial) and is_experimental else None


def clear_cache() -> None:
    """Make DTensor ask for strategies again that it has asked for before."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def redistribute_costs(strategy: OpStrategy, spec: DTensorSpec) -> list[float]:
    """Return what it costs to bring an argument to the placements of ``spec``."""
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    return generate_redistribute_costs(strategy, spec)


def strategies_in(value: Any) -> Iterator[OpStrategy]:
    """Yield what stands for each tensor among the arguments that DTensor gives to a strategy function."""
    if isinstance(value, OpStrategy):
        yield value
    elif isinstance(value, (list, tuple, dict, TupleStrategy)):
        each = value.values() if isinstance(value, dict) else children(value)
        for item in each:
            yield from strategies_in(item)


def children(value: Any) -> Any:
    """Return the items of a list of tensors in a strategy function's arguments."""
    return value.children if isinstance(value, TupleStrategy) else value


def is_list(value: Any) -> bool:
    """Return whether a strategy function's argument is a list."""
    return isinstance(value, (list, tuple, TupleStrategy))


def tensor_like(strategy: OpStrategy) -> torch.Tensor:
    """Return an empty tensor with the sizes, strides, dtype and device of an argument, under a fake mode."""
    spec: Any = strategy.strategies[0].output_spec
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=spec.mesh.device_type)
