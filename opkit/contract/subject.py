"""The operator under test, whatever it is: opkit's, ``torch.library``'s, an ``OpOverload``, a plain callable."""

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
    """What is checked.

    Attributes:
        name: "namespace::name", or a function's qualified name.
        target: what the user gave.
        function: calls the operator.
        spec: what its arguments are drawn from.
        reference: says what it computes, if anything does.
        overload: what the dispatcher has of it; None for a plain callable.
        operator: opkit's own object; None for others.
        device: where the arguments are.
        notes: what a property keeps from one case to the next, under its name.
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
        """The schema arguments that it says it writes to."""
        if self.schema is None:
            return ()
        return tuple(a.name for a in self.schema.arguments if a.alias_info is not None and a.alias_info.is_write)

    @property
    def functional(self) -> bool:
        """Whether it says that it writes to no argument."""
        return not self.writes

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that an operator of opkit's has for the device."""
        if self.operator is None:
            return ()
        kind = torch.device(self.device).type
        return tuple(each.name for each in self.operator._operator.kernels.kernels if each.device in (None, kind))

    def call(self, call: Call, function: Callable[..., Any] | None = None) -> CallOutcome:
        """Call the operator, or ``function`` in its place.

        Raises:
            CallRefused: it raised.
        """
        try:
            returned = (function or self.function)(*call.args, **call.kwargs)
        except Exception as error:
            raise CallRefused(error) from error
        return CallOutcome(call, leaves(returned), returned)

    def run(self, case: Case, **how: Any) -> CallOutcome:
        """Make the case's arguments and call the operator; ``how`` is passed on to :meth:`Case.make`."""
        return self.call(case.make(self.device, **how))

    def expect(self, case: Case, **how: Any) -> CallOutcome:
        """The same of the reference."""
        assert self.reference is not None
        return self.call(case.make(self.device, **how), self.reference)


def subject_of(
    target: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    reference: Callable[..., Any] | None = None,
    device: str = "cpu",
) -> Subject:
    """What ``target`` is, as a subject.

    Raises:
        ArgumentError: it is nothing that can be checked, or arguments are neither given nor can be inferred.
    """
    name, function, overload, operator = _identified(target)
    if reference is None and operator is not None:
        reference = operator.reference
    if args is not None or kwargs is not None:
        spec = ArgumentSpecs(tuple(args or ()), tuple((kwargs or {}).items()))
    else:
        spec = _inferred(name, function, overload, operator)
    return Subject(name, target, function, spec, reference, overload, operator, device)


def _identified(target: Any) -> tuple[str, Callable[..., Any], Any, CustomOp[Any, Any] | None]:
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


def _inferred(name: str, function: Any, overload: Any, operator: CustomOp[Any, Any] | None) -> ArgumentSpecs:
    if operator is not None:
        return inference.from_signature(name, operator._operator.signature)
    body = getattr(function, "_init_fn", function)
    found = inference.from_function(name, body) if not isinstance(body, torch._ops.OpOverload) else None
    if found is None and overload is not None:
        return inference.from_schema(name, overload._schema)
    if found is None:
        raise ArgumentError(f"{name}: nothing says what its arguments are. Give args=, as in args=(tensor('n'), 2.0).")
    return found
