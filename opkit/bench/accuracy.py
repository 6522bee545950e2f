"""Errors against float64, and the rule by which a model passes.

As in torch's own benchmarks, a compiled model may be as wrong as the model itself is in eager mode, times a small factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

FACTOR = 10.0
"""How often the error of eager mode a compiled model may have."""

FLOOR = 1e-5
"""The error that any compiled model may have, for models whose results in eager mode are exact or nearly so."""


_PART = 1 << 26  # elements


def floating_leaves(result: Any) -> list[Tensor]:
    """Return the floating-point tensors in a result, in order; models of transformers and diffusers return objects."""
    leaves = pytree.tree_leaves(result.to_tuple() if hasattr(result, "to_tuple") else result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())]


def loss_of(result: Any) -> Tensor:
    """Return the loss of a training step: see :class:`~opkit.bench.architecture.Task`."""
    if isinstance(result, Mapping) and isinstance(result.get("loss"), Tensor):
        return result["loss"]
    if isinstance(result, Mapping) and result and all(isinstance(v, Tensor) and v.dim() == 0 for v in result.values()):
        return torch.stack(list(result.values())).sum()
    squares = [leaf.abs().square().mean() for leaf in floating_leaves(result)]
    return torch.stack([each.to(torch.promote_types(each.dtype, torch.float32)) for each in squares]).sum()


def worst_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of the tensors, in the Euclidean norm; infinity if their number or shapes differ."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return math.inf
    return max((_relative([a], [b]) for a, b in zip(found, expected, strict=True)), default=0.0)


def joint_error(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Return the relative error of all tensors as one vector; infinity if one is None where the other is not."""
    if [each is None for each in found] != [each is None for each in expected]:
        return math.inf
    return _relative([each for each in found if each is not None], [each for each in expected if each is not None])


def worst_of_calls(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> float:
    """Return the largest relative error of the results of several calls."""
    return max(worst_error(a, b) for a, b in zip(found, expected, strict=True))


def shapes(results: Sequence[Sequence[Tensor]]) -> list[list[torch.Size]]:
    """Return the shapes of the results of several calls."""
    return [[each.shape for each in result] for result in results]


@dataclasses.dataclass(frozen=True)
class Training:
    """The losses, the gradients of the first step, and how much the steps changed each floating-point parameter and buffer."""

    losses: list[Tensor]
    gradients: list[Tensor | None]
    changes: list[Tensor]
    first_seconds: float

    def errors(self, exact: Training) -> dict[str, float]:
        """Return the relative errors of the first loss, of the gradients, and of what the steps changed, with their losses."""
        return {
            "loss": joint_error(self.losses[:1], exact.losses[:1]),
            "gradients": joint_error(self.gradients, exact.gradients),
            "steps": joint_error([*self.losses, *self.changes], [*exact.losses, *exact.changes]),
        }


def _relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    difference = norm = 0.0
    for whole_a, whole_b in zip(found, expected, strict=True):
        wide = torch.complex128 if whole_b.is_complex() else torch.float64
        for a, b in zip(_parts(whole_a), _parts(whole_b), strict=True):
            a, b = a.to(wide), b.to(a.device, wide)
            same = a == b  # infinities too, such as those of masks
            difference += torch.where(same, 0.0, a - b).abs().square().sum().item()
            norm += torch.where(same & ~b.isfinite(), 0.0, b).abs().square().sum().item()
    return math.sqrt(difference) / math.sqrt(norm) if norm else math.sqrt(difference)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor in parts whose copies in float64 take little memory."""
    return tensor.detach().flatten().split(_PART)


def limit(eager: float) -> float:
    """Return the largest error with which a model passes, for its error in eager mode."""
    return max(FACTOR * eager, FLOOR)


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each error over several runs; of an even number, the larger of the two in the middle.

    An error that is not a number counts as infinite.
    """
    return {
        name: sorted(math.inf if math.isnan(run[name]) else run[name] for run in runs)[len(runs) // 2]
        for name in runs[0]
    }


def wrong_results(errors: Mapping[str, float], eager: Mapping[str, float]) -> list[str]:
    """Return a line for each error that is above its limit, or is not a number."""
    return [
        f"{name}: error {error:.3g}, more than {limit(eager[name]):.3g} (eager mode: {eager[name]:.3g})"
        for name, error in errors.items()
        if not error <= limit(eager[name]) < math.inf
    ]
