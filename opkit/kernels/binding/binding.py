"""Match the names of a C function's parameters to an operator's arguments, outputs and named sizes."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

from opkit.errors import DeclarationError
from opkit.kernels.binding.facts import Facts
from opkit.kernels.binding.names import measure, output_numbers
from opkit.kernels.binding.slots import ANY_DTYPE, BY_KIND, Scope, Slot, Target, c_type, integer, variable
from opkit.kernels.cc.declaration import CFunction, CParameter

LISTS = ("tensors", "ints", "floats", "bools")

Constant = int | float | str | None
"""A value of ``bind={...}``: a number, another name for the parameter, or None for a null pointer."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """A C function with a slot for every parameter. ``variables`` are the type variables that a call's dtypes decide."""

    function: CFunction
    facts: Facts
    slots: tuple[Slot, ...]
    variables: tuple[str, ...]


def _output_target(facts: Facts, number: int, name: str) -> Target:
    alias = facts.outputs[number].alias
    if alias is not None:
        argument = facts.arguments[alias]
        return Target(name, alias, argument.kind, argument.optional, written=True, output=True)
    return Target(name, len(facts.arguments) + number, "tensor", written=True, output=True)


def _targets(facts: Facts, names: Sequence[str]) -> dict[str, Target]:
    arguments = {
        argument.name: Target(argument.name, number, argument.kind, argument.optional, argument.written)
        for number, argument in enumerate(facts.arguments)
    }
    outputs = output_numbers(facts, names)
    return {**arguments, **{name: _output_target(facts, number, name) for name, number in outputs.items()}}


def _named_target(scope: Scope, parameter: CParameter, name: str) -> Slot | None:
    target = scope.targets.get(name)
    return None if target is None else BY_KIND[target.kind](scope, parameter, target)


def _length(scope: Scope, parameter: CParameter, name: str) -> Slot | None:
    match = re.fullmatch(r"(\w+)_len(?:gth)?|n_(\w+)", name)
    target = scope.targets.get(match[1] or match[2]) if match else None
    if target is None or target.kind not in (*LISTS, "str"):
        return None
    return integer(scope, parameter, Slot(name, "LENGTH", target.number))


def _measure(scope: Scope, parameter: CParameter, name: str) -> Slot | None:
    argument, source, dimension = measure(name) or ("", "", 0)
    target = scope.targets.get(argument)
    if target is None or target.kind != "tensor" or source == "LENGTH":
        return None
    return integer(scope, parameter, Slot(name, source, target.number, dimension))


def _named_size(scope: Scope, parameter: CParameter, name: str) -> Slot | None:
    sizes = scope.facts.sizes
    return integer(scope, parameter, Slot(name, "NAMED_SIZE", 0, sizes.index(name))) if name in sizes else None


def _stream(scope: Scope, parameter: CParameter, name: str) -> Slot | None:
    if name != "stream":
        return None
    if not scope.cuda:
        raise scope.error(parameter, "a kernel on the CPU has no stream. Leave it out.")
    if (parameter.type, parameter.pointer) not in (("cudaStream_t", 0), ("void", 1)):
        raise scope.error(parameter, "take torch's current stream as `cudaStream_t stream` or `void* stream`.")
    return Slot(parameter.name, "STREAM", c_type=parameter.spelling)


_RULES = (_named_target, _length, _measure, _named_size, _stream)


def _known_names(scope: Scope) -> list[str]:
    lengths = [f"{name}_len" for name, target in scope.targets.items() if target.kind in (*LISTS, "str")]
    return [*scope.targets, *scope.facts.sizes, *lengths, *(["stream"] if scope.cuda else [])]


def _unknown(scope: Scope, parameter: CParameter, name: str) -> DeclarationError:
    known = _known_names(scope)
    tensors = [target.name for target in scope.targets.values() if target.kind == "tensor"]
    measures = f", <tensor>_numel, _rank, _size_<k> and _stride_<k> of {', '.join(tensors)}" if tensors else ""
    derived = [f"{tensor}_{what}" for tensor in tensors for what in ("numel", "rank", "size_0", "stride_0")]
    near = difflib.get_close_matches(name, [*known, *derived], 3)
    hint = f" Nearest: {', '.join(near)}." if near else ""
    return scope.error(
        parameter, f"{name!r} stands for nothing that the operator has. It could be {', '.join(known)}{measures}.{hint} "
        f"Rename it, or say what it receives: bind={{{parameter.name!r}: ...}}.",
    )  # fmt: skip


def _constant(scope: Scope, parameter: CParameter, value: int | float | None) -> Slot:
    """Return the slot of a number from ``bind={...}``; None is a null pointer."""
    kind = c_type(parameter).kind
    if (value is None) != bool(parameter.pointer):
        raise scope.error(
            parameter, f"bind={{{parameter.name!r}: {value!r}}} does not fit it. A pointer takes None alone."
        )
    if value is None:
        return Slot(parameter.name, "INT_CONSTANT", constant=0, const=parameter.const, c_type=parameter.spelling)
    floating = kind == "float" or (parameter.type in scope.variables and isinstance(value, float))
    if isinstance(value, float) and not floating:
        raise scope.error(parameter, f"bind={{{parameter.name!r}: {value!r}}} does not fit it. Give it an integer.")
    low, high = c_type(parameter).limits
    if not floating and not max(low if low is not None else -(2**63), -(2**63)) <= value <= (high or 2**63 - 1):
        raise scope.error(parameter, f"bind={{{parameter.name!r}: {value!r}}} does not fit into {parameter.type}.")
    source, member = ("FLOAT_CONSTANT", "f") if floating else ("INT_CONSTANT", "i")
    number = float(value) if floating else int(value)
    return Slot(parameter.name, source, constant=number, c_type=parameter.type, member=member)


def _slot(scope: Scope, parameter: CParameter, constants: Mapping[str, Constant]) -> Slot:
    name = constants.get(parameter.name, parameter.name)
    if not isinstance(name, str):
        return _constant(scope, parameter, name)
    for rule in _RULES:
        slot = rule(scope, parameter, name)
        if slot is not None:
            return slot
    raise _unknown(scope, parameter, name)


def _check_constants(scope: Scope, function: CFunction, constants: Mapping[str, Constant]) -> None:
    names = [parameter.name for parameter in function.parameters]
    for name in constants:
        if name not in names:
            raise DeclarationError(
                f"{scope.where}: bind= names {name!r}, but {function.name} has no such parameter. It has {', '.join(names)}."
            )


def _check_outputs(scope: Scope, names: Sequence[str], slots: Sequence[Slot]) -> None:
    """Raise unless a parameter receives every new output: the kernel would leave it unwritten."""
    written = {slot.argument for slot in slots if slot.source in ("DATA", "TENSOR")}
    for number, output in enumerate(scope.facts.outputs):
        if output.alias is None and len(scope.facts.arguments) + number not in written:
            common = "out" if len(names) == 1 else f"out{number}"
            spelled = " or ".join(dict.fromkeys(f"`T* {name}`" for name in (names[number], common) if name))
            raise DeclarationError(
                f"{scope.where}: no parameter receives output {number} ({names[number] or common}), which the kernel would "
                f"leave unwritten. Add {spelled}."
            )


def _determined(scope: Scope, slots: Sequence[Slot]) -> Iterator[Slot]:
    """Give plain opk_tensor parameters the only type variable as their dtype, where no pointer decides it."""
    decided = any(slot.dtype <= variable(0) for slot in slots)
    for slot in slots:
        plain = slot.source in ("TENSOR", "TENSOR_LIST") and slot.dtype == ANY_DTYPE
        takes = plain and len(scope.variables) == 1 and not decided
        yield dataclasses.replace(slot, dtype=variable(0)) if takes else slot


def _renumbered(slots: Sequence[Slot], variables: tuple[str, ...]) -> tuple[tuple[Slot, ...], tuple[str, ...]]:
    """Return the slots and type variables without the variables that no tensor decides."""
    used = sorted({-2 - slot.dtype for slot in slots if slot.dtype <= variable(0)})
    numbers = {variable(old): variable(new) for new, old in enumerate(used)}
    renumbered = (dataclasses.replace(slot, dtype=numbers.get(slot.dtype, slot.dtype)) for slot in slots)
    return tuple(renumbered), tuple(variables[number] for number in used)


def bind(
    function: CFunction,
    facts: Facts,
    variables: Sequence[str] = (),
    constants: Mapping[str, Constant] | None = None,
    kernel_name: str = "",
    outputs: Sequence[str] | None = None,
    cuda: bool = False,
) -> Bound:
    """Bind each parameter of ``function`` to what it receives in a call of the operator.

    ``constants`` (an author's ``bind={...}``) gives parameters numbers or other names, and takes precedence. ``outputs``
    are names for the outputs in place of the schema's. Raises DeclarationError for the first parameter that does not fit.
    """
    names = tuple(outputs) if outputs is not None else tuple(output.name for output in facts.outputs)
    kernel = kernel_name or function.name
    if len(names) != len(facts.outputs):
        raise DeclarationError(
            f"{facts.operator}, kernel {kernel!r}: outputs= has {len(names)} names for {len(facts.outputs)}."
        )
    scope = Scope(facts, tuple(variables), kernel, cuda, _targets(facts, names))
    _check_constants(scope, function, constants or {})
    slots = [_slot(scope, parameter, constants or {}) for parameter in function.parameters]
    _check_outputs(scope, names, slots)
    slots, decided = _renumbered(list(_determined(scope, slots)), scope.variables)
    return Bound(function, facts, slots, decided)
