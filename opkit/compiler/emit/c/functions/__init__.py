"""Elementary functions and conversions of narrow floats as C text without #include, which generated C calls.

They are accurate to 2 ulp over the whole range of their type and have no branches, so that gcc and clang vectorise a loop that
calls them under ``-O3 -fno-math-errno -fno-trapping-math``. ``opk_exp_f32`` is the function named "exp_f32".

>>> print(text(["bf16_to_f32"]).splitlines()[-2].strip())
return opk_from_bits_f32((unsigned)h << 16);
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from opkit.compiler.emit.c.functions import exponential, floats, hyperbolic, logarithm, trigonometric
from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Expr
from opkit.compiler.ir.ops import OPS

_MODULES = (floats, exponential, logarithm, hyperbolic, trigonometric)
_TEXT = {name: body for module in _MODULES for name, body in module.TEXT.items()}
_CALL = re.compile(r"\bopk_(\w+)")
_PREAMBLE = "#define OPK_INLINE static inline __attribute__((always_inline))\n"

NAMES = tuple(_TEXT)

# The function for an op of the IR on a type, where one is needed; the others are operators of C.
SPELLED: dict[tuple[str, str], str] = {
    (op, dtype): f"{op}_{dtype}" for op in OPS for dtype in DTYPES if f"{op}_{dtype}" in _TEXT
}


def is_elementary_function(node: Expr) -> bool:
    """Return whether an expression takes many operations for the element or two that it reads."""
    return node.op == "random" or (node.op, DTYPES[node.dtype].compute) in SPELLED


def text(names: Iterable[str]) -> str:
    """Return the C text of functions and of all that they call, each once, before what calls it.

    Raises:
        KeyError: there is no such function.
    """
    order: dict[str, None] = {}
    for name in names:
        _visit(name, order)
    return _PREAMBLE + "".join(_TEXT[name] for name in order)


def _visit(name: str, order: dict[str, None]) -> None:
    if name in order:
        return
    for called in _CALL.findall(_TEXT[name]):
        if called != name and called in _TEXT:
            _visit(called, order)
    order[name] = None
