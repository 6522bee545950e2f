"""The functions that the Python of a compiled graph calls: torch's operators by name, and functions that adapt their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from opkit.compiler.capture import torch_private as private
from opkit.compiler.run import driver
from opkit.compiler.run.driver_program import STEPS
from opkit.compiler.run.library import Runtime, raise_error

# Python bindings of operators, which are faster than the dispatcher's generic call.
_SHORT: dict[str, Callable[..., Any]] = {
    "aten.mm.default": torch.mm,
    "aten.bmm.default": torch.bmm,
    "aten.addmm.default": torch.addmm,
    "aten.baddbmm.default": torch.baddbmm,
}


def seed(out: torch.Tensor | None = None) -> torch.Tensor:
    """Draw a number from torch's default generator, so that ``torch.manual_seed`` decides it."""
    drawn = torch.empty((), dtype=torch.int64) if out is None else out
    return drawn.random_()


_OWN: dict[str, Callable[..., Any]] = {"opkit.seed": seed}


def function(target: str, targets: Mapping[str, Callable[..., Any]], out: bool = False) -> Callable[..., Any]:
    """Return the function of a target; with ``out``, its variant that writes its result to ``out=``.

    Raises:
        AttributeError: there is no operator of that name, or it has no such variant.
    """
    short = _SHORT.get(target) or _OWN.get(target)
    if short is not None:
        return short
    found = targets.get(target) or private.overload_named(target)
    if out:
        variant = private.out_variant(found)
        if variant is None:
            raise AttributeError(f"{target} has no variant with out=")
        found = variant
    return private.builtin(found) if private.is_overload(found) else found


def single(target: str, targets: Mapping[str, Callable[..., Any]]) -> bool:
    """Return whether the result of a target is one tensor, and not a tuple or list of them."""
    if target in _SHORT or target in _OWN:
        return True
    found: Any = targets.get(target) or private.overload_named(target)
    if not private.is_overload(found):
        return False
    returns = private.schema(found).returns
    return len(returns) == 1 and str(returns[0].type) in ("Tensor", "int", "Optional[Tensor]")


def into(operator: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    """Compute a product of ``tensors[1:]`` into ``tensors[0]``."""
    operator(*tensors[1:], out=tensors[0])


def failed(words: list[int], runtime: Runtime, origins: tuple[tuple[str, ...], ...], graph: str, at: int) -> None:
    """Raise the error of a step of the driver that begins at ``words[at]``.

    Raises:
        IndexError, MemoryError: a segment failed.
        RuntimeError: torch refused to allocate memory, or to make a view.
    """
    step = STEPS[words[at]]
    if step == "segment":
        raise_error(runtime, origins[words[at + 2]], graph)
    if step not in ("view", "allocate"):
        raise RuntimeError(f"torch refused the step {step!r} (in {graph})")
    rank = words[at + 4]
    shape, strides = (tuple(words[begin : begin + rank]) for begin in (at + 5, at + 5 + rank))
    if step == "allocate":
        torch.empty_strided(shape, strides, dtype=driver.dtype_numbered(words[at + 3]))  # says what is wrong
    raise RuntimeError(f"torch refused to {step} a tensor of sizes {shape} and strides {strides} (in {graph})")


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return the results of an operator as a tuple."""
    return tuple(result) if isinstance(result, list | tuple) else (result,)


def fit(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the strides that the graph was captured with, without conjugate or negative bit."""
    if tensor.stride() == strides and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    if tuple(tensor.shape) != shape:
        raise RuntimeError(
            f"an operator gave the sizes {tuple(tensor.shape)} where its fake implementation gives {shape}"
        )
    return torch.empty_strided(shape, strides, dtype=tensor.dtype).copy_(tensor)
