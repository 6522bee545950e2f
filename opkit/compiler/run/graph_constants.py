"""What a plan uses of torch, as JSON: the values that its arguments name, and small constant tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from opkit.compiler.capture import torch_private as private
from opkit.compiler.run.runner import GraphConstants
from opkit.op import registry

_MOST_NUMBERS = 256  # of a constant tensor


def described(found: GraphConstants) -> dict[str, Any]:
    """Surroundings in terms of JSON.

    Raises:
        TypeError: they hold what text cannot name: functions, modules, large tensors.
    """
    for text, target in found.targets.items():
        if (
            text != "getitem"
            and not private.is_torchs_own(target)
            and not registry.find(private.qualified_name(target))
        ):
            raise TypeError(f"it calls {text}")
    for text, value in found.opaques.items():
        if named(text) != value:
            raise TypeError(f"an argument is {text}")
    return {
        "constants": {name: _constant(tensor) for name, tensor in found.tensors.items()},
        "opaques": list(found.opaques),
        "computed": dict(found.computed),
        "resolved": sorted(found.resolved),
    }


def restored(content: Mapping[str, Any]) -> GraphConstants:
    """What :func:`described` was given, but for targets, which are found by their names."""
    return GraphConstants(
        {name: _tensor(*parts) for name, parts in content["constants"].items()},
        {},
        {text: named(text) for text in content["opaques"]},
        content["computed"],
        frozenset(content["resolved"]),
    )


def named(text: str) -> Any:
    """The dtype, device, layout or memory format of this name; None if there is none."""
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."), None)
    try:
        return torch.device(text)
    except RuntimeError:
        return None


def _constant(tensor: torch.Tensor) -> list[Any]:
    if tensor.numel() > _MOST_NUMBERS or not tensor.is_contiguous() or tensor.is_complex():
        raise TypeError(f"it holds a tensor of {tuple(tensor.shape)}")
    return [str(tensor.dtype), list(tensor.shape), tensor.flatten().tolist()]


def _tensor(dtype: str, shape: list[int], numbers: list[Any]) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=named(dtype)).reshape(shape)
