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

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkit.errors import AliasError
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch import fastcall_source
from opkit.op.dispatch.planning import Plan, make_plan
from opkit.op.dispatch.selection import forced_kernels
from opkit.op.dispatch.training import make_training

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_MOST_PLANS, _MOST_ENTRIES = 4096, 4


class Entry:
    """A guard and what to run when it holds.

    ``recorded`` says whether gradients must be recorded in this thread, or must not; None: no tensor requires grad.
    """

    __slots__ = ("check", "flags", "go", "plan", "recorded")

    def __init__(
        self,
        check: Callable[..., bool],
        flags: tuple[Any, ...],
        plan: Plan,
        go: Callable[..., Any],
        recorded: bool | None,
    ) -> None:
        self.check = check
        self.flags = flags
        self.plan = plan
        self.go = go
        self.recorded = recorded


class Binding:
    """What holds, and lets go of, the function that runs an operator's calls of one kind.

    ``go`` is None where there is none. It may be called for tensors for which a guard like the operator's own holds, while
    gradients are recorded or not as they were, and while :func:`undisturbed`.
    """

    __slots__ = ("__weakref__", "go")

    def __init__(self) -> None:
        self.go: Callable[..., Any] | None = None


def undisturbed() -> bool:
    """Whether nothing of this thread, beside what guards look at, wants to see calls: no mode, profiler or forward gradient."""
    seen = private.profiling() or private.function_modes() or private.dispatch_modes()
    return not seen and private.forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]


class FastCalls:
    """The written functions of one operator, for direct calls and for the Autograd kernel."""

    call: Callable[..., Any]
    dispatched: Callable[..., Any]
    planned: Callable[..., Any]
    bound: Callable[..., Any]  # what a call with these arguments runs, once that is known; None before

    def __init__(self) -> None:
        self.bindings: weakref.WeakSet[Binding] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._written: dict[str, Any] = {}
        self._writing: Callable[[], dict[str, Any]] | None = None
        self._operator: Operator | None = None

    def bind(self, binding: Binding, *args: Any, **kwargs: Any) -> None:
        """Let ``binding`` run what calls like this one run, until the functions are written anew."""
        with self._lock:
            binding.go = self.bound(*args, **kwargs)
            if binding.go is not None:
                self.bindings.add(binding)

    def _let_go(self) -> None:
        with self._lock:
            self.bound = lambda *args, **kwargs: None
            for binding in list(self.bindings):
                binding.go = None
            self.bindings.clear()

    def renew(
        self, operator: Operator, slow: Callable[..., Any], decide: Callable[..., Any], generic: Callable[..., Any]
    ) -> None:
        """Have the functions written anew, without plans, when one of them is called first.

        Args:
            operator: whose signature and kernels they are written for.
            slow: calls through the dispatcher.
            decide: the Autograd kernel for calls that are not plain.
            generic: runs plain calls where the signature has no written form.
        """
        self._written = {}
        self._writing = None
        if fastcall_source.has_fast_form(operator):
            self._writing = functools.partial(_functions, operator, slow, decide, generic)
            self._operator = operator
        self.suspend(slow, decide, generic)
        self.resume()

    def _write(self) -> None:
        """Write the functions, and have the operator take them."""
        with self._lock:
            writing, self._writing = self._writing, None
            if writing is not None:
                self._written = writing()
        operator = self._operator
        if writing is not None and operator is not None:
            with operator.lock:
                operator.refreshed(renewed=False)

    def _late(self, name: str) -> Callable[..., Any]:
        """The function of this name, which is written by its first call."""

        def first(*args: Any, **kwargs: Any) -> Any:
            self._write()
            found = self._written.get(name)
            return (found or getattr(self, name))(*args, **kwargs)

        return first

    def suspend(self, slow: Callable[..., Any], decide: Callable[..., Any], generic: Callable[..., Any]) -> None:
        """Do without the written functions; the arguments are those of :meth:`renew`."""
        self._let_go()
        self.call, self.dispatched, self.planned = slow, decide, generic

    def resume(self) -> None:
        """Take the functions that were written last, if there are any, without their plans; or those that are to be written."""
        if self._writing is not None:
            self.call, self.dispatched, self.planned = map(self._late, ("call", "dispatched", "planned"))
        if not self._written:
            return
        self._written["_opkit_plans"].clear()
        self._written["_opkit_entries"].clear()
        self.call, self.dispatched = self._written["call"], self._written["dispatched"]
        self.planned, self.bound = self._written["planned"], self._written["bound"]


def _functions(
    operator: Operator, slow: Callable[..., Any], decide: Callable[..., Any], generic: Callable[..., Any]
) -> dict[str, Any]:
    """The functions for an operator, as written out, and what they use."""
    namespace = _namespace(operator, slow, decide, generic)
    source = fastcall_source.source(operator, namespace)
    exec(compile(source, f"<opkit call of {operator.name}>", "exec"), namespace)
    return namespace


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
        if not tensors or any(tensor is None for tensor in tensors):
            return
        go = plan.train if training else plan.run
        assert go is not None
        recorded = bool(training) if any(tensor.requires_grad for tensor in tensors) else None
        entry = Entry(private.tensor_guard(tensors, strict), flags, plan, go, recorded)
        if not entry.check(*tensors):  # the guard refuses a tensor given twice
            return
        entries[:] = [entry, *[old for old in entries if old.go is not go][: _MOST_ENTRIES - 1]]

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
