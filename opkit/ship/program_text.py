"""This module writes the program of a saved model as C, which runs it without Python.

The C is compiled with the kernels. ``opkit/kernels/include/opkit_program.h`` says what it and the runtime know of each other; the
runtime is in ``cpp_ext/model``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opkit.compiler.capture.conversion import Captured
from opkit.compiler.emit.c import expressions
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.graph import OpaqueValue, TypeName
from opkit.compiler.ir.index import Div, Index, Mod, Symbol
from opkit.compiler.ir.program import Buffer, Extern, ScalarItem, Strided
from opkit.compiler.run import driver, driver_program
from opkit.compiler.run import plan as plans
from opkit.compiler.run import torch_private as private
from opkit.compiler.run.plan import ExecutionPlan, GpuLaunch, Segment
from opkit.compiler.run.torch_operators import CONTROL_FLOW
from opkit.ship import size_arithmetic, torch_private

_HEADERS = Path(__file__).parents[1] / "kernels" / "include"
VERSION = 1
"""``OPK_PROGRAM_VERSION`` of ``opkit_program.h``."""

_SIZES = {"b1": ("BOOL", "uint8_t"), "f32": ("FLOAT", "float"), "f64": ("FLOAT", "double")} | {
    f"{sign}{bits}": ("INT", f"{'u' if sign == 'u' else ''}int{bits}_t") for sign in "iu" for bits in (8, 16, 32, 64)
}
"""How a number in memory is passed to an operator, and its type in C, by its dtype."""


class NotWritable(Exception):
    """The program needs Python; the message says why."""


@dataclasses.dataclass(frozen=True)
class ProgramText:
    """A program.

    Attributes:
        text: a translation unit.
        description: what the runtime reads, as JSON: inputs, sizes, constants, operators, buffers and steps.
        constants: the names of the constants in the order in which the program takes them.
    """

    text: str
    description: Mapping[str, Any]
    constants: tuple[str, ...]


def write(plan: ExecutionPlan, captured: Captured) -> ProgramText:
    """Return the program of a plan.

    Raises:
        NotWritable: it calls Python, or has arguments or results that only Python has.
    """
    return _ProgramWriter(plan, captured).write()


class _ProgramWriter:
    def __init__(self, plan: ExecutionPlan, captured: Captured) -> None:
        self.plan, self.captured, self.is_gpu = plan, captured, plan.device != "cpu"
        self.numbers = {name: number for number, name in enumerate(plan.buffers)}
        self.constants = [name for name, each in plan.buffers.items() if each.role == "constant"]
        self.operators: dict[tuple[str, str], int] = {}
        self.lines: list[str] = []
        self.available: set[str] = set()
        self.positions: dict[str, list[int]] = {}
        for number, name in enumerate(plan.table):
            self.positions.setdefault(name, []).append(number)
        externs = [step for step in plan.steps if isinstance(step, Extern)]
        self.releases = {} if any(step.aliases for step in externs) else self._last_uses()
        """The buffers that are not needed after a step; none if results of operators may lie in them."""

    def _last_uses(self) -> dict[int, list[str]]:
        last = {name: number for number, step in enumerate(self.plan.steps) for name in plans.mentioned(step)}
        returned = {each.buffer for each in plans.tensors(self.plan.outputs)}
        made = {n: at for n, at in last.items() if self.plan.buffers[n].role == "made" and n not in self.plan.places}
        steps: dict[int, list[str]] = {}
        for name, number in made.items():
            if name not in returned:
                steps.setdefault(number, []).append(name)
        return steps

    def write(self) -> ProgramText:
        self._place_buffers()
        for number, step in enumerate(self.plan.steps):
            if isinstance(step, Extern):
                self._extern(number, step)
            else:
                for buffer in step.buffers:
                    self._allocate(buffer, number)
                self._kernels(number, step)
            for buffer in self.releases.get(number, ()):
                self.lines.append(f"host->release(host, {self.numbers[buffer]});")
        for number, output in enumerate(self.plan.outputs):
            self._give(number, output)
        return ProgramText(self._text(), self._description(), tuple(self.constants))

    def _kernels(self, number: int, step: Segment | GpuLaunch) -> None:
        if isinstance(step, Segment):
            self._try(f"opkit_segment_{step.number}(t + {step.first}, sizes, &host->segments)", number)
            return
        # the last two parameters are memory that Triton may ask for
        parameters = [f"&t[{self.positions[buffer][0]}]" for buffer in step.buffers]
        parameters += [f"&(int64_t){{{self._size(size)}}}" for size in step.sizes] + ["&(void *){0}"] * 2
        launch = (
            f"host->launch(host, {step.kernel}, {self._size(step.programs)}, (void *[]){{{', '.join(parameters)}}})"
        )
        self._try(launch, number)

    def _try(self, call: str, step: int) -> None:
        self.lines.append(f"if ({call}) return {step + 1};")

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def _place_buffers(self) -> None:
        inputs = {name: n for n, name in enumerate(self.plan.inputs) if isinstance(name, str)}
        constants = {name: n for n, name in enumerate(self.constants)}
        for name in self.plan.buffers:
            if name in self.plan.places:
                self._set(name, f"arena + {self._size(self.plan.places[name])}")
            elif name in inputs:
                self._set(name, f"inputs[{inputs[name]}]")
            elif name in constants:
                self._set(name, f"constants[{constants[name]}]")

    def _set(self, buffer: str, value: str) -> None:
        self.available.add(buffer)
        pointer, positions = f"p[{self.numbers[buffer]}]", self.positions.get(buffer, ())
        if self.is_gpu and self.plan.buffers[buffer].role == "number":  # kernels take it by value
            self.lines += [f"{pointer} = {value};", *(f"t[{n}] = *(void **){pointer};" for n in positions)]
        else:
            self.lines.append(f"{''.join(f't[{n}] = ' for n in positions)}{pointer} = {value};")

    def _allocate(self, buffer: str, step: int) -> None:
        if buffer in self.available:
            return
        layout = self.plan.buffers[buffer]
        number = self.numbers[buffer]
        self._set(buffer, f"host->allocate(host, {number}, {self._layout_of(layout)})")
        self.lines.append(f"if (!p[{number}]) return {step + 1};")

    def _layout_of(self, buffer: Buffer) -> str:
        return f"&{self._tensor('0', buffer, buffer)}"

    def _strided(self, tensor: Strided) -> str:
        row = self.plan.buffers[tensor.buffer]
        offset = self._size(tensor.offset * DTYPES[row.dtype].bytes)
        pointer = f"p[{self.numbers[tensor.buffer]}]"
        data = pointer if tensor.offset == 0 else f"(char *){pointer} + {offset}"
        return self._tensor(data, tensor, row)

    def _tensor(self, data: str, layout: Strided | Buffer, buffer: Buffer) -> str:
        """Return a tensor of a layout over a buffer's memory."""
        sizes, strides = (self._array(each) for each in (layout.shape, layout.strides))
        device = "host->device" if self.is_gpu and buffer.role != "number" else "-1"
        return (
            f"(opk_tensor){{{data}, {sizes}, {strides}, {len(layout.shape)}, {_dtype_number(buffer.dtype)}, {device}}}"
        )

    # ---- sizes -------------------------------------------------------------------------------------------------------

    def _array(self, of: Sequence[Index]) -> str:
        return f"(int64_t[]){{{', '.join(map(self._size, of)) or '0'}}}"

    def _size(self, at: Index) -> str:
        def spell(atom: Any) -> str:
            if isinstance(atom, Symbol):
                return f"sizes[{self.plan.sizes.index(atom.name)}]"
            assert isinstance(atom, Div | Mod), atom
            function = "opk_floordiv" if isinstance(atom, Div) else "opk_rem"
            return f"{function}({self._size(atom.dividend)}, {self._size(atom.divisor)})"

        return expressions.index_text(at, spell)

    def _computed(self, text: str) -> str:
        """Return a Python expression of sizes as C."""
        try:
            return size_arithmetic.c_text(text, self.plan.sizes)
        except ValueError as error:
            raise NotWritable(str(error)) from error

    def _bound(self) -> list[list[Any]]:
        """Return where sizes come from: the size's number and name, the input, "size", "stride" or "value", and the dimension."""
        found: dict[str, list[Any]] = {}
        for number, each in enumerate(self.plan.inputs):
            if isinstance(each, Index):
                self._bind(found, each, [number, "value", 0])
            elif isinstance(each, str):
                buffer = self.plan.buffers[each]
                for d, (extent, stride) in enumerate(zip(buffer.shape, buffer.strides, strict=True)):
                    self._bind(found, extent, [number, "size", d])
                    self._bind(found, stride, [number, "stride", d])
        missing = [name for name in self.plan.sizes if name not in found and name not in self.captured.computed]
        if missing:
            raise NotWritable(f"no input determines the size {missing[0]}")
        return [[self.plan.sizes.index(name), name, *at] for name, at in found.items() if name in self.plan.sizes]

    @staticmethod
    def _bind(found: dict[str, list[Any]], at: Index, source: list[Any]) -> None:
        for monomial, factor in at.terms.items():
            if len(at.terms) == 1 and factor == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol):
                found.setdefault(monomial[0].name, source)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _extern(self, number: int, step: Extern) -> None:
        for each in plans.tensors((step.args, step.kwargs)):
            self._allocate(each.buffer, number)
        operator = self._operator(step)
        passed = [self._passed(each, "") for each in step.args]
        kwargs = {**step.kwargs, **self._defaults(step)}
        passed += [self._passed(each, name) for name, each in kwargs.items()]
        results = [self._result(step, output) for output in step.outputs]
        self.lines.append(f"{{ opk_result r[] = {{{', '.join(results) or '{-1}'}}};")
        arguments = f"(opk_passed[]){{{', '.join(passed) or '{0}'}}}, {len(passed)}"
        self._try(f"host->call(host, {operator}, {arguments}, r, {len(results)})", number)
        for position, output in enumerate(step.outputs):
            if isinstance(output, str) and output not in self.available:
                self._set(output, f"r[{position}].tensor.data")
        self.lines.append("}")

    def _defaults(self, step: Extern) -> dict[str, Any]:
        """Return what a call leaves to the schema of an operator whose kernel takes all of its arguments."""
        target = self.captured.targets.get(step.target)
        if not private.qualified_name(target) or private.is_torchs_own(target):
            return {}
        return torch_private.defaults_left_out(target, step.args, step.kwargs)

    def _operator(self, step: Extern) -> int:
        target = self.captured.targets.get(step.target)
        if step.target.startswith("opaque.") and target in CONTROL_FLOW.values():
            name = f"control_flow::{step.target.removeprefix('opaque.')}"
            return self.operators.setdefault((name, "default"), len(self.operators))
        name = private.qualified_name(target) or step.target.rsplit(".", 1)[0].replace(".", "::", 1)
        overload = step.target.rsplit(".", 1)[1] if target is None else private.overload_name(target)
        if "::" not in name or name in ("opkit::seed", "opkit::wait"):
            raise NotWritable(f"it calls {step.target}")
        if step.out:
            overload = private.overload_name(private.out_variant(target)) if target is not None else "out"
        return self.operators.setdefault((name, overload), len(self.operators))

    def _result(self, step: Extern, output: Any) -> str:
        if output is None:
            return "{-1}"
        if not isinstance(output, str):
            raise NotWritable(f"{step.target} computes a size")
        buffer, number = self.plan.buffers[output], self.numbers[output]
        if step.out:
            self._allocate(output, 0)
        data = f"p[{number}]" if output in self.available else "0"
        return f"{{{number}, {self._tensor(data, buffer, buffer)}}}"

    def _passed(self, value: Any, name: str) -> str:
        kind, count, member, text = self._value(value)
        return f"{{OPK_PASSED_{kind}, {count}, {json.dumps(name) if name else '0'}, {{.{member} = {text}}}}}"

    def _value(self, value: Any) -> tuple[str, int, str, str]:
        """Return the kind of an argument, its count, the member of the union, and that in C."""
        if isinstance(value, Strided):
            return "TENSOR", 0, "tensor", f"&{self._strided(value)}"
        if isinstance(value, ScalarItem):
            dtype = self.plan.buffers[value.buffer].dtype
            if dtype in _SIZES:
                kind, ctype = _SIZES[dtype]
                member = "f" if kind == "FLOAT" else "i"
                return kind, 0, member, f"*(const {ctype} *)p[{self.numbers[value.buffer]}]"
        if isinstance(value, TypeName):
            return "DTYPE", 0, "i", str(_dtype_number(value.name))
        if isinstance(value, OpaqueValue) and not value.text.startswith("tensor "):
            return "TEXT", 0, "text", json.dumps(value.text)
        if isinstance(value, Index):
            return "INT", 0, "i", self._size(value)
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            items = [self._passed(each, "") for each in value]
            return "LIST", len(items), "items", f"(opk_passed[]){{{', '.join(items) or '{0}'}}}"
        return self._plain_value(value)

    def _plain_value(self, value: Any) -> tuple[str, int, str, str]:
        if value is None:
            return "NONE", 0, "i", "0"
        if isinstance(value, bool):
            return "BOOL", 0, "i", str(int(value))
        if isinstance(value, int):
            return "INT", 0, "i", f"{value}L"
        if isinstance(value, float):
            return "FLOAT", 0, "f", expressions.number(value, "f64")
        if isinstance(value, str):
            return "TEXT", 0, "text", json.dumps(value)
        raise NotWritable(f"an operator takes {value!r}")

    def _give(self, number: int, output: Any) -> None:
        if isinstance(output, Strided):
            self._allocate(output.buffer, len(self.plan.steps) - 1)
            buffer = self.numbers[output.buffer] if self.plan.buffers[output.buffer].role == "made" else -1
            self.lines.append(f"host->give(host, {number}, {buffer}, &{self._strided(output)});")
        elif isinstance(output, Index | int) and not isinstance(output, bool):
            at = self._size(output) if isinstance(output, Index) else str(output)
            integer = f"(opk_tensor){{(int64_t[]){{{at}}}, (int64_t[]){{0}}, (int64_t[]){{0}}, 0, OPK_INT64, -1}}"
            self.lines.append(f"host->give(host, {number}, -1, &{integer});")
        elif output is not None:
            raise NotWritable(f"it returns {output!r}")

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def _text(self) -> str:
        computed = [
            f"sizes[{self.plan.sizes.index(name)}] = {self._computed(text)};"
            for name, text in self.captured.computed.items()
            if name in self.plan.sizes
        ]
        layouts = [self.plan.arena]
        for each in self.plan.inputs:
            if isinstance(each, str):
                layouts += [*self.plan.buffers[each].shape, *self.plan.buffers[each].strides]
        written = [f"layouts[{n}] = {self._size(at)};" for n, at in enumerate(layouts)]
        declared = [
            f"int64_t opkit_segment_{n}(void *const *, const int64_t *, opk_segments *);"
            for n in range(self.plan.segments)
        ]
        run = "const int64_t *sizes, char *arena, void *const *inputs, void *const *constants"
        memory = f"void *p[{len(self.plan.buffers) + 1}] = {{0}}, *t[{len(self.plan.table) + 1}] = {{0}};"
        return "\n".join([
            *((_HEADERS / name).read_text() for name in ("opkit.h", "opkit_program.h")),
            size_arithmetic.FUNCTIONS, *declared, "",
            _function("void opkit_program_sizes(int64_t *sizes)", computed),
            _function("void opkit_program_layouts(const int64_t *sizes, int64_t *layouts)", written),
            _function(f"int64_t opkit_program_run(opk_host *host, {run})", [memory, *self.lines, "return 0;"]),
        ])  # fmt: skip

    def _described(self, taken: Any) -> list[Any]:
        """Return the dtype, the rank and the text of an input, whether it is on a GPU, and begins at a multiple of 16 bytes."""
        if isinstance(taken, Index):
            return [-1, 0, "a size", 0, 0]
        if not isinstance(taken, str):
            raise NotWritable(f"it takes {taken!r}")
        buffer = self.plan.buffers[taken]
        shape = ", ".join(map(str, buffer.shape))
        is_there = self.is_gpu and buffer.role != "number"
        aligned = is_there and True in driver_program.alignments(self.plan).get(taken, ())
        text = f"{DTYPES[buffer.dtype].torch}[{shape}]"
        return [_dtype_number(buffer.dtype), len(buffer.shape), text, int(is_there), int(aligned)]

    def _description(self) -> dict[str, Any]:
        inputs = [self._described(each) for each in self.plan.inputs]
        steps = [
            "; ".join(filter(None, s.origins)) if isinstance(s, Segment) else getattr(s, "origin", "")
            for s in self.plan.steps
        ]
        functions = [[f.library, f.name, f.instance if f.run_parameters else -1] for f in self.plan.functions]
        return {
            "version": VERSION, "inputs": inputs, "sizes": len(self.plan.sizes), "bound": self._bound(),
            "buffers": len(self.plan.buffers), "operators": [list(each) for each in self.operators], "steps": steps,
            "functions": functions, "outputs": len(self.plan.outputs), "graphs": list(self.captured.bodies),
        }  # fmt: skip


def _dtype_number(dtype: str) -> int:
    return driver.dtype(DTYPES[dtype].torch)


def _function(head: str, lines: Sequence[str]) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f'__attribute__((visibility("default"))) {head} {{\n{body}}}\n'
