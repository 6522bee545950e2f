"""This module defines the operator under test: one of opkit's or ``torch.library``'s, an ``OpOverload``, or a callable."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opkit.contract.calls import inference
from opkit.contract.calls.cases import Call, Case
from opkit.contract.calls.specs import ArgumentSpecs
from opkit.contract.observed.outcome import CallOutcome, leaves
from opkit.contract.prop import CallRefused
from opkit.errors import ArgumentError
from opkit.op import torch_private as private
from opkit.op.operator import CustomOp


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


def _infer_spec(name: str, function: Any, overload: Any, operator: CustomOp[Any, Any] | None) -> ArgumentSpecs:
    if operator is not None:
        return inference.from_signature(name, operator._operator.signature)
    body = getattr(function, "_init_fn", function)
    spec = inference.from_function(name, body) if not isinstance(body, torch._ops.OpOverload) else None
    if spec is None and overload is not None:
        return inference.from_schema(name, overload._schema)
    if spec is None:
        raise ArgumentError(f"{name}: nothing says what its arguments are. Give args=, as in args=(tensor('n'), 2.0).")
    return spec
