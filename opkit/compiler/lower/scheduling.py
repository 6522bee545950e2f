"""Turn a program into a schedule: fuse steps, make kernels of groups, batch launches, and plan the memory of buffers.

Launches of kernels that do not depend on each other form a batch, which shares one parallel region. One pass over the launches
between two extern calls decides: a small launch moves up into the first batch after all that it depends on. A large one joins the
last batch or starts one: moving it would separate it from data in the cache. All buffers of a batch are in memory at once, so
their share of the arena is limited.

In the arena, two buffers share memory if the last use of one is before the first of the other. A buffer takes the lowest place
that is free during its lifetime, the largest buffers first. Sizes that are not numbers are compared as expressions: a piece is
reused for exactly its own size. The arena stays allocated for a whole call and between calls, however briefly all of it is
needed. With ``save_memory``, as in training, a large buffer that would be much of the arena has memory of its own, from its first
to its last use. The system zeroes such memory in each call, which costs time without a benefit elsewhere (ResNet-50's inference:
9 %).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index, index, product
from opkit.compiler.ir.kernel import Kernel, KernelLaunch, Schedule, moments, parallel
from opkit.compiler.ir.program import Buffer, Extern, Program, ScalarItem, Strided, reads, writes
from opkit.compiler.lower.fuse import Fused, fuse
from opkit.compiler.lower.nest import nests
from opkit.compiler.lower.target import PLAIN, LoweringTarget

ScheduledStep = KernelLaunch | Extern

SMALL_LAUNCH = 16.0  # the most pieces of work, each worth a thread, of a launch that moves to an earlier batch
BATCH_MEMORY = 1 << 20  # bytes of the arena that the launches of a batch may touch
ALIGNMENT = 64  # of buffers in the arena
LARGE_BUFFER = 8 << 20  # bytes
LARGE_SHARE = 4  # with ``save_memory``, a large buffer of at least 1/4 of the arena is outside of it


def schedule(program: Program, target: LoweringTarget = PLAIN, save_memory: bool = False) -> Schedule:
    """Return the schedule of a program.

    With ``save_memory``, large buffers lie outside of the arena, which then stays small between calls.
    """
    fused = fuse(program, target)
    needed = _needed(program, fused)
    buffers = dict(program.buffers)
    steps: list[ScheduledStep] = []
    shared: dict[Kernel, Kernel] = {}
    for entry in fused.entries:
        if isinstance(entry, Extern):
            steps.append(entry)
            continue
        stored = {name for name in entry.members if name in needed}
        if not stored:
            continue
        of_group = nests(entry, buffers, stored, program.sizes, f"k{len(shared)}", target)
        buffers |= {buffer.name: buffer for buffer in of_group.buffers}
        steps += [_deduplicated(launch, shared) for launch in of_group.launches]
    inside = _inside(program, buffers, steps)
    steps, apart = batched(steps, BatchSizes.of(program.sizes, inside)) if target.device == "cpu" else (steps, [])
    places, size = _places(inside, steps, save_memory)
    used = {name for step in steps for name in _touched(step)} | set(program.buffers) & _outputs(program)
    needed = used | {name for name, buffer in buffers.items() if buffer.role != "made"}
    remaining = {name: buffer for name, buffer in buffers.items() if name in needed and buffer.whole is None}
    return Schedule(program, remaining, tuple(steps), places, size, tuple(fused.refusals), tuple(apart))


def _needed(program: Program, fused: Fused) -> set[str]:
    """Return the buffers that must be in memory: read by another entry, returned, or the caller's."""
    needed = set(program.with_parts(_outputs(program)))
    for entry in fused.entries:
        if isinstance(entry, Extern):
            needed |= {*program.reads(entry), *program.with_parts(entry.mutated)}
        else:
            needed |= set(entry.loads)
    return needed | {name for name, buffer in program.buffers.items() if buffer.role != "made"}


def _outputs(program: Program) -> set[str]:
    return {output.buffer for output in program.outputs if isinstance(output, Strided | ScalarItem)}


def _deduplicated(launch: KernelLaunch, shared: dict[Kernel, Kernel]) -> KernelLaunch:
    """Return the launch of an equal kernel that exists already, if there is one."""
    plain = dataclasses.replace(launch.kernel, name="", origins=())
    if plain not in shared:
        shared[plain] = dataclasses.replace(launch.kernel, name=f"k{len(shared)}")
    return dataclasses.replace(launch, kernel=shared[plain])


def _touched(step: ScheduledStep) -> list[str]:
    return list(step.buffers) if isinstance(step, KernelLaunch) else [*reads(step), *writes(step)]


# ---- batches --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Expected values of sizes, and the bytes of the arena that each buffer takes."""

    expected: Mapping[str, int]
    arena: Mapping[str, float]

    @staticmethod
    def of(expected: Mapping[str, int], inside: Mapping[str, Buffer]) -> BatchSizes:
        """Return the sizes for the buffers in the arena."""
        return BatchSizes(expected, {name: estimate(nbytes(each), expected) for name, each in inside.items()})

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


# ---- the arena ------------------------------------------------------------------------------------------------------


def _inside(program: Program, buffers: dict[str, Buffer], steps: Sequence[ScheduledStep]) -> dict[str, Buffer]:
    """Return the buffers in the arena: those that kernels and calls with ``out`` write, and that do not leave the graph."""
    calls = [step for step in steps if isinstance(step, Extern)]
    allocated = {name for call in calls if not call.out for name in writes(call)}
    owned = {name for call in calls if call.uses_storage for name in reads(call)}
    aside = (
        _outputs(program) | allocated | owned
    )  # a call's result may alias its arguments, or count from their storage's start
    touched = dict.fromkeys(name for step in steps for name in _touched(step))
    return {name: buffers[name] for name in touched if buffers[name].role == "made" and name not in aside}


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """The first and the last step that need a buffer."""

    buffer: str
    first: int
    last: int


def _places(
    buffers: Mapping[str, Buffer], steps: Sequence[ScheduledStep], save_memory: bool
) -> tuple[dict[str, Index], Index]:
    """Return the first byte of each of the buffers in the arena, and the arena's size in bytes."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, step in moments(steps):
        for name in _touched(step):
            first.setdefault(name, at)
            last[name] = at
    lives = [Lifetime(name, first[name], last[name]) for name in buffers]
    fixed = {life: int(size) for life in lives if (size := nbytes(buffers[life.buffer]).constant) is not None}
    found, end = _fixed(fixed)
    if save_memory:
        found, end = _fixed(
            {life: size for life, size in fixed.items() if size < max(LARGE_BUFFER, end // LARGE_SHARE)}
        )
    more, total = _symbolic([life for life in lives if life not in fixed], buffers, index(end))
    return found | more, total


def nbytes(buffer: Buffer) -> Index:
    """Return the bytes of a dense buffer, rounded up to the arena's alignment."""
    exact = product(buffer.shape) * DTYPES[buffer.dtype].bytes
    return exact if exact.constant == 0 else (exact + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def _fixed(sizes: Mapping[Lifetime, int]) -> tuple[dict[str, Index], int]:
    """Place the largest buffers first: each at the lowest place that no buffer with an overlapping lifetime uses."""
    placed: list[tuple[Lifetime, int, int]] = []
    found: dict[str, Index] = {}
    for life in sorted(sizes, key=lambda life: (-sizes[life], life.first)):
        at = _lowest(
            sizes[life], [(b, e) for other, b, e in placed if other.first <= life.last and life.first <= other.last]
        )
        placed.append((life, at, at + sizes[life]))
        found[life.buffer] = index(at)
    return found, max((end for _, _, end in placed), default=0)


def _lowest(length: int, taken: list[tuple[int, int]]) -> int:
    """Return the first byte of the lowest gap of a length between ranges of bytes that are taken."""
    at = 0
    for begin, end in sorted(taken):
        if begin - at >= length:
            break
        at = max(at, end)
    return at


def _symbolic(lives: Sequence[Lifetime], buffers: Mapping[str, Buffer], end: Index) -> tuple[dict[str, Index], Index]:
    """Place buffers of symbolic sizes after byte ``end``."""
    found: dict[str, Index] = {}
    free: dict[Index, list[tuple[int, Index]]] = {}  # by size: pieces, each with the step after which it is free
    for life in sorted(lives, key=lambda life: life.first):
        length = nbytes(buffers[life.buffer])
        pieces = free.setdefault(length, [])
        reusable = next((piece for piece in pieces if piece[0] < life.first), None)
        if reusable is None:
            found[life.buffer], end = end, end + length
        else:
            pieces.remove(reusable)
            found[life.buffer] = reusable[1]
        pieces.append((life.last, found[life.buffer]))
    return found, end


# ---- streaming stores -------------------------------------------------------------------------------------------------


def streamed(schedule: Schedule, cache: int | None) -> Schedule:
    """Mark the results of kernels that are larger than half of ``cache`` bytes, so that they are written past the caches."""
    if cache is None:
        return schedule
    buffers = {**schedule.program.buffers, **schedule.buffers}
    elements = {
        name: product(buffer.shape).constant or 0 for name, buffer in buffers.items()
    }  # 0 if it depends on sizes
    large = {name for name, count in elements.items() if count * DTYPES[buffers[name].dtype].bytes > cache // 2}
    steps = [_with_streams(step, large) if isinstance(step, KernelLaunch) else step for step in schedule.steps]
    return dataclasses.replace(schedule, steps=tuple(steps))


def _with_streams(launch: KernelLaunch, large: set[str]) -> KernelLaunch:
    """Return a launch whose kernel streams the large buffers that it writes."""
    pairs = list(zip(launch.kernel.arguments, launch.buffers, strict=True))
    if not any(argument.written and buffer in large for argument, buffer in pairs):
        return launch
    arguments = [
        dataclasses.replace(argument, streamed=argument.written and buffer in large) for argument, buffer in pairs
    ]
    return dataclasses.replace(launch, kernel=dataclasses.replace(launch.kernel, arguments=tuple(arguments)))
