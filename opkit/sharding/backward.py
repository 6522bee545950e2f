"""Gradients of calls with DTensors: the derived backward runs on the pieces that each device has.

With a strategy of the forward the operator is a function of pieces, and its vector-Jacobian product on each device gives the
gradients of that device's pieces. An argument that all devices have a copy of gets a summand from each: its gradient is Partial.
Where that does not hold, or the call's strategy is not known, the reference's vector-Jacobian product runs in operators of aten
on DTensors, and DTensor places it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from opkit.op import torch_compile
from opkit.op.core import Operator
from opkit.op.torch_private import no_modes
from opkit.sharding import torch_private as private
from opkit.sharding.dtensor import torch_placements
from opkit.sharding.rules import rule_of
from opkit.sharding.strategies import Strategy


@dataclasses.dataclass
class PiecesOfCall:
    """The arguments and output gradients of a call as one device has them.

    Attributes:
        leaves: the leaves of the arguments, with local tensors.
        seeds: the gradients of the differentiable results as local tensors, None where a result was not used.
        placements: the placements of each leaf's gradient on the mesh.
        inputs: the leaves with DTensors.
    """

    leaves: list[Any]
    seeds: list[Any]
    placements: dict[int, tuple[Any, ...]]
    inputs: Sequence[Any]

    def whole(self, i: int, gradient: torch.Tensor | None) -> Any:
        """Return the gradient of the leaf ``i`` as a DTensor."""
        if gradient is None or i not in self.placements:
            return gradient
        given = self.inputs[i]
        mesh = given.device_mesh
        return private.DTensor.from_local(
            gradient.contiguous(), mesh, self.placements[i], shape=given.shape, stride=given.stride()
        )


def pieces_of(
    operator: Operator, leaves: Sequence[Any], spec: Any, flags: Sequence[bool], seeds: Sequence[Any]
) -> PiecesOfCall | None:
    """Return the pieces on which a backward may run, or None where it must run on DTensors.

    Args:
        operator: the operator.
        leaves: the leaves of its arguments.
        spec: their structure.
        flags: which results are differentiable.
        seeds: the gradients of those.
    """
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    used = [
        seed if isinstance(seed, private.DTensor) else None for seed in seeds
    ]  # autograd's own zeros are no DTensors
    sharded = all(isinstance(leaves[i], private.DTensor) for i in at)
    if torch.is_grad_enabled() or torch_compile.functionalizing() or not sharded:
        return PiecesOfCall(list(leaves), used, {}, leaves)
    chosen = _strategies(operator, [leaves[i] for i in at], pytree.tree_unflatten(leaves, spec), flags)
    if chosen is None:
        return PiecesOfCall(list(leaves), used, {}, leaves)
    local = list(leaves)
    for i in at:
        local[i] = leaves[i].to_local()
    wanted = map(torch_placements, zip(*(s.arguments for s in chosen), strict=True))
    pieces = [
        None if seed is None else seed.redistribute(seed.device_mesh, placements).to_local()
        for seed, placements in zip(used, wanted, strict=True)
    ]
    placed = map(torch_placements, zip(*(s.results for s in chosen), strict=True))
    return PiecesOfCall(local, pieces, dict(zip(at, placed, strict=True)), leaves)


def _strategies(operator: Operator, tensors: Sequence[Any], call: Any, flags: Sequence[bool]) -> list[Strategy] | None:
    """Return the backward's strategy of each mesh dimension, for arguments that lie as these do; None where one has none."""
    with no_modes(), FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = pytree.tree_map_only(private.DTensor, _like, call)
    rule = rule_of(operator, args, kwargs)
    found: list[Strategy] = []
    for placements in zip(*(tensor.placements for tensor in tensors), strict=True):
        fitting = [s.backward(flags) for s in rule.strategies if torch_placements(s.arguments) == placements]
        if not fitting or fitting[0] is None:
            return None
        found.append(fitting[0])
    return found


def _like(tensor: Any) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
