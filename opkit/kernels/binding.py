"""Bind the parameters of a C function, by name, to an operator's arguments, outputs and named sizes, and check their types."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from opkit.errors import DeclarationError
from opkit.kernels.cc.declaration import TENSOR, CFunction, CParameter
from opkit.kernels.cc.dtypes import C_TYPES, DTYPES, CType
from opkit.kernels.facts import Facts, Target, measure, targets

ANY_DTYPE = -1


@dataclasses.dataclass(frozen=True)
class Slot:
    """The source of one C parameter's value: a row of ``opk_parameter``, and the cast in the trampoline.

    ``source`` is the end of an ``opk_source``'s name. ``argument`` is an argument's number, or the number of arguments
    plus an output's. ``member`` is the one of ``opk_value`` that holds the value.
    """

    name: str
    source: str
    argument: int = 0
    detail: int = 0
    dtype: int = ANY_DTYPE
    constant: int | float | None = None
    const: bool = False
    c_type: str = ""
    member: str = "p"
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Scope:
    """The meaning of names for one kernel."""

    facts: Facts
    variables: tuple[str, ...]
    kernel: str
    cuda: bool
    targets: Mapping[str, Target]

    def error(self, parameter: CParameter, message: str) -> DeclarationError:
        """Return the error to raise about a parameter."""
        return DeclarationError(f"{self.where}, parameter `{parameter.text}`: {message}")

    @property
    def where(self) -> str:
        """The beginning of an error's message."""
        return f"{self.facts.operator}, kernel {self.kernel!r}"


def _variable(number: int) -> int:
    """Return ``OPK_VARIABLE(number)``."""
    return -2 - number


def _c_type(parameter: CParameter) -> CType:
    """Return the row of ``C_TYPES`` for a parameter's type; of an unknown type, the kind "unknown"."""
    return C_TYPES.get(parameter.type, CType("unknown", None))


def _element(scope: Scope, parameter: CParameter, name: str) -> int:
    """Return the number of the dtype that a pointer to ``name`` requires."""
    if name in scope.variables:
        return _variable(scope.variables.index(name))
    known = C_TYPES.get(name)
    if known is None or (known.dtype is None and known.kind != "void"):
        variables = (
            f"one of the type variables {', '.join(scope.variables)}" if scope.variables else "T with dtypes=..."
        )
        raise scope.error(
            parameter,
            f"{name} is no element type. Write {variables}, a C type such as float or int64_t, or void for any.",
        )
    return ANY_DTYPE if known.dtype is None else DTYPES[known.dtype].number


def _check_const(scope: Scope, parameter: CParameter, target: Target) -> None:
    if not parameter.const and not target.written:
        raise scope.error(
            parameter, f"the operator does not write to {target.name}. Declare it const, or let the operator mutate it."
        )
    if parameter.const and target.output:
        raise scope.error(parameter, f"{target.name} is an output and must be written to. Declare it without const.")


def _slot_of(parameter: CParameter, target: Target, source: str, dtype: int = ANY_DTYPE) -> Slot:
    """Return the slot of a pointer."""
    return Slot(
        parameter.name, source, target.number, 0, dtype, None, parameter.const, parameter.spelling, kind=target.kind
    )


def _tensor_struct(scope: Scope, parameter: CParameter, target: Target, source: str) -> Slot:
    if parameter.pointer != 1 or not parameter.const:
        raise scope.error(parameter, f"an opk_tensor is taken as `const opk_tensor* {parameter.name}`.")
    dtype = _element(scope, parameter, parameter.element) if parameter.element else ANY_DTYPE
    return _slot_of(parameter, target, source, dtype)


def _tensor(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    if parameter.type == TENSOR:
        return _tensor_struct(scope, parameter, target, "TENSOR")
    if parameter.pointer != 1:
        raise scope.error(
            parameter, f"{target.name} is a tensor: take `{target.const}T* {parameter.name}` or "
            f"`const opk_tensor* {parameter.name}`.",
        )  # fmt: skip
    dtype = _element(scope, parameter, parameter.type)
    _check_const(scope, parameter, target)
    return _slot_of(parameter, target, "DATA", dtype)


def _tensors(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    if parameter.type == TENSOR:
        return _tensor_struct(scope, parameter, target, "TENSOR_LIST")
    if parameter.pointer != 2 or not parameter.inner_const:
        raise scope.error(
            parameter, f"{target.name} is a list of tensors: take `{target.const}T* const* {parameter.name}` or "
            f"`const opk_tensor* {parameter.name}`, and {target.name}_len for their number.",
        )  # fmt: skip
    dtype = _element(scope, parameter, parameter.type)
    _check_const(scope, parameter, target)
    return _slot_of(parameter, target, "DATA_LIST", dtype)


_POINTEES = {
    "int": ("int64_t", ("int64",)),
    "float": ("double", ("float64",)),
    "bool": ("bool", ("bool", "uint8")),
    "dtype": ("int32_t", ("int32",)),
}


def _pointer(scope: Scope, parameter: CParameter, target: Target, source: str, kind: str) -> Slot:
    """Return the slot of a pointer to a scalar, or to a list's elements."""
    wanted, accepted = _POINTEES[kind]
    if parameter.pointer != 1 or not parameter.const or _c_type(parameter).dtype not in accepted:
        what = "a list" if source == "VALUES" else ("optional" if target.optional else "a value")
        other = "" if source == "VALUES" or target.optional else "take it by value, or as "
        null = "; it is NULL for None" if target.optional else ""
        raise scope.error(
            parameter, f"{target.name} is {what}: {other or 'take '}`const {wanted}* {parameter.name}`{null}."
        )
    return _slot_of(parameter, target, source)


def _scalar(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    if parameter.pointer or target.optional:
        return _pointer(scope, parameter, target, "SCALAR_POINTER", target.kind)
    kind = _c_type(parameter).kind
    kind = "variable" if parameter.type in scope.variables else kind
    kind = "int" if parameter.type.startswith("enum ") else kind
    if kind not in _TAKEN[target.kind]:
        wanted = "`float` or `double`" if target.kind == "float" else "an integer type such as `int64_t`"
        raise scope.error(
            parameter, f"{target.name} is of kind {target.kind} and cannot be taken as {parameter.type}. Take {wanted}."
        )
    member = "f" if target.kind == "float" else "i"
    return Slot(parameter.name, "SCALAR", target.number, c_type=parameter.type, member=member, kind=target.kind)


_TAKEN = {
    "int": ("int", "bool", "float", "char", "variable"),
    "float": ("float", "variable"),
    "bool": ("int", "bool", "char"),
    "dtype": ("int",),
}


def _string(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    if (parameter.type, parameter.pointer, parameter.const) != ("char", 1, True):
        raise scope.error(parameter, f"{target.name} is a string: take `const char* {parameter.name}`.")
    return _slot_of(parameter, target, "STRING")


def _values(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    return _pointer(scope, parameter, target, "VALUES", target.kind.removesuffix("s"))


def _ignored(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    raise scope.error(
        parameter,
        f"{target.name} is a device, layout, memory format or generator, which a C kernel cannot take. Leave it out.",
    )


_BY_KIND: Mapping[str, Callable[[Scope, CParameter, Target], Slot]] = {
    "tensor": _tensor, "tensors": _tensors, "str": _string, "ignored": _ignored,
    **dict.fromkeys(("int", "float", "bool", "dtype"), _scalar), **dict.fromkeys(("ints", "floats", "bools"), _values),
}  # fmt: skip
"""The function that binds a parameter to an argument, by the argument's kind."""


def _integer(scope: Scope, parameter: CParameter, slot: Slot) -> Slot:
    """Return the slot of a size or a length; raise unless the parameter is an integer of 32 or 64 bits."""
    taken = _c_type(parameter)
    if parameter.pointer or taken.kind != "int" or taken.bits < 32:
        raise scope.error(
            parameter, f"it is a size, and is taken by value as an integer of 32 or 64 bits: `int64_t {slot.name}`."
        )
    return dataclasses.replace(slot, name=parameter.name, c_type=parameter.type, member="i")


# ---- names -----------------------------------------------------------------------------------------------------------


_LISTS = ("tensors", "ints", "floats", "bools")

Constant = int | float | str | None
"""A value of ``bind={...}``: a number, another name for the parameter, or None for a null pointer."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """A C function with a slot for every parameter. ``variables`` are the type variables that a call's dtypes decide."""

    function: CFunction
    facts: Facts
    slots: tuple[Slot, ...]
    variables: tuple[str, ...]


def _named_target(scope: Scope, parameter: CParameter, name: str) -> Slot | None:
    target = scope.targets.get(name)
    return None if target is None else _BY_KIND[target.kind](scope, parameter, target)


def _length(scope: Scope, parameter: CParameter, name: str) -> Slot | None:
    match = re.fullmatch(r"(\w+)_len(?:gth)?|n_(\w+)", name)
    target = scope.targets.get(match[1] or match[2]) if match else None
    if target is None or target.kind not in (*_LISTS, "str"):
        return None
    return _integer(scope, parameter, Slot(name, "LENGTH", target.number))


def _measure(scope: Scope, parameter: CParameter, name: str) -> Slot | None:
    argument, source, dimension = measure(name) or ("", "", 0)
    target = scope.targets.get(argument)
    if target is None or target.kind != "tensor" or source == "LENGTH":
        return None
    return _integer(scope, parameter, Slot(name, source, target.number, dimension))


def _named_size(scope: Scope, parameter: CParameter, name: str) -> Slot | None:
    sizes = scope.facts.sizes
    return _integer(scope, parameter, Slot(name, "NAMED_SIZE", 0, sizes.index(name))) if name in sizes else None


def _stream(scope: Scope, parameter: CParameter, name: str) -> Slot | None:
    if name != "stream":
        return None
    if not scope.cuda:
        raise scope.error(parameter, "a kernel on the CPU has no stream. Leave it out.")
    if (parameter.type, parameter.pointer) not in (("cudaStream_t", 0), ("void", 1)):
        raise scope.error(parameter, "take torch's current stream as `cudaStream_t stream` or `void* stream`.")
    return Slot(parameter.name, "STREAM", c_type=parameter.spelling)


_RULES = (_named_target, _length, _measure, _named_size, _stream)


def _unknown(scope: Scope, parameter: CParameter, name: str) -> DeclarationError:
    lengths = [f"{name}_len" for name, target in scope.targets.items() if target.kind in (*_LISTS, "str")]
    known = [*scope.targets, *scope.facts.sizes, *lengths, *(["stream"] if scope.cuda else [])]
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
    kind = _c_type(parameter).kind
    if (value is None) != bool(parameter.pointer):
        raise scope.error(
            parameter, f"bind={{{parameter.name!r}: {value!r}}} does not fit it. A pointer takes None alone."
        )
    if value is None:
        return Slot(parameter.name, "INT_CONSTANT", constant=0, const=parameter.const, c_type=parameter.spelling)
    floating = kind == "float" or (parameter.type in scope.variables and isinstance(value, float))
    if isinstance(value, float) and not floating:
        raise scope.error(parameter, f"bind={{{parameter.name!r}: {value!r}}} does not fit it. Give it an integer.")
    low, high = _c_type(parameter).limits
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
    decided = any(slot.dtype <= _variable(0) for slot in slots)
    for slot in slots:
        plain = slot.source in ("TENSOR", "TENSOR_LIST") and slot.dtype == ANY_DTYPE
        takes = plain and len(scope.variables) == 1 and not decided
        yield dataclasses.replace(slot, dtype=_variable(0)) if takes else slot


def _renumbered(slots: Sequence[Slot], variables: tuple[str, ...]) -> tuple[tuple[Slot, ...], tuple[str, ...]]:
    """Return the slots and type variables without the variables that no tensor decides."""
    used = sorted({-2 - slot.dtype for slot in slots if slot.dtype <= _variable(0)})
    numbers = {_variable(old): _variable(new) for new, old in enumerate(used)}
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
    scope = Scope(facts, tuple(variables), kernel, cuda, targets(facts, names))
    _check_constants(scope, function, constants or {})
    slots = [_slot(scope, parameter, constants or {}) for parameter in function.parameters]
    _check_outputs(scope, names, slots)
    slots, decided = _renumbered(list(_determined(scope, slots)), scope.variables)
    return Bound(function, facts, slots, decided)
