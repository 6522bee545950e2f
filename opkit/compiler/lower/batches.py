"""Put launches next to each other that do not depend on each other: a batch, which shares one parallel region.

One pass over the launches between two extern calls decides: a small launch moves up into the first batch after all that it
depends on. A large one joins the last batch or starts one: moving it would separate it from data in the cache. All buffers of a
batch are in memory at once, so their share of the arena is limited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.index import Index, product
from opkit.compiler.ir.kernel import KernelLaunch, parallel
from opkit.compiler.ir.program import Extern, same_memory

ScheduledStep = KernelLaunch | Extern

SMALL_LAUNCH = 16.0  # the most pieces of work, each worth a thread, of a launch that moves to an earlier batch
BATCH_MEMORY = 1 << 20  # bytes of the arena that the launches of a batch may touch


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Expected values of sizes, and the bytes of the arena that each buffer takes."""

    expected: Mapping[str, int]
    arena: Mapping[str, float]

    @staticmethod
    def of(expected: Mapping[str, int], arena: Mapping[str, Index]) -> BatchSizes:
        """Return the sizes for buffers that take so many bytes of the arena."""
        return BatchSizes(expected, {name: estimate(nbytes, expected) for name, nbytes in arena.items()})

    def work(self, launch: KernelLaunch) -> float:
        """Return the number of pieces of work that are each worth a thread."""
        names = zip(launch.kernel.sizes, launch.sizes, strict=True)
        known = {name: self.expected.get(size, 0) for name, size in names}
        return estimate(product(loop.axis.extent for loop in parallel(launch.kernel)[0]), known) / launch.kernel.grain

    def memory(self, launch: KernelLaunch) -> float:
        """Return the bytes of the arena that a launch touches."""
        return sum(self.arena.get(name, 0) for name in set(launch.buffers))


def batched(steps: Sequence[ScheduledStep], sizes: BatchSizes) -> tuple[list[ScheduledStep], list[str]]:
    """Return the steps with the launches of a batch next to each other, and the reasons why launches did not join a batch."""
    memory = same_memory(steps)
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
        first = after + 1 if self.sizes.work(launch) <= SMALL_LAUNCH else max(after + 1, last)
        memory = self.sizes.memory(launch)
        for at in dict.fromkeys((first, last)):
            if after < at <= last and (memory == 0 or self.batches[at].memory + memory <= BATCH_MEMORY):
                return at
        if self.batches:
            memory_reason = f"{launch.kernel.name}: with what is before it, it would need more memory at once"
            self.reasons[refusal if after == last else memory_reason] = None
        self.batches.append(_Batch([], 0.0))
        return last + 1

    def _after(self, launch: KernelLaunch) -> tuple[int, str]:
        """Return the last batch that must come before the launch, or -1, and the reason."""
        found = (-1, "", "")
        for name, written in self._uses(launch):
            found = max(found, (*(self.touched if written else self.written).get(name, (-1, "")), name))
        return found[0], f"{launch.kernel.name} comes after {found[1]}, for both use {found[2]}"
