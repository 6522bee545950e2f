"""A function of numbers that a kernel calls: one that a shared library exports, with no effects but its value."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Callee:
    """A function.

    Attributes:
        name: its symbol.
        library: the path of the library, or the name that the loader knows it by.
        arguments: the types that it takes, keys of ``DTYPES``.
        result: the type of its value.
    """

    name: str
    library: str
    arguments: tuple[str, ...]
    result: str
