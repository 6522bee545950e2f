"""This module writes constants of graphs as weights of a file, and reads them: views, and narrower storage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opkit.errors import ArgumentError
from opkit.ship import torch_private as private
from opkit.ship.products import PANEL

STORAGE = {"bfloat16": torch.bfloat16, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
"""The dtypes that weights may be stored in."""

_MIN_STORED = 1 << 10  # elements of a weight that is worth narrower storage


@dataclasses.dataclass
class WeightWriter:
    """Collects the weights of a file.

    Attributes:
        storage: the dtype that matrices of floats are stored in; None for their own.
        weights: contiguous tensors on the CPU, by name.
    """

    storage: torch.dtype | None = None
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict[str, torch.Tensor])
    _known: dict[Any, str] = dataclasses.field(default_factory=dict[Any, str])
    _records: dict[Any, dict[str, Any]] = dataclasses.field(default_factory=dict[Any, dict[str, Any]])
    _alive: list[torch.Tensor] = dataclasses.field(
        default_factory=list[torch.Tensor]
    )  # an address names memory until it is freed

    def _is_narrowed(self, tensor: torch.Tensor, depth: int | None) -> bool:
        return (
            self.storage is not None
            and (tensor.dim() > 1 or depth is not None)
            and tensor.numel() >= _MIN_STORED
            and tensor.dtype.is_floating_point
        )

    def add(self, tensor: torch.Tensor, name: str, depth: int | None = None) -> dict[str, Any]:
        """Add a tensor, and return the JSON that :class:`WeightReader` reads it by.

        Args:
            tensor: the tensor.
            name: its name in the file.
            depth: the depth of a packed weight; None for others.
        """
        if not private.is_dense(tensor):
            tensor = tensor.contiguous()
        record = {"shape": list(tensor.shape), "strides": list(tensor.stride())}
        if self._is_narrowed(tensor, depth):
            return self._once(tensor, self.storage, lambda: {**record, **self._add_narrowed(tensor, name, depth)})
        return {"at": self._add(tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()), name), **record}

    def _add_narrowed(self, tensor: torch.Tensor, name: str, depth: int | None) -> dict[str, Any]:
        """Add a tensor in the storage's dtype, with its dimensions in the order in which they lie in memory."""
        assert self.storage is not None
        record = {"dtype": str(tensor.dtype).removeprefix("torch.")}
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        plain = tensor.permute(order).contiguous() if depth is None else tensor.view(-1, depth, PANEL)
        row = tuple(range(1, plain.dim())) if depth is None else (1,)
        if self.storage is torch.bfloat16:
            return {**record, "at": self._add(plain.to(self.storage), name)}
        largest = 127.0 if self.storage is torch.int8 else torch.finfo(self.storage).max
        scale = plain.abs().amax(row, keepdim=True).float() / largest
        scaled = plain / torch.where(scale == 0, 1, scale)
        stored = scaled.round().to(torch.int8) if self.storage is torch.int8 else scaled.to(self.storage)
        return {**record, "at": self._add(stored, name), "scale": self._add(scale, f"{name}.scale")}

    def _once(self, tensor: torch.Tensor, form: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the record of a tensor in another form, which programs for several instruction sets share."""
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, repr(form))
        if key not in self._records:
            self._records[key] = make()
            self._alive.append(tensor)
        return self._records[key]

    def _add(self, tensor: torch.Tensor, name: str) -> str:
        """Add a contiguous tensor, unless the same memory was added, and return its name."""
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        known = self._known.get(key) if tensor.numel() else None
        if known is None:
            known = name if name not in self.weights else f"{name}.{len(self.weights)}"
            self.weights[known] = tensor.cpu()
            self._known[key] = known
            self._alive.append(tensor)
        return known


class WeightReader:
    """Makes tensors of a file's weights.

    Args:
        weights: the tensors of the file.
        device: where the results are.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._weights, self._device = weights, device
        self._moved: dict[str, torch.Tensor] = {}
        self._states: dict[str, torch.Tensor] = {}

    def tensor(self, record: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor of a record.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: the record does not fit the weights.
        """
        flat, shape, strides = self._on_device(record["at"]), record["shape"], record["strides"]
        if "dtype" in record:
            wide = flat.to(torch.float32)
            wide = wide * self._on_device(record["scale"]) if "scale" in record else wide
            flat = wide.to(getattr(torch, record["dtype"])).reshape(-1)
        if any(n < 0 for n in (*shape, *strides)) or len(shape) != len(strides):
            raise ValueError(f"a weight has the sizes {shape} and strides {strides}")
        if flat.numel() <= sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) and 0 not in shape:
            raise ValueError(f"a weight of {shape} is not within {record['at']}")
        return flat.as_strided(shape, strides)

    def state(self, record: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor of a weight that a program takes or writes to: one for all entries that have it."""
        key = json.dumps(record)
        if key not in self._states:
            self._states[key] = self.tensor(record).clone()
        return self._states[key]

    def _on_device(self, name: str) -> torch.Tensor:
        if name not in self._moved:
            self._moved[name] = self._weights[name].to(self._device)
        return self._moved[name]


def storage_dtype(storage: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that weights are stored in.

    Raises:
        ArgumentError: there is no such storage.
    """
    if storage is None:
        return None
    name = str(storage).removeprefix("torch.")
    if name not in STORAGE:
        raise ArgumentError(f"opkit.export: storage={storage!r} is not one of {', '.join(STORAGE)}.")
    return STORAGE[name]
