"""This module turns a program into a schedule: it fuses steps, makes kernels of groups, and plans the memory of buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index, product
from opkit.compiler.ir.kernel import Kernel
from opkit.compiler.ir.program import Buffer, Extern, Program, ScalarItem, Strided, reads, writes
from opkit.compiler.ir.schedule import KernelLaunch, Schedule, moments
from opkit.compiler.lower import memory_planning
from opkit.compiler.lower.batch import BatchSizes, batched
from opkit.compiler.lower.fuse import Fused, fuse
from opkit.compiler.lower.nest import nests
from opkit.compiler.lower.rules.externs import FROM_STORAGE


def schedule(program: Program, save_memory: bool = False) -> Schedule:
    """Return the schedule of a program.

    With ``save_memory``, large buffers lie outside of the arena, which then stays small between calls.
    """
    return planned(program, fuse(program), save_memory)


def planned(program: Program, fused: Fused, save_memory: bool = False) -> Schedule:
    """Return the schedule of groups of steps."""
    needed = _needed(program, fused)
    buffers = dict(program.buffers)
    steps: list[KernelLaunch | Extern] = []
    shared: dict[Kernel, Kernel] = {}
    for entry in fused.entries:
        if isinstance(entry, Extern):
            steps.append(entry)
            continue
        stored = {name for name in entry.members if name in needed}
        if not stored:
            continue
        nest_of_group = nests(entry, buffers, stored, program.sizes, f"k{len(shared)}")
        buffers |= {buffer.name: buffer for buffer in nest_of_group.buffers}
        steps += [_shared(launch, shared) for launch in nest_of_group.launches]
    inside = _inside(program, buffers, steps)
    steps, apart = batched(steps, BatchSizes.of(program.sizes, inside))
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


def _shared(launch: KernelLaunch, shared: dict[Kernel, Kernel]) -> KernelLaunch:
    """Return the launch of an equal kernel that exists already, if there is one."""
    plain = dataclasses.replace(launch.kernel, name="", origins=())
    if plain not in shared:
        shared[plain] = dataclasses.replace(launch.kernel, name=f"k{len(shared)}")
    return dataclasses.replace(launch, kernel=shared[plain])


def _touched(step: KernelLaunch | Extern) -> list[str]:
    return list(step.buffers) if isinstance(step, KernelLaunch) else [*reads(step), *writes(step)]


def _inside(program: Program, buffers: dict[str, Buffer], steps: Sequence[KernelLaunch | Extern]) -> dict[str, Buffer]:
    """Return the buffers in the arena: those that kernels and calls with ``out`` write, and that do not leave the graph."""
    allocated = {name for step in steps if isinstance(step, Extern) and not step.out for name in writes(step)}
    aside = _outputs(program) | allocated | _owned(steps)
    touched = dict.fromkeys(name for step in steps for name in _touched(step))
    return {name: buffers[name] for name in touched if buffers[name].role == "made" and name not in aside}


def _places(
    inside: dict[str, Buffer], steps: Sequence[KernelLaunch | Extern], save_memory: bool
) -> tuple[dict[str, Index], Index]:
    """Return the places of buffers in the arena, and its size."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, step in moments(steps):
        for name in _touched(step):
            first.setdefault(name, at)
            last[name] = at
    return memory_planning.places(
        [memory_planning.Lifetime(name, first[name], last[name]) for name in inside], inside, save_memory
    )


def _owned(steps: Sequence[KernelLaunch | Extern]) -> set[str]:
    """Return the buffers with a storage of their own: an operator's result aliases it, or its offset counts from its start."""
    calls = [step for step in steps if isinstance(step, Extern)]
    return {name for step in calls if step.aliases or step.target in FROM_STORAGE for name in reads(step)}


# ---- streaming stores -------------------------------------------------------------------------------------------------


def streamed(schedule: Schedule, cache: int | None) -> Schedule:
    """Mark the results of kernels that are larger than half of ``cache`` bytes, so that they are written past the caches."""
    if cache is None:
        return schedule
    buffers = {**schedule.program.buffers, **schedule.buffers}
    large = {name for name, buffer in buffers.items() if _bytes(buffer) > cache // 2}
    steps = [_marked(step, large) if isinstance(step, KernelLaunch) else step for step in schedule.steps]
    return dataclasses.replace(schedule, steps=tuple(steps))


def _bytes(buffer: Buffer) -> int:
    """Return the bytes of a buffer's elements, or 0 if that depends on sizes."""
    return (product(buffer.shape).constant or 0) * DTYPES[buffer.dtype].bytes


def _marked(launch: KernelLaunch, large: set[str]) -> KernelLaunch:
    pairs = list(zip(launch.kernel.arguments, launch.buffers, strict=True))
    if not any(argument.written and buffer in large for argument, buffer in pairs):
        return launch
    arguments = [
        dataclasses.replace(argument, streamed=argument.written and buffer in large) for argument, buffer in pairs
    ]
    return dataclasses.replace(launch, kernel=dataclasses.replace(launch.kernel, arguments=tuple(arguments)))
