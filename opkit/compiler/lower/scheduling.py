"""Turn a program into a schedule: fuse steps, make kernels of groups, batch launches, and plan the memory of buffers.

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

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index, index, product
from opkit.compiler.ir.kernel import Kernel, KernelLaunch, Schedule, moments
from opkit.compiler.ir.program import WAIT, Buffer, Extern, Program, ScalarItem, Strided, is_collective, reads, writes
from opkit.compiler.lower.batches import BatchSizes, ScheduledStep, batched
from opkit.compiler.lower.fuse import Fused, fuse
from opkit.compiler.lower.nest import nests
from opkit.compiler.lower.target import PLAIN, LoweringTarget

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
    for number, entry in enumerate(fused.entries):
        if isinstance(entry, Extern):
            steps.append(entry)
            continue
        stored = {name for name in entry.members if name in needed}
        if not stored:
            continue
        of_group = nests(entry, buffers, stored, program.sizes, f"g{number}", target)
        buffers |= {buffer.name: buffer for buffer in of_group.buffers}
        steps += [_deduplicated(launch, shared) for launch in of_group.launches]
    inside = _inside(program, buffers, steps)
    in_arena = BatchSizes.of(program.sizes, {name: nbytes(buffer) for name, buffer in inside.items()})
    steps, apart = batched(steps, in_arena) if target.device == "cpu" else (steps, [])
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


# ---- the arena ------------------------------------------------------------------------------------------------------


def _inside(program: Program, buffers: dict[str, Buffer], steps: Sequence[ScheduledStep]) -> dict[str, Buffer]:
    """Return the buffers in the arena: those that kernels and calls with ``out`` write, and that do not leave the graph."""
    calls = [step for step in steps if isinstance(step, Extern)]
    allocated = {name for call in calls if not call.out for name in writes(call)}
    waited = {name for call in calls if call.target == WAIT for name in reads(call)}
    running = [call for call in calls if is_collective(call.target) and not waited.issuperset(writes(call))]
    owned = {name for call in calls if call.uses_storage or call in running for name in reads(call)}
    # a call's result may alias its arguments, or count from their storage's start; it may need them after the graph's end
    aside = _outputs(program) | allocated | owned
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
