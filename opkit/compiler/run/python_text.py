"""This module writes the arguments of Python calls in a compiled graph as text, and numbers the names that the text uses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.graph import OpaqueValue, TypeName
from opkit.compiler.ir.index import Index
from opkit.compiler.ir.program import ScalarItem, Strided
from opkit.compiler.run.sizing import spelled


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
        self._known: dict[Any, str] = {}

    def variable(self, buffer: str) -> str:
        """Return the variable of a buffer: its name as a Python identifier, with a prefix that no other name has."""
        known = self._variables.get(buffer)
        if known is None:
            plain = "b_" + re.sub(r"\W", "_", buffer)
            known = plain if plain not in self._variables.values() else f"{plain}_{len(self._variables)}"
            self._variables[buffer] = known
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
        text = spelled(of) if isinstance(of, Index) else tuple_text(list(map(spelled, parts)))
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
        if isinstance(argument, Index):
            return self.numbers_text(argument)
        if isinstance(argument, TypeName):
            return DTYPES[argument.name].torch
        if isinstance(argument, OpaqueValue):
            return self._named("opaque", argument.text, self.opaques, argument.text)
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
