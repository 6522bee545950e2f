"""Check the C type of a parameter against the kind of argument that it receives, and make its slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from opkit.errors import DeclarationError
from opkit.kernels.binding.facts import Facts
from opkit.kernels.cc.declaration import TENSOR, CParameter
from opkit.kernels.cc.dtypes import C_TYPES, DTYPES, CType

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
class Target:
    """An argument or an output that a parameter can receive."""

    name: str
    number: int
    kind: str
    optional: bool = False
    written: bool = False
    output: bool = False


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


def variable(number: int) -> int:
    """Return ``OPK_VARIABLE(number)``."""
    return -2 - number


def c_type(parameter: CParameter) -> CType:
    """Return the row of ``C_TYPES`` for a parameter's type; of an unknown type, the kind "unknown"."""
    return C_TYPES.get(parameter.type, CType("unknown", None))


def _element(scope: Scope, parameter: CParameter, name: str) -> int:
    """Return the number of the dtype that a pointer to ``name`` requires."""
    if name in scope.variables:
        return variable(scope.variables.index(name))
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


def _tensor_struct(scope: Scope, parameter: CParameter, target: Target, source: str) -> Slot:
    if parameter.pointer != 1 or not parameter.const:
        raise scope.error(parameter, f"an opk_tensor is taken as `const opk_tensor* {parameter.name}`.")
    dtype = _element(scope, parameter, parameter.element) if parameter.element else ANY_DTYPE
    return Slot(parameter.name, source, target.number, 0, dtype, None, True, parameter.spelling, kind=target.kind)


def _tensor(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    if parameter.type == TENSOR:
        return _tensor_struct(scope, parameter, target, "TENSOR")
    if parameter.pointer != 1:
        raise scope.error(
            parameter, f"{target.name} is a tensor: take `{_const(target)}T* {parameter.name}` or "
            f"`const opk_tensor* {parameter.name}`.",
        )  # fmt: skip
    dtype = _element(scope, parameter, parameter.type)
    _check_const(scope, parameter, target)
    return Slot(
        parameter.name, "DATA", target.number, 0, dtype, None, parameter.const, parameter.spelling, kind=target.kind
    )


def _const(target: Target) -> str:
    return "" if target.written else "const "


def _tensors(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    if parameter.type == TENSOR:
        return _tensor_struct(scope, parameter, target, "TENSOR_LIST")
    if parameter.pointer != 2 or not parameter.inner_const:
        raise scope.error(
            parameter, f"{target.name} is a list of tensors: take `{_const(target)}T* const* {parameter.name}` or "
            f"`const opk_tensor* {parameter.name}`, and {target.name}_len for their number.",
        )  # fmt: skip
    dtype = _element(scope, parameter, parameter.type)
    _check_const(scope, parameter, target)
    return Slot(
        parameter.name,
        "DATA_LIST",
        target.number,
        0,
        dtype,
        None,
        parameter.const,
        parameter.spelling,
        kind=target.kind,
    )


_POINTEES = {
    "int": ("int64_t", ("int64",)),
    "float": ("double", ("float64",)),
    "bool": ("bool", ("bool", "uint8")),
    "dtype": ("int32_t", ("int32",)),
}


def _pointer(scope: Scope, parameter: CParameter, target: Target, source: str, kind: str) -> Slot:
    """Return the slot of a pointer to a scalar, or to a list's elements."""
    wanted, accepted = _POINTEES[kind]
    if parameter.pointer != 1 or not parameter.const or c_type(parameter).dtype not in accepted:
        what = "a list" if source == "VALUES" else ("optional" if target.optional else "a value")
        other = "" if source == "VALUES" or target.optional else "take it by value, or as "
        null = "; it is NULL for None" if target.optional else ""
        raise scope.error(
            parameter, f"{target.name} is {what}: {other or 'take '}`const {wanted}* {parameter.name}`{null}."
        )
    return Slot(parameter.name, source, target.number, const=True, c_type=parameter.spelling, kind=target.kind)


def _scalar(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    if parameter.pointer or target.optional:
        return _pointer(scope, parameter, target, "SCALAR_POINTER", target.kind)
    kind = c_type(parameter).kind
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
    return Slot(parameter.name, "STRING", target.number, const=True, c_type=parameter.spelling, kind=target.kind)


def _values(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    return _pointer(scope, parameter, target, "VALUES", target.kind.removesuffix("s"))


def _ignored(scope: Scope, parameter: CParameter, target: Target) -> Slot:
    raise scope.error(
        parameter,
        f"{target.name} is a device, layout, memory format or generator, which a C kernel cannot take. Leave it out.",
    )


BY_KIND: Mapping[str, Callable[[Scope, CParameter, Target], Slot]] = {
    "tensor": _tensor, "tensors": _tensors, "str": _string, "ignored": _ignored,
    **dict.fromkeys(("int", "float", "bool", "dtype"), _scalar), **dict.fromkeys(("ints", "floats", "bools"), _values),
}  # fmt: skip
"""The function that binds a parameter to an argument, by the argument's kind."""


def integer(scope: Scope, parameter: CParameter, slot: Slot) -> Slot:
    """Return the slot of a size or a length; raise unless the parameter is an integer of 32 or 64 bits."""
    taken = c_type(parameter)
    if parameter.pointer or taken.kind != "int" or taken.bits < 32:
        raise scope.error(
            parameter, f"it is a size, and is taken by value as an integer of 32 or 64 bits: `int64_t {slot.name}`."
        )
    return dataclasses.replace(slot, name=parameter.name, c_type=parameter.type, member="i")
