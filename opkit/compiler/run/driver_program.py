"""This module writes a plan as a program of the driver (``driver.c``), with the Python functions that the driver calls.

A program is a list of words. A step is its number in ``STEPS`` and its operands: numbers, and names of numbers that a frame
fills in. ``text`` is the same program in readable form::

    def run(inputs):
        [b_x, b_w] = inputs
        t2 = as_strided(b_w, (8, 8), (1, 8), 0)
        aten_mm_default_out(b_x, t2, out=view0)
        del b_w, t2
        b_y = empty_strided((8, 8), (8, 1), dtype=float32)
        segment0()
        return [b_y]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.graph import OpaqueValue
from opkit.compiler.ir.index import index
from opkit.compiler.ir.program import Buffer, Extern, Strided, is_collective
from opkit.compiler.run.plan import ExecutionPlan, GpuLaunch, Segment, mentioned, tensors
from opkit.compiler.run.python_text import PythonNames

STEPS = ("point", "value", "align", "view", "allocate", "segment", "launch", "python", "product", "drop", "end")

PRODUCTS = {
    "aten.mm.default": 2,
    "aten.bmm.default": 2,
    "aten.addmm.default": 3,
    "aten.baddbmm.default": 3,
}
"""The matrix products that the driver calls in torch's C shim, with their number of operands."""

Word = int | str


@dataclasses.dataclass
class DriverProgram:
    """A program of the driver, and the Python that belongs to it.

    Attributes:
        words: the program.
        slots: the number of slots.
        taken: the slot of each input; -1 for one that is no tensor, or that nothing needs.
        names: the names that its Python uses: views, numbers, operators.
        functions: the Python functions that it calls: a name in ``python``, or the target of a product in a tuple.
        python: the text of those functions; of ``prepare``, which gets the inputs first, if some must be fitted or are
            objects; and of ``finish``, which makes the results of those that are tensors, if some are not.
        text: for people.
    """

    words: list[Word] = dataclasses.field(default_factory=list[Word])
    slots: int = 0
    taken: list[int] = dataclasses.field(default_factory=list[int])
    names: PythonNames = dataclasses.field(default_factory=PythonNames)
    functions: list[Any] = dataclasses.field(default_factory=list[Any])
    python: str = ""
    text: str = ""


def write(plan: ExecutionPlan, single: Callable[[str], bool], resolved: frozenset[int] = frozenset()) -> DriverProgram:
    """Return the program of a plan.

    Args:
        plan: the plan.
        single: whether a target returns one tensor, and not several.
        resolved: the inputs that may hold values which are conjugated or negated when they are read.
    """
    return _ProgramWriter(plan, single, resolved).write()


class _ProgramWriter:
    def __init__(self, plan: ExecutionPlan, single: Callable[[str], bool], resolved: frozenset[int]) -> None:
        self.plan, self.single, self.resolved = plan, single, resolved
        self.code = DriverProgram()
        self.names = self.code.names
        self.lines: list[str] = []
        self.positions: dict[str, list[int]] = {}
        for number, name in enumerate(plan.table):
            self.positions.setdefault(name, []).append(number)
        self.slots: dict[str, int] = {}  # of buffers
        self.views: dict[str, dict[Strided, int]] = {}  # slots of tensors that are parts of a buffer, by the buffer
        self.last = self._last_uses()
        self.alignments = alignments(plan)
        self.current: set[Strided] = set()  # views that got a version since something was written to them

    def _last_uses(self) -> dict[int, list[str]]:
        """Return the buffers that are not needed after a step, by the step's number."""
        last = {name: number for number, step in enumerate(self.plan.steps) for name in mentioned(step)}
        returned = {each.buffer for each in tensors(self.plan.outputs)}
        steps: dict[int, list[str]] = {}
        for name, number in last.items():
            if name not in returned:
                steps.setdefault(number, []).append(name)
        return steps

    def write(self) -> DriverProgram:
        self._take_inputs()
        for number, step in enumerate(self.plan.steps):
            if isinstance(step, Segment):
                self._segment(number, step)
            elif isinstance(step, GpuLaunch):
                self._launch(number, step)
            else:
                self._extern(step)
            self._drop([name for name in self.last.get(number, ()) if name in self.slots])
        self._return()
        self.code.text = _function("run", [f"[{', '.join(self._inputs())}] = inputs", *self.lines])
        return self.code

    def _step(self, step: str, *words: Word | Sequence[Word]) -> None:
        flat = [word for each in words for word in ([each] if isinstance(each, int | str) else each)]
        self.code.words += [STEPS.index(step), *flat]

    # ---- slots -------------------------------------------------------------------------------------------------------

    def _slot(self, name: str) -> int:
        self.names.of_slots[self.code.slots] = name
        self.code.slots += 1
        return self.code.slots - 1

    def _buffer(self, buffer: str) -> int:
        """Return a new slot for a buffer."""
        self.slots[buffer] = self._slot(self.names.variable(buffer))
        return self.slots[buffer]

    def _is_in_frame(self, buffer: str) -> bool:
        """Return whether the buffer belongs to the frame: it has a place in the arena, or is a constant."""
        return buffer in self.plan.places or self.plan.buffers[buffer].role == "constant"

    def _whole(self, buffer: str) -> int:
        return self._tensor(self._strided(buffer))

    def _tensor(self, tensor: Strided) -> int:
        """Return the slot of a tensor; a step that makes the view is added if there is none."""
        if self._is_in_frame(tensor.buffer):
            return -1 - self.names.view(tensor)
        if _covers(tensor, self.plan.buffers[tensor.buffer]):
            return self.slots[tensor.buffer]
        known = self.views.setdefault(tensor.buffer, {})
        if tensor not in known:
            known[tensor] = self._view(tensor)
        return known[tensor]

    def _view(self, tensor: Strided) -> int:
        of, slot = self.slots[tensor.buffer], self._slot(f"t{self.code.slots}")
        layout = self._layout(tensor)
        self._step("view", slot, of, self.names.word(tensor.offset), *layout)
        numbers = ", ".join(map(self.names.numbers_text, (tensor.shape, tensor.strides, tensor.offset)))
        self.lines.append(f"t{slot} = as_strided({self.names.of_slots[of]}, {numbers})")
        return slot

    def _layout(self, of: Strided | Buffer) -> tuple[Word | list[Word], ...]:
        return len(of.shape), list(map(self.names.word, of.shape)), list(map(self.names.word, of.strides))

    def _point(self, buffer: str) -> None:
        positions, is_gpu = self.positions.get(buffer, ()), self.plan.device != "cpu"
        is_number = is_gpu and self.plan.buffers[buffer].role == "number"
        if positions and is_gpu and not is_number and True in self.alignments[buffer]:
            self._step("align", self.slots[buffer], self._function_number("aligned"))
        for position in positions:
            self._step("value" if is_number else "point", self.slots[buffer], position)

    def _allocate(self, buffer: str) -> None:
        """Add a step that allocates a buffer outside of the arena, before the first step that writes to it."""
        if buffer in self.slots or self._is_in_frame(buffer):
            return
        layout_of = self.plan.buffers[buffer]
        dtype = DTYPES[layout_of.dtype].torch
        first, *others = self.positions.get(buffer, (-1,))
        self._step("allocate", self._buffer(buffer), first, dtype, *self._layout(layout_of))
        for position in others:
            self._step("point", self.slots[buffer], position)
        numbers = ", ".join(map(self.names.numbers_text, (layout_of.shape, layout_of.strides)))
        self.lines.append(f"{self.names.variable(buffer)} = empty_strided({numbers}, dtype={dtype})")

    def _drop(self, buffers: list[str]) -> None:
        slots = [slot for each in buffers for slot in (self.slots[each], *self.views.pop(each, {}).values())]
        if slots:
            self._step("drop", len(slots), slots)
            self.lines.append(f"del {', '.join(map(self.names.tensor, slots))}")

    # ---- inputs and results ------------------------------------------------------------------------------------------

    def _inputs(self) -> list[str]:
        return [
            self.names.variable(each) if isinstance(each, str) else f"_{n}" for n, each in enumerate(self.plan.inputs)
        ]

    def _take_inputs(self) -> None:
        plan = self.plan
        mentioned_buffers = {name for step in plan.steps for name in mentioned(step)} | {
            s.buffer for s in tensors(plan.outputs)
        }
        needed = [isinstance(each, str) and each in mentioned_buffers for each in plan.inputs]
        self.code.taken = [self._buffer(str(e)) if needed[n] else -1 for n, e in enumerate(plan.inputs)]
        fitted = [
            line
            for n, each in enumerate(plan.inputs)
            if isinstance(each, OpaqueValue)
            for line in self._object(n, each)
        ]
        for n in sorted(self.resolved):
            if needed[n]:
                fitted.append(f"inputs[{n}] = {self._fit(f'inputs[{n}]', plan.buffers[str(plan.inputs[n])])}")
        if fitted:
            self.code.python += _function("prepare", fitted, "inputs")
            self.lines.append("prepare(inputs)")
        for name in self.slots:
            self._point(name)

    def _object(self, number: int, value: OpaqueValue) -> list[str]:
        """Return the lines that pass an input which is no tensor to the functions of the frame."""
        name = self._argument(value, {})
        return [f"global {name}", f"{name} = inputs[{number}]"]

    def _fit(self, name: str, layout_of: Buffer) -> str:
        return f"fit({name}, {self.names.numbers_text(layout_of.shape)}, {self.names.numbers_text(layout_of.strides)})"

    def _return(self) -> None:
        outputs = self.plan.outputs
        for each in tensors(outputs):
            self._allocate(each.buffer)  # nothing writes to it: it has no elements
        used: dict[int, None] = {}
        slots = [self._tensor(each) for each in outputs if isinstance(each, Strided)]
        results = [self._argument(each, used) for each in outputs]
        if len(slots) < len(outputs):
            slots = list(used)
            self.code.python += _function("finish", [*self._unpack_line(used), f"return [{', '.join(results)}]"])
        self._step("end", len(slots), slots, [int(s >= 0 and s not in slots[n + 1 :]) for n, s in enumerate(slots)])
        self.lines.append(f"return [{', '.join(results)}]")

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _segment(self, number: int, step: Segment) -> None:
        for buffer in step.buffers:
            self._allocate(buffer)
        self._may_write(step.buffers)
        self._step("segment", f"segment{step.number}", number, step.first)
        self.lines.append(f"segment{step.number}()")

    def _launch(self, number: int, step: GpuLaunch) -> None:
        for buffer in step.buffers:
            self._allocate(buffer)
        self._may_write(step.buffers)
        programs = self.names.word(step.programs)
        # of each parameter: its place in the table, or -1 and its value; the last two are memory that Triton may ask for
        pointers = [word for buffer in step.buffers for word in (self.positions[buffer][0], 0)]
        numbers = [word for size in step.sizes for word in (-1, self.names.word(size))]
        count = len(step.buffers) + len(step.sizes) + 2
        n = step.kernel
        resources = (f"threads{n}", f"shared{n}")
        self._step("launch", number, f"kernel{n}", programs, *resources, count, pointers, numbers, [-1, 0, -1, 0])
        self.lines.append(f"kernel{n}[{programs}]({', '.join(map(self.names.variable, step.buffers))})")

    def _extern(self, step: Extern) -> None:
        for each in tensors((step.args, step.kwargs)):
            self._allocate(each.buffer)
        if step.out and isinstance(step.outputs[0], str):
            self._allocate(step.outputs[0])
        if _is_product(step, self.plan):
            self._product(step)
        else:
            self._python(step)

    def _product(self, step: Extern) -> None:
        slots = [self._whole(str(step.outputs[0])), *map(self._tensor, step.args)]
        function = self._function_number((step.target,))
        self._step("product", step.target, function, len(slots), slots)
        out, *operands = map(self.names.tensor, slots)
        self.lines.append(f"{self.names.function(step.target, True)}({', '.join(operands)}, out={out})")

    def _function_number(self, function: Any) -> int:
        if function not in self.code.functions:
            self.code.functions.append(function)
        return self.code.functions.index(function)

    def _python(self, step: Extern) -> None:
        """Add a Python function for a step: it takes a list of tensors, and returns those that get slots."""
        used: dict[int, None] = {}
        lines, results = self._body(step, self._call(step, used), used)
        lines = [*self._versions(step), *lines]
        name = f"step{len(self.code.functions)}"
        returned = ", ".join(map(self.names.variable, results))
        self.code.python += _function(name, [*self._unpack_line(used), *lines, f"return [{returned}]"])
        to = [self._buffer(each) for each in results]
        self._step("python", self._function_number(name), len(used), list(used), len(to), to)
        self.lines += lines
        for each in results:
            self._point(each)

    def _versions(self, step: Extern) -> list[str]:
        """Return the lines that give views of the arena versions of their own: they are the same tensors in each call.

        Torch's operators compute from the elements alone. Others may cache what they computed for a tensor, and take it for
        unchanged as long as its version is.
        """
        self._may_write([*step.mutated, *(each for each in step.outputs if isinstance(each, str))])
        if step.target.startswith("aten."):
            return []
        passed = tensors((step.args, step.kwargs))
        views = [each for each in passed if isinstance(each, Strided) and each.buffer in self.plan.places]
        new = [each for each in dict.fromkeys(views) if each not in self.current]
        self.current.update(new)
        names = [self.names.tensor(self._tensor(each)) for each in new]
        return [f"increment_version([{', '.join(names)}])"] if names else []

    def _may_write(self, buffers: Iterable[str]) -> None:
        written = frozenset(buffers)
        self.current = {each for each in self.current if each.buffer not in written}

    def _call(self, step: Extern, used: dict[int, None]) -> str:
        arguments = [self._argument(each, used) for each in step.args]
        arguments += [f"{key}={self._argument(each, used)}" for key, each in step.kwargs.items()]
        if step.out and isinstance(step.outputs[0], str):
            arguments.append(f"out={self._use_slot(self._whole(step.outputs[0]), used)}")
        return f"{self.names.function(step.target, step.out)}({', '.join(arguments)})"

    def _body(self, step: Extern, call: str, used: dict[int, None]) -> tuple[list[str], list[str]]:
        """Return the lines of a step, and the buffers that it creates."""
        if step.out or not any(isinstance(name, str) for name in step.outputs):
            return [call], []
        names = [self.names.variable(e) if isinstance(e, str) else f"_{n}" for n, e in enumerate(step.outputs)]
        alone = self.single(step.target) and len(names) == 1
        lines = [f"{names[0]} = {call}" if alone else f"{', '.join(names)}, = as_tuple({call})"]
        made: list[str] = []
        for name, each in zip(names, step.outputs, strict=True):
            if not isinstance(each, str):
                continue
            if self._is_in_frame(each) or each in self.slots:
                lines.append(f"{self._use_slot(self._whole(each), used)}.copy_({name})")
            else:
                if not is_collective(step.target):  # a result is not there yet: only its wait reads it
                    lines.append(f"{name} = {self._fit(name, self.plan.buffers[each])}")
                made.append(each)
        return lines, made

    # ---- arguments of Python's functions -------------------------------------------------------------------------------

    def _argument(self, argument: Any, used: dict[int, None]) -> str:
        """Return the text of an argument; the slots that it names are added to ``used``."""
        return self.names.argument(argument, lambda tensor: self._use_slot(self._tensor(tensor), used), self._strided)

    def _strided(self, buffer: str) -> Strided:
        layout_of = self.plan.buffers[buffer]
        return Strided(buffer, layout_of.shape, layout_of.strides, index(0))

    def _use_slot(self, slot: int, used: dict[int, None]) -> str:
        if slot >= 0:
            used[slot] = None
        return self.names.tensor(slot)

    def _unpack_line(self, used: dict[int, None]) -> list[str]:
        return [f"[{', '.join(map(self.names.tensor, used))}] = tensors"] if used else []


def alignments(plan: ExecutionPlan) -> dict[str, set[bool]]:
    """Return of each buffer whether kernels of a GPU take its address for a multiple of 16: all of them, none, or some."""
    found: dict[str, set[bool]] = {}
    for step in plan.steps:
        if isinstance(step, GpuLaunch):
            kernel = plan.kernels[step.kernel]
            for (parameter, _), buffer in zip(kernel.parameters, step.buffers, strict=False):
                found.setdefault(buffer, set()).add(parameter not in kernel.unaligned)
    return found


def _is_product(step: Extern, plan: ExecutionPlan) -> bool:
    """Return whether the driver computes a step: an unscaled product of tensors of one floating type, into a buffer."""
    found = PRODUCTS.get(step.target)
    if found is None or not step.out or step.kwargs or len(step.args) != found:
        return False
    if not isinstance(step.outputs[0], str) or not all(isinstance(each, Strided) for each in step.args):
        return False
    kinds = {plan.buffers[name].dtype for name in (step.outputs[0], *(each.buffer for each in step.args))}
    return len(kinds) == 1 and is_float(*kinds)


def _covers(tensor: Strided, buffer: Buffer) -> bool:
    return tensor.offset == 0 and tensor.shape == buffer.shape and tensor.strides == buffer.strides


def _function(name: str, lines: Sequence[str], parameter: str = "") -> str:
    return f"def {name}({parameter or ('inputs' if name == 'run' else 'tensors')}):\n" + "".join(
        f"    {x}\n" for x in lines
    )
