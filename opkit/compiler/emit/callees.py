"""This module writes calls of libraries' functions as C: of scalar functions, and of functions of runs of elements.

A function of runs takes values, each a pointer, an integer or a float, as ``opk_trampoline`` of opkit.h says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opkit.compiler.emit.types import C_TYPES, variable_type
from opkit.compiler.ir.expr import Callee, Expr


def pointer(callee: Callee, number: int) -> str:
    """Return the declaration of a function, from the runtime's table."""
    parameters, result = ", ".join(variable_type(t) for t in callee.arguments), variable_type(callee.result)
    if callee.run_parameters:
        parameters, result = "const union opkit_value *, const char **", "int32_t"
    return f"{result} (*const c_{number})({parameters}) = ({result} (*)({parameters}))runtime->functions[{number}];"


def text(node: Expr, number: int, arguments: Sequence[str]) -> str:
    """Return the value of a call; of a function of runs, of a run of one."""
    callee: Callee = node.data
    if not callee.run_parameters:
        return f"c_{number}({', '.join(arguments)})"
    kinds = taken(callee)
    declared = "".join(
        f"const {C_TYPES[dtype]} e{n} = {argument}; "
        for n, (kind, dtype, argument) in enumerate(zip(kinds, callee.arguments, arguments, strict=True))
        if kind == "elements"
    )
    arguments = [f"&e{n}" if kind == "elements" else arguments[n] for n, kind in enumerate(kinds)]
    return f"({{ {declared}{C_TYPES[callee.result]} e; {run(callee, number, arguments, '&e', '1')} e; }})"


def run(callee: Callee, number: int, arguments: Iterable[str], result: str, count: str) -> str:
    """Return the statement that calls a function of runs; its arguments are pointers and numbers."""
    rest = iter(arguments)
    known = {"result": f".p = {result}", "count": f".i = {count}"}
    members = {"elements": "p", "i": "i", "f": "f"}
    values = [known.get(kind) or f".{members[kind]} = {next(rest)}" for kind in callee.run_parameters]
    listed = ", ".join(f"{{{each}}}" for each in values)
    return f"{{ const char *said; c_{number}((const union opkit_value[]){{{listed}}}, &said); }}"


def taken(callee: Callee) -> list[str]:
    """Return what the arguments of a function of runs are: "elements", or numbers."""
    return [kind for kind in callee.run_parameters if kind not in ("result", "count")]
