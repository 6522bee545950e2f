"""This module batches kernels: launches that do not depend on each other share one parallel region.

It makes one pass over the launches between two extern calls. A small launch moves up into the first batch after all that it
depends on. A large one joins the last batch or starts one: moving it would separate it from data in the cache. All buffers of a
batch are in memory at once, so their share of the arena is limited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from opkit.compiler.ir.index import product
from opkit.compiler.ir.kernel import parallel
from opkit.compiler.ir.program import Buffer, Extern, reads, writes
from opkit.compiler.ir.schedule import KernelLaunch
from opkit.compiler.lower.iteration_space import number
from opkit.compiler.lower.memory_planning import nbytes

SMALL = 16.0  # pieces of work that are worth a thread each
MEMORY = 1 << 20  # bytes of the arena that the launches of a batch may touch

ScheduledStep = KernelLaunch | Extern


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Expected values of sizes, and the bytes of the arena that each buffer takes."""

    expected: Mapping[str, int]
    arena: Mapping[str, float]

    @staticmethod
    def of(expected: Mapping[str, int], inside: Mapping[str, Buffer]) -> BatchSizes:
        """Return the sizes for the buffers in the arena."""
        return BatchSizes(expected, {name: number(nbytes(each), expected) for name, each in inside.items()})

    def work(self, launch: KernelLaunch) -> float:
        """Return the number of pieces of work that are each worth a thread."""
        names = zip(launch.kernel.sizes, launch.sizes, strict=True)
        known = {name: self.expected.get(size, 0) for name, size in names}
        return number(product(loop.axis.extent for loop in parallel(launch.kernel)[0]), known) / launch.kernel.grain

    def memory(self, launch: KernelLaunch) -> float:
        """Return the bytes of the arena that a launch touches."""
        return sum(self.arena.get(name, 0) for name in set(launch.buffers))


def batched(steps: Sequence[ScheduledStep], sizes: BatchSizes) -> tuple[list[ScheduledStep], list[str]]:
    """Return the steps with the launches of a batch next to each other, and the reasons why launches did not join a batch."""
    memory = _same_memory(steps)
    found: list[ScheduledStep] = []
    reasons: dict[str, None] = {}
    run = _Run(sizes, memory, reasons)
    for step in steps:
        if isinstance(step, KernelLaunch):
            run.add(step)
        else:
            found += [*run.ordered(), step]
            run = _Run(sizes, memory, reasons)
    return found + run.ordered(), list(reasons)


def _same_memory(steps: Sequence[ScheduledStep]) -> dict[str, str]:
    """Map buffers that may share memory, such as an operator's results and arguments, to one name."""
    found: dict[str, str] = {}
    for step in steps:
        if isinstance(step, Extern) and step.aliases:
            first, *others = (_root(found, name) for name in (*reads(step), *writes(step)))
            found |= {name: first for name in others if name != first}
    return {name: _root(found, name) for name in found}


def _root(found: Mapping[str, str], name: str) -> str:
    while name in found:
        name = found[name]
    return name


@dataclasses.dataclass
class _Batch:
    launches: list[KernelLaunch]
    memory: float


class _Run:
    """The batches between two extern calls, in order."""

    def __init__(self, sizes: BatchSizes, same: Mapping[str, str], reasons: dict[str, None]) -> None:
        self.sizes, self.same, self.reasons = sizes, same, reasons
        self.batches: list[_Batch] = []
        self.written: dict[str, tuple[int, str]] = {}  # the last batch that writes to a buffer, and its kernel
        self.touched: dict[str, tuple[int, str]] = {}  # the last one that reads it or writes to it

    def add(self, launch: KernelLaunch) -> None:
        at = self._place(launch)
        batch = self.batches[at]
        batch.launches.append(launch)
        batch.memory += self.sizes.memory(launch)
        for name, written in self._uses(launch):
            self.touched[name] = max((at, launch.kernel.name), self.touched.get(name, (at, "")))
            if written:
                self.written[name] = (at, launch.kernel.name)

    def ordered(self) -> list[ScheduledStep]:
        """Return the launches as steps, batch by batch."""
        groups = (batch.launches for batch in self.batches)
        return [dataclasses.replace(each, joined=k > 0) for group in groups for k, each in enumerate(group)]

    def _uses(self, launch: KernelLaunch) -> list[tuple[str, bool]]:
        """Return the buffers of a launch, and whether it writes to them."""
        names = (self.same.get(name, name) for name in launch.buffers)
        return [(name, argument.written) for name, argument in zip(names, launch.kernel.arguments, strict=True)]

    def _place(self, launch: KernelLaunch) -> int:
        """Return the number of the batch for a launch, a new one if necessary."""
        after, refusal = self._after(launch)
        last = len(self.batches) - 1
        first = after + 1 if self.sizes.work(launch) <= SMALL else max(after + 1, last)
        memory = self.sizes.memory(launch)
        for at in dict.fromkeys((first, last)):
            if after < at <= last and self._fits_memory(self.batches[at], memory):
                return at
        if self.batches:
            self.reasons[refusal if after == last else f"{launch.kernel.name}: {_MEMORY_REASON}"] = None
        self.batches.append(_Batch([], 0.0))
        return last + 1

    def _fits_memory(self, batch: _Batch, memory: float) -> bool:
        return batch.memory + memory <= MEMORY or memory == 0

    def _after(self, launch: KernelLaunch) -> tuple[int, str]:
        """Return the last batch that must come before the launch, or -1, and the reason."""
        found = (-1, "", "")
        for name, written in self._uses(launch):
            found = max(found, (*(self.touched if written else self.written).get(name, (-1, "")), name))
        return found[0], f"{launch.kernel.name} comes after {found[1]}, for both use {found[2]}"


_MEMORY_REASON = "with what is before it, it would need more memory at once"
