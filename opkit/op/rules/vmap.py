"""Derive vmap: one call of the kernel for a ``*batch`` operator, the mapped reference, or a loop.

An operator whose tensors are annotated ``*batch ...`` takes a mapped dimension as one more leading size, so one call of
the kernel does. That the operator treats its leading sizes independently is the annotation's promise; the first folded
call of each kind is compared with the reference, and an operator that breaks the promise is never folded again.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.op.schema.signature import Signature


def fold_refusal(signature: Signature, in_dims: Sequence[Any]) -> str | None:
    """Return why a mapped call cannot be folded into leading sizes; None where it can."""
    names = {p.pattern.leading_batch for p in signature.parameters if p.pattern} - {None}
    if len(names) != 1:
        return "the operator's tensors have no common leading *batch"
    (batch,) = names
    if signature.flattened or any(p.kind == "tensors" for p in signature.parameters):
        return "the operator takes or returns lists or structures"
    outputs = signature.return_patterns
    if not all(pattern is not None and pattern.leading_batch == batch for pattern in outputs):
        return f"an output does not begin with *{batch}"
    for parameter, dim in zip(signature.parameters, in_dims, strict=False):
        if dim is not None and (parameter.pattern is None or parameter.pattern.leading_batch != batch):
            return f"the mapped argument {parameter.name} does not begin with *{batch}"
    return None


def fold(
    op: Callable[..., Any], signature: Signature, info: Any, in_dims: Sequence[Any], args: Sequence[Any], kwargs: Any
) -> tuple[Any, Any]:
    """Call ``op`` once with the mapped dimension as its first size."""
    moved: list[Any] = []
    for parameter, dim, arg in zip(signature.parameters, in_dims, args, strict=False):
        if not isinstance(arg, torch.Tensor):
            moved.append(arg)
        elif dim is not None:
            moved.append(arg.movedim(dim, 0))
        elif parameter.pattern is not None and parameter.pattern.leading_batch:
            moved.append(arg.expand(info.batch_size, *arg.shape))
        else:
            moved.append(arg)
    output = op(*moved, **kwargs)
    return output, pytree.tree_map_only(torch.Tensor, _first, output)


def _first(_: torch.Tensor) -> int:
    return 0


def loop(op: Callable[..., Any], info: Any, in_dims: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, Any]:
    """Call ``op`` once for each index of the mapped dimension and stack the results."""
    results: list[list[Any]] = []
    output_spec: Any = None
    for index in range(info.batch_size):
        flat, output_spec = pytree.tree_flatten(op(*_picked(args, in_dims, index), **kwargs))
        results.append(flat)
    stacked = [torch.stack(column) for column in zip(*results, strict=True)]
    return (
        pytree.tree_unflatten(stacked, output_spec),
        pytree.tree_unflatten([0] * len(stacked), output_spec),
    )


@dataclasses.dataclass
class FoldRecord:
    """The kinds of folded calls that agreed with the reference, and why the operator is no longer folded, if it is not."""

    agreed: set[Any] = dataclasses.field(default_factory=set)
    broken: str = ""


def _picked(args: Sequence[Any], in_dims: Any, index: int) -> Any:
    leaves, spec = pytree.tree_flatten(list(args))
    dims = pytree.tree_leaves(in_dims, is_leaf=lambda dim: dim is None)
    picked = [
        leaf.select(dim, index) if isinstance(leaf, torch.Tensor) and dim is not None else leaf
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return pytree.tree_unflatten(picked, spec)


def agrees(
    reference: Callable[..., Any], folded: Any, info: Any, in_dims: Any, args: Sequence[Any], kwargs: Any
) -> bool:
    """Return whether a folded result is the reference's, for the first and the last index, up to the rounding of its dtype."""
    with torch.no_grad():
        for index in {0, info.batch_size - 1} if info.batch_size else ():
            expected = pytree.tree_leaves(reference(*_picked(args, in_dims, index), **kwargs))
            got = [leaf.select(0, index) for leaf in pytree.tree_leaves(folded)]
            if not all(_close(a, b) for a, b in zip(got, expected, strict=True)):
                return False
    return True


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return bool(torch.equal(a, b))
    tolerance = 64 * torch.finfo(a.dtype).eps ** 0.75
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
