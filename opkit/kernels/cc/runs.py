"""Check the parameters of elementwise kernels, which may be called on any range of elements, by several threads.

Such a kernel takes pointers to elements, numbers, and the number of elements; anything else would have another meaning for a
part of the tensors.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from opkit.errors import DeclarationError
from opkit.kernels.binding import ANY_DTYPE, Bound, Slot
from opkit.kernels.cc import scanner
from opkit.kernels.cc.dtypes import DTYPES
from opkit.kernels.cc.native import NativeKernel
from opkit.kernels.facts import Shape

Kind = Literal["elements", "result", "count", "number", "constant"]


@dataclasses.dataclass(frozen=True)
class Taken:
    """The value that a parameter takes.

    Attributes:
        kind: elements of a tensor, memory for the result's, their count, the number of an argument, or a constant.
        argument: the argument's number.
        member: the member of ``opk_value`` that holds it: "p", "i" or "f".
        constant: the value of a constant.
        c_type: of a number: its C type, or the type variable of it; "" if every number fits.
        dtype: of elements: the name of their type, or the type variable of it.
    """

    kind: Kind
    argument: int = 0
    member: str = "p"
    constant: int | float | None = None
    c_type: str = ""
    dtype: str = ""


_NAMES = {dtype.number: dtype.name for dtype in DTYPES.values()}


def taken(native: NativeKernel, bound: Bound) -> tuple[Taken, ...]:
    """Return the value that each parameter of an elementwise kernel takes.

    Raises:
        DeclarationError: it takes something that has another meaning for a part of the tensors.
    """
    where = f"{bound.facts.operator}, kernel {native.name!r}"
    if len(bound.facts.outputs) != 1 or bound.facts.outputs[0].alias is not None:
        raise DeclarationError(f"{where}: an elementwise kernel has one output, which is a new tensor.")
    if bound.function.returns != "void":
        raise DeclarationError(f"{where}: an elementwise kernel returns nothing; it returns {bound.function.returns}.")
    texts = [native.text, *(path.read_text(encoding="utf-8", errors="replace") for path in native.sources)]
    if any(re.search(r"\bopk_fail\b", scanner.without_literals(text)) for text in texts):
        raise DeclarationError(
            f"{where}: an elementwise kernel cannot fail: it calls opk_fail. Check in the reference, or let "
            "the operator be called as a whole: leave elementwise=True out."
        )
    found = tuple(_taken(bound, slot, where) for slot in bound.slots)
    if not any(each.kind == "elements" for each in found):
        raise DeclarationError(f"{where}: an elementwise kernel takes the elements of a tensor, and this takes none.")
    return found


def _taken(bound: Bound, slot: Slot, where: str) -> Taken:
    output = len(bound.facts.arguments)
    if slot.source == "DATA" and slot.dtype != ANY_DTYPE and (slot.argument == output or slot.const):
        kind = "result" if slot.argument == output else "elements"
        return Taken(kind, slot.argument, dtype=_dtype(bound, slot.dtype))
    if slot.source == "NUMEL" or (slot.source == "NAMED_SIZE" and _is_every_size(bound, slot)):
        return Taken("count", member="i")
    if slot.source == "SCALAR":
        return Taken("number", slot.argument, slot.member, c_type="" if slot.kind == "bool" else slot.c_type)
    if slot.source in ("INT_CONSTANT", "FLOAT_CONSTANT") and slot.member != "p":
        return Taken("constant", member=slot.member, constant=slot.constant)
    raise DeclarationError(
        f"{where}, parameter {slot.name!r}: an elementwise kernel is called on parts of the tensors. It can take their "
        "elements by typed pointers, <tensor>_numel, and numbers. Change the parameter, or leave elementwise=True out."
    )


def _dtype(bound: Bound, number: int) -> str:
    return _NAMES[number] if number > ANY_DTYPE else bound.variables[-2 - number]


def _is_every_size(bound: Bound, slot: Slot) -> bool:
    """Return whether a named size is the only dimension of every tensor, and so counts the elements."""
    name = bound.facts.sizes[slot.detail]
    arguments = [argument.shape for argument in bound.facts.arguments if argument.kind == "tensor"]
    shapes = [*arguments, *(output.shape for output in bound.facts.outputs)]
    return all(shape is not None and _sizes(shape) == [name] for shape in shapes)


def _sizes(shape: Shape) -> list[str | int | None]:
    return [*shape.before, *([] if shape.variadic is None else [shape.variadic]), *shape.after]


def types(taken: tuple[Taken, ...], native: NativeKernel, have: Mapping[int, str]) -> dict[str, str] | None:
    """Return the dtypes of the type variables where arguments (by number; the output is the last) have the dtypes ``have``;
    None if the kernel does not take them."""
    found: dict[str, str] = {}
    for each in taken:
        if each.kind not in ("elements", "result"):
            continue
        dtype = have[each.argument]
        allowed = native.variables.get(each.dtype, (each.dtype,))
        if dtype not in allowed or found.setdefault(each.dtype, dtype) != dtype:
            return None
    return {name: dtype for name, dtype in found.items() if name in native.variables}
