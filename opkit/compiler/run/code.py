"""A plan as the text of a Python function: a line for each call, so that a call of the graph costs little else.

    def run(inputs):
        x, w = inputs
        inputs.clear()
        pointers[0] = x.data_ptr()
        mm(x, w, out=view0)
        y = empty_strided((8, 8), (8, 1), dtype=f32)
        pointers[2] = y.data_ptr()
        if segment0(buffers, sizes, runtime): fail(0)
        return [y]

Names that are not assigned there are those of a frame: views of the arena, constants, and what sizes decide.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.graph import Opaque, TypeName
from opkit.compiler.ir.index import Div, Index, Mod, Size, index
from opkit.compiler.ir.program import Buffer, Extern, Item, Strided
from opkit.compiler.run.plan import Plan, Segment, mentioned, tensors


@dataclasses.dataclass
class Code:
    """A program and the names that it uses.

    Attributes:
        text: of ``run``.
        views: tensors over buffers that have a place or are constants, by the name that the text calls them by.
        numbers: texts of what sizes decide, in terms of the sizes, by name.
        targets: operators, by name: the target, and whether it writes to ``out=``.
        opaques: the texts of Opaque arguments, by name.
    """

    text: str = ""
    views: dict[str, Strided] = dataclasses.field(default_factory=dict)
    numbers: dict[str, str] = dataclasses.field(default_factory=dict)
    targets: dict[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)
    opaques: dict[str, str] = dataclasses.field(default_factory=dict)


def spelled(at: Index) -> str:
    """An index over sizes as Python spells it."""
    terms = [
        "*".join([*map(_atom, monomial), *([str(c)] if c != 1 or not monomial else [])])
        for monomial, c in at.terms.items()
    ]
    return "+".join(terms) or "0"


def _atom(atom: Any) -> str:
    if isinstance(atom, Size):
        return atom.name
    assert isinstance(atom, Div | Mod), f"{atom} is not known before the program runs"
    sign = "//" if isinstance(atom, Div) else "%"
    return f"(({spelled(atom.dividend)}){sign}({spelled(atom.divisor)}))"


def write(plan: Plan, single: Callable[[str], bool], resolved: frozenset[int] = frozenset()) -> Code:
    """The program of a plan.

    Args:
        plan: the plan.
        single: whether a target returns one tensor, and not several.
        resolved: the inputs that may hold values which are conjugated or negated when they are read.
    """
    return _Writer(plan, single, resolved).write()


class _Writer:
    def __init__(self, plan: Plan, single: Callable[[str], bool], resolved: frozenset[int]) -> None:
        self.plan, self.single, self.resolved = plan, single, resolved
        self.code = Code()
        self.lines: list[str] = []
        self.position = {name: number for number, name in enumerate(plan.table)}
        self.made: set[str] = set()  # buffers that have a variable
        self.allocated: set[str] = set()  # those of them that begin where their memory does
        self.names: dict[str, str] = {}
        self.known: dict[Any, str] = {}
        self.last = self._last_uses()

    def _last_uses(self) -> dict[int, list[str]]:
        """The buffers whose variable is not needed after a step, by the step's number."""
        last = {name: number for number, step in enumerate(self.plan.steps) for name in mentioned(step)}
        kept = {each.buffer for each in tensors(self.plan.outputs)}
        steps: dict[int, list[str]] = {}
        for name, number in last.items():
            if name not in kept:
                steps.setdefault(number, []).append(name)
        return steps

    def write(self) -> Code:
        self._take_inputs()
        for number, step in enumerate(self.plan.steps):
            if isinstance(step, Segment):
                self._segment(step)
            else:
                self._extern(step)
            self._drop([name for name in self.last.get(number, ()) if name in self.made])
        results = [self._argument(each) for each in self._outputs()]
        self._line(f"return [{', '.join(results)}]")
        self.code.text = "def run(inputs):\n" + "".join(f"    {line}\n" for line in self.lines)
        return self.code

    def _line(self, text: str) -> None:
        self.lines.append(text)

    def _drop(self, names: list[str]) -> None:
        if names:
            self._line(f"del {', '.join(map(self._variable, names))}")

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def _variable(self, buffer: str) -> str:
        """The variable of a buffer: its name where Python allows that, with a letter before it against all others."""
        known = self.names.get(buffer)
        if known is None:
            plain = "b_" + re.sub(r"\W", "_", buffer)
            known = plain if plain not in self.names.values() else f"{plain}_{len(self.names)}"
            self.names[buffer] = known
        return known

    def _is_kept(self, buffer: str) -> bool:
        """Whether a frame has it."""
        return buffer in self.plan.places or self.plan.buffers[buffer].role == "constant"

    def _take_inputs(self) -> None:
        plan = self.plan
        names = [
            self._variable(each) if isinstance(each, str) else f"_{number}" for number, each in enumerate(plan.inputs)
        ]
        self._line(f"[{', '.join(names)}] = inputs")
        self._line("inputs.clear()")
        held = {name for step in plan.steps for name in mentioned(step)} | {s.buffer for s in tensors(plan.outputs)}
        buffers = [each for each in plan.inputs if isinstance(each, str)]
        for number, each in enumerate(plan.inputs):
            if isinstance(each, str) and number in self.resolved and each in held:
                self._fit(each)
        self.made |= set(buffers)
        for each in buffers:
            self._point(each)
        self._drop([each for each in buffers if each not in held])

    def _point(self, buffer: str) -> None:
        if buffer in self.position:
            self._line(f"pointers[{self.position[buffer]}] = {self._variable(buffer)}.data_ptr()")

    def _allocate(self, buffer: str) -> None:
        """A variable for a buffer that lives by itself, before the first step that writes to it."""
        if buffer in self.made or self._is_kept(buffer):
            return
        about = self.plan.buffers[buffer]
        dtype = DTYPES[about.dtype].torch
        sizes = f"{self._numbers(about.shape)}, {self._numbers(about.strides)}"
        self._line(f"{self._variable(buffer)} = empty_strided({sizes}, dtype={dtype})")
        self.made.add(buffer)
        self.allocated.add(buffer)
        self._point(buffer)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _segment(self, step: Segment) -> None:
        for buffer in step.buffers:
            self._allocate(buffer)
        self._line(f"if segment{step.number}(buffers, sizes, runtime): fail({step.number})")

    def _extern(self, step: Extern) -> None:
        for each in tensors((step.args, step.kwargs)):
            self._allocate(each.buffer)
        arguments = [self._argument(each) for each in step.args]
        arguments += [f"{key}={self._argument(each)}" for key, each in step.kwargs.items()]
        if step.out and isinstance(step.outputs[0], str):
            self._allocate(step.outputs[0])
            arguments.append(f"out={self._whole(step.outputs[0])}")
        call = f"{self._function(step.target, step.out)}({', '.join(arguments)})"
        if step.out or not any(isinstance(name, str) for name in step.outputs):
            self._line(call)
            return
        self._results(step, call)

    def _results(self, step: Extern, call: str) -> None:
        names = [self._result(each, number) for number, each in enumerate(step.outputs)]
        if self.single(step.target) and len(names) == 1:
            self._line(f"{names[0]} = {call}")
        else:
            self._line(f"{', '.join(names)}, = spread({call})")
        for name, each in zip(names, step.outputs, strict=True):
            if isinstance(each, str):
                self._receive(each, name)

    def _result(self, buffer: str | Index | None, number: int) -> str:
        return self._variable(buffer) if isinstance(buffer, str) else f"_{number}"

    def _receive(self, buffer: str, name: str) -> None:
        """A result, in its buffer if that has a place, else with the strides that are expected of it."""
        if self._is_kept(buffer):
            self._line(f"{self._whole(buffer)}.copy_({name})")
            self._line(f"del {name}")
            return
        self._fit(buffer)
        self.made.add(buffer)
        self._point(buffer)

    def _fit(self, buffer: str) -> None:
        name, about = self._variable(buffer), self.plan.buffers[buffer]
        self._line(f"{name} = fit({name}, {self._numbers(about.shape)}, {self._numbers(about.strides)})")

    def _outputs(self) -> tuple[Any, ...]:
        for each in tensors(self.plan.outputs):
            self._allocate(each.buffer)  # nothing writes to it: it has no elements
        return self.plan.outputs

    # ---- arguments ---------------------------------------------------------------------------------------------------

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, Strided):
            return self._tensor(argument)
        if isinstance(argument, Item):
            return f"{self._whole(argument.buffer)}.item()"
        if isinstance(argument, Index):
            return self._numbers(argument)
        if isinstance(argument, TypeName):
            return DTYPES[argument.name].torch
        if isinstance(argument, Opaque):
            return self._named("opaque", argument.text, self.code.opaques, argument.text)
        if isinstance(argument, list | tuple):
            parts = [self._argument(each) for each in argument]
            return f"[{', '.join(parts)}]" if isinstance(argument, list) else _tuple(parts)
        if isinstance(argument, dict):
            return "{" + ", ".join(f"{key!r}: {self._argument(each)}" for key, each in argument.items()) + "}"
        return _literal(argument)

    def _whole(self, buffer: str) -> str:
        about = self.plan.buffers[buffer]
        return self._tensor(Strided(buffer, about.shape, about.strides, index(0)))

    def _tensor(self, tensor: Strided) -> str:
        if self._is_kept(tensor.buffer):
            key = (tensor.buffer, tensor.shape, tensor.strides, tensor.offset)
            return self._named("view", key, self.code.views, tensor)
        variable = self._variable(tensor.buffer)
        if _covers(tensor, self.plan.buffers[tensor.buffer]):
            return variable
        sizes = f"{self._numbers(tensor.shape)}, {self._numbers(tensor.strides)}"
        base = "" if tensor.buffer in self.allocated else f"{variable}.storage_offset() + "
        return f"as_strided({variable}, {sizes}, {base}{self._numbers(tensor.offset)})"

    def _numbers(self, of: Index | tuple[Index, ...]) -> str:
        """Sizes: as they are where they are known, else by a name that the frame computes."""
        parts = (of,) if isinstance(of, Index) else of
        text = spelled(of) if isinstance(of, Index) else _tuple(list(map(spelled, parts)))
        if all(each.constant is not None for each in parts):
            return text
        return self._named("size", text, self.code.numbers, text)

    def _function(self, target: str, out: bool) -> str:
        plain = re.sub(r"\W", "_", target) + ("_out" if out else "")
        return self._named(plain, (target, out), self.code.targets, (target, out), numbered=False)

    def _named(self, stem: str, key: Any, table: dict[str, Any], value: Any, numbered: bool = True) -> str:
        known = self.known.get((stem, key))
        if known is None:
            known = f"{stem}{len(table)}" if numbered else stem
            self.known[stem, key] = known
            table[known] = value
        return known


def _tuple(parts: list[str]) -> str:
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _covers(tensor: Strided, buffer: Buffer) -> bool:
    return tensor.offset == 0 and tensor.shape == buffer.shape and tensor.strides == buffer.strides


def _literal(value: Any) -> str:
    if isinstance(value, complex):
        return f"complex({_literal(value.real)}, {_literal(value.imag)})"
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


def binding(plan: Plan, computed: Mapping[str, str]) -> str:
    """The text of ``bind``, which gives the plan's sizes, in its order, from the inputs.

    Raises:
        LookupError: a size that no input tells.
    """
    found = _sources(plan)
    for name in plan.sizes:
        if name not in found and name not in computed:
            raise LookupError(f"no input tells the size {name}")
    lines = [f"{name} = {text}" for name, text in found.items()]
    lines += [f"{name} = {text}" for name, text in computed.items()]
    body = "".join(
        f"    {line}\n" for line in [*lines, f"return ({', '.join(plan.sizes)},)" if plan.sizes else "return ()"]
    )
    return f"def bind(inputs):\n{body}"


def _sources(plan: Plan) -> dict[str, str]:
    """Where each size is found: an input, a size of an input, or a stride of one."""
    found: dict[str, str] = {}
    for number, given in enumerate(plan.inputs):
        if isinstance(given, Index):
            _note(found, given, f"inputs[{number}]")
            continue
        buffer = plan.buffers[given]
        for d, (extent, stride) in enumerate(zip(buffer.shape, buffer.strides, strict=True)):
            _note(found, extent, f"inputs[{number}].shape[{d}]")
            _note(found, stride, f"inputs[{number}].stride({d})")
    return found


def _note(found: dict[str, str], at: Index, text: str) -> None:
    if list(at.terms.values()) == [1]:
        (monomial,) = at.terms
        if len(monomial) == 1 and isinstance(monomial[0], Size):
            found.setdefault(monomial[0].name, text)
