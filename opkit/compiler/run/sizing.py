"""This module writes Python text for symbolic sizes: an index in terms of them, and a function that reads them from inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opkit.compiler.ir.index import Div, Index, Mod, Size
from opkit.compiler.run.plan import ExecutionPlan


def spelled(at: Index) -> str:
    """Return an index over sizes as a Python expression."""
    terms = [
        "*".join([*map(_atom, monomial), *([str(c)] if c != 1 or not monomial else [])])
        for monomial, c in at.terms.items()
    ]
    return "+".join(terms) or "0"


def _atom(atom: Any) -> str:
    if isinstance(atom, Size):
        return atom.name
    assert isinstance(atom, Div | Mod), f"{atom} is not known before the program runs"
    sign = "//" if isinstance(atom, Div) else "%"
    return f"(({spelled(atom.dividend)}){sign}({spelled(atom.divisor)}))"


def binding(plan: ExecutionPlan, computed: Mapping[str, str]) -> str:
    """Return the text of ``bind``, a function that returns the plan's sizes, in its order, from the inputs.

    Raises:
        LookupError: no input determines a size.
    """
    found = _sources(plan)
    for name in plan.sizes:
        if name not in found and name not in computed:
            raise LookupError(f"no input determines the size {name}")
    lines = [f"{name} = {text}" for name, text in found.items()]
    lines += [f"{name} = {text}" for name, text in computed.items()]
    body = "".join(
        f"    {line}\n" for line in [*lines, f"return ({', '.join(plan.sizes)},)" if plan.sizes else "return ()"]
    )
    return f"def bind(inputs):\n{body}"


def _sources(plan: ExecutionPlan) -> dict[str, str]:
    """Return where each size comes from: an input, a size of an input, or a stride of one."""
    found: dict[str, str] = {}
    for number, plan_input in enumerate(plan.inputs):
        if isinstance(plan_input, Index):
            _note(found, plan_input, f"inputs[{number}]")
        if not isinstance(plan_input, str):
            continue
        buffer = plan.buffers[plan_input]
        for d, (extent, stride) in enumerate(zip(buffer.shape, buffer.strides, strict=True)):
            _note(found, extent, f"inputs[{number}].shape[{d}]")
            _note(found, stride, f"inputs[{number}].stride({d})")
    return found


def _note(found: dict[str, str], at: Index, text: str) -> None:
    if list(at.terms.values()) == [1]:
        (monomial,) = at.terms
        if len(monomial) == 1 and isinstance(monomial[0], Size):
            found.setdefault(monomial[0].name, text)
