"""A plan as a program of the driver's (``driver.c``), and as the Python that it calls for what the driver cannot do itself.

A program is a list of words, in which a step is its number in ``STEPS`` and what it takes: numbers, and names of numbers
that a frame knows. ``text`` is the same for people::

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
from collections.abc import Callable, Sequence
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.graph import OpaqueValue
from opkit.compiler.ir.index import index
from opkit.compiler.ir.program import Buffer, Extern, Strided
from opkit.compiler.run.plan import ExecutionPlan, Segment, mentioned, tensors
from opkit.compiler.run.python_text import PythonNames

STEPS = ("point", "view", "allocate", "segment", "python", "product", "forget", "end")

PRODUCTS = {
    "aten.mm.default": ("aoti_torch_cpu_mm_out", 2),
    "aten.bmm.default": ("aoti_torch_cpu_bmm_out", 2),
    "aten.addmm.default": ("aoti_torch_cpu_addmm_out", 3),
    "aten.baddbmm.default": ("aoti_torch_cpu_baddbmm_out", 3),
}
"""What the driver calls in torch's C shim, and of how many tensors it is."""

Word = int | str


@dataclasses.dataclass
class DriverProgram:
    """A program and what it uses.

    Attributes:
        words: the program.
        slots: how many slots it has.
        taken: of each input, its slot; -1 for one that is no tensor, or that nothing needs.
        names: what its Python knows by name: views, numbers, operators.
        functions: of Python's: each is a name in ``python``, or the target of a product in a tuple.
        python: the text of those functions; of ``prepare``, which is given the inputs first, if some must be fitted or are
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
    """The program of a plan.

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
        self.position = {name: number for number, name in enumerate(plan.table)}
        self.slots: dict[str, int] = {}  # of buffers
        self.views: dict[str, dict[Strided, int]] = {}  # slots of tensors that are parts of a buffer, by the buffer
        self.last = self._last_uses()

    def _last_uses(self) -> dict[int, list[str]]:
        """The buffers that are not needed after a step, by the step's number."""
        last = {name: number for number, step in enumerate(self.plan.steps) for name in mentioned(step)}
        kept = {each.buffer for each in tensors(self.plan.outputs)}
        steps: dict[int, list[str]] = {}
        for name, number in last.items():
            if name not in kept:
                steps.setdefault(number, []).append(name)
        return steps

    def write(self) -> DriverProgram:
        self._take_inputs()
        for number, step in enumerate(self.plan.steps):
            if isinstance(step, Segment):
                self._segment(step)
            else:
                self._extern(step)
            self._forget([name for name in self.last.get(number, ()) if name in self.slots])
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
        """A slot for a buffer."""
        self.slots[buffer] = self._slot(self.names.variable(buffer))
        return self.slots[buffer]

    def _is_kept(self, buffer: str) -> bool:
        """Whether a frame has it."""
        return buffer in self.plan.places or self.plan.buffers[buffer].role == "constant"

    def _whole(self, buffer: str) -> int:
        about = self.plan.buffers[buffer]
        return self._tensor(Strided(buffer, about.shape, about.strides, index(0)))

    def _tensor(self, tensor: Strided) -> int:
        """The slot of a tensor, which is made if there is none."""
        if self._is_kept(tensor.buffer):
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
        if buffer in self.position:
            self._step("point", self.slots[buffer], self.position[buffer])

    def _allocate(self, buffer: str) -> None:
        """A tensor for a buffer that lives by itself, before the first step that writes to it."""
        if buffer in self.slots or self._is_kept(buffer):
            return
        about = self.plan.buffers[buffer]
        dtype = DTYPES[about.dtype].torch
        self._step("allocate", self._buffer(buffer), self.position.get(buffer, -1), dtype, *self._layout(about))
        numbers = ", ".join(map(self.names.numbers_text, (about.shape, about.strides)))
        self.lines.append(f"{self.names.variable(buffer)} = empty_strided({numbers}, dtype={dtype})")

    def _forget(self, buffers: list[str]) -> None:
        slots = [slot for each in buffers for slot in (self.slots[each], *self.views.pop(each, {}).values())]
        if slots:
            self._step("forget", len(slots), slots)
            self.lines.append(f"del {', '.join(map(self.names.tensor, slots))}")

    # ---- inputs and results ------------------------------------------------------------------------------------------

    def _inputs(self) -> list[str]:
        return [
            self.names.variable(each) if isinstance(each, str) else f"_{n}" for n, each in enumerate(self.plan.inputs)
        ]

    def _take_inputs(self) -> None:
        plan = self.plan
        held = {name for step in plan.steps for name in mentioned(step)} | {s.buffer for s in tensors(plan.outputs)}
        needed = [isinstance(each, str) and each in held for each in plan.inputs]
        self.code.taken = [self._buffer(str(e)) if needed[n] else -1 for n, e in enumerate(plan.inputs)]
        fitted = [
            line
            for n, each in enumerate(plan.inputs)
            if isinstance(each, OpaqueValue)
            for line in self._object(n, each)
        ]
        fitted += [self._fitted(n) for n in sorted(self.resolved) if needed[n]]
        if fitted:
            self.code.python += _function("prepare", fitted, "inputs")
            self.lines.append("prepare(inputs)")
        for name in self.slots:
            self._point(name)

    def _object(self, number: int, given: OpaqueValue) -> list[str]:
        """The lines that make an input which is no tensor known to the functions of the frame."""
        name = self._argument(given, {})
        return [f"global {name}", f"{name} = inputs[{number}]"]

    def _fitted(self, number: int) -> str:
        buffer = self.plan.buffers[str(self.plan.inputs[number])]
        return f"inputs[{number}] = {self._fit(f'inputs[{number}]', buffer)}"

    def _fit(self, name: str, about: Buffer) -> str:
        return f"fit({name}, {self.names.numbers_text(about.shape)}, {self.names.numbers_text(about.strides)})"

    def _return(self) -> None:
        outputs = self.plan.outputs
        for each in tensors(outputs):
            self._allocate(each.buffer)  # nothing writes to it: it has no elements
        given: dict[int, None] = {}
        slots = [self._tensor(each) for each in outputs if isinstance(each, Strided)]
        results = [self._argument(each, given) for each in outputs]
        if len(slots) < len(outputs):
            slots = list(given)
            self.code.python += _function("finish", [*self._given(given), f"return [{', '.join(results)}]"])
        self._step("end", len(slots), slots, [int(s >= 0 and s not in slots[n + 1 :]) for n, s in enumerate(slots)])
        self.lines.append(f"return [{', '.join(results)}]")

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _segment(self, step: Segment) -> None:
        for buffer in step.buffers:
            self._allocate(buffer)
        self._step("segment", f"segment{step.number}", step.number)
        self.lines.append(f"segment{step.number}()")

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
        self._step("product", PRODUCTS[step.target][0], function, len(slots), slots)
        out, *given = map(self.names.tensor, slots)
        self.lines.append(f"{self.names.function(step.target, True)}({', '.join(given)}, out={out})")

    def _function_number(self, function: Any) -> int:
        if function not in self.code.functions:
            self.code.functions.append(function)
        return self.code.functions.index(function)

    def _python(self, step: Extern) -> None:
        """A function for a step: it is given tensors, and returns those that get slots."""
        given: dict[int, None] = {}
        lines, results = self._body(step, self._call(step, given), given)
        name = f"step{len(self.code.functions)}"
        returned = ", ".join(map(self.names.variable, results))
        self.code.python += _function(name, [*self._given(given), *lines, f"return [{returned}]"])
        to = [self._buffer(each) for each in results]
        self._step("python", self._function_number(name), len(given), list(given), len(to), to)
        self.lines += lines
        for each in results:
            self._point(each)

    def _call(self, step: Extern, given: dict[int, None]) -> str:
        arguments = [self._argument(each, given) for each in step.args]
        arguments += [f"{key}={self._argument(each, given)}" for key, each in step.kwargs.items()]
        if step.out and isinstance(step.outputs[0], str):
            arguments.append(f"out={self._known(self._whole(step.outputs[0]), given)}")
        return f"{self.names.function(step.target, step.out)}({', '.join(arguments)})"

    def _body(self, step: Extern, call: str, given: dict[int, None]) -> tuple[list[str], list[str]]:
        """The lines of a step, and the buffers that it makes."""
        if step.out or not any(isinstance(name, str) for name in step.outputs):
            return [call], []
        names = [self.names.variable(e) if isinstance(e, str) else f"_{n}" for n, e in enumerate(step.outputs)]
        alone = self.single(step.target) and len(names) == 1
        lines = [f"{names[0]} = {call}" if alone else f"{', '.join(names)}, = spread({call})"]
        made: list[str] = []
        for name, each in zip(names, step.outputs, strict=True):
            if not isinstance(each, str):
                continue
            if self._is_kept(each) or each in self.slots:
                lines.append(f"{self._known(self._whole(each), given)}.copy_({name})")
            else:
                lines.append(f"{name} = {self._fit(name, self.plan.buffers[each])}")
                made.append(each)
        return lines, made

    # ---- arguments of Python's functions -------------------------------------------------------------------------------

    def _argument(self, argument: Any, given: dict[int, None]) -> str:
        """The text of an argument; the slots that it names are noted in ``given``."""
        return self.names.argument(argument, lambda tensor: self._known(self._tensor(tensor), given), self._strided)

    def _strided(self, buffer: str) -> Strided:
        about = self.plan.buffers[buffer]
        return Strided(buffer, about.shape, about.strides, index(0))

    def _known(self, slot: int, given: dict[int, None]) -> str:
        if slot >= 0:
            given[slot] = None
        return self.names.tensor(slot)

    def _given(self, given: dict[int, None]) -> list[str]:
        return [f"[{', '.join(map(self.names.tensor, given))}] = given"] if given else []


def _is_product(step: Extern, plan: ExecutionPlan) -> bool:
    """Whether the driver computes it: a product of tensors of one floating type, not scaled, into a buffer."""
    found = PRODUCTS.get(step.target)
    if found is None or not step.out or step.kwargs or len(step.args) != found[1]:
        return False
    if not isinstance(step.outputs[0], str) or not all(isinstance(each, Strided) for each in step.args):
        return False
    kinds = {plan.buffers[name].dtype for name in (step.outputs[0], *(each.buffer for each in step.args))}
    return len(kinds) == 1 and is_float(*kinds)


def _covers(tensor: Strided, buffer: Buffer) -> bool:
    return tensor.offset == 0 and tensor.shape == buffer.shape and tensor.strides == buffer.strides


def _function(name: str, lines: Sequence[str], given: str = "") -> str:
    return f"def {name}({given or ('inputs' if name == 'run' else 'given')}):\n" + "".join(f"    {x}\n" for x in lines)
