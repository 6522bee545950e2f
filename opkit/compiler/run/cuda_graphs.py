"""CUDA graphs of compiled graphs: the third call of a graph is recorded, and later calls replay the recording.

A recording reads its inputs at fixed addresses. An input that moved between the first calls, or moves later, is copied to memory
of the recording; the others, such as parameters, are read where they are, which each call checks. An input that is written to is
not copied: after it moved, as caches of keys and values do from text to text, a call is recorded anew if there are many replays.
Results that the user sees are copied. Saved tensors of a forward, and gradients, are memory of the recording: it is not replayed
while somebody holds one of the call before, as in two forwards before a backward. Such calls run without a recording.

A graph whose kernels take longer than launching them would gain nothing, and is not recorded unless that is requested: calls
before the recording are timed, more than one where the first took long, since another process may have used the GPU then.

The memory between kernels is the arena of calls without a recording. Random numbers come from seeds that the recording draws from
torch's generator each time.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.graph import OpaqueValue
from opkit.compiler.ir.index import product
from opkit.compiler.ir.program import Extern, ScalarItem, Strided, is_collective
from opkit.compiler.run import torch_private as private
from opkit.compiler.run.plan import ExecutionPlan, mentioned, tensors
from opkit.compiler.run.runner import Arena, Runner, give_arena, take_arena, take_this_arena
from opkit.op.dispatch.selection import forced_kernels

log = logging.getLogger("opkit.compiler")

CALLS_BEFORE = {"inference": 2, "forward": 2, "backward": 4}
"""Calls before the first recording, in which libraries choose their kernels, and inputs show whether they move. What a backward
gets moves until the forward is recorded."""

MIN_STEPS = 8  # a graph with fewer steps is recorded on request only: launching them takes as long as a replay
MAX_WAITING = 2.0  # a call's time on the GPU relative to that of its launches; above, it is recorded on request only
MAX_TIMED = 3  # calls whose kernels take so long before that is believed
MAX_COPIED_SHARE = 1 / 16  # of the bytes that steps read or write; more copies are made on request only
MAX_ATTEMPTS = 4  # to record a graph on one stream for the same sizes; with more, there must be on average
MIN_REPLAYS = 8  # for each of them, or its inputs move too often
MAX_SIZES = 16  # sets of sizes and streams with a recording each; a new one replaces the oldest

_HOST = ("aten.nonzero.", "aten.masked_select.", "aten.unique")
_KNOWN = ("mm.", "bmm.", "addmm.", "baddbmm.", "addmv.", "mv.", "dot.", "convolution", "cudnn_convolution", "_addmm_activation.",
          "_scaled_dot_product", "_fft_", "sort.", "topk.", "searchsorted.", "add.", "clone.", "zero.")  # fmt: skip
_OWN = ("seed", "attention", "append_kv", "paged_attention")
_LAUNCHING = (*(f"aten.{name}" for name in _KNOWN), *(f"opkit.{name}" for name in _OWN))
"""Operators that only launch kernels, by the beginning of their names, with grids that shapes decide. Others, such as custom
operators, may do work on the host, which a recording leaves out; graphs with them are recorded on request only."""

_UNSAFE = torch.Tag.cudagraph_unsafe
_REQUEST = "Request it with options={'cuda_graphs': True}"


def recorded(
    runner: Runner, wanted: bool | None, kind: str, user_results: int | None = None
) -> Runner | RecordedRunner:
    """Return a function that records calls of a runner and replays them, or the runner if that is impossible.

    Args:
        runner: the runner.
        wanted: True: record where it is possible; None: where it is also safe and faster; False: never.
        kind: "inference", "forward", "backward", or "body": of a control flow operator, which is part of another graph.
        user_results: how many of a forward's first results the user sees; None for all.
    """
    if wanted is False or runner.device.type == "cpu" or kind == "body":
        return runner
    all_results = len(runner.plan.outputs)
    copied = {"inference": all_results, "backward": 0}.get(kind, all_results if user_results is None else user_results)
    reason = _refusal(runner, wanted is True, copied)
    if reason:
        _report(runner.plan, reason, wanted is True)
        return runner
    return RecordedRunner(runner, wanted is True, copied, CALLS_BEFORE[kind])


def _report(plan: ExecutionPlan, reason: str, wanted: bool) -> None:
    report = log.warning if wanted else log.info
    report("%s is not recorded as a CUDA graph: %s.", plan.name, reason)


def _refusal(runner: Runner, wanted: bool, copied: int) -> str:
    """Return why no call of a runner can be recorded, or ""."""
    plan = runner.plan
    calls = [step for step in plan.steps if isinstance(step, Extern)]
    numbers = [name for name, buffer in plan.buffers.items() if buffer.role == "number"]
    if not {*numbers}.isdisjoint(plan.table):
        return f"kernels take the float {numbers[0]}, which may change from call to call"
    for call in calls:
        target = runner.constants.targets.get(call.target)
        items = [each for each in tensors((call.args, call.kwargs)) if isinstance(each, ScalarItem)]
        if items or call.target.startswith(_HOST) or call.target in runner.constants.opaques:
            return f"{call.target} reads memory on the host"
        if target is not None and private.is_overload(target) and _UNSAFE in private.tags(target):
            return f"{call.target} has torch's tag cudagraph_unsafe"
        if not wanted and is_collective(call.target):
            return f"{call.target} communicates with other processes. {_REQUEST}"
        if not wanted and not call.target.startswith(_LAUNCHING):
            return f"{call.target} may do work on the host. {_REQUEST}"
    if any(isinstance(each, OpaqueValue) for each in plan.inputs):
        return "an input is neither a tensor nor a size"
    if not wanted and plan.sizes:
        return f"its sizes may change. {_REQUEST}"
    if not wanted and len(plan.steps) < MIN_STEPS:
        return f"it has fewer than {MIN_STEPS} steps. {_REQUEST}"
    results = [each.buffer for each in plan.outputs[:copied] if isinstance(each, Strided)]
    if len({*results}) < len(results):
        return "two results share memory"
    return "" if wanted else _too_many(plan, sum(_nbytes(plan, n) for n in results if plan.buffers[n].role == "made"))


def _too_many(plan: ExecutionPlan, nbytes: int) -> str:
    """Return why so many bytes are too many to copy in each call, or ""."""
    moved = sum(_nbytes(plan, name) for step in plan.steps for name in mentioned(step))
    return f"{nbytes:,} bytes would be copied in each call. {_REQUEST}" if nbytes > moved * MAX_COPIED_SHARE else ""


def _waits_for_kernels(calls: _Calls) -> str:
    """Return that kernels take longer than their launches, which a recording saves, or ""."""
    assert calls.timed is not None
    begin, end, launches = calls.timed
    end.synchronize()
    kernels = begin.elapsed_time(end)
    if kernels <= launches * MAX_WAITING:
        return ""
    return f"its kernels take {kernels:.3g} ms, and their launches {launches:.3g} ms. {_REQUEST}"


def _nbytes(plan: ExecutionPlan, name: str) -> int:
    return (product(plan.buffers[name].shape).constant or 0) * DTYPES[plan.buffers[name].dtype].bytes


@dataclasses.dataclass
class _Recording:
    """A recorded call.

    Attributes:
        graph: the CUDA graph.
        arena: the arena that it uses.
        fixed: the addresses of inputs that are read where they are, by number.
        copies: the memory for the other inputs, by number.
        views: results that are inputs or views of them: the input, sizes, strides, and the offset from the input's first element.
        results: the other results, by number.
        held: the memory of results that are not copied, with its references while no caller has any.
    """

    graph: torch.cuda.CUDAGraph
    arena: Arena
    fixed: Mapping[int, int]
    copies: Mapping[int, torch.Tensor]
    views: Mapping[int, tuple[int, torch.Size, tuple[int, ...], int]]
    results: Mapping[int, Any]
    held: Sequence[tuple[torch.UntypedStorage, int]]


@dataclasses.dataclass
class _Calls:
    """What is known of the calls for one stream, set of sizes, and set of forced kernels.

    Attributes:
        addresses: those of the last call's inputs.
        moving: the inputs that are copied, as they moved.
        count: the number of calls without a recording.
        attempts: the number of those that were to be recorded.
        replays: the number of replays.
        timed: of a call: what it launched first and last on the GPU, and the milliseconds in which it was launched.
        waited: the number of timed calls that waited for their kernels.
        recording: the last one, if it is still valid.
        reason: why no more recordings are made.
    """

    addresses: list[int]
    moving: set[int]
    count: int = 0
    attempts: int = 0
    replays: int = 0
    timed: tuple[torch.cuda.Event, torch.cuda.Event, float] | None = None
    waited: int = 0
    recording: _Recording | None = None
    reason: str = ""


class RecordedRunner:
    """A runner whose calls are recorded as CUDA graphs and replayed; like a runner, it empties the list of its inputs."""

    def __init__(self, runner: Runner, wanted: bool, copied: int, calls_before: int) -> None:
        self._boxed_call = True  # torch hands over the only references to the inputs
        self.plan, self.sizes = runner.plan, runner.sizes
        self._runner, self._wanted, self._copied, self._calls_before = runner, wanted, copied, calls_before
        self._calls: dict[tuple[Any, ...], _Calls] = {}
        self._lock = threading.Lock()
        self._numbers = {name: n for n, name in enumerate(self.plan.inputs) if isinstance(name, str)}
        self._written = {self._numbers[name] for name in self.plan.written}

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if private.has_dispatch_modes() or torch.cuda.is_current_stream_capturing() or not self._lock.acquire(False):
            return self._runner(inputs)
        try:
            with torch.cuda.device(self._runner.device):
                return self._call(inputs)
        finally:
            self._lock.release()

    def _call(self, inputs: list[Any]) -> list[Any]:
        stream = private.raw_stream(self._runner.device.index)
        key = stream, self.sizes(inputs), frozenset(forced_kernels.get().items())
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in inputs]
        calls = self._calls.get(key)
        if calls is None:
            if len(self._calls) >= MAX_SIZES:
                del self._calls[next(iter(self._calls))]
            calls = self._calls[key] = _Calls(addresses, set(self._runner.constants.resolved))
        recording = calls.recording
        if recording is not None and any(addresses[n] != at for n, at in recording.fixed.items()):
            recording = calls.recording = None
        if recording is None and not calls.reason:
            calls.count += 1
            moved = {n for n, at in enumerate(addresses) if at != calls.addresses[n]}
            calls.addresses = addresses
            if calls.count > self._calls_before:
                calls.moving |= moved - self._written
                recording = self._try_to_record(calls, stream, inputs, moved.isdisjoint(self._written))
            if recording is None and not (self._wanted or calls.timed):
                return self._timed(calls, inputs)
        if recording is None or any(private.storage_use_count(s) > count for s, count in recording.held):
            return self._runner(inputs)
        if not take_this_arena(recording.arena):  # a call in another thread uses it
            return self._runner(inputs)
        calls.replays += 1
        try:
            return self._replayed(recording, inputs)
        finally:
            give_arena(recording.arena)

    def _timed(self, calls: _Calls, inputs: list[Any]) -> list[Any]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        started = time.perf_counter()
        results = self._runner(inputs)
        took = time.perf_counter() - started
        end.record()
        if calls.count >= self._calls_before:  # of the calls before, the last one
            calls.timed = begin, end, 1e3 * took
        return results

    # ---- recording ---------------------------------------------------------------------------------------------------

    def _try_to_record(self, calls: _Calls, stream: int, inputs: list[Any], settled: bool) -> _Recording | None:
        waits = "" if self._wanted else _waits_for_kernels(calls)
        if waits:
            calls.waited += 1
            if calls.waited < MAX_TIMED:
                calls.timed = None  # time the next call, too
                return None
        calls.attempts += 1
        calls.reason = waits or self._reason(calls, inputs)
        if settled and not calls.reason:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    calls.recording = self._record(stream, inputs, calls.addresses, calls.moving)
            except Exception as error:
                calls.reason = f"{type(error).__name__}: {error}"
        if calls.reason:
            _report(self.plan, calls.reason, self._wanted)
        return calls.recording

    def _reason(self, calls: _Calls, inputs: Sequence[Any]) -> str:
        """Return why this call cannot be recorded, or ""."""
        tensors = {n: x for n, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
        if any(x.device != self._runner.device for x in tensors.values()):
            return "an input is on another device"
        few = calls.attempts > MAX_ATTEMPTS and calls.replays < calls.attempts * MIN_REPLAYS
        if few or not calls.moving.isdisjoint(self._written):
            return "the addresses of its inputs change too often"
        if self._wanted:
            return ""
        nbytes = sum(tensors[n].nbytes for n in calls.moving if n in tensors)
        return _too_many(self.plan, nbytes)

    def _record(self, stream: int, inputs: list[Any], addresses: Sequence[int], moving: set[int]) -> _Recording:
        runner, tensors = self._runner, {n: x for n, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
        copies = {n: _empty_like(x).copy_(x) for n, each in tensors.items() if n in moving for x in [_distinct(each)]}
        tensors |= {n: copy.expand(tensors[n].shape) for n, copy in copies.items()}
        passed = [tensors.get(n, x) for n, x in enumerate(inputs)]
        arena = take_arena(runner.arena_bytes(inputs), (runner.device, stream))
        try:
            lasting = len(self.plan.outputs) > self._copied
            graph, results = _captured(lambda: runner.run_in(arena, [*passed]), runner.device, stream, lasting)
        finally:
            give_arena(arena)
        views: dict[int, tuple[int, torch.Size, tuple[int, ...], int]] = {}
        own: dict[int, Any] = {}
        for n, (result, at) in enumerate(zip(results, self.plan.outputs, strict=True)):
            of = self._numbers.get(at.buffer) if isinstance(at, Strided) else None
            if of is None:
                own[n] = result
            else:
                offset = result.storage_offset() - tensors[of].storage_offset()
                views[n] = of, result.shape, result.stride(), offset
        del results, result
        saved = [r for n, r in own.items() if n >= self._copied and isinstance(r, torch.Tensor)]
        memory = {r.data_ptr(): r.untyped_storage() for r in saved}
        held = [(storage, private.storage_use_count(storage)) for storage in memory.values()]
        fixed = {n: addresses[n] for n in tensors if n not in copies}
        return _Recording(graph, arena, fixed, copies, views, own, held)

    # ---- replaying ---------------------------------------------------------------------------------------------------

    def _replayed(self, recording: _Recording, inputs: list[Any]) -> list[Any]:
        if recording.copies:
            torch._foreach_copy_([*recording.copies.values()], [_distinct(inputs[n]) for n in recording.copies])
        recording.graph.replay()
        copied = {n: r for n, r in recording.results.items() if n < self._copied and isinstance(r, torch.Tensor)}
        new = {n: _empty_like(r) for n, r in copied.items()}
        if new:
            torch._foreach_copy_([*new.values()], [*copied.values()])
        views = {
            n: _view(inputs[of], shape, strides, offset) for n, (of, shape, strides, offset) in recording.views.items()
        }
        inputs.clear()
        found = views | new | {n: _again(r) for n, r in recording.results.items() if n not in new}
        return [found[n] for n in range(len(found))]


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _distinct(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the repetitions of its elements that ``expand`` makes."""
    if 0 not in x.stride():
        return x
    return x.as_strided([1 if s == 0 else n for n, s in zip(x.shape, x.stride(), strict=True)], x.stride())


def _view(x: torch.Tensor, shape: torch.Size, strides: tuple[int, ...], offset: int) -> torch.Tensor:
    if x.shape == shape and x.stride() == strides and offset == 0:
        return x
    return x.as_strided(shape, strides, x.storage_offset() + offset)


def _again(result: Any) -> Any:
    """Return a new tensor of the same memory, which autograd does not know as a view."""
    if not isinstance(result, torch.Tensor):
        return result
    new = torch.empty(0, dtype=result.dtype, device=result.device)
    return new.set_(result.untyped_storage(), result.storage_offset(), result.shape, result.stride())


# ---- capture ---------------------------------------------------------------------------------------------------------

_streams: dict[torch.device, torch.cuda.Stream] = {}
_first: dict[tuple[torch.device, int], torch.cuda.CUDAGraph] = {}
"""Of each stream, a graph whose pool of memory the graphs share whose results are copied, as they never run at the same time.

A graph whose results last, such as saved tensors, has a pool of its own: in a shared one, what a graph that was recorded before
it computes on the way may be in the same memory, and may run before the results are read.
"""


def _captured(
    run: Callable[[], list[Any]], device: torch.device, stream: int, lasting: bool
) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """Return the CUDA graph of what a function launches, which does not run, and the function's results."""
    side = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = _first.get((device, stream))
        torch.mm(ones := torch.ones(16, 16, device=device), ones)  # so that cuBLAS has a handle in this thread
        if first is None:
            first = _first[device, stream] = _capture(lambda: [ones + 1], torch.cuda.graph_pool_handle())[0]
        try:
            return _capture(run, torch.cuda.graph_pool_handle() if lasting else first.pool())
        except Exception:
            # torch's generator and the pool of memory believe that they are in a capture, the generator until one ends
            del _first[device, stream]
            _capture(lambda: [torch.zeros(1, device=device)], torch.cuda.graph_pool_handle())
            raise
        finally:
            side.synchronize()


def _capture(run: Callable[[], list[Any]], pool: Any) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    graph = torch.cuda.CUDAGraph()
    private.release_cublas_workspaces()  # so that the graph's are of its pool, which nobody else gets
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        results = run()
    finally:
        graph.capture_end()
        private.release_cublas_workspaces()
    return graph, results
