"""The sizes, strides and dtypes of an operator's new outputs, for kernels that are given their outputs.

:func:`layout_of` works them out for one call, by running the author's fake implementation or the reference on fake
tensors. :func:`derive` makes a program of the same run on symbolic sizes, which gives them for every call that fits it,
without Python. ``opkit/kernels/include/opkit.h`` describes both forms.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkit.errors import ArgumentTypeError, OpkitError, OutputError, RuleError
from opkit.kernels.binding.facts import Facts
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.facts import declared_type, facts_of, kind_of
from opkit.op.layout import program as p
from opkit.op.layout import trace as tracing
from opkit.op.layout.code import NoCodeError, constant
from opkit.op.layout.program import Program, run
from opkit.op.layout.writer import Writer
from opkit.op.trace import body as bodies
from opkit.op.trace.body import Opaque, Trace

__all__ = ["Program", "Refusal", "derive", "layout_of", "operands", "run"]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why there is no program for calls like one."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def operands(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The value of each schema argument of a call, defaults filled in."""
    values: list[Any] = []
    for number, argument in enumerate(operator.schema.arguments):
        if argument.name in kwargs:
            values.append(kwargs[argument.name])
        elif number < len(args) and not argument.kwarg_only:
            values.append(args[number])
        else:
            values.append(_default(operator, argument))
    return values


def _default(operator: Operator, argument: Any) -> Any:
    if not argument.has_default_value():
        raise ArgumentTypeError(f"{operator.name}: the argument {argument.name} is missing and has no default.")
    value = argument.default_value
    if declared_type(argument) == "ScalarType" and isinstance(value, int):
        return next((dtype for dtype, number in p.DTYPES.items() if number == value), value)
    return value


# ---- one call -------------------------------------------------------------------------------------------------------


def layout_of(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """The dtype, rank, sizes and strides of each new output of a call through the schema.

    Raises:
        RuleError: the sizes are not known: the body leaves torch and no fake implementation is registered, or they
            depend on data.
        OutputError: an output is not a tensor that a C kernel can be given.
        KernelError: the operator returns a list of tensors.
    """
    new = _new_outputs(facts_of(operator))
    if not new:
        return []
    trace = tracing.isolated(lambda: _trace(operator, args, kwargs))
    if trace.opaque is not None:
        raise _unknown(operator, args, kwargs, trace.opaque)
    device = _device(operator, args, kwargs)
    outputs = _listed(operator, trace.outputs)
    return [word for name, i in new for word in _layout(operator, f"its output {name}", outputs[i], device)]


def _new_outputs(facts: Facts) -> list[tuple[str, int]]:
    return [(output.name, i) for i, output in enumerate(facts.outputs) if output.alias is None]


def _trace(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Trace:
    with torch.inference_mode(False), private.without_fake_tensor_logs():
        if operator.given.fake is None:
            return operator.traced(args, kwargs)
        return bodies.trace(_shapes(operator), args, kwargs)


def _shapes(operator: Operator) -> Callable[..., Any]:
    """The function that tells the outputs' sizes when it is run on fake tensors."""
    if operator.given.fake is None:
        return operator.reference
    return private.in_fake_context(operator.flat(operator.given.fake), operator.overload)


def _unknown(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], opaque: Opaque) -> OpkitError:
    function = getattr(operator.function, "__name__", "op")
    if operator.given.fake is not None:
        return RuleError(
            f"{operator.name}: the output sizes of this call are not known, because the fake implementation failed: "
            f"{opaque}. Correct what is registered with `{function}.register_fake`."
        )
    error = RuleError(
        f"{operator.name}: the output sizes of this call are not known, and a C kernel is given its outputs: {opaque}. "
        f"Register a fake implementation with `{function}.register_fake`."
    )
    operator.known_trace(args, kwargs)  # which the note reads
    error.add_note(operator.opaque_note("output sizes", "register_fake"))
    return error


def _device(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    first = next((tensor for _, tensor in operator.named_tensors(args, kwargs)), None)
    return torch.device(operator.device(args, kwargs)) if first is None else first.device


def _listed(operator: Operator, returned: Any) -> list[Any]:
    count = len(operator.schema.returns)
    outputs = [returned] if count == 1 else list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(outputs) != count:
        raise OutputError(f"{operator.name}: {len(outputs)} outputs where the schema has {count}.")
    return outputs


def _checked(operator: Operator, name: str, output: Any, device: torch.device) -> torch.Tensor:
    """``output`` if it is a strided tensor on the call's device, of a dtype that C kernels know."""
    if not isinstance(output, torch.Tensor):
        raise OutputError(f"{operator.name}: {name} is {type(output).__name__}, but a C kernel writes to tensors.")
    if output.layout is not torch.strided:
        raise OutputError(
            f"{operator.name}: {name} has the layout {output.layout}, but a C kernel writes to dense tensors. Return its "
            "parts as tensors, and put them together outside of the operator."
        )
    if output.dtype not in p.DTYPES:
        raise OutputError(
            f"{operator.name}: {name} has dtype {output.dtype}, for which C kernels have no element type. Return "
            f"another dtype, and convert outside of the operator."
        )
    if not _same(output.device, device):
        raise OutputError(
            f"{operator.name}: {name} is on {output.device}, but the call is on {device}, where a C kernel makes its "
            f"outputs. Return it on the device of the arguments."
        )
    return output


def _same(one: torch.device, other: torch.device) -> bool:
    indices: set[int | None] = {one.index, other.index}
    return one.type == other.type and (None in indices or len(indices) == 1)


def _layout(operator: Operator, name: str, output: Any, device: torch.device) -> list[int]:
    tensor = _checked(operator, name, output, device)
    sizes, strides = ([_known(operator, name, n) for n in ns] for ns in (tensor.shape, tensor.stride()))
    if _overlaps(sizes, strides):
        raise OutputError(
            f"{operator.name}: {name} has shape {tuple(sizes)} and strides {tuple(strides)}, so that elements share "
            "memory, but a C kernel writes to each. Return it .contiguous() from the reference."
        )
    return [p.DTYPES[tensor.dtype], len(sizes), *sizes, *strides]


def _known(operator: Operator, name: str, size: Any) -> int:
    if isinstance(size, torch.SymInt):
        known = size.node.maybe_as_int()
        if known is None:
            raise RuleError(
                f"{operator.name}: the sizes of {name} depend on the data of the arguments, and a C kernel is given its "
                "outputs before it runs. Return a tensor of the greatest possible size and, as a second output, how much "
                "of it counts."
            )
        return known
    return int(size)


def _overlaps(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements may share memory; strides under which they provably do not are those of permuted dense tensors."""
    extent = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride < extent:
            return 0 not in sizes
        extent += (size - 1) * stride
    return False


# ---- every call like one --------------------------------------------------------------------------------------------


def derive(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Program | Refusal:
    """The program that gives the layout of a call through the schema, and of as many others as it can.

    It holds for this call, which is checked, and for every other one that fits its key and guard.
    There is none where a tensor is not row-major: such calls pass their layout.
    """
    try:
        facts, values = facts_of(operator), operands(operator, args, kwargs)
        _refuse_untestable(operator)
        if not _new_outputs(facts):
            return _assembled(facts, values, [2, *constant(1)])
        expected, device = layout_of(operator, args, kwargs), _device(operator, args, kwargs)
    except (OpkitError, p.UnfitError) as error:
        return _refused(operator, error)
    return _Deriving(operator, facts, values, expected, device).best()


def _refused(operator: Operator, why: object) -> Refusal:
    return Refusal(f"{operator.name}: there is no program of output sizes: {why}")


def _refuse_untestable(operator: Operator) -> None:
    arguments = operator.schema.arguments
    tensors = any(kind_of(argument).startswith("tensor") for argument in arguments)
    for argument in arguments:
        declared = declared_type(argument)
        harmless = declared == "Generator" or (declared == "Device" and not tensors)
        if kind_of(argument) == "ignored" and not harmless:
            raise p.UnfitError(f"a program cannot test the argument {argument.name} of type {declared}")


@dataclasses.dataclass
class _Deriving:
    """The call that a program is derived from, and its layout."""

    operator: Operator
    facts: Facts
    values: list[Any]
    expected: list[int]
    device: torch.device

    @property
    def kinds(self) -> list[str]:
        return [argument.kind for argument in self.facts.arguments]

    def best(self) -> Program | Refusal:
        """The program with the fewest numbers pinned."""
        found = self.attempt(frozenset())
        for pinned in ({"float"}, {"float", "int"}):
            if isinstance(found, Refusal) and any(kind.removesuffix("s") in pinned for kind in self.kinds):
                found = self.attempt(frozenset(pinned))
        return found

    def attempt(self, pinned: frozenset[Any]) -> Program | Refusal:
        """The program with the numbers ``pinned`` (see :class:`~opkit.op.layout.trace.Symbols`) taken as they are."""
        try:
            program = self._program(self._traced(pinned))
        except (NoCodeError, OpkitError, p.UnfitError, tracing.NotTracedError) as error:
            return _refused(self.operator, error)
        if self._right(program):
            return program
        why = f"on symbolic sizes the reference does other than on plain ones.\n{program}"
        return _refused(self.operator, why)

    def _right(self, program: Program) -> bool:
        """Whether the program is right for the call, and, if it fits, for one of twice the sizes."""
        if run(program.words, self.kinds, self.values) != self.expected:
            return False
        values = tracing.isolated(lambda: tracing.doubled(self.values))
        found = run(program.words, self.kinds, values)
        return found is None or found == self._layout(values)

    def _layout(self, values: list[Any]) -> list[int] | None:
        named = zip(self.operator.schema.arguments, values, strict=True)
        kwargs = {argument.name: value for argument, value in named if argument.kwarg_only}
        try:
            return layout_of(self.operator, values[: len(values) - len(kwargs)], kwargs)
        except OpkitError:
            return None

    def _traced(self, pinned: frozenset[Any]) -> tracing.SymbolicRun:
        names = [argument.name if argument.kwarg_only else None for argument in self.operator.schema.arguments]
        while True:
            traced = _attempted(self.operator, self.kinds, self.values, names, pinned)
            floats = traced.floats(self._new(traced))
            if not floats:
                return traced
            pinned |= floats

    def _new(self, traced: tracing.SymbolicRun) -> list[torch.Tensor]:
        listed = _listed(self.operator, traced.returned)
        return [
            _checked(self.operator, f"its output {name}", listed[i], self.device)
            for name, i in _new_outputs(self.facts)
        ]

    def _program(self, traced: tracing.SymbolicRun) -> Program:
        writer = Writer(traced)
        outputs = [word for tensor in self._new(traced) for word in writer.output(tensor)]
        return _assembled(self.facts, self.values, [*writer.guard(), *outputs])


def _assembled(facts: Facts, values: list[Any], rest: list[int]) -> Program:
    arguments = tuple((argument.name, argument.kind) for argument in facts.arguments)
    words = [*p.key([kind for _, kind in arguments], values), *rest]
    return Program(facts.operator, (1 + len(words), *words), arguments)


def _attempted(
    operator: Operator, kinds: list[str], values: list[Any], names: list[str | None], pinned: frozenset[Any]
) -> tracing.SymbolicRun:
    try:
        return tracing.run(_shapes(operator), kinds, values, names, pinned)
    except tracing.NotTracedError:
        raise
    except Exception as error:  # whatever the body raised is the reason
        first = str(error).strip().split("\n")[0]
        raise tracing.NotTracedError(
            f"on symbolic sizes the reference raises {type(error).__name__}: {first}"
        ) from error
