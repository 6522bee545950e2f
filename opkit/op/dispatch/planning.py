"""Decide how eager calls of one set of shapes run: by which kernel, with which checks and with which gradients.

``fastcall`` looks plans up and calls :func:`make_plan` for shapes that are new. A plan's first call verifies the kernel
(``verification``); later calls go straight to the kernel.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkit import config
from opkit.errors import NoKernelError
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch import selection
from opkit.op.dispatch.selection import REFERENCE, RegisteredKernel, Selection, leaves
from opkit.op.dispatch.verification import bound_arguments, check_arguments, run_verified
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.rules.autograd import (
    AutogradCall,
    RegisteredRule,
    apply,
    counts_of,
    has_flattened_lists,
    restore,
    unflattened_lists,
)


class CallPlan:
    """How calls of one set of shapes run: ``run`` computes; ``train`` computes and records gradients (made at first use).

    ``uses`` counts the look-ups since a guard was last installed for the plan. ``patience`` is the number of look-ups after
    which the next guard is installed. It doubles each time, so that calls of changing shapes do not spend their time on
    installing guards.
    """

    __slots__ = ("kernel", "patience", "run", "train", "uses")

    def __init__(self, kernel: str, run: Callable[..., Any]) -> None:
        self.kernel = kernel
        self.run = run
        self.train: Callable[..., Any] | None = None
        self.uses, self.patience = 0, 2


def make_plan(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> CallPlan:
    """Return the plan of calls of these shapes. Its first run verifies; later ones go straight to the kernel."""
    binding = check_arguments(operator, args, kwargs)
    if _runs_fake(operator, args, kwargs):
        keys = private.DispatchKeySet(
            private.DispatchKey.Meta
        )  # the fake implementation is registered for meta tensors
        return CallPlan("fake", lambda *args, **kwargs: operator.overload.redispatch(keys, *args, **kwargs))
    kernel = _choose_built(operator, args, kwargs)
    name = REFERENCE if kernel is None else kernel.name
    function = operator.body if kernel is None else kernel.function
    if kernel is not None and kernel.prepared:
        function = kernel.function.prepare(*args, **kwargs)  # type: ignore[attr-defined]  # pyright: ignore
    native: Any = kernel.function if kernel is not None and kernel.native else None
    plan = CallPlan(name, function)

    def first(*args: Any, **kwargs: Any) -> Any:
        capturing = selection.capturing()  # results cannot be read back while a CUDA graph is captured
        try:
            plan.run = run = function if native is None else native.prepare(args, kwargs)
            output, plan.run = run_verified(operator, kernel, run, args, kwargs, binding, not capturing)
        except BaseException:
            plan.run = first
            raise
        if capturing:
            plan.run = first
            return output
        if native is not None and plan.run is run:
            plan.run = native.settle(args, kwargs, run)
        return output

    settings = config.get()
    verifies = settings.verify_all or (settings.verify and not (kernel is not None and kernel.trusted))
    if verifies or native is not None:
        plan.run = first
    return plan


def _runs_fake(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the fake implementation runs the call, because tensors on the meta device hold no data."""
    tensors = [leaf for leaf in leaves(args, kwargs) if isinstance(leaf, torch.Tensor)]
    if operator.device(args, kwargs) != "meta" and not any(tensor.is_meta for tensor in tensors):
        return False
    if any(kernel.device == "meta" for kernel in operator.kernels.kernels):
        return False
    # the reference itself is as good as the fake implementation derived from it, and keeps torch's own gradients
    return bool(operator.registered.fake or operator.kernels.serves("meta") or not operator.transparent(args, kwargs))


def _choose_built(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> RegisteredKernel | None:
    """Return the kernel of a call, built; a kernel that no compiler can build here refuses from then on."""
    while True:
        kernel, _ = choose(operator, args, kwargs)
        native: Any = None if kernel is None or not kernel.native else kernel.function
        if native is None or native.ready():
            return kernel


observers: list[Callable[[Operator, Sequence[Any], dict[str, Any]], None]] = []
"""Are called with each call of an operator that a profiler records, before it runs: the operator and its arguments."""


def select(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Selection:
    """Return which kernel a call would run, and why each other one is refused."""
    kernel, refused = choose(operator, args, kwargs)
    if kernel is not None and operator.explicit_reference is None:
        refused = {**refused, REFERENCE: f"{kernel.name} is preferred"}
    notes: Sequence[str] = ()
    if kernel is not None and isinstance(kernel.function, PreparedKernel):
        notes = kernel.function.notes(*bound_arguments(operator, args, kwargs).values())
    return Selection(operator.name, REFERENCE if kernel is None else kernel.name, refused, tuple(notes))


def choose(
    operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[RegisteredKernel | None, dict[str, str]]:
    """Return the kernel of a call (None: the reference), and the reason of each one refused.

    Raises:
        NoKernelError: no kernel takes the call, and the reference itself is limited to other devices.
    """
    device = operator.device(args, kwargs)
    accepted, refused = eligible(operator, args, kwargs)
    tuned = [kernel for kernel in accepted if kernel.autotune]
    if tuned and accepted[0].autotune:
        fastest = selection.fastest(operator.name, tuned, args, kwargs, device)
        refused |= {k.name: f"{fastest.name} was measured to be faster" for k in accepted if k is not fastest}
        return fastest, refused
    if accepted:
        return accepted[0], refused | {k.name: f"{accepted[0].name} is preferred" for k in accepted[1:]}
    if operator.device_types is not None and device not in operator.device_types and device != "meta":
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
        raise NoKernelError(
            f"{operator.opname} does not have a kernel registered for {device}. Please use register_kernel to do so.{reasons}"
        )
    return None, refused


def eligible(
    operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[RegisteredKernel], dict[str, str]]:
    """Return the kernels that take a call through the schema, the preferred one first, and the reason of each one refused."""
    values = bound_arguments(operator, args, kwargs) if operator.kernels.kernels else {}
    return operator.kernels.eligible((), values, operator.device(args, kwargs), (args, kwargs))


# ---- calls that record gradients -------------------------------------------------------------------------------------


def make_training(
    operator: Operator, plan: CallPlan, args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Return how calls of these shapes run when gradients are recorded, on ordinary tensors in eager mode.

    The kernel runs within an autograd node. Everything that does not depend on the tensors is decided here, once for a plan.
    """
    if plan.kernel == REFERENCE and operator.self_differentiating(args, kwargs):
        return lambda *args, **kwargs: plan.run(*args, **kwargs)
    rule = operator.rule(args, kwargs)
    counts, function = counts_of(args), operator.autograd_function
    flattened = has_flattened_lists(counts)
    trimmed_defaults: list[Any] = []
    if isinstance(rule, RegisteredRule):
        if (setup := _simple_setup(operator, rule, args, kwargs, flattened)) is not None:
            return _simple_training(operator, plan, rule, args, setup)
        # the dispatcher drops trailing arguments that equal their defaults, and the author's rule may count on it
        if not operator.signature.flattened:
            trimmed_defaults = [p.default for p in operator.signature.parameters if not p.keyword_only]

    def train(*args: Any, **kwargs: Any) -> Any:
        if trimmed_defaults:
            args = _trimmed(args, trimmed_defaults)
        call = AutogradCall(plan.run, rule, kwargs, True, counts and counts[: len(args)], flattened)
        return restore(call, apply(function, call, args))

    return train


def _simple_setup(
    operator: Operator, rule: RegisteredRule, args: Sequence[Any], kwargs: dict[str, Any], flattened: bool
) -> Callable[..., Any] | None:
    """Return the rule's ``setup_context`` if autograd nodes can take arguments and results of such calls as they are."""
    listed = flattened or any(str(r.type).startswith("List") for r in operator.schema.returns)
    if listed or not all(parameter.required for parameter in operator.signature.parameters):
        return None
    return rule.setup_of(args, kwargs)


def _simple_training(
    operator: Operator, plan: CallPlan, rule: RegisteredRule, args: Sequence[Any], setup: Callable[..., Any]
) -> Callable[..., Any]:
    """As :func:`make_training`, with one :class:`AutogradCall` for all calls."""
    counts = counts_of(args)
    call = AutogradCall(plan.run, rule, {}, True, counts, setup=setup, unflattened=unflattened_lists(counts))
    record = operator.autograd_function.apply

    def train(*args: Any) -> Any:
        call.run = plan.run  # the first call replaces it
        return record(*args, call)

    return train


def _trimmed(args: tuple[Any, ...], defaults: list[Any]) -> tuple[Any, ...]:
    count = len(args)
    while count:
        value, default = args[count - 1], defaults[count - 1]
        if value is not default and (
            isinstance(value, torch.Tensor) or type(value) is not type(default) or value != default
        ):
            break
        count -= 1
    return args[:count]
