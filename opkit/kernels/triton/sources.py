"""Make sources for ``triton.compile``: Triton's own, with variants, and with the line at which compiling failed.

One variant is for grids larger than the hardware's, which are launched in pieces. Six int32 parameters are added at the end: the
piece's start along x, y and z, which is added to each program id, and the whole grid's sizes, which take the place of
``tl.num_programs``. The text of Triton's IR is rewritten by regular expressions, after the functions that the kernel calls have
been inlined into it, because Triton's Python bindings can neither add a parameter to a function nor replace an operation.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from opkit.errors import KernelError
from opkit.kernels.triton import parsing, wide

_VERSION = 1  # of what the variants are: part of the key in Triton's cache


class SourceLine(NamedTuple):
    """A line of an author's."""

    file: str
    line: int


class SourceVariant:
    """A mixin for Triton's ``ASTSource``, which precedes it among the bases."""

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
        return shifted(module, context, self.name, self.fn.is_gluon()) if self.offsets else module


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
    """Return the node that a code generator visits; None for other objects. Tuples of Triton 3.6 raise for unknown names."""
    return getattr(generator, "cur_node", None) if isinstance(generator, ast.NodeVisitor) else None


# ---- grids in pieces -------------------------------------------------------------------------------------------------


AXES = "xyz"
_ENTRY = re.compile(r"^  tt\.func public @(?:[^\n]*)$", re.MULTILINE)
_LISTED = re.compile(r"\)(?= attributes \{| \{)")
_START = re.compile(r"^( *)(%[\w$.-]+) = tt\.get_program_id ([xyz]) : i32(.*)$", re.MULTILINE)
_TOTAL = re.compile(r"^( *)(%[\w$.-]+) = tt\.get_num_programs ([xyz]) : i32(.*)$", re.MULTILINE)
_CANNOT = "its grid is larger than the hardware's, and cannot be launched in pieces"
_APART = "it takes its program id in a part that runs in warps of its own. Take it in the kernel, and pass it on."
_LEFT = re.compile(r"tt\.(?:get_program_id|get_num_programs)")


def shifted(module: Any, context: Any, kernel: str, gluon: bool = False) -> Any:
    """Return the module of a kernel, with the six parameters, as ``Param`` calls them: "offset" and "total", axes 0 to 2.

    Raises:
        KernelError: a program id is taken where the kernel's parameters cannot be seen.
    """
    _inline(module, context, gluon)
    text = rewritten(str(module), kernel)
    return _parsed(text, context, kernel)


def rewritten(text: str, kernel: str) -> str:
    """Return the IR as text, changed.

    Raises:
        KernelError: a program id is taken where the kernel's parameters cannot be seen.
    """
    entry = _ENTRY.search(text)
    if entry is None:
        raise KernelError(f"{kernel}: {_CANNOT}: there is no function in its IR.")
    end = _end(text, entry.end())
    if _LEFT.search(text[: entry.start()]) or _LEFT.search(text[end:]):
        raise KernelError(
            f"{kernel}: {_CANNOT}: a function that is not inlined takes its program id. "
            "Pass the id to it as an argument, or leave noinline=True out."
        )
    body = _START.sub(_shift, _TOTAL.sub(_whole, text[entry.end() : end]))
    return text[: entry.start()] + _head(entry[0]) + body + text[end:]


def _end(text: str, start: int) -> int:
    """Return where the entry function's body ends: at the brace that stands below its ``tt.func``."""
    return text.index("\n  }", start)


def _head(line: str) -> str:
    added = [f"%opk_offset_{axis}: i32" for axis in AXES] + [f"%opk_total_{axis}: i32" for axis in AXES]
    before, after = _split(line)
    separator = "" if before.endswith("(") else ", "
    return before + separator + ", ".join(added) + after


def _split(line: str) -> tuple[str, str]:
    """Return the line of a function before and after the end of its parameters."""
    found = list(_LISTED.finditer(line))[-1]
    return line[: found.start()], line[found.start() :]


def _shift(match: re.Match[str]) -> str:
    indent, name, axis, location = match.groups()
    inner = f"%opk_id{name[1:]}"
    return (
        f"{indent}{inner} = tt.get_program_id {axis} : i32{location}\n"
        f"{indent}{name} = arith.addi {inner}, %opk_offset_{axis} : i32{location}"
    )


def _whole(match: re.Match[str]) -> str:
    indent, name, axis, location = match.groups()
    total = f"%opk_total_{axis}"
    return f"{indent}{name} = arith.ori {total}, {total} : i32{location}"  # the same; folded away


def _inline(module: Any, context: Any, gluon: bool) -> None:
    from triton._C.libtriton import ir, passes

    manager = ir.pass_manager(context)
    (passes.gluon if gluon else passes.common).add_inliner(manager)
    passes.common.add_symbol_dce(manager)  # the functions that were inlined
    manager.run(module, "inline")


def _parsed(text: str, context: Any, kernel: str) -> Any:
    from triton._C.libtriton import ir

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttir"
        path.write_text(text)
        try:
            module = ir.parse_mlir_module(str(path), context)
        except RuntimeError as error:
            reason = _APART if "warp_specialize" in text else "this release of Triton does not read the changed IR."
            raise KernelError(f"{kernel}: {_CANNOT}: {reason}") from error
    module.context = context
    return module
