"""The eager fast path: functions written for one operator's signature.

Dispatching through torch costs several microseconds a call in Python. When nothing needs the dispatcher (no mode, no
transform, no autocast, no profiler, only ordinary dense tensors) a call can go straight to its plan. Two functions are
written out as Python source for the operator's own parameters, as ``dataclasses`` does for ``__init__``; with loops in
their place they would cost more than they save:

- ``call`` asks one compiled guard, the one that torch.compile's own programs use (``TensorGuards``: types, dispatch keys
  with the thread's modes, dtypes, devices, sizes, whether gradients are needed), whether this call is like the last;
- ``planned`` looks the plan up by shapes, dtypes and flags, and installs that guard once a plan has come up often.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_RESERVED = {"plan", "result", "training", "entry", "keyset"}

_TEMPLATE = """
def call({parameters}):
    for entry in entries:
        if (entry.check({tensors}){same} and not (profiling() or function_modes() or dispatch_modes())
                and forward_ad._current_level < 0):
            result = entry.go({passed})
            if {returned}:
                returned_argument()
            return result
    if (dispatch_modes() or functorch_level() is not None or function_modes() or profiling() or any_autocast()
            or jit_tracing() or forward_ad._current_level >= 0{unusual}):
        return slow({passed})
    return planned({passed})

def dispatched(keyset, {parameters}):
    for entry in entries:
        if entry.check({tensors}){same} and not (profiling() or dispatch_modes()) and forward_ad._current_level < 0:
            result = entry.go({passed})
            if {returned}:
                returned_argument()
            return result
    return decide(keyset, {passed})

def planned({parameters}):
    try:
        plan = plans.get({key})
    except AttributeError:  # None for a tensor, which the dispatcher lets through
        return generic({passed})
    if plan is None:
        plan = new_plan({key}, ({positional}), {named})
    if {gradients}:
        if plan.train is None:
            new_training(plan, ({positional}), {named})
        result = plan.train({passed})
        training = 1
    else:
        result = plan.run({passed})
        training = 0
    if {returned}:
        returned_argument()
    plan.uses += 1
    if plan.uses >= plan.patience:
        install(training, plan, ({tensors},), ({flags}))
    return result
"""


class Entry:
    """A guard and what to run when it holds."""

    __slots__ = ("check", "flags", "go", "plan")

    def __init__(self, check: Callable[..., bool], flags: tuple[Any, ...], plan: Plan, go: Callable[..., Any]) -> None:
        self.check = check
        self.flags = flags
        self.plan = plan
        self.go = go


class FastCalls:
    """The written functions of one operator, for direct calls and for the Autograd kernel."""

    call: Callable[..., Any]
    dispatched: Callable[..., Any]
    planned: Callable[..., Any]

    def renew(
        self, operator: Operator, slow: Callable[..., Any], decide: Callable[..., Any], generic: Callable[..., Any]
    ) -> None:
        """Write the functions anew, without plans.

        Args:
            operator: whose signature and kernels they are written for.
            slow: calls through the dispatcher.
            decide: the Autograd kernel for calls that are not plain.
            generic: runs plain calls where the signature has no written form.
        """
        self.call, self.dispatched, self.planned = slow, decide, generic
        tensors = [p for p in operator.signature.parameters if p.kind == "tensor"]
        if _has_fast_form(operator, tensors):
            namespace = _namespace(operator, slow, decide, generic)
            source = _source(operator, tensors, namespace)
            exec(compile(source, f"<opkit call of {operator.name}>", "exec"), namespace)
            self.call, self.dispatched, self.planned = (namespace[n] for n in ("call", "dispatched", "planned"))


def _has_fast_form(operator: Operator, tensors: list[Parameter]) -> bool:
    schema, parameters = operator.schema, operator.signature.parameters
    known = all(p.kind == "tensor" or p.kind in _SCALAR_TYPES for p in parameters)
    named_apart = not any(p.name in _RESERVED or p.name.startswith("_opkit") for p in parameters)
    plain = not (schema.is_mutable or schema._is_view_op() or operator.signature.flattened)  # pyright: ignore[reportPrivateUsage]
    same_names = [p.name for p in parameters] == [a.name for a in schema.arguments]
    return bool(tensors) and known and named_apart and plain and same_names and len(schema.returns) > 0


def _source(operator: Operator, tensors: list[Parameter], namespace: dict[str, Any]) -> str:
    parameters = operator.signature.parameters
    conditional = any(kernel.when is not None or kernel.autotune for kernel in operator.kernels.kernels)
    flags = [p for p in parameters if p.kind != "tensor" and (p.kind != "float" or conditional)]
    text = _TEMPLATE.format(
        parameters=_parameter_list(parameters, namespace),
        tensors=", ".join(p.name for p in tensors),
        same=_same(parameters, flags, namespace),
        flags="".join(f"{p.name}, " for p in flags),
        unusual="".join(_unusual(p, operator, namespace) for p in parameters),
        key=_key(parameters, conditional, bool(operator.kernels.kernels), bool(operator.device_types)),
        passed=", ".join(f"{p.name}={p.name}" if p.keyword_only else p.name for p in parameters),
        positional="".join(f"{p.name}, " for p in parameters if not p.keyword_only),
        named="{" + ", ".join(f"'{p.name}': {p.name}" for p in parameters if p.keyword_only) + "}",
        gradients=_gradients(tensors),
        returned=" or ".join(f"result is {p.name}" for p in tensors if not p.optional) or "False",
    )
    for name in _HELPERS:  # the helpers' names are prefixed, so that no parameter can hide one
        text = text.replace(f"{name}(", f"_opkit_{name}(").replace(f" {name}:", f" _opkit_{name}:")
    text = text.replace("forward_ad.", "_opkit_forward_ad.").replace("plans.get", "_opkit_plans.get")
    return text.replace("def _opkit_planned(", "def planned(")


_HELPERS = ("profiling", "function_modes", "returned_argument", "dispatch_modes", "functorch_level", "any_autocast", "slow",
            "jit_tracing", "planned", "decide", "generic", "new_plan", "new_training", "install", "grad_enabled",
            "entries")  # fmt: skip


def _namespace(
    operator: Operator, slow: Callable[..., Any], decide: Callable[..., Any], generic: Callable[..., Any]
) -> dict[str, Any]:
    plans: dict[Any, Plan] = {}
    entries: list[Entry] = []
    strict = bool(operator.kernels.kernels)  # into whose layout results are put depends on the arguments' strides

    def new_plan(key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        plan = make_plan(operator, args, kwargs)
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = plan
        return plan

    def new_training(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan.train = make_training(operator, plan, args, kwargs)

    def install(training: int, plan: Plan, tensors: Sequence[Any], flags: tuple[Any, ...]) -> None:
        plan.uses, plan.patience = 0, plan.patience * 2
        if any(tensor is None for tensor in tensors):
            return
        go = plan.train if training else plan.run
        assert go is not None
        entry = Entry(private.tensor_guard(tensors, strict), flags, plan, go)
        if not entry.check(*tensors):  # the guard refuses a tensor given twice
            return
        kept = [old for old in entries if (old.go is old.plan.train) != bool(training)]
        entries[:] = [entry, *kept]

    def returned_argument() -> None:
        raise AliasError(
            f"{operator.name}: the output is one of the inputs and may not alias it. Return a copy, for example x.clone()."
        )

    helpers: dict[str, Any] = {
        "dispatch_modes": private.dispatch_modes, "function_modes": private.function_modes,
        "functorch_level": private.functorch_level, "profiling": private.profiling, "any_autocast": private.any_autocast,
        "jit_tracing": private.jit_tracing,
        "forward_ad": private.forward_ad, "grad_enabled": private.grad_enabled, "plans": plans, "entries": entries,
        "slow": slow, "decide": decide, "generic": generic, "new_plan": new_plan, "new_training": new_training,
        "install": install, "returned_argument": returned_argument, "plain_types": _PLAIN_TYPES, "strided": torch.strided,
    }  # fmt: skip
    namespace = {f"_opkit_{name}": value for name, value in helpers.items()}

    def planned(*args: Any, **kwargs: Any) -> Any:
        return namespace["planned"](*args, **kwargs)

    namespace["_opkit_planned"] = planned
    return namespace


def _parameter_list(parameters: tuple[Parameter, ...], namespace: dict[str, Any]) -> str:
    written: list[str] = []
    for p in parameters:
        if p.keyword_only and "*" not in written:
            written.append("*")
        if p.required:
            written.append(p.name)
        else:
            namespace[f"_opkit_default_{p.name}"] = p.default
            written.append(f"{p.name}=_opkit_default_{p.name}")
    return ", ".join(written)


def _same(parameters: tuple[Parameter, ...], flags: list[Parameter], namespace: dict[str, Any]) -> str:
    tests: list[str] = []
    for p in parameters:
        if p.kind != "tensor":
            namespace[f"_opkit_type_{p.kind}"] = _SCALAR_TYPES[p.kind]
            test = f"type({p.name}) is _opkit_type_{p.kind}"
            tests.append(f"({p.name} is None or {test})" if p.optional else test)
    if flags:
        tests.append(f"({''.join(f'{p.name}, ' for p in flags)}) == entry.flags")
    return "".join(f" and {test}" for test in tests)


def _unusual(p: Parameter, operator: Operator, namespace: dict[str, Any]) -> str:
    if p.kind != "tensor":
        test = f"type({p.name}) is not _opkit_type_{p.kind}"
    else:
        test = f"type({p.name}) not in _opkit_plain_types"
        if operator.kernels.kernels:  # a kernel may read memory as it lies: no sparse layout, no lazy negation
            test += f" or {p.name}.layout is not _opkit_strided or {p.name}.is_neg() or {p.name}.is_conj()"
        test = f"({test})"
    return f" or ({p.name} is not None and {test})" if p.optional else f" or {test}"


def _key(parameters: tuple[Parameter, ...], conditional: bool, kernels: bool, limited: bool) -> str:
    parts: list[str] = []
    for p in parameters:
        if p.kind == "tensor":
            text = f"{p.name}.shape, {p.name}.dtype" + (f", {p.name}.device" if kernels or limited else "")
            text += f", {p.name}.stride()" if kernels else ""
            parts.append(f"None if {p.name} is None else ({text})" if p.optional else text)
        elif p.kind != "float" or conditional:
            parts.append(p.name)
    return f"({', '.join(parts)},)"


def _gradients(tensors: list[Parameter]) -> str:
    wanted = [
        f"({p.name} is not None and {p.name}.requires_grad)" if p.optional else f"{p.name}.requires_grad"
        for p in tensors
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
