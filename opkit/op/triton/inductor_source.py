"""Find what Inductor would leave out of the source of a user's Triton kernel: helpers and constants that it does not copy.

Inductor copies a kernel's source and, of what that refers to, functions of Triton's and whole numbers, strings and constexprs, by
their names (``user_defined_triton_kernel_transitive_closure_source_code`` of ``torch/_inductor/codegen/wrapper.py``, torch 2.13).
A helper that is reached through its module (``rows.within``), or imported by another name, is left out, and the compiled
program ends in a NameError.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import dis
from collections.abc import Iterator
from typing import Any

_IMPORTED = {"tl", "triton", "libdevice", "tl_math", "triton_helpers"}  # at the head of every file that Inductor writes
_WRITTEN = (int, str, bool)


def left_out(function: Any) -> str:
    """Return what a kernel refers to and Inductor leaves out, or "".

    Args:
        function: the kernel as Python has it, without ``triton.jit``.
    """
    return next(_missing(function, set()), "")


def _missing(function: Any, seen: set[Any]) -> Iterator[str]:
    seen.add(function)
    for name, value in _globals(function):
        if _is_helper(value):
            if value.fn.__name__ != name:
                yield f"{name}, whose own name is {value.fn.__name__}"
            elif value.fn not in seen:
                yield from _missing(value.fn, seen)
        elif name not in _IMPORTED and not _is_written(value):
            yield name


def _globals(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads of its module, by name."""
    names = {each.argval for each in dis.Bytecode(function) if each.opname == "LOAD_GLOBAL"}
    yield from ((name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__)


def _is_helper(value: Any) -> bool:
    from triton.runtime import jit

    return isinstance(value, (jit.JITFunction, getattr(jit, "ConstexprFunction", jit.JITFunction)))


def _is_written(value: Any) -> bool:
    from triton.language import constexpr

    known = isinstance(value, (*_WRITTEN, constexpr))
    return known or str(getattr(value, "__module__", "")).startswith("triton")
