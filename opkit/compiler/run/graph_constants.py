"""The torch objects that a plan uses: operators, constant tensors, and values that arguments name. They are stored as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opkit.compiler.capture import torch_private as private
from opkit.op import registry

_MAX_ELEMENTS = 256  # of a constant tensor


@dataclasses.dataclass(frozen=True)
class GraphConstants:
    """The torch objects that a plan uses, with the meanings of the fields of ``opkit.compiler.capture.conversion.Captured``.

    Attributes:
        tensors: constant tensors, by node.
        targets: the functions that its operators are called by, by target.
        opaques: the values of :class:`OpaqueValue` arguments, by text.
        computed: Python expressions of sizes that the runtime computes from others, by name.
        resolved: the numbers of the inputs that may come with other strides, conjugated or negated.
    """

    tensors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    targets: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    opaques: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    computed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    resolved: frozenset[int] = frozenset()


def to_json(constants: GraphConstants) -> dict[str, Any]:
    """Return the constants of a graph as JSON.

    Raises:
        TypeError: they contain something that text cannot name: a function, a module, a large tensor.
    """
    for text, target in constants.targets.items():
        if (
            text != "getitem"
            and not private.is_torchs_own(target)
            and not registry.find(private.qualified_name(target))
        ):
            raise TypeError(f"it calls {text}")
    for text, value in constants.opaques.items():
        if named(text) != value:
            raise TypeError(f"an argument is {text}")
    return {
        "constants": {name: _constant(tensor) for name, tensor in constants.tensors.items()},
        "opaques": list(constants.opaques),
        "computed": dict(constants.computed),
        "resolved": sorted(constants.resolved),
    }


def from_json(content: Mapping[str, Any]) -> GraphConstants:
    """Return the constants that :func:`to_json` wrote, without targets: these are looked up by name."""
    return GraphConstants(
        {name: _tensor(*parts) for name, parts in content["constants"].items()},
        {},
        {text: named(text) for text in content["opaques"]},
        content["computed"],
        frozenset(content["resolved"]),
    )


def named(text: str) -> Any:
    """Return the dtype, device, layout or memory format of this name, or None if none has it."""
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."), None)
    try:
        return torch.device(text)
    except RuntimeError:
        return None


def _constant(tensor: torch.Tensor) -> list[Any]:
    if tensor.numel() > _MAX_ELEMENTS or not tensor.is_contiguous() or tensor.is_complex():
        raise TypeError(f"it holds a tensor of {tuple(tensor.shape)}")
    return [str(tensor.dtype), list(tensor.shape), tensor.flatten().tolist()]


def _tensor(dtype: str, shape: list[int], numbers: list[Any]) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=named(dtype)).reshape(shape)
