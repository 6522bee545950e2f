"""The eager fast path: a function written for one operator's signature.

Dispatching through torch costs several microseconds a call in Python. When nothing needs the dispatcher (no mode, no
transform, no autocast, no profiler, only ordinary dense tensors) a call can go straight to its plan. That test, and the
lookup of the plan by shapes and dtypes, is written out as Python source for the operator's own parameters, as
``dataclasses`` does for ``__init__``; with loops in their place it would cost more than it saves.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opkit.errors import AliasError
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.planning import Plan, make_plan, make_training
from opkit.op.selection import forced_kernels
from opkit.op.signature import Parameter

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_SCALAR_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "dtype": torch.dtype, "device": torch.device}
_MOST_PLANS = 4096

_TEMPLATE = """
def call({parameters}):
    if (dispatch_modes() or functorch_level() is not None or function_modes() or profiling() or any_autocast()
            or forward_ad._current_level >= 0{unusual}):
        return slow({passed})
    plan = plans.get({key})
    if plan is None:
        plan = new_plan({key}, ({positional}), {named})
    if {gradients}:
        train = plan.train
        if train is None:
            train = new_training(plan, ({positional}), {named})
        result = train({passed})
    else:
        result = plan.run({passed})
    if {returned}:
        returned_argument()
    return result
"""


def compile_call(operator: Operator, slow: Callable[..., Any]) -> Callable[..., Any]:
    """The fast call of ``operator``; ``slow`` itself where the signature has no fast form."""
    parameters = operator.signature.parameters
    tensors = [p for p in parameters if p.kind == "tensor"]
    if not _has_fast_form(operator, tensors):
        return slow
    namespace = _namespace(operator, slow)
    source = _TEMPLATE.format(
        parameters=_parameter_list(parameters, namespace),
        unusual="".join(_unusual(p, operator, namespace) for p in parameters),
        key=_key(operator),
        passed=_passed(parameters),
        positional="".join(f"{p.name}, " for p in parameters if not p.keyword_only),
        named="{" + ", ".join(f"'{p.name}': {p.name}" for p in parameters if p.keyword_only) + "}",
        gradients=_gradients(tensors),
        returned=" or ".join(f"result is {p.name}" for p in tensors if not p.optional) or "False",
    )
    exec(compile(source, f"<opkit call of {operator.name}>", "exec"), namespace)
    return namespace["call"]


def _has_fast_form(operator: Operator, tensors: list[Parameter]) -> bool:
    schema = operator.schema
    known = all(p.kind == "tensor" or p.kind in _SCALAR_TYPES for p in operator.signature.parameters)
    named_apart = not any(p.name in _RESERVED for p in operator.signature.parameters)
    written = operator.signature.parameters and len(operator.signature.parameters) == len(schema.arguments)
    plain = not (schema.is_mutable or schema._is_view_op() or operator.signature.flattened)  # pyright: ignore[reportPrivateUsage]
    names = [p.name for p in operator.signature.parameters] == [a.name for a in schema.arguments]
    return bool(tensors) and known and named_apart and bool(written) and plain and names and len(schema.returns) > 0


_RESERVED = {"plans", "plan", "slow", "train", "result", "new_plan", "new_training", "call", "returned_argument"}


def _namespace(operator: Operator, slow: Callable[..., Any]) -> dict[str, Any]:
    plans: dict[Any, Plan] = {}

    def new_plan(key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        plan = make_plan(operator, args, kwargs)
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = plan
        return plan

    def new_training(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        plan.train = make_training(operator, plan, args, kwargs)
        return plan.train

    def returned_argument() -> None:
        raise AliasError(
            f"{operator.name}: the output is one of the inputs and may not alias it. Return a copy, for example x.clone()."
        )

    return {
        "dispatch_modes": private.dispatch_modes,
        "function_modes": private.function_modes,
        "functorch_level": private.functorch_level,
        "profiling": private.profiling,
        "any_autocast": private.any_autocast,
        "forward_ad": private.forward_ad,
        "grad_enabled": private.grad_enabled,
        "plain_types": _PLAIN_TYPES,
        "strided": torch.strided,
        "plans": plans,
        "slow": slow,
        "new_plan": new_plan,
        "new_training": new_training,
        "returned_argument": returned_argument,
    }


def _parameter_list(parameters: tuple[Parameter, ...], namespace: dict[str, Any]) -> str:
    written: list[str] = []
    for p in parameters:
        if p.keyword_only and "*" not in written:
            written.append("*")
        if p.required:
            written.append(p.name)
        else:
            namespace[f"default_{p.name}"] = p.default
            written.append(f"{p.name}=default_{p.name}")
    return ", ".join(written)


def _passed(parameters: tuple[Parameter, ...]) -> str:
    return ", ".join(f"{p.name}={p.name}" if p.keyword_only else p.name for p in parameters)


def _unusual(p: Parameter, operator: Operator, namespace: dict[str, Any]) -> str:
    if p.kind != "tensor":
        namespace[f"type_{p.kind}"] = _SCALAR_TYPES[p.kind]
        test = f"type({p.name}) is not type_{p.kind}"
    else:
        test = f"type({p.name}) not in plain_types"
        if operator.kernels.kernels:  # a kernel may read memory as it lies: no sparse layout, no lazy negation
            test += f" or {p.name}.layout is not strided or {p.name}.is_neg() or {p.name}.is_conj()"
        test = f"({test})"
    return f" or ({p.name} is not None and {test})" if p.optional else f" or {test}"


def _key(operator: Operator) -> str:
    conditional = any(kernel.when is not None for kernel in operator.kernels.kernels)
    tuned = any(kernel.autotune for kernel in operator.kernels.kernels)
    parts: list[str] = []
    for p in operator.signature.parameters:
        if p.kind == "tensor":
            strides = f", {p.name}.stride()" if conditional or tuned else ""
            text = f"{p.name}.shape, {p.name}.dtype, {p.name}.device{strides}"
            parts.append(f"None if {p.name} is None else ({text})" if p.optional else text)
        elif p.kind != "float" or conditional:
            parts.append(p.name)
    return f"({', '.join(parts)},)"


def _gradients(tensors: list[Parameter]) -> str:
    wanted = [
        f"({p.name} is not None and {p.name}.requires_grad)" if p.optional else f"{p.name}.requires_grad" for p in tensors
    ]
    return f"({' or '.join(wanted)}) and grad_enabled()"


class GenericCall:
    """The same plans without a written-out key, for arguments that the fast form does not cover."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.plans: dict[Any, Plan] = {}

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """The plan of a call, made when its shapes are first seen."""
        key = (forced_kernels.get().get(self.operator.name), _generic_key(args, kwargs))
        plan = self.plans.get(key)
        if plan is None:
            plan = make_plan(self.operator, args, kwargs)
            if len(self.plans) >= _MOST_PLANS:
                self.plans.clear()
            self.plans[key] = plan
        return plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan(args, kwargs)
        if not (private.grad_enabled() and private.any_requires_grad(*args, **kwargs)):
            return plan.run(*args, **kwargs)
        if plan.train is None:
            plan.train = make_training(self.operator, plan, args, kwargs)
        return plan.train(*args, **kwargs)


def _generic_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs:
        args = (*args, *kwargs.items())
    return tuple([_key_of(arg) for arg in args])


def _key_of(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.shape, arg.dtype, arg.device, arg.stride() if arg.layout is torch.strided else arg.layout
    if isinstance(arg, (list, tuple)):
        return tuple([_key_of(item) for item in arg])
    return type(arg), arg
