"""This module infers the specs of an operator's arguments from its annotations or, if it has none, from its schema."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from opkit.contract.calls.specs import ArgumentSpecs, TensorArgument, tensor
from opkit.errors import ArgumentError, DefinitionError
from opkit.op.schema import signature
from opkit.op.schema.codecs import EnumCodec
from opkit.op.schema.patterns import TensorPattern
from opkit.op.schema.signature import OperatorParameter, Signature

_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ANY = "*shape"  # tensors without annotations have equal shapes
_SCALARS: dict[str, Any] = {
    "int": st.integers(0, 3),
    "float": st.sampled_from([0.5, 1.0, 2.0, 0.25]),
    "bool": st.booleans(),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "device": torch.device("cpu"),
}


def from_signature(name: str, found: Signature) -> ArgumentSpecs:
    """Infer specs from annotations such as ``Float[Tensor, "*batch d"]``.

    Raises:
        ArgumentError: a parameter without default has a type whose values cannot be drawn.
    """
    values = [(parameter, _of_parameter(name, parameter)) for parameter in found.parameters]
    positional = tuple(value for parameter, value in values if not parameter.keyword_only)
    return ArgumentSpecs(positional, tuple((p.name, value) for p, value in values if p.keyword_only))


def from_function(name: str, function: Callable[..., Any]) -> ArgumentSpecs | None:
    """Infer specs from a Python function's annotations; return None if they are not those of an operator."""
    try:
        found = signature.read(inspect.unwrap(function))
    except (DefinitionError, TypeError, ValueError):
        return None
    annotated = all(p.kind != "other" or not p.required for p in found.parameters)
    return from_signature(name, found) if annotated and found.parameters else None


def _of_parameter(name: str, parameter: OperatorParameter) -> Any:
    if parameter.kind == "tensor":
        return _tensor(parameter.pattern, parameter.optional)
    if parameter.kind == "tensors":
        return [_tensor(parameter.pattern, False)] * 2
    if parameter.choices:
        return st.sampled_from(parameter.choices)
    if not parameter.required:
        return _near(parameter.default)
    if parameter.optional:
        return None
    if isinstance(parameter.codec, EnumCodec):
        return st.sampled_from([*parameter.codec.kind])
    return _scalar(name, parameter.name, parameter.kind, str(parameter.annotation))


def _tensor(pattern: TensorPattern | None, optional: bool) -> TensorArgument:
    if pattern is None:
        return tensor(_ANY, _FLOATING, optional=optional)
    allowed = pattern.dtypes
    dtypes = tuple(d for d in _FLOATING if allowed is None or d in allowed) or _others(pattern)
    return TensorArgument(pattern=pattern, dtypes=dtypes, optional=optional)


def _others(pattern: TensorPattern) -> tuple[torch.dtype, ...]:
    wanted = (
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
    return tuple(dtype for dtype in wanted if dtype in (pattern.dtypes or ())) or (pattern.example_dtype(),)


def _near(default: Any) -> Any:
    """Return a default and values near it: both truth values, and half and double a positive float."""
    if isinstance(default, bool):
        return st.sampled_from([default, not default])
    if isinstance(default, float) and 0 < default < float("inf"):
        return st.sampled_from([default, default / 2, default * 2])
    return default


def _scalar(name: str, argument: str, kind: str, annotation: str) -> Any:
    if kind not in _SCALARS:
        raise ArgumentError(
            f"{name}: no value can be drawn for {argument} ({annotation}). Give args= with a Hypothesis strategy, or a value."
        )
    return _SCALARS[kind]


def from_schema(name: str, schema: Any) -> ArgumentSpecs:
    """Infer specs from a dispatcher schema: tensors of equal shapes in every floating dtype, and defaults.

    Raises:
        ArgumentError: an argument without default has a type whose values cannot be drawn.
    """
    values = [(argument, _of_argument(name, argument)) for argument in schema.arguments]
    positional = tuple(value for argument, value in values if not argument.kwarg_only)
    return ArgumentSpecs(positional, tuple((a.name, value) for a, value in values if a.kwarg_only))


def _of_argument(name: str, argument: Any) -> Any:
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        return tensor(_ANY, _FLOATING, optional=kind != "Tensor")
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [tensor(_ANY, _FLOATING)] * 2
    if argument.has_default_value():
        return _near(argument.default_value)
    if kind.startswith("Optional"):
        return None
    return _scalar(name, argument.name, kind.lower(), kind)
