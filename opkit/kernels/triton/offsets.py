"""Compile a Triton function for grids larger than the hardware's, which are launched in pieces.

 Six int32 parameters are added at the end: the piece's start along x, y and z, which is
added to each program id, and the whole grid's sizes, which take the place of ``tl.num_programs``. This changes the
text of Triton's IR, after the functions that the kernel calls have been inlined into it.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from opkit.errors import KernelError

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
