"""Derive forward mode from a backward that the author registered.

A backward is linear in the gradients that it receives, and forward mode is its transpose: with the backward ``B`` of a call, the
tangents of the results are the derivative of ``sum(B(u) * tangents)`` with respect to ``u``, which autograd finds by running
backwards twice.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import RuleError
from opkit.op import torch_private as private

transposing: list[Any] = []
"""The calls whose backward is being transposed, in any thread: functorch must not begin a level there."""


def from_backward(name: str, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the results of a call with their tangents.

    Args:
        name: the operator's name, for messages.
        call: runs the operator within an autograd node of the registered backward.
        args: the positional arguments; tensors among them carry tangents.
        kwargs: the keyword arguments, likewise.

    Raises:
        RuleError: the backward cannot be differentiated with respect to the gradients that it receives.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    duals = {i: private.unpack_dual(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    moved = {i: tangent for i, (_, tangent) in duals.items() if tangent is not None}
    recorded = torch.is_grad_enabled() and any(primal.requires_grad for primal, _ in duals.values())
    with torch.enable_grad():
        values = [duals[i][0] if i in duals else leaf for i, leaf in enumerate(leaves)]
        for i in moved:
            values[i] = values[i] if values[i].requires_grad else private.requiring_grad(values[i])
        primals, named = pytree.tree_unflatten(values, spec)
        results, structure = pytree.tree_flatten(call(*primals, **named))
        at = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and r.requires_grad]
        outputs, inputs = [results[i] for i in at], [values[i] for i in moved]
        seeds = [private.requiring_grad(torch.ones_like(output)) for output in outputs]  # any values will do
        transposing.append(call)
        try:
            tangents = _transposed(name, outputs, inputs, seeds, list(moved.values()))
        finally:
            transposing.pop()
    for i, output, tangent in zip(at, outputs, tangents, strict=True):
        if not recorded and private.functorch_level() is None:  # no outer transform or autograd records them
            output, tangent = output.detach(), tangent.detach()
        results[i] = private.make_dual(output, tangent)
    return pytree.tree_unflatten(results, structure)


def _transposed(name: str, outputs: list[Any], inputs: list[Any], seeds: list[Any], tangents: list[Any]) -> list[Any]:
    if not outputs:
        return []
    pulled: Any = torch.autograd.grad(outputs, inputs, seeds, create_graph=True, allow_unused=True)
    pairs = [(gradient, tangent) for gradient, tangent in zip(pulled, tangents, strict=True) if gradient is not None]
    if not all(gradient.requires_grad or private.known_zero(gradient) for gradient, _ in pairs):
        raise RuleError(
            f"{name}: forward-mode derivatives are derived from the registered backward, which leaves torch or detaches the "
            "gradients that it receives. Compute the backward by torch operations, or use reverse mode."
        )
    pairs = [(gradient, tangent) for gradient, tangent in pairs if gradient.requires_grad]
    if not pairs:
        return [torch.zeros_like(output) for output in outputs]
    transposed: Any = torch.autograd.grad(
        [gradient for gradient, _ in pairs],
        seeds,
        [tangent for _, tangent in pairs],
        create_graph=True,
        allow_unused=True,
    )
    return [torch.zeros_like(s) if f is None else f for f, s in zip(transposed, seeds, strict=True)]
