"""This module turns a plan and its compiled segments into a function of tensors.

Everything that a call needs, apart from its inputs, is created once and cached: a frame for each arena and each set of sizes.
An arena is the memory for tensors that live no longer than a call. All graphs share a few large arenas: a call takes one and
gives it back, so that nested calls and calls of several threads have one each.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.index import Index
from opkit.compiler.ir.program import Strided
from opkit.compiler.run import driver, driver_program, library, torch_operators
from opkit.compiler.run import torch_private as private
from opkit.compiler.run.driver_program import DriverProgram
from opkit.compiler.run.library import LoadedSegments
from opkit.compiler.run.plan import ExecutionPlan, GpuLaunch, GraphConstants, Segment
from opkit.compiler.run.python_text import binding, size_text
from opkit.errors import CompileError

_MAX_FRAMES = 16  # for one arena; a frame for new sizes replaces the oldest one


@dataclasses.dataclass(frozen=True)
class CallFrame:
    """The function for one arena and one set of sizes, with the state of segments and of the driver, which live as long."""

    run: driver.Boxed
    prepare: Callable[[list[Any]], None] | None
    state: driver.DriverFrame
    runtime: library.Runtime


class Runner:
    """A compiled graph: takes a list of its inputs, empties it, and returns the list of its outputs."""

    def __init__(self, plan: ExecutionPlan, constants: GraphConstants, segments: LoadedSegments) -> None:
        self._boxed_call = (
            True  # torch hands over the only references to the inputs; of the object, for torch copies that
        )
        self.plan, self.constants, self.segments = plan, constants, segments
        single = functools.partial(torch_operators.single, targets=constants.targets)
        self.device = torch.device(plan.device)
        self._index = self.device.index
        self.code = driver_program.write(plan, single, constants.resolved)
        self._python = compile(self.code.python, f"<opkit {plan.name}>", "exec")
        self._bind, self._bytes, self._values = _size_functions(plan, constants.computed, self.code)
        self._callees = library.function_table(plan.functions)
        self._names = self._fixed_names()
        self._words = self._fixed_words()
        self._frames: weakref.WeakKeyDictionary[Arena, dict[tuple[int, ...], CallFrame]] = weakref.WeakKeyDictionary()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self._index is None or self._index == torch.cuda.current_device():
            return self._run(inputs)
        with torch.cuda.device(self.device):
            return self._run(inputs)

    def _run(self, inputs: list[Any]) -> list[Any]:
        sizes = self._bind(inputs)
        stream = None if self._index is None else private.raw_stream(self._index)
        block = take_arena(self._bytes(*sizes), (self.device, stream))
        try:
            return self._run_in(block, inputs, sizes, stream)
        finally:
            give_arena(block)

    def run_in(self, block: Arena, inputs: list[Any]) -> list[Any]:
        """Run on the current stream with an arena that was taken."""
        return self._run_in(block, inputs, self._bind(inputs), private.raw_stream(self._index or 0))

    def _run_in(self, block: Arena, inputs: list[Any], sizes: tuple[int, ...], stream: int | None) -> list[Any]:
        frame = self._frame(block, sizes)
        frame.runtime.threads = library.threads()
        frame.state.by_python = private.is_observed()
        frame.state.stream = stream
        if frame.prepare is not None:
            frame.prepare(inputs)
        return frame.run(inputs)

    def arena_bytes(self, inputs: list[Any]) -> int:
        """Return the bytes of the arena for these inputs."""
        return self._bytes(*self._bind(inputs))

    def sizes(self, inputs: list[Any]) -> tuple[int, ...]:
        """Return the plan's sizes for these inputs."""
        return self._bind(inputs)

    # ---- frames ------------------------------------------------------------------------------------------------------

    def _frame(self, block: Arena, sizes: tuple[int, ...]) -> CallFrame:
        frames = self._frames.get(block)
        if frames is None:
            frames = self._frames.setdefault(block, {})
        frame = frames.get(sizes)
        if frame is None:
            if len(frames) >= _MAX_FRAMES:
                del frames[next(iter(frames))]
            frame = frames[sizes] = self._create(block, sizes)
        return frame

    def _create(self, block: Arena, sizes: tuple[int, ...]) -> CallFrame:
        values = dict(zip(self.plan.sizes, sizes, strict=True))
        with torch.inference_mode(False), torch.no_grad():
            views = [self._view(tensor, block, values) for tensor in self.code.names.views]
        numbers = dict(zip(self.code.names.numbers, self._values(*sizes), strict=True))
        python = {**self._names, **numbers, **{f"view{number}": view for number, view in enumerate(views)}}
        exec(self._python, python)
        runtime = library.runtime(ctypes.addressof(self._callees) if self.plan.functions else None)
        words = [word if isinstance(word, int) else (self._words | numbers)[word] for word in self.code.words]
        run, state = driver.function(
            words, self.code.slots, self.code.taken, views, self._tables(block, values, runtime),
            self._calls(python, words, runtime), self.device,
        )  # fmt: skip
        return CallFrame(run, python.get("prepare"), state, runtime)

    def _tables(self, block: Arena, values: Mapping[str, int], runtime: library.Runtime) -> dict[str, Any]:
        pointers = (ctypes.c_void_p * max(1, len(self.plan.table)))(*self._addresses(block, values))
        sizes = (ctypes.c_int64 * max(1, len(values)))(*values.values())
        return {"pointers": pointers, "sizes": sizes, "runtime": runtime}

    def _calls(self, python: dict[str, Any], words: list[int], runtime: library.Runtime) -> dict[str, Any]:
        """Return the Python functions that the driver calls; none refers to the frame, which would be a cycle."""
        functions = tuple(
            python[each] if isinstance(each, str) else self._product(*each) for each in self.code.functions
        )
        failed = functools.partial(_raise_failure, words, runtime, self.plan)
        return {"functions": functions, "finished": python.get("finish"), "failed": failed}

    def _product(self, target: str) -> Callable[[list[Any]], None]:
        return functools.partial(torch_operators.into, torch_operators.function(target, self.constants.targets, True))

    def _fixed_words(self) -> dict[str, int]:
        """Return the words of programs that are the same for all frames."""
        dtypes = {word for word in self.code.words if isinstance(word, str)} & {row.torch for row in DTYPES.values()}
        segments = {f"segment{n}": address for n, address in enumerate(self.segments.addresses)}
        kernels = {
            f"{field}{n}": value
            for n, kernel in enumerate(self.segments.kernels)
            for field, value in zip(("kernel", "threads", "shared"), kernel, strict=True)
        }
        products = driver.products(self.device.type)
        return {**segments, **kernels, **products, **{name: driver.dtype(name) for name in dtypes}}

    def _fixed_names(self) -> dict[str, Any]:
        """Return the names of Python functions that are the same for all frames."""
        constants, names = self.constants, self.code.names
        functions = {
            name: torch_operators.function(target, constants.targets, out)
            for name, (target, out) in names.targets.items()
        }
        if "opkit_seed" in functions:
            functions["opkit_seed"] = functools.partial(torch_operators.seed, self.device)
        return {
            **{row.torch: getattr(torch, row.torch) for row in DTYPES.values()},
            **functions,
            **{name: constants.opaques[text] for name, text in names.opaques.items() if text in constants.opaques},
            "math": math,
            "fit": torch_operators.fit,
            "as_tuple": torch_operators.as_tuple,
            "aligned": torch_operators.aligned,
            "increment_version": torch.autograd.graph.increment_version,
        }

    def _view(self, tensor: Strided, block: Arena, values: Mapping[str, int]) -> torch.Tensor:
        shape, strides = (tuple(_value(each, values) for each in of) for of in (tensor.shape, tensor.strides))
        offset = _value(tensor.offset, values)
        constant = self.constants.tensors.get(tensor.buffer)
        if tensor.buffer not in self.plan.places and constant is not None:
            return constant.as_strided(shape, strides, constant.storage_offset() + offset)
        row = DTYPES[self.plan.buffers[tensor.buffer].dtype]
        begin = _value(self.plan.places[tensor.buffer], values) // row.bytes
        empty = torch.empty(0, dtype=getattr(torch, row.torch), device=self.device)
        return empty.set_(block.memory.untyped_storage(), begin + offset, shape, strides)

    def _addresses(self, block: Arena, values: Mapping[str, int]) -> list[int]:
        """Return the address of each buffer of the table that has a place or is a constant; a call fills in the others."""
        begin, places = block.memory.data_ptr(), self.plan.places
        constants = {name: tensor.data_ptr() for name, tensor in self.constants.tensors.items()}
        return [
            begin + _value(places[name], values) if name in places else constants.get(name, 0)
            for name in self.plan.table
        ]


def _value(at: Index, values: Mapping[str, int]) -> int:
    constant = at.constant
    return eval(size_text(at), {}, dict(values)) if constant is None else constant


def _size_functions(
    plan: ExecutionPlan, computed: Mapping[str, str], program: DriverProgram
) -> tuple[Callable[..., Any], ...]:
    """Return functions for the sizes of a call, the bytes of its arena, and the numbers that the program has names for."""
    names: dict[str, Any] = {"math": __import__("math")}
    try:
        exec(binding(plan, computed), names)
    except LookupError as error:
        raise CompileError(f"{plan.name}: {error}") from error
    parameters = ", ".join(plan.sizes)
    size = eval(f"lambda {parameters}: {size_text(plan.arena)}", names)
    values = eval(f"lambda {parameters}: ({''.join(f'{text}, ' for text in program.names.numbers.values())})", names)
    return names["bind"], size, values


def assemble(plan: ExecutionPlan, constants: GraphConstants, segments: LoadedSegments) -> Runner:
    """Return the function that runs a plan.

    Raises:
        CompileError: no input determines a size, or a library that kernels call is gone.
        AttributeError: the plan calls an operator that does not exist.
    """
    return Runner(plan, constants, segments)


def _raise_failure(words: list[int], runtime: library.Runtime, plan: ExecutionPlan, at: int, error: int) -> None:
    """Raise the error of a step of the driver that begins at ``words[at]``; ``error`` is the code of a launch that failed.

    Raises:
        IndexOutOfRangeError, MemoryError: a segment failed.
        RuntimeError: torch refused to allocate memory, or to make a view, or the GPU's driver to launch a kernel.
    """
    step, graph = driver_program.STEPS[words[at]], plan.name
    if step == "segment":
        segment = plan.steps[words[at + 2]]
        assert isinstance(segment, Segment)
        library.raise_error(runtime, segment.origins, graph)
    if step == "launch":
        launch = plan.steps[words[at + 1]]
        assert isinstance(launch, GpuLaunch)
        try:
            torch.cuda.synchronize(plan.device)  # an earlier kernel's error is raised as torch raises it
        except RuntimeError as failure:
            failure.add_note(f"Found at the launch of {launch.origin} in {graph}; an earlier kernel may have failed.")
            raise
        raise RuntimeError(f"the GPU's driver refused a launch with the error {error} (in {graph}, of {launch.origin})")
    if step not in ("view", "allocate"):
        raise RuntimeError(f"torch refused the step {step!r} (in {graph})")
    rank = words[at + 4]
    shape, strides = (tuple(words[begin : begin + rank]) for begin in (at + 5, at + 5 + rank))
    if step == "allocate":
        torch.empty_strided(shape, strides, dtype=driver.dtype_numbered(words[at + 3]), device=plan.device)  # says why
    raise RuntimeError(f"torch refused to {step} a tensor of sizes {shape} and strides {strides} (in {graph})")


# ---- the memory of calls ---------------------------------------------------------------------------------------------

_MIN_ARENA = 1 << 12  # bytes
_GROWTH = 1.25  # sizes that grow slowly from call to call must not need new memory at each

_lock = threading.Lock()
Queue = tuple[torch.device, int | None]
"""A device, and a stream of it: calls on other streams may run at the same time."""

_CPU: Queue = (torch.device("cpu"), None)
_free_arenas: dict[Queue, list[Arena]] = {}


class Arena:
    """A block of memory, aligned to 64 bytes.

    Attributes:
        memory: its bytes.
        size: the number of bytes.
        queue: where it is used.
        in_use: whether a call has taken it.
    """

    __slots__ = ("__weakref__", "in_use", "memory", "queue", "size")

    def __init__(self, size: int, queue: Queue = _CPU) -> None:
        with torch.inference_mode(False):  # a block made within it could not be written to outside
            self.memory = torch.empty(size, dtype=torch.uint8, device=queue[0])
        self.size, self.queue, self.in_use = size, queue, True


def take_arena(size: int, queue: Queue = _CPU) -> Arena:
    """Return a block of at least ``size`` bytes for exclusive use; a free block that is too small is replaced."""
    with _lock:
        free = _free_arenas.setdefault(queue, [])
        for position in range(len(free) - 1, -1, -1):
            if free[position].size >= size:
                free[position].in_use = True
                return free.pop(position)
        grown = int(size * _GROWTH) if free else size
        if free:
            free.pop()
    return Arena(max(grown, _MIN_ARENA), queue)


def take_this_arena(arena: Arena) -> bool:
    """Take a block for exclusive use; return False if it is in use. It may have been replaced, or released."""
    with _lock:
        free = _free_arenas.setdefault(arena.queue, [])
        if arena.in_use:
            return False
        if arena in free:
            free.remove(arena)
        arena.in_use = True
        return True


def give_arena(arena: Arena) -> None:
    """Return a block to the free ones."""
    with _lock:
        arena.in_use = False
        _free_arenas.setdefault(arena.queue, []).append(arena)


def release_arenas() -> None:
    """Free the blocks that are not in use."""
    with _lock:
        _free_arenas.clear()
