"""Derive layout programs: the layout of an operator's outputs for every call that is like one example.

:func:`derive` runs the reference on symbolic sizes (``symbolic_run``). It writes the sizes of the results, and a guard with what
torch assumed about sizes on the way, as the words of a program (``program``). ``sympy_code`` translates the expressions.
"""

# pyright: reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from opkit.errors import OpkitError
from opkit.kernels.facts import Facts
from opkit.op.core import Operator
from opkit.op.layout import program as p
from opkit.op.layout import symbolic_run
from opkit.op.layout.outputs import (
    checked_output,
    declared_type,
    facts_of,
    kind_of,
    layout_of,
    list_outputs,
    new_outputs,
    operands,
    output_device,
    shape_function,
    split_arguments,
)
from opkit.op.layout.program import LayoutProgram, run
from opkit.op.layout.symbolic_run import SymbolicRun, expression
from opkit.op.layout.sympy_code import Code, NoCodeError, Translator, constant, joined
from opkit.op.trace.reference_trace import concrete


@dataclasses.dataclass(frozen=True)
class LayoutRefusal:
    """Why there is no layout program for calls like the example."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def derive(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> LayoutProgram | LayoutRefusal:
    """Derive the program that computes the layout of a call through the schema, and of as many others as it can.

    It holds for this call, which is checked, and for every other one that fits its key and guard.
    There is none where a tensor is not row-major: Python passes the layout to such calls.
    """
    try:
        facts, values = facts_of(operator), operands(operator, args, kwargs)
        _refuse_untestable(operator)
        if not new_outputs(facts):
            return _assembled(facts, values, [2, *constant(1)])
        expected, device = layout_of(operator, args, kwargs), output_device(operator, args, kwargs)
    except (OpkitError, p.UnfitError) as error:
        return _refused(operator, error)
    return _Deriving(operator, facts, values, expected, device).best()


def _refused(operator: Operator, why: object) -> LayoutRefusal:
    return LayoutRefusal(f"{operator.name}: there is no program of output sizes: {why}")


def _refuse_untestable(operator: Operator) -> None:
    """Raise if the operator has an argument that a program cannot test."""
    arguments = operator.schema.arguments
    tensors = any(kind_of(argument).startswith("tensor") for argument in arguments)
    for argument in arguments:
        declared = declared_type(argument)
        harmless = declared == "Generator" or (declared == "Device" and not tensors)
        if kind_of(argument) == "ignored" and not harmless:
            raise p.UnfitError(f"a program cannot test the argument {argument.name} of type {declared}")


@dataclasses.dataclass
class _Deriving:
    """The derivation of a program from one call, whose layout is ``expected``."""

    operator: Operator
    facts: Facts
    values: list[Any]
    expected: list[int]
    device: torch.device

    @property
    def kinds(self) -> list[str]:
        return [argument.kind for argument in self.facts.arguments]

    def best(self) -> LayoutProgram | LayoutRefusal:
        """Return the program with the fewest numbers pinned."""
        result = self.attempt(frozenset())
        for pinned in ({"float"}, {"float", "int"}):
            if isinstance(result, LayoutRefusal) and any(kind.removesuffix("s") in pinned for kind in self.kinds):
                result = self.attempt(frozenset(pinned))
        return result

    def attempt(self, pinned: frozenset[Any]) -> LayoutProgram | LayoutRefusal:
        """Return the program with the numbers ``pinned`` (see :class:`~opkit.op.layout.symbolic_run.Symbols`) as constants."""
        try:
            program = self._program(self._traced(pinned))
        except (NoCodeError, OpkitError, p.UnfitError, symbolic_run.NotTracedError) as error:
            return _refused(self.operator, error)
        if self._is_right(program):
            return program
        why = f"on symbolic sizes the reference does something else than on plain ones.\n{program}"
        return _refused(self.operator, why)

    def _is_right(self, program: LayoutProgram) -> bool:
        """Return whether the program is right for the call, and for one of twice the sizes if that fits."""
        if run(program.words, self.kinds, self.values) != self.expected:
            return False
        values = symbolic_run.isolated(lambda: symbolic_run.doubled(self.values))
        layout = run(program.words, self.kinds, values)
        return layout is None or layout == self._layout(values)

    def _layout(self, values: list[Any]) -> list[int] | None:
        try:
            return layout_of(self.operator, *split_arguments(self.operator, values))
        except OpkitError:
            return None

    def _traced(self, pinned: frozenset[Any]) -> symbolic_run.SymbolicRun:
        names = [argument.name if argument.kwarg_only else None for argument in self.operator.schema.arguments]
        while True:
            traced = _attempted(self.operator, self.kinds, self.values, names, pinned)
            floats = traced.floats(self._new(traced))
            if not floats:
                return traced
            pinned |= floats

    def _new(self, traced: symbolic_run.SymbolicRun) -> list[torch.Tensor]:
        listed = list_outputs(self.operator, traced.returned)
        return [
            checked_output(self.operator, f"its output {name}", listed[i], self.device)
            for name, i in new_outputs(self.facts)
        ]

    def _program(self, traced: symbolic_run.SymbolicRun) -> LayoutProgram:
        writer = LayoutWriter(traced)
        outputs = [word for tensor in self._new(traced) for word in writer.output(tensor)]
        return _assembled(self.facts, self.values, [*writer.guard(), *outputs])


def _assembled(facts: Facts, values: list[Any], rest: list[int]) -> LayoutProgram:
    arguments = tuple((argument.name, argument.kind) for argument in facts.arguments)
    words = [*p.key([kind for _, kind in arguments], values), *rest]
    return LayoutProgram(facts.operator, (1 + len(words), *words), arguments)


def _attempted(
    operator: Operator, kinds: list[str], values: list[Any], names: list[str | None], pinned: frozenset[Any]
) -> symbolic_run.SymbolicRun:
    try:
        return symbolic_run.run(shape_function(operator), kinds, values, names, pinned)
    except symbolic_run.NotTracedError:
        raise
    except Exception as error:  # what the body raised is the reason
        first = str(error).strip().split("\n")[0]
        raise symbolic_run.NotTracedError(
            f"on symbolic sizes the reference raises {type(error).__name__}: {first}"
        ) from error


# ---- writing a program -----------------------------------------------------------------------------------------------


class LayoutWriter:
    """Writes the parts of a program; :meth:`guard` must be called last, because the outputs add to its conditions."""

    def __init__(self, traced: SymbolicRun) -> None:
        self.traced = traced
        self.env = traced.symbols.env
        self.translator = Translator(traced.symbols.code)
        self.no_overlap: list[Code] = []

    def output(self, tensor: torch.Tensor) -> list[int]:
        """Return the words of one new output."""
        sizes, strides = [[self._plain(expression(n)) for n in ns] for ns in (tensor.shape, tensor.stride())]
        words = [p.DTYPES[tensor.dtype], len(sizes), *self._codes(sizes)]
        if self._row_major(sizes, strides):
            return [*words, 0]
        nested = sorted(range(len(sizes)), key=lambda i: (concrete(tensor.stride(i)), concrete(tensor.shape[i])))
        self._forbid_overlap([(sizes[i], strides[i]) for i in nested])
        return [*words, 1, *self._codes(strides)]

    def guard(self) -> list[int]:
        """Return the words of the guard."""
        guards = [self.translator.code(guard) for guard in dict.fromkeys(self.traced.guards)]
        conditions = [*self.traced.symbols.conditions, *guards, *self.no_overlap, *self.translator.conditions]
        conditions = [code for code in dict.fromkeys(conditions) if code != constant(1)]
        return _sized(joined(p.AND, conditions or [constant(1)]))

    def _codes(self, numbers: Sequence[Any]) -> list[int]:
        return [word for number in numbers for word in _sized(self.translator.code(number))]

    def _plain(self, number: Any) -> Any:
        """Return ``number`` without ``max(1, ...)`` around what is at least 1 anyway."""
        known = {
            item: self._at_least_one(other) for item in number.atoms(_max()) if (other := _other(item)) is not None
        }
        return number.xreplace({item: other for item, other in known.items() if other is not item})

    def _at_least_one(self, number: Any) -> Any:
        return number if self.env.bound_sympy(number).lower >= 1 else _max()(1, number)

    def _row_major(self, sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
        step: Any = 1
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            if not _equal(stride, step):
                return False
            step = step * self._at_least_one(size)
        return True

    def _forbid_overlap(self, dimensions: Sequence[tuple[Any, Any]]) -> None:
        """Add conditions under which no two elements share memory, with the dimensions (size, stride) nested as in this call."""
        extent = expression(1)
        if any(size == 0 for size, _ in dimensions):
            return
        for size, stride in dimensions:
            if size != 1 and not _equal(stride, extent):
                self.no_overlap.append((*self.translator.code(extent), *self.translator.code(stride), p.LESS_EQUAL))
            extent = _expanded(extent + (size - 1) * stride)


def _max() -> Any:
    from torch.utils._sympy.functions import Max

    return Max


def _other(maximum: Any) -> Any:
    """Return ``x`` for ``max(1, x)``; None for any other maximum."""
    rest = [item for item in maximum.args if item != 1]
    return rest[0] if len(rest) == 1 and len(maximum.args) == 2 else None


def _expanded(number: Any) -> Any:
    import sympy

    return sympy.expand(number)


def _equal(one: Any, other: Any) -> bool:
    return one == other or _expanded(one - other) == 0


def _sized(code: Code) -> list[int]:
    """Return a piece of code after its length."""
    if p.depth(code) > p.MAX_DEPTH:
        raise NoCodeError(f"the code of one number holds more than {p.MAX_DEPTH} values at a time")
    return [len(code), *code]
