"""This module writes Python text for a compiled graph: names, arguments of calls, symbolic sizes and where they come from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.graph import ObjectCall, OpaqueValue, TypeName
from opkit.compiler.ir.index import Div, Index, Mod, Symbol
from opkit.compiler.ir.program import Formula, ScalarItem, Strided
from opkit.compiler.run.plan import ExecutionPlan


class PythonNames:
    """The names of one program.

    Attributes:
        views: tensors over buffers that have a place or are constants; number k is called ``viewk``.
        numbers: expressions in terms of the sizes, by name.
        targets: operators, by name: the target, and whether it writes to ``out=``.
        opaques: the texts of OpaqueValue arguments, by name.
        of_slots: the variables of slots.
    """

    def __init__(self) -> None:
        self.views: dict[Strided, int] = {}
        self.numbers: dict[str, str] = {}
        self.targets: dict[str, tuple[str, bool]] = {}
        self.opaques: dict[str, str] = {}
        self.of_slots: dict[int, str] = {}
        self._variables: dict[str, str] = {}
        self._taken: set[str] = set()
        self._known: dict[Any, str] = {}

    def variable(self, buffer: str) -> str:
        """Return the variable of a buffer: its name as a Python identifier, with a prefix that no other name has."""
        known = self._variables.get(buffer)
        if known is None:
            plain = "b_" + re.sub(r"\W", "_", buffer)
            known = plain if plain not in self._taken else f"{plain}_{len(self._variables)}"
            self._variables[buffer] = known
            self._taken.add(known)
        return known

    def view(self, tensor: Strided) -> int:
        """Return the number of a view."""
        return self.views.setdefault(tensor, len(self.views))

    def tensor(self, slot: int) -> str:
        """Return the name of the tensor in a slot."""
        return self.of_slots[slot] if slot >= 0 else f"view{-1 - slot}"

    def word(self, of: Index) -> int | str:
        """Return a number for the driver, or the name of one that depends on sizes."""
        return int(of.constant) if of.constant is not None else self.numbers_text(of)

    def numbers_text(self, of: Index | tuple[Index, ...]) -> str:
        """Return sizes as text: numbers if they are constant, else a name that the frame computes."""
        parts = (of,) if isinstance(of, Index) else of
        text = size_text(of) if isinstance(of, Index) else tuple_text(list(map(size_text, parts)))
        if all(each.constant is not None for each in parts):
            return text
        return self._named("size", text, self.numbers, text)

    def function(self, target: str, out: bool) -> str:
        """Return the name of an operator."""
        plain = re.sub(r"\W", "_", target) + ("_out" if out else "")
        return self._named(plain, (target, out), self.targets, (target, out), numbered=False)

    def _named(self, stem: str, key: Any, table: dict[str, Any], value: Any, numbered: bool = True) -> str:
        known = self._known.get((stem, key))
        if known is None:
            known = f"{stem}{len(table)}" if numbered else stem
            self._known[stem, key] = known
            table[known] = value
        return known

    def argument(self, argument: Any, tensor: Callable[[Strided], str], whole: Callable[[str], Strided]) -> str:
        """Return an argument as text.

        Args:
            argument: as in an ``Extern``.
            tensor: returns the name of a tensor.
            whole: returns the tensor of a whole buffer.
        """
        if isinstance(argument, Strided):
            return tensor(argument)
        if isinstance(argument, ScalarItem):
            return f"{tensor(whole(argument.buffer))}.item()"
        if isinstance(argument, Formula):
            return argument.text.format(*(self.argument(each, tensor, whole) for each in argument.operands))
        if isinstance(argument, Index):
            return self.numbers_text(argument)
        if isinstance(argument, TypeName):
            return DTYPES[argument.name].torch
        if isinstance(argument, OpaqueValue):
            return self._named("opaque", argument.text, self.opaques, argument.text)
        if isinstance(argument, ObjectCall):
            parts = [self.argument(each, tensor, whole) for each in argument.args]
            return f"{self.function(argument.target, False)}({', '.join(parts)})"
        if isinstance(argument, list | tuple):
            parts = [self.argument(each, tensor, whole) for each in argument]
            return f"[{', '.join(parts)}]" if isinstance(argument, list) else tuple_text(parts)
        if isinstance(argument, dict):
            parts = [f"{key!r}: {self.argument(each, tensor, whole)}" for key, each in argument.items()]
            return "{" + ", ".join(parts) + "}"
        return _literal(argument)


def tuple_text(parts: list[str]) -> str:
    """Return a tuple of these parts."""
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _literal(value: Any) -> str:
    if isinstance(value, complex):
        return f"complex({_literal(value.real)}, {_literal(value.imag)})"
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def size_text(at: Index) -> str:
    """Return an index over sizes as a Python expression."""
    terms = [
        "*".join([*map(_atom_text, monomial), *([str(c)] if c != 1 or not monomial else [])])
        for monomial, c in at.terms.items()
    ]
    return "+".join(terms) or "0"


def _atom_text(atom: Any) -> str:
    if isinstance(atom, Symbol):
        return atom.name
    assert isinstance(atom, Div | Mod), f"{atom} is not known before the program runs"
    sign = "//" if isinstance(atom, Div) else "%"
    return f"(({size_text(atom.dividend)}){sign}({size_text(atom.divisor)}))"


def binding(plan: ExecutionPlan, computed: Mapping[str, str]) -> str:
    """Return the text of ``bind``, a function that returns the plan's sizes, in its order, from the inputs.

    Raises:
        LookupError: no input determines a size.
    """
    found = _sources(plan)
    for name in plan.sizes:
        if name not in found and name not in computed:
            raise LookupError(f"no input determines the size {name}")
    lines = [f"{name} = {text}" for name, text in found.items()]
    lines += [f"{name} = {text}" for name, text in computed.items()]
    body = "".join(
        f"    {line}\n" for line in [*lines, f"return ({', '.join(plan.sizes)},)" if plan.sizes else "return ()"]
    )
    return f"def bind(inputs):\n{body}"


def _sources(plan: ExecutionPlan) -> dict[str, str]:
    """Return where each size comes from: an input, a size of an input, or else a stride of one."""
    sizes: list[tuple[Index, str]] = []
    strides: list[tuple[Index, str]] = []
    for number, plan_input in enumerate(plan.inputs):
        if isinstance(plan_input, Index):
            sizes.append((plan_input, f"inputs[{number}]"))
        if not isinstance(plan_input, str):
            continue
        buffer = plan.buffers[plan_input]
        for d, (extent, stride) in enumerate(zip(buffer.shape, buffer.strides, strict=True)):
            sizes.append((extent, f"inputs[{number}].shape[{d}]"))
            if extent.constant != 1:  # else its stride may be any number
                strides.append((stride, f"inputs[{number}].stride({d})"))
    found: dict[str, str] = {}
    for at, text in sorted(sizes, key=lambda each: not _is_symbol(each[0])) + strides:
        _add_source(found, at, text)
    return found


def _is_symbol(at: Index) -> bool:
    return list(at.terms.values()) == [1] and len(next(iter(at.terms))) == 1


def _add_source(found: dict[str, str], at: Index, text: str) -> None:
    """Add what ``text`` says about a size if its value, ``at``, is a multiple of it and a number more."""
    more = at.terms.get((), 0)
    parts = {monomial: times for monomial, times in at.terms.items() if monomial}
    if len(parts) == 1:
        ((monomial, times),) = parts.items()
        if len(monomial) == 1 and isinstance(monomial[0], Symbol):
            found.setdefault(monomial[0].name, text if (more, times) == (0, 1) else f"({text} - {more}) // {times}")
