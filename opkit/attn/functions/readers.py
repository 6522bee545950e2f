"""Compile the comparison of what functions read with what functions have read in an earlier call.

To describe a function (:mod:`opkit.attn.functions.captures`) takes longer than to launch a kernel. The steps of a description say
where each value is found and what of it counts. They become the source of a function that reads the same places and returns the
tensors there if all else is as it was, so that a description would be the same.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from opkit.attn.functions import attributes
from opkit.attn.functions.captures import Step, names_in

Reader = Callable[..., "tuple[Tensor, ...] | None"]

_VALUES = {
    "cell": "{x}.__closure__[{a}].cell_contents",
    "default": "{x}.__defaults__[{a}]",
    "keyword": "{x}.__kwdefaults__[{a!r}]",
    "global": "{x}.__globals__[{a!r}]",
    "item": "{x}[{a}]",
    "function": "{x}.__func__",
    "self": "{x}.__self__",
    "path": "plain_value({x}, {a!r})",
}
"""By the kind of a place, the value there: {x} is the other value, {a} what of it."""
_FACTS = {
    "same": "{x} is {k} or (type({x}) is type({k}) and {x} == {k})",
    "mask": "type({x}) is type({k}) and {x}.static and {x} == {k}",
    "tuple": "isinstance({x}, tuple) and len({x}) == {k}",
    "method": "type({x}) is method",
    "object": "type({x}) is {k}",
    "function": (
        "type({x}) is function and {x}.__code__ == {k}[0] and len({x}.__defaults__ or ()) == {k}[1]"
        " and (*({x}.__kwdefaults__ or ()),) == {k}[2]"
    ),
}
"""By the fact, the test of a value {x}; {k} is what the fact is about."""


def reader(arguments: Sequence[Sequence[Step]], places: Sequence[int]) -> Reader:
    """Return a function of some functions that returns the tensors that they capture, each once; None if they read other values.

    It does not test tensors: which of their properties count, a guard tests.

    Args:
        arguments: the steps of each function.
        places: of each tensor that steps find, its number among the different ones.

    >>> from opkit.attn.functions.captures import Captures
    >>> def add(y):
    ...     return lambda x: x + y
    >>> read = reader([Captures.of(add(5)).steps], [])
    >>> read(add(5)), read(add(6)), read(lambda x: x)
    ((), None, None)
    """
    lines: list[str] = []
    found: dict[int, str] = {}
    space: dict[str, Any] = {
        "plain_value": attributes.plain_value, "function": types.FunctionType, "method": types.MethodType,
    }  # fmt: skip
    numbers = iter(places)
    for argument, steps in enumerate(arguments):
        for at, ((parent, kind, what), fact, value) in enumerate(steps):
            x = f"x{argument}_{at}"
            if parent >= 0:
                lines.append(f"{x} = {_VALUES[kind].format(x=f'x{argument}_{parent}', a=what)}")
            if fact == "tensor":
                number = next(numbers)
                test = f"{x} is {found.setdefault(number, x)}"
            elif fact == "recursive":
                test = f"{x} is x{argument}_{_functions_around(steps, at)[value]}"
            else:
                test = _FACTS[fact].format(x=x, k=f"k{x}")
                space[f"k{x}"] = value
            lines.append(f"if not ({test}): return None")
            absent = _missing(steps, at) if fact == "function" else []
            lines += [f"if {name!r} in {x}.__globals__: return None" for name in absent]
    text = "".join(f"  {line}\n" for line in [*lines, f"return ({''.join(f'{x}, ' for x in found.values())})"])
    parameters = ", ".join(f"x{argument}_0" for argument in range(len(arguments)))
    source = f"def read({parameters}):\n try:\n{text} except (AttributeError, LookupError, ValueError): return None\n"
    exec(compile(source, "<opkit reader>", "exec"), space)
    return space["read"]


def _functions_around(steps: Sequence[Step], at: int) -> list[int]:
    """Return the steps of the functions that a value is read by, the outermost first."""
    around: list[int] = []
    while (at := steps[at][0][0]) >= 0:
        if steps[at][1] == "function":
            around.insert(0, at)
    return around


def _missing(steps: Sequence[Step], at: int) -> list[str]:
    """Return the names that a function reads as globals and that are none, but builtins, as long as no global hides these."""
    code = steps[at][2][0]
    there = {what for (parent, kind, what), _, _ in steps if (parent, kind) == (at, "global")}
    return sorted({name for name in names_in(code) if name not in there and attributes.read(code, name) != ()})
