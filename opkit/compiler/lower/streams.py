"""Which results are too large for the caches, so that kernels had better write past them."""

from __future__ import annotations

import dataclasses

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import product
from opkit.compiler.ir.program import Buffer
from opkit.compiler.ir.schedule import Launch, Schedule


def streamed(schedule: Schedule, cache: int | None) -> Schedule:
    """The schedule with what its kernels write marked where it takes more than half of ``cache`` bytes."""
    if cache is None:
        return schedule
    buffers = {**schedule.program.buffers, **schedule.buffers}
    large = {name for name, buffer in buffers.items() if _bytes(buffer) > cache // 2}
    steps = [_marked(step, large) if isinstance(step, Launch) else step for step in schedule.steps]
    return dataclasses.replace(schedule, steps=tuple(steps))


def _bytes(buffer: Buffer) -> int:
    """How many bytes the elements of a buffer take; 0 where that depends on sizes."""
    return (product(buffer.shape).constant or 0) * DTYPES[buffer.dtype].bytes


def _marked(launch: Launch, large: set[str]) -> Launch:
    pairs = list(zip(launch.kernel.arguments, launch.buffers, strict=True))
    if not any(argument.written and buffer in large for argument, buffer in pairs):
        return launch
    arguments = [
        dataclasses.replace(argument, streamed=argument.written and buffer in large) for argument, buffer in pairs
    ]
    return dataclasses.replace(launch, kernel=dataclasses.replace(launch.kernel, arguments=tuple(arguments)))
