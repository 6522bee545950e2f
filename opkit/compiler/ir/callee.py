"""A function that a kernel calls: one that a shared library has, with no effects but its value."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Callee:
    """A function of numbers, or one of runs of elements.

    Attributes:
        name: its symbol.
        library: the path of the library, or the name that the loader knows it by.
        arguments: the types that it takes, keys of ``DTYPES``.
        result: the type of its value.
        given: of a function of runs, what each of the values is that it is given: "elements" (a pointer to them), "i" or "f"
            (an integer or a float: these three are the arguments, in order), "result" (a pointer to where results go),
            "count" (how many there are). Empty for a function of numbers.
        instance: of a function of runs, its number in the library.
    """

    name: str
    library: str
    arguments: tuple[str, ...]
    result: str
    given: tuple[str, ...] = ()
    instance: int = 0
