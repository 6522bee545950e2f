"""Describe a bound kernel in the numbers of ``opkit.h``, as ``opkit._core.launch_kernel`` reads it."""

from __future__ import annotations

from typing import Any

from opkit.kernels.binding.facts import Argument, Shape
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.names import Source


def description(bound: BoundKernel, cuda: bool, packed: bool = True) -> dict[str, Any]:
    """Return a kernel as ``opkit._core.launch_kernel`` takes it."""
    facts = bound.facts
    return {
        "operator": facts.operator,
        "kernel": bound.name,
        "schema": facts.schema,
        "cuda": cuda,
        "arguments": [_argument(argument) for argument in facts.arguments],
        "outputs": [{"name": output.name, "alias": output.alias} for output in facts.outputs],
        "size_names": list(facts.sizes),
        "sources": [_source(bound, source, packed) for source in bound.sources],
    }


def _argument(argument: Argument) -> dict[str, Any]:
    return {
        "name": argument.name,
        "kind": argument.kind,
        "optional": argument.optional,
        "written": argument.written,
        "shape": None if argument.shape is None else _shape(argument.shape),
    }


def _shape(shape: Shape) -> dict[str, Any]:
    return {"before": shape.before, "variadic": shape.variadic, "after": shape.after}


def _source(bound: BoundKernel, source: Source, packed: bool) -> tuple[str, int, int, int, int]:
    origin, detail = source.origin, source.detail
    if source.kind == "tensor" and packed:
        dims = bound.strided.get(source.argument, ())
        origin, detail = "PACKED_TENSOR", sum(1 << (d if d >= 0 else 15 - d) for d in dims)
    return origin, source.argument, detail, -1, 0
