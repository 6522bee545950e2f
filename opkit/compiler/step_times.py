"""This module times the steps of a compiled graph for CPUs one by one, and what the machine can do at most.

The graph is compiled again with a function for each launch, and runs with random inputs of its sizes. The driver calls a function
that takes the time, in place of each of these and of each call of torch's operators; that adds about a microsecond to a step.
"""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from opkit.compiler.diagnostics import CompiledGraph
from opkit.compiler.emit.c.source import source
from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index
from opkit.compiler.ir.program import Program
from opkit.compiler.run import driver, library
from opkit.compiler.run.library import LoadedSegments, SegmentsBuild
from opkit.compiler.run.plan import GraphConstants, one_launch_each, plan
from opkit.compiler.run.runner import Runner
from opkit.errors import CompileError

_SECONDS, _MAX_ROUNDS, _MIN_ROUNDS = 1.0, 100, 5
_UNITS = 2  # translation units, which as many compiler processes compile at once


@dataclasses.dataclass(frozen=True)
class MachinePeaks:
    """What the machine did best a moment ago: the bytes a second of a copy, and the operations a second of a float32 product."""

    bandwidth: float
    operations: float


def measure_peaks() -> MachinePeaks:
    """Measure a copy of 64 MiB, and a product of two matrices of 1024 x 1024."""
    x, y = torch.ones(2**24), torch.empty(2**24)
    a = torch.ones(1024, 1024)
    copied, multiplied = _fastest(lambda: y.copy_(x)), _fastest(lambda: a @ a)
    return MachinePeaks(2 * x.nbytes / copied, 2 * 1024**3 / multiplied)


def _fastest(function: Callable[[], Any]) -> float:
    def seconds() -> float:
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin

    return min(seconds() for _ in range(5))


def step_times(compiled: CompiledGraph) -> tuple[float, ...]:
    """Return the least time of each step of the schedule, in seconds: what other processes take is not the step's.

    Raises:
        CompileError: the graph is not for a CPU, runs in eager mode, calls graphs, or takes more than tensors and numbers.
    """
    captured, schedule = compiled.captured, compiled.schedule
    if captured is None or schedule is None:
        raise CompileError(f"it runs in eager mode: {compiled.reason}")
    if captured.device.type != "cpu":
        raise CompileError(f"it runs on {captured.device}: use torch.profiler, which names each kernel")
    if captured.bodies:
        raise CompileError("it calls other graphs, whose steps are not its own")
    execution_plan, launches = one_launch_each(*plan(schedule))
    texts = source(launches, execution_plan.table, execution_plan.sizes, _UNITS)
    segments = SegmentsBuild(texts, len(launches), f"the steps of {compiled.name}", library.flags()).wait()
    constants = GraphConstants(
        captured.constants, captured.targets, captured.opaques, captured.computed, captured.resolved
    )
    runner = _TimedRunner(execution_plan, constants, segments)
    inputs = _random_inputs(schedule.program)
    rounds: list[list[float]] = []
    begin = time.perf_counter()
    with torch.no_grad():
        runner([*inputs])  # the first call creates the frame
        while len(rounds) < _MIN_ROUNDS or (len(rounds) < _MAX_ROUNDS and time.perf_counter() - begin < _SECONDS):
            runner.seconds.clear()
            runner([*inputs])
            rounds.append([*runner.seconds])
    return tuple(map(min, zip(*rounds, strict=True)))


_SEGMENT = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class _TimedRunner(Runner):
    """A runner that appends the time of each step to ``seconds``."""

    def __init__(self, execution_plan: Any, constants: GraphConstants, segments: LoadedSegments) -> None:
        self.seconds: list[float] = []
        self._callbacks = [_SEGMENT(self._timed(_SEGMENT(address))) for address in segments.addresses]
        addresses = tuple(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._callbacks)
        super().__init__(execution_plan, constants, dataclasses.replace(segments, addresses=addresses))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            self.seconds.append(time.perf_counter() - begin)
            return result

        return run

    def _fixed_words(self) -> dict[str, int]:
        return super()._fixed_words() | dict.fromkeys(driver.products("cpu"), 0)  # so that products go through Python

    def _calls(self, python: dict[str, Any], words: list[int], runtime: library.Runtime) -> dict[str, Any]:
        calls = super()._calls(python, words, runtime)
        return calls | {"functions": tuple(map(self._timed, calls["functions"]))}


def _random_inputs(program: Program) -> list[Any]:
    """Return inputs of the sizes with which a graph was compiled; integers are 1, which is an index of most tables."""

    def number(at: Index) -> int:
        return int(estimate(at, program.sizes))

    def value(each: Any) -> Any:
        if isinstance(each, Index):
            return number(each)
        if not isinstance(each, str) or each not in program.buffers:
            raise CompileError(f"it takes {each}, which is no tensor and no number")
        buffer = program.buffers[each]
        dtype = getattr(torch, DTYPES[buffer.dtype].torch)
        shape, strides = (tuple(map(number, of)) for of in (buffer.shape, buffer.strides))
        length = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        real = dtype.is_floating_point or dtype.is_complex
        return (torch.randn(length) if real else torch.ones(length)).to(dtype).as_strided(shape, strides)

    return [value(each) for each in program.inputs]
