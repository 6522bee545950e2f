"""Name Triton's functions and constants in place of importing them: compiled kernels are found in the cache without Triton.

:mod:`opkit.kernels.triton.parsing` has the figures.

>>> Layout("NVMMASharedLayout", swizzle_byte_width=128, element_bitwidth=16, rank=4)
NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import linecache
import re
from typing import Any, cast

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


class FunctionText:
    """A function decorated with ``triton.jit`` by its text, the module that defines it; kernels take it as a constant.

    The name of that module has a hash of the text and of the modules of opkit that the text imports, and kernels are found by it.

    >>> FunctionText("twice", "import triton\\n\\n\\n@triton.jit\\ndef twice(x):\\n    return x + x\\n").name
    'twice'
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        files = [parsing.file_of(each) for each in sorted({each.module for each in parsing.imports(text, "")})]
        own = [path.read_bytes() for path in files if path is not None and "opkit" in path.parts]
        self.digest = hashlib.sha256(b"".join([text.encode(), *own])).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"FunctionText({self.name!r}, {self.digest})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionText) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return the parts of a contract's hash."""
        return [("function", repr(self))]

    def resolved(self) -> Any:
        """Return Triton's function."""
        return _executed(self)


@functools.lru_cache(maxsize=1024)
def _executed(function: FunctionText) -> Any:
    module = f"opkit_function_{function.digest}"
    file = f"<{module}>"
    linecache.cache[file] = (len(function.text), None, function.text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": module}
    exec(compile(function.text, file, "exec"), names)
    return names[function.name]


def resolved(value: Any) -> Any:
    """Return Triton's or Gluon's object for what stands for one, also in tuples; other values unchanged."""
    if isinstance(value, tuple):
        return tuple([resolved(each) for each in cast("tuple[Any, ...]", value)])
    return value.resolved() if isinstance(value, (Layout, Element, FunctionText)) else value


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
