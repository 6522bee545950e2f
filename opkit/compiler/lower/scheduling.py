"""From a program to what runs: steps are fused, groups become kernels, and buffers get their places."""

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
    """What runs for a program; ``spare``: with large buffers outside of the arena, so that it stays small between calls."""
    return planned(program, fuse(program), save_memory)


def planned(program: Program, fused: Fused, save_memory: bool = False) -> Schedule:
    """What runs for groups of steps."""
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
        made = nests(entry, buffers, stored, program.sizes, f"k{len(shared)}")
        buffers |= {buffer.name: buffer for buffer in made.buffers}
        steps += [_shared(launch, shared) for launch in made.launches]
    inside = _inside(program, buffers, steps)
    steps, apart = batched(steps, BatchSizes.of(program.sizes, inside))
    places, size = _places(inside, steps, save_memory)
    used = {name for step in steps for name in _touched(step)} | set(program.buffers) & _outputs(program)
    needed = used | {name for name, buffer in buffers.items() if buffer.role != "made"}
    remaining = {name: buffer for name, buffer in buffers.items() if name in needed and buffer.whole is None}
    return Schedule(program, remaining, tuple(steps), places, size, tuple(fused.refusals), tuple(apart))


def _needed(program: Program, fused: Fused) -> set[str]:
    """The buffers that must be in memory: read by another entry, returned, or the caller's."""
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
    """The launch of a kernel that was made before, if it is the same one."""
    plain = dataclasses.replace(launch.kernel, name="", origins=())
    if plain not in shared:
        shared[plain] = dataclasses.replace(launch.kernel, name=f"k{len(shared)}")
    return dataclasses.replace(launch, kernel=shared[plain])


def _touched(step: KernelLaunch | Extern) -> list[str]:
    return list(step.buffers) if isinstance(step, KernelLaunch) else [*reads(step), *writes(step)]


def _inside(program: Program, buffers: dict[str, Buffer], steps: Sequence[KernelLaunch | Extern]) -> dict[str, Buffer]:
    """What lies in the arena: what kernels and calls with ``out`` make and nobody outside sees."""
    allocated = {name for step in steps if isinstance(step, Extern) and not step.out for name in writes(step)}
    aside = _outputs(program) | allocated | _owned(steps)
    made = dict.fromkeys(name for step in steps for name in _touched(step))
    return {name: buffers[name] for name in made if buffers[name].role == "made" and name not in aside}


def _places(
    inside: dict[str, Buffer], steps: Sequence[KernelLaunch | Extern], save_memory: bool
) -> tuple[dict[str, Index], Index]:
    """Their places."""
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
    """What needs a storage of its own: an operator's result lies in it, or the operator counts from its beginning."""
    calls = [step for step in steps if isinstance(step, Extern)]
    return {name for step in calls if step.aliases or step.target in FROM_STORAGE for name in reads(step)}


# ---- streaming stores -------------------------------------------------------------------------------------------------


def streamed(schedule: Schedule, cache: int | None) -> Schedule:
    """The schedule with what its kernels write marked where it takes more than half of ``cache`` bytes."""
    if cache is None:
        return schedule
    buffers = {**schedule.program.buffers, **schedule.buffers}
    large = {name for name, buffer in buffers.items() if _bytes(buffer) > cache // 2}
    steps = [_marked(step, large) if isinstance(step, KernelLaunch) else step for step in schedule.steps]
    return dataclasses.replace(schedule, steps=tuple(steps))


def _bytes(buffer: Buffer) -> int:
    """How many bytes the elements of a buffer take; 0 where that depends on sizes."""
    return (product(buffer.shape).constant or 0) * DTYPES[buffer.dtype].bytes


def _marked(launch: KernelLaunch, large: set[str]) -> KernelLaunch:
    pairs = list(zip(launch.kernel.arguments, launch.buffers, strict=True))
    if not any(argument.written and buffer in large for argument, buffer in pairs):
        return launch
    arguments = [
        dataclasses.replace(argument, streamed=argument.written and buffer in large) for argument, buffer in pairs
    ]
    return dataclasses.replace(launch, kernel=dataclasses.replace(launch.kernel, arguments=tuple(arguments)))
