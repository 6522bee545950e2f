"""The schedule of a graph: kernels and calls in order, and the places of buffers. It is the compiler's last form before C."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from opkit.compiler.ir.expr import Callee
from opkit.compiler.ir.index import Index
from opkit.compiler.ir.kernel import Kernel, callees
from opkit.compiler.ir.program import Buffer, Extern, Program


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """A call of a kernel.

    Attributes:
        kernel: the kernel.
        buffers, sizes: the program's buffers and sizes for its arguments and sizes.
        joined: whether it is in a batch with the launch before it. Launches of a batch share one parallel region and run in
            any order, at the same time too: none of them touches what another one writes.
    """

    kernel: Kernel
    buffers: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    joined: bool = False


@dataclasses.dataclass(frozen=True)
class FusionRefusal:
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
        program: the program; its inputs and outputs are the schedule's.
        buffers: the program's buffers that are still needed, and those between kernels of one group, by name.
        steps: in order.
        places: of each buffer in the arena, the byte at which it begins (a multiple of 64). Buffers that are returned, and
            results that extern calls allocate, have none: they are allocated by themselves.
        arena: how many bytes it has.
        refusals: what was not fused.
        apart: launches that are in no batch, or not in an earlier one, and why.
    """

    program: Program
    buffers: dict[str, Buffer]
    steps: tuple[KernelLaunch | Extern, ...]
    places: dict[str, Index]
    arena: Index
    refusals: tuple[FusionRefusal, ...] = ()
    apart: tuple[str, ...] = ()


def batches(steps: Iterable[KernelLaunch | Extern]) -> list[list[KernelLaunch]]:
    """Return the launches among steps as they run: those of a batch together."""
    found: list[list[KernelLaunch]] = []
    for launch in steps:
        if isinstance(launch, KernelLaunch):
            if not launch.joined:
                found.append([])
            found[-1].append(launch)
    return found


def called_functions(launches: Iterable[KernelLaunch]) -> tuple[Callee, ...]:
    """Return the functions of libraries that kernels call, each once, in the order of the table that kernels take."""
    kernels = dict.fromkeys(launch.kernel for launch in launches)
    return tuple(dict.fromkeys(callee for kernel in kernels for callee in callees(kernel.body)))


def moments(steps: Iterable[KernelLaunch | Extern]) -> Iterator[tuple[int, KernelLaunch | Extern]]:
    """Yield each step with its number, which is that of its batch: what is needed at one moment has memory of its own."""
    number = -1
    for step in steps:
        number += not (isinstance(step, KernelLaunch) and step.joined)
        yield number, step
