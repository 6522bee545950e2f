"""Make sources for ``triton.compile``: Triton's own, with variants, and with the line at which compiling failed."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from opkit.kernels.triton import offsets, parsing, wide

_VERSION = 1  # of what the variants are: part of the key in Triton's cache


class SourceLine(NamedTuple):
    """A line of an author's."""

    file: str
    line: int


class SourceVariant:
    """Goes before Triton's ``ASTSource`` among the bases of a class."""

    wide = False
    offsets = False
    place: SourceLine | None = None
    fn: Any
    name: str
    constants: dict[tuple[int, ...], Any]

    def hash(self) -> str:
        parent: Any = super()
        with parsing.ALONE:
            plain = parent.hash()
        texts = any(isinstance(value, str) for value in self.constants.values())  # Triton writes 1 and "1" alike
        if not (self.wide or self.offsets or texts):
            return plain
        constants = [(at, v if isinstance(v, str) else type(v).__name__) for at, v in sorted(self.constants.items())]
        return hashlib.sha256(
            f"{plain} {self.wide} {self.offsets} {texts and constants} {_VERSION}".encode()
        ).hexdigest()

    def make_ir(self, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any) -> Any:
        parent: Any = super()
        make = functools.partial(wide.make_ir, self) if self.wide else parent.make_ir
        try:
            with parsing.ALONE:
                module = make(target, options, codegen_fns, module_map, context)
        except Exception as error:
            self.place = place_of(error)
            raise
        return offsets.shifted(module, context, self.name, self.fn.is_gluon()) if self.offsets else module


def source(function: Any, signature: Any, constexprs: Any, attributes: Any) -> Any:
    """Return a source of the function's kind: Triton's or Gluon's."""
    return _class(function.is_gluon())(function, signature, constexprs, attributes)


@functools.cache
def _class(gluon: bool) -> Any:
    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as base
    else:
        from triton.compiler.compiler import ASTSource as base
    return type("Source", (SourceVariant, base), {})


def place_of(error: BaseException) -> SourceLine | None:
    """Return the innermost line of the author's that Triton's code generator was at; None if it was at none."""
    import triton

    own = str(Path(triton.__file__).parent)
    found = [place for place in _places(error) if not place.file.startswith(own)]
    return found[-1] if found else None


def _places(error: BaseException) -> Iterator[SourceLine]:
    """Yield every line that a code generator was at, outermost first: each caller's generator runs its callee's."""
    trace = error.__traceback__
    while trace is not None:
        generator: Any = trace.tb_frame.f_locals.get("self")
        node = _node(generator)
        if hasattr(node, "lineno"):
            yield SourceLine(str(generator.file_name), generator.begin_line + node.lineno)
        trace = trace.tb_next
    if error.__cause__ is not None:
        yield from _places(error.__cause__)


def _node(generator: Any) -> Any:
    """What a code generator is at, None of anything else: tuples of Triton 3.6 raise a ValueError for names they have not."""
    return getattr(generator, "cur_node", None) if isinstance(generator, ast.NodeVisitor) else None
