"""This module compares a call's arguments before and after it, byte by byte and over their whole storages."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from opkit.contract.calls.arguments import distinct, owners
from opkit.contract.calls.cases import Call, Case
from opkit.contract.memory.guarded import plain
from opkit.contract.subject import Subject


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # pyright: ignore[reportArgumentType]


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": tuple(tensor.shape),
        "strides": tensor.stride(),
        "storage offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "address": tensor.untyped_storage().data_ptr(),
        "size of its storage": tensor.untyped_storage().nbytes(),
        "requires_grad": tensor.requires_grad,
        "negative bit": tensor.is_neg(),
        "conjugate bit": tensor.is_conj(),
    }


@dataclasses.dataclass(frozen=True)
class TensorSnapshot:
    """A tensor, and its metadata and bytes at an earlier time."""

    number: int
    tensor: torch.Tensor
    facts: dict[str, Any]
    bytes: torch.Tensor
    version: int
    inside: torch.Tensor

    def metadata_changes(self) -> list[str]:
        """Describe the metadata that has changed."""
        now = _facts(self.tensor)
        return [f"its {name} was {was} and is {now[name]}" for name, was in self.facts.items() if now[name] != was]

    def written(self) -> bool:
        """Return whether its elements were written to, even with the same numbers."""
        return bool(self.bytes_changed(True)) or self.tensor._version != self.version

    def bytes_changed(self, inside: bool) -> int:
        """Count the changed bytes of its elements, or of the rest of its storage."""
        now = storage_bytes(self.tensor)
        if now.shape != self.bytes.shape:
            return 0
        return int(((now != self.bytes) & (self.inside == inside)).sum())


def snapshots(call: Call) -> list[TensorSnapshot]:
    """Return a snapshot of each tensor of the call."""
    return [
        TensorSnapshot(number, each, _facts(each), storage_bytes(each).clone(), each._version, _inside(each))
        for number, each in distinct(call)
    ]


def _inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask of the storage's bytes that belong to elements."""
    size = tensor.element_size()
    found = torch.zeros(tensor.untyped_storage().nbytes() // size, dtype=torch.bool, device=tensor.device)
    lying = plain(tensor)
    places = torch.arange(found.numel(), device=tensor.device)
    found[torch.as_strided(places, lying.shape, lying.stride(), lying.storage_offset()).reshape(-1)] = True
    return found.repeat_interleave(size)


def may_write(subject: Subject, case: Case, margin: int = 0) -> set[int]:
    """Return the numbers of the tensors that an operator may write to: by its schema, or else by what its reference does."""
    if subject.schema is not None:
        return {number for number, name in enumerate(owners(case, subject.schema)) if name in subject.writes}
    assert subject.reference is not None
    call = case.make(subject.device, margin=margin)
    before = snapshots(call)
    subject.call(call, subject.reference)
    return {each.number for each in before if each.written() or each.metadata_changes()}
