"""This module defines the operator under test: one of opkit's or ``torch.library``'s, an ``OpOverload``, or a callable."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from opkit.contract.calls.cases import Call, Case
from opkit.contract.calls.specs import ArgumentSpecs, TensorArgument, tensor
from opkit.contract.compare.outcome import CallOutcome, leaves
from opkit.errors import ArgumentError, DefinitionError
from opkit.op import torch_private as private
from opkit.op.operator import CustomOp
from opkit.op.schema import signature
from opkit.op.schema.codecs import EnumCodec
from opkit.op.schema.patterns import TensorPattern
from opkit.op.schema.signature import OperatorParameter, Signature

_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_OTHERS = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_SCALARS: dict[str, Any] = {
    "int": st.integers(0, 3),
    "float": st.sampled_from([0.5, 1.0, 2.0, 0.25]),
    "bool": st.booleans(),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "device": torch.device("cpu"),
}


class CallRefused(Exception):
    """The operator raised. ``numbers.accepts`` checks whether it may; other properties pass over the case.

    ``error`` is the exception that it raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


@dataclasses.dataclass(frozen=True)
class Subject:
    """The operator under test.

    Attributes:
        name: "namespace::name", or a function's qualified name.
        target: the object that the user passed.
        function: calls the operator.
        spec: the specs that arguments are drawn from.
        reference: a function that computes what the operator should, or None.
        overload: the dispatcher's overload; None for a plain callable.
        operator: opkit's own object; None for others.
        device: the device of the arguments.
        notes: what a property stores from one case to the next, under its name.
    """

    name: str
    target: Any
    function: Callable[..., Any]
    spec: ArgumentSpecs
    reference: Callable[..., Any] | None = None
    overload: Any = None
    operator: CustomOp[Any, Any] | None = None
    device: str = "cpu"
    notes: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def schema(self) -> Any:
        """The dispatcher's schema, or None."""
        return None if self.overload is None else self.overload._schema

    @functools.cached_property
    def writes(self) -> tuple[str, ...]:
        """The schema arguments that are declared as written to."""
        if self.schema is None:
            return ()
        return tuple(a.name for a in self.schema.arguments if a.alias_info is not None and a.alias_info.is_write)

    @property
    def functional(self) -> bool:
        """Whether no argument is declared as written to."""
        return not self.writes

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of an opkit operator's kernels for the device."""
        if self.operator is None:
            return ()
        kind = torch.device(self.device).type
        return tuple(each.name for each in self.operator._operator.kernels.kernels if each.device in (None, kind))

    def call(self, call: Call, function: Callable[..., Any] | None = None) -> CallOutcome:
        """Call the operator, or ``function`` in its place.

        Raises:
            CallRefused: the operator raised.
        """
        try:
            returned = (function or self.function)(*call.args, **call.kwargs)
        except Exception as error:
            raise CallRefused(error) from error
        return CallOutcome(call, leaves(returned), returned)

    def run(self, case: Case, **how: Any) -> CallOutcome:
        """Create the case's arguments and call the operator; ``how`` is passed on to :meth:`Case.make`."""
        return self.call(case.make(self.device, **how))

    def expect(self, case: Case, **how: Any) -> CallOutcome:
        """Create the case's arguments and call the reference."""
        assert self.reference is not None
        return self.call(case.make(self.device, **how), self.reference)


def subject_of(
    target: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    reference: Callable[..., Any] | None = None,
    device: str = "cpu",
) -> Subject:
    """Return the subject for ``target``.

    Raises:
        ArgumentError: the target cannot be checked, or its arguments are neither passed nor can be inferred.
    """
    name, function, overload, operator = _identify(target)
    if reference is None and operator is not None:
        reference = operator.reference
    if args is not None or kwargs is not None:
        spec = ArgumentSpecs(tuple(args or ()), tuple((kwargs or {}).items()))
    else:
        spec = _infer_spec(name, function, overload, operator)
    return Subject(name, target, function, spec, reference, overload, operator, device)


def _identify(target: Any) -> tuple[str, Callable[..., Any], Any, CustomOp[Any, Any] | None]:
    if isinstance(target, CustomOp):
        return target.name, target, target._opoverload, target
    if isinstance(target, private.CustomOpDef):
        return target._qualname, target, target._opoverload, None
    if isinstance(target, torch._ops.OpOverload):
        return str(target.name()), target, target, None
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name, target, _only_overload(target), None
    if callable(target):
        return getattr(target, "__qualname__", type(target).__name__), target, None, None
    raise ArgumentError(
        f"opkit.check takes an operator or a callable, got {type(target).__name__}: {target!r}. Pass the function that "
        "opkit.custom_op or torch.library.custom_op returned, torch.ops.namespace.name, or any callable."
    )


def _only_overload(packet: Any) -> Any:
    names = packet.overloads()
    if len(names) == 1 or "default" in names:
        return getattr(packet, "default" if "default" in names else names[0])
    raise ArgumentError(f"{packet} has several overloads: {', '.join(names)}. Check each, as in {packet}.{names[0]}.")


# ---- specs from annotations or a schema ----------------------------------------------------------------------------------


def _infer_spec(name: str, function: Any, overload: Any, operator: CustomOp[Any, Any] | None) -> ArgumentSpecs:
    found = operator._operator.signature if operator is not None else _read_signature(function)
    if found is not None:
        return _specs((p.name, p.keyword_only, _of_parameter(name, p)) for p in found.parameters)
    if overload is not None:  # tensors of equal shapes in every floating dtype, and defaults
        return _specs((a.name, a.kwarg_only, _of_argument(name, a)) for a in overload._schema.arguments)
    raise ArgumentError(f"{name}: nothing says what its arguments are. Give args=, as in args=(tensor('n'), 2.0).")


def _specs(arguments: Iterable[tuple[str, bool, Any]]) -> ArgumentSpecs:
    """Return specs for arguments, each with a name, whether it is passed by name only, and its spec."""
    known = [*arguments]
    positional = tuple(spec for _, by_name, spec in known if not by_name)
    return ArgumentSpecs(positional, tuple((name, spec) for name, by_name, spec in known if by_name))


def _read_signature(function: Any) -> Signature | None:
    """Return the signature that a Python function's annotations declare; None if they are not those of an operator."""
    body = getattr(function, "_init_fn", function)
    try:
        found = None if isinstance(body, torch._ops.OpOverload) else signature.read(inspect.unwrap(body))
    except (DefinitionError, TypeError, ValueError):
        return None
    if found is None or not found.parameters:
        return None
    return found if all(p.kind != "other" or not p.required for p in found.parameters) else None


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


def _of_argument(name: str, argument: Any) -> Any:
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        return _tensor(None, kind != "Tensor")
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [_tensor(None, False)] * 2
    if argument.has_default_value():
        return _near(argument.default_value)
    if kind.startswith("Optional"):
        return None
    return _scalar(name, argument.name, kind.lower(), kind)


def _tensor(pattern: TensorPattern | None, optional: bool) -> TensorArgument:
    if pattern is None:
        return tensor("*shape", _FLOATING, optional=optional)  # tensors without annotations have equal shapes
    known = pattern.dtypes
    dtypes = tuple(d for d in _FLOATING if known is None or d in known) or tuple(
        d for d in _OTHERS if d in (known or ())
    )
    return TensorArgument(pattern=pattern, dtypes=dtypes or (pattern.example_dtype(),), optional=optional)


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
