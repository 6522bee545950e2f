"""This module times the steps of a compiled graph one by one, and what the machine can do at most.

The graph runs with random inputs of its sizes. For CPUs it is compiled again with a function for each launch; the driver calls a
function that takes the time, in place of each of these and of each call of torch's operators, which adds about a microsecond to a
step. On GPUs torch's profiler has the time of each kernel: a launch is a kernel, and a call has those that it launches.
"""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from opkit import _core
from opkit.compiler.diagnostics import CompiledGraph
from opkit.compiler.emit.c.source import source
from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index
from opkit.compiler.ir.kernel import Schedule
from opkit.compiler.ir.program import Program
from opkit.compiler.run import driver, library
from opkit.compiler.run.gpu_kernels import GpuKernelsBuild
from opkit.compiler.run.library import SegmentsBuild
from opkit.compiler.run.plan import GpuLaunch, GraphConstants, one_launch_each, plan
from opkit.compiler.run.runner import Runner
from opkit.errors import CompileError

_SECONDS, _MAX_ROUNDS, _MIN_ROUNDS = 1.0, 100, 5
_GPU_ROUNDS = 10
_UNITS = 2  # translation units, which as many compiler processes compile at once
_CALL = "opkit: a step"  # the range of the profiler that is a call of torch's operators
_SIZES = {"cpu": (2**24, 1024), "cuda": (2**28, 8192)}
"""Of the peaks, by device type: the numbers to copy, more than caches hold, and the rows of a square matrix to multiply."""


@dataclasses.dataclass(frozen=True)
class MachinePeaks:
    """What the machine did best a moment ago: the bytes a second of a copy, and the operations a second of a product, whose
    dtype is float32 on CPUs and bfloat16 on GPUs."""

    bandwidth: float
    operations: float
    dtype: torch.dtype


def measure_peaks(device: torch.device) -> MachinePeaks:
    """Measure a copy, and a product of two matrices."""
    numbers, rows = _SIZES[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, y = torch.ones(numbers, device=device), torch.empty(numbers, device=device)
    a = torch.randn(rows, rows, device=device, dtype=dtype)
    copied, multiplied = _fastest(lambda: y.copy_(x), device), _fastest(_product(a), device)
    return MachinePeaks(2 * x.nbytes / copied, 2 * rows**3 / multiplied, dtype)


def _product(a: torch.Tensor) -> Callable[[], Any]:
    if a.device.type != "cpu" or not driver.has_own_products():
        return lambda: a @ a
    n, y = len(a), torch.empty_like(a)
    packed = torch.empty(_core.packed_floats(n, n))
    _core.pack(a.data_ptr(), 1, n, n, n, packed.data_ptr())
    return lambda: _core.linear(a.data_ptr(), n, packed.data_ptr(), 0, y.data_ptr(), n, n, n, "none")


def _fastest(function: Callable[[], Any], device: torch.device) -> float:
    def seconds() -> float:
        begin = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    return min(seconds() for _ in range(5))


def step_times(compiled: CompiledGraph) -> tuple[float, ...]:
    """Return the least time of each step of the schedule, in seconds: what other processes take is not the step's.

    Raises:
        CompileError: the graph runs in eager mode, calls graphs, or takes more than tensors and numbers.
    """
    captured, schedule = compiled.captured, compiled.schedule
    if captured is None or schedule is None:
        raise CompileError(f"it runs in eager mode: {compiled.reason}")
    if captured.bodies:
        raise CompileError("it calls other graphs, whose steps are not its own")
    constants = GraphConstants(
        captured.constants, captured.targets, captured.opaques, captured.computed, captured.resolved
    )
    inputs = _random_inputs(schedule.program, captured.device)
    with torch.no_grad():
        if captured.device.type == "cpu":
            rounds = _rounds_on_cpu(schedule, constants, inputs)
        else:
            rounds = _rounds_on_gpu(compiled, constants, inputs, captured.device)
    return tuple(map(min, zip(*rounds, strict=True)))


class _ObservedRunner(Runner):
    """A runner that calls torch's operators as ``observed`` returns them."""

    def __init__(self, *arguments: Any, observed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._observed = observed
        super().__init__(*arguments)

    def _fixed_words(self) -> dict[str, int]:
        return super()._fixed_words() | dict.fromkeys(driver.products(self.device.type), 0)  # products through Python

    def _calls(self, python: dict[str, Any], words: list[int], runtime: library.Runtime) -> dict[str, Any]:
        calls = super()._calls(python, words, runtime)
        return calls | {"functions": tuple(map(self._observed, calls["functions"]))}


# ---- CPUs ------------------------------------------------------------------------------------------------------------

_SEGMENT = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def _rounds_on_cpu(schedule: Schedule, constants: GraphConstants, inputs: list[Any]) -> list[list[float]]:
    execution_plan, launches = one_launch_each(*plan(schedule))
    texts = source(launches, execution_plan.table, execution_plan.sizes, _UNITS)
    segments = SegmentsBuild(texts, len(launches), f"the steps of {execution_plan.name}", library.flags()).wait()
    seconds: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            seconds.append(time.perf_counter() - begin)
            return result

        return run

    callbacks = [_SEGMENT(timed(_SEGMENT(address))) for address in segments.addresses]
    addresses = tuple(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in callbacks)
    segments = dataclasses.replace(segments, addresses=addresses)
    runner = _ObservedRunner(execution_plan, constants, segments, observed=timed)
    rounds: list[list[float]] = []
    begin = time.perf_counter()
    runner([*inputs])  # the first call creates the frame
    while len(rounds) < _MIN_ROUNDS or (len(rounds) < _MAX_ROUNDS and time.perf_counter() - begin < _SECONDS):
        seconds.clear()
        runner([*inputs])
        rounds.append([*seconds])
    return rounds


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def _rounds_on_gpu(
    compiled: CompiledGraph, constants: GraphConstants, inputs: list[Any], device: torch.device
) -> list[list[float]]:
    assert compiled.plan is not None
    segments = GpuKernelsBuild(compiled.kernels, compiled.texts[0], device).wait()
    runner = _ObservedRunner(compiled.plan, constants, segments, observed=_in_range)
    runner([*inputs])
    torch.cuda.synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(_GPU_ROUNDS):
            runner([*inputs])
        torch.cuda.synchronize(device)
    names = {kernel.name for kernel in compiled.kernels}
    events = sorted(profile.events() or (), key=lambda event: event.time_range.start)
    on_gpu = torch.autograd.DeviceType.CUDA
    launches = iter([e.device_time for e in events if e.device_type == on_gpu and e.name in names])
    calls = iter([e.device_time_total for e in events if e.device_type != on_gpu and e.name == _CALL])
    steps = [launches if isinstance(step, GpuLaunch) else calls for step in compiled.plan.steps]
    return [[next(times) * 1e-6 for times in steps] for _ in range(_GPU_ROUNDS)]


def _in_range(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with torch.profiler.record_function(_CALL):
            return function(*arguments)

    return run


def _random_inputs(program: Program, device: torch.device) -> list[Any]:
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
        made = (torch.randn if real else torch.ones)(length, device="cpu" if buffer.role == "number" else device)
        return made.to(dtype).as_strided(shape, strides)

    return [value(each) for each in program.inputs]
