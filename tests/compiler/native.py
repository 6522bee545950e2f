"""Schedules compiled and run on numpy arrays, for tests of the planner and the emitter: no torch, one thread."""

from __future__ import annotations

import ctypes

import numpy as np

from opkit.compiler.emit.c.source import source
from opkit.compiler.ir.kernel import KernelLaunch, Schedule
from opkit.compiler.run.library import flags
from opkit.kernels.cc import compilation
from opkit.kernels.cc.compilation import Request, Unit

WARNINGS = ("-Wall", "-Werror", "-Wno-unused", "-Wno-unknown-pragmas")

_NUMPY = {"b1": "?", "bf16": "<u2", "f16": "<f2", "f32": "<f4", "f64": "<f8", "c64": "<c8", "c128": "<c16"} | {
    f"{kind}{8 * size}": f"<{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)
}


class _Runtime(ctypes.Structure):
    _fields_ = (
        ("parallel", ctypes.c_void_p),
        ("thread", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("error", ctypes.c_int64 * 3),
    )


def run(
    schedule: Schedule, inputs: dict[str, np.ndarray], sizes: dict[str, int] | None = None
) -> dict[str, np.ndarray]:
    """The memory of every buffer after the schedule's kernels ran; buffers start with a pattern, not with zeros."""
    sizes = sizes or dict(schedule.program.sizes)
    launches = [step for step in schedule.steps if isinstance(step, KernelLaunch)]
    assert len(launches) == len(schedule.steps), "only kernels are run here"
    names = list(schedule.buffers)
    memory = {name: _memory(schedule.buffers[name], inputs.get(name), sizes) for name in names}
    segment = library(source([launches], names, list(sizes))[0]).opkit_segment_0
    segment.restype = ctypes.c_int64
    pointers = (ctypes.c_void_p * len(names))(*(memory[name].ctypes.data for name in names))
    values = (ctypes.c_int64 * max(1, len(sizes)))(*sizes.values())
    runtime = _Runtime(None, None, 1)
    code = segment(pointers, values, ctypes.byref(runtime))
    if code:
        raise IndexError(f"error {code}: {list(runtime.error)}")
    return memory


def _memory(buffer, given, sizes):
    length = int(np.prod([_value(e, sizes) for e in buffer.shape]))
    if given is not None:
        return np.ascontiguousarray(given).reshape(-1).copy()
    return np.frombuffer(
        b"\x5a" * max(1, length) * np.dtype(_NUMPY[buffer.dtype]).itemsize, _NUMPY[buffer.dtype]
    ).copy()


def _value(at, sizes):
    total = at.substitute({atom: sizes[atom.name] for atom in at.leaves()}).constant
    assert total is not None
    return total


def library(text):
    """A unit that opkit made, compiled, with no warning, and loaded."""
    request = Request("test", (Unit("kernels.c", text, "c"),), (*flags(), *WARNINGS))
    return ctypes.CDLL(str(compilation.build(request)))
