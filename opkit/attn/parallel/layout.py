"""Which positions of a sequence each process holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opkit.attn.compat import torch_private
from opkit.errors import ArgumentTypeError


def group_of(mesh: Any, name: str) -> dist.ProcessGroup:
    """Return the process group of a mesh of one dimension, or a group itself; ``name`` is that of the function that got it."""
    group = mesh if isinstance(mesh, dist.ProcessGroup) or not hasattr(mesh, "get_group") else mesh.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(f"{name}: mesh must be a DeviceMesh or a process group, got {type(mesh).__name__}.")
    return group


@dataclasses.dataclass(frozen=True)
class Layout:
    """The processes among which a sequence is divided.

    Attributes:
        name: that of their process group.
        size: their number.
        rank: that of this process among them.
        balanced: whether each holds two parts, one from the front and one from the back: rank ``r`` of ``n`` has the parts ``r``
            and ``2n - 1 - r`` of ``2n``. With a causal mask all have equal work then.
    """

    name: str
    size: int
    rank: int
    balanced: bool

    @classmethod
    def of(cls, group: dist.ProcessGroup, balanced: bool) -> Layout:
        """Return the layout of a process group."""
        return cls(group.group_name, group.size(), group.rank(), balanced)

    @classmethod
    def named(cls, name: str, balanced: bool = False) -> Layout:
        """Return the layout of the process group with a name."""
        return cls.of(torch_private.process_group(name), balanced)

    @property
    def group(self) -> dist.ProcessGroup:
        return torch_private.process_group(self.name)

    @property
    def parts(self) -> int:
        """The number of parts that each process has."""
        return 2 if self.balanced else 1

    def numbers(self, rank: int) -> list[int]:
        """Return which of all parts a process has, in the order in which it has them."""
        return [rank, 2 * self.size - 1 - rank] if self.balanced else [rank]

    def positions(self, rank: int, length: int) -> list[range]:
        """Return the positions in the whole sequence of the ``length`` that each process has."""
        part = length // self.parts
        return [range(n * part, (n + 1) * part) for n in self.numbers(rank)]

    def order(self, device: torch.device) -> Tensor:
        """Return which of the parts of all processes, one process after another, is which of the sequence."""
        return torch.tensor([n for rank in range(self.size) for n in self.numbers(rank)], device=device).argsort()

    def exchange(self, step: int, sent: Tensor | None, received: Tensor | None) -> list[Any]:
        """Begin to send to the rank ``step`` after this one, and to receive from the one ``step`` before."""
        operations: list[Any] = []
        for operation, tensor, rank in ((dist.isend, sent, self.rank + step), (dist.irecv, received, self.rank - step)):
            if tensor is not None:
                peer = dist.get_global_rank(self.group, rank % self.size)
                operations.append(dist.P2POp(operation, tensor, peer, self.group))
        return dist.batch_isend_irecv(operations) if operations else []
