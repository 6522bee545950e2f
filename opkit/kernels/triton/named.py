"""Name Triton's functions and constants in place of importing them: compiled kernels are found in the cache without Triton.

:mod:`opkit.kernels.triton.parsing` has the figures.

>>> Layout("NVMMASharedLayout", swizzle_byte_width=128, element_bitwidth=16, rank=4)
NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any

from opkit.errors import DeclarationError, KernelError
from opkit.kernels.triton import environment, parsing
from opkit.kernels.triton.parsing import Header


@dataclasses.dataclass(frozen=True)
class Named:
    """A function decorated with ``triton.jit`` or Gluon's ``jit``, by its module and its name there.

    Its parameters are read from the file, its module is imported where it must be compiled or run in another way, and a kernel
    compiled before is found by the text of the module's file and of those that it imports from the same package. What the
    module computes when it is imported must follow from these files alone, not from the environment.

    >>> function = Named("opkit.attn.gpu.device.tile_lists", "tile_lists")
    >>> function.header.parameters[0].name
    'tiles'
    """

    module: str
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def header(self) -> Header | None:
        """Its definition without the body; None where the file alone does not determine it."""
        return parsing.read_header(self.module, self.name)

    @property
    def origin(self) -> str | None:
        """A hash of everything that it is compiled from; None where the files alone do not decide it."""
        return environment.origin_of(self.module)

    def loaded(self) -> Any:
        """Return the function itself, of its module, which is imported.

        Raises:
            DeclarationError: the module cannot be imported, or has no such function.
        """
        try:
            return getattr(environment.load_module(self.module), self.name)
        except (ImportError, AttributeError) as error:
            raise DeclarationError(
                f"The Triton kernel {self.name} of {self.module} cannot be loaded: {error}"
            ) from error

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return the parts of a contract's hash that decide what it computes."""
        origin = self.origin or parsing.cache_key(self.loaded())
        return [("module", self.module), ("name", self.name), ("origin", origin)]


def loaded(function: Any) -> Any:
    """Return a Triton function; for a :class:`Named` one, load it."""
    return function.loaded() if isinstance(function, Named) else function


# ---- constants -------------------------------------------------------------------------------------------------------


_DESCRIPTOR = re.compile(r"(tensordesc<[^\[]*\[[^\]]*\]),(.*)>", re.DOTALL)


class Layout:
    """A layout of Gluon's by the name of its class and its fields, which are plain constants."""

    def __init__(self, name: str, **fields: Any) -> None:
        self.name, self.fields = name, fields

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return the parts of a contract's hash."""
        return [("layout", repr(self))]

    def resolved(self) -> Any:
        """Return Gluon's layout.

        Raises:
            KernelError: Gluon has no such layout.
        """
        from triton.experimental.gluon import language

        try:
            return getattr(language, self.name)(**self.fields)
        except (AttributeError, AssertionError, TypeError, ValueError) as error:
            raise KernelError(f"Gluon has no layout {self!r}: {type(error).__name__}: {error}") from error


class Element:
    """An element type of Triton's by its name in ``triton.language``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Element({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Element) and other.name == self.name

    def __hash__(self) -> int:
        return hash((Element, self.name))

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return the parts of a contract's hash."""
        return [("element", self.name)]

    def resolved(self) -> Any:
        """Return Triton's element type."""
        import triton.language

        return getattr(triton.language, self.name)


def resolved(value: Any) -> Any:
    """Return Triton's or Gluon's object for a :class:`Layout` or :class:`Element`; other values unchanged."""
    return value.resolved() if isinstance(value, (Layout, Element)) else value


def written_out(kind: str) -> str:
    """Return the type of a descriptor with its layout as Gluon writes it, which is what its compiler reads.

    >>> written_out("tensordesc<bf16[64, 64],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)>")[:65]
    'tensordesc<bf16[64, 64],NVMMASharedLayout(swizzle_byte_width=128,'
    >>> written_out("*bf16")
    '*bf16'
    """
    match = _DESCRIPTOR.fullmatch(kind)
    layout = None if match is None else _layout(match[2])
    return kind if match is None or layout is None else f"{match[1]},{layout.resolved()!r}>"


def _layout(text: str) -> Layout | None:
    """Return the layout that a text spells, or None."""
    try:
        with parsing.ALONE:
            node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            return None
        return Layout(node.func.id, **{str(each.arg): ast.literal_eval(each.value) for each in node.keywords})
    except (SyntaxError, ValueError):
        return None
