"""What runs, in order, and where everything lies: the compiler's last form before C."""

from __future__ import annotations

import dataclasses

from opkit.compiler.ir.index import Index
from opkit.compiler.ir.kernel import Kernel
from opkit.compiler.ir.program import Buffer, Extern, Program


@dataclasses.dataclass(frozen=True)
class Launch:
    """A call of a kernel: ``buffers`` and ``sizes`` are what its arguments and sizes are in the program."""

    kernel: Kernel
    buffers: tuple[str, ...]
    sizes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Two steps that were not fused, and why."""

    first: str
    second: str
    reason: str

    def __str__(self) -> str:
        return f"{self.first} and {self.second}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A program with its kernels.

    Attributes:
        program: where it comes from; its inputs and outputs are the schedule's.
        buffers: the program's that are still needed, and what kernels keep between them, by name.
        steps: in order.
        places: of each buffer in the arena, the byte at which it begins (a multiple of 64). Buffers that are returned, and
            results that extern calls allocate, have none: they are allocated by themselves.
        arena: how many bytes it has.
        refusals: what was not fused.
    """

    program: Program
    buffers: dict[str, Buffer]
    steps: tuple[Launch | Extern, ...]
    places: dict[str, Index]
    arena: Index
    refusals: tuple[Refusal, ...] = ()
