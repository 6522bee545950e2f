"""Example values of arguments: scalars by kind, shapes that fit a pattern, and small calls from which a reference is traced."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from opkit.op.schema.patterns import TensorPattern, evaluate
from opkit.op.schema.signature import OperatorParameter, Signature

_MAX_COMBINATIONS = 32
EXAMPLE_SIZES = ((3, 5, 7, 11, 13, 17, 19, 23, 29, 31), (4, 8, 16, 32, 64, 128, 256, 12, 24, 48))
"""Sizes for examples: odd and distinct ones, or, for operators that need even sizes, powers of two."""

SCALARS: dict[str, tuple[Any, ...]] = {
    "int": (1, 0, -1),
    "float": (0.5,),
    "bool": (False, True),
    "str": ("",),
    "dtype": (torch.float32,),
    "device": (torch.device("cpu"),),
    "ints": ([2], [2, 3], [2, 3, 4], [2, 3, 4, 6]),
    "floats": ([0.5], [0.5, 2.0]),
    "bools": ([False], [True]),
}
"""The values of arguments of each kind that is no tensor, the usual first."""

_TRACED = {"int": (2,), **{kind: SCALARS[kind] for kind in ("float", "dtype", "device")}}
"""The scalars for traces: an integer of 1 would be a size that broadcasts."""


def example_shape(pattern: TensorPattern, sizes: dict[str, Any], choices: Sequence[int]) -> tuple[int, ...]:
    """Return a small shape that fits ``pattern``; named sizes are chosen from ``choices`` and added to ``sizes``."""
    shape: list[int] = []
    for dim in pattern.dims:
        if dim.kind == "many":
            shape.extend(sizes.setdefault(dim.text, (2,)))
        elif dim.kind == "expression":
            shape.append(evaluate(dim.text, sizes) or 2)
        elif dim.kind == "number":
            shape.append(dim.number)
        else:
            taken = sum(isinstance(size, int) for size in sizes.values())
            shape.append(sizes.setdefault(dim.text, choices[taken % len(choices)]))
    return tuple(shape)


def calls_to_trace(signature: Signature, sizes_from: Sequence[int]) -> list[tuple[list[Any], dict[str, Any]]] | None:
    """Return small calls that fit a signature's annotations, one for each combination of flags and optional arguments.

    None: an annotation does not give a tensor's sizes, or an argument has no example value.
    """
    sizes: dict[str, Any] = {}
    choices: list[Sequence[Any]] = []
    for parameter in signature.parameters:
        choice = _choices(parameter, sizes, sizes_from)
        if choice is None:
            return None
        choices.append(choice)
    calls: list[tuple[list[Any], dict[str, Any]]] = []
    for values in itertools.islice(itertools.product(*choices), _MAX_COMBINATIONS):
        pairs = list(zip(signature.parameters, values, strict=True))
        calls.append(([v for p, v in pairs if not p.keyword_only], {p.name: v for p, v in pairs if p.keyword_only}))
    return calls


def _choices(parameter: OperatorParameter, sizes: dict[str, Any], sizes_from: Sequence[int]) -> Sequence[Any] | None:
    nothing = (None,) if parameter.optional else ()
    if parameter.kind in ("tensor", "tensors"):
        if parameter.pattern is None:
            return None
        shape = example_shape(parameter.pattern, sizes, sizes_from)
        tensor = torch.zeros(shape, dtype=parameter.pattern.example_dtype())
        return ([tensor, tensor.clone()] if parameter.kind == "tensors" else tensor, *nothing)
    if parameter.kind == "bool":
        return (*SCALARS["bool"], *nothing)
    if not parameter.required:
        return (parameter.default,)
    if parameter.choices:
        return parameter.choices
    if parameter.codec is not None:
        return None
    return (*_TRACED.get(parameter.kind, ()), *nothing) or None
