"""The eager fast path: functions written for one operator's signature.

Dispatching through torch costs several microseconds a call in Python. When nothing needs the dispatcher (no mode, no
transform, no profiler, only ordinary dense tensors) a call can go straight to its plan. Functions are generated as Python
source for the operator's own parameters (``fastcall_source``), as ``dataclasses`` does for ``__init__``; loops over the
parameters would cost more than they save:

- ``call`` evaluates one compiled guard, the one that torch.compile's own programs use (``TensorGuards``: types, dispatch keys
  with the thread's modes, dtypes, devices, sizes, need of gradients), to see whether this call is like a recent one;
- ``planned`` looks the plan up by shapes, dtypes and flags (``planning`` makes it if it is new), and installs that guard once
  the plan is used often;
- ``dispatched`` and ``below`` do the same for the Autograd kernel and the one below it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from opkit.errors import AliasError
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch import fastcall_source
from opkit.op.dispatch.guards import Guards, guard, kind_of
from opkit.op.dispatch.planning import CallPlan, make_plan, make_training
from opkit.op.dispatch.selection import forced_kernels

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_MAX_PLANS, _MAX_ENTRIES, _MAX_COUNTED = 4096, 4, 256

T = TypeVar("T")


class AutocastKernel:
    """The Autocast kernel of a device type: it runs ``below[0]`` with autocast off. ``casts``: that casts arguments first."""

    def __init__(self, key: Any, make: Callable[..., Callable[..., Any]]) -> None:
        self.key = key
        self.below: list[Callable[..., Any]] = [make]
        self.casts = True
        self._make = make
        self.kernel = private.untraced(make(private.is_excluded, private.set_excluded, key, self.below))

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``fn`` with autocast off."""
        return self._make(private.is_excluded, private.set_excluded, self.key, [fn])


class Routes(NamedTuple):
    """The functions that run calls which the generated functions do not.

    Attributes:
        slow: calls through the dispatcher.
        decide: the Autograd kernel for calls that are not plain.
        generic: runs plain calls where the signature has no generated form.
        backend: the kernel below autograd.
        autocast: the Autocast kernel of each device type.
    """

    slow: Callable[..., Any]
    decide: Callable[..., Any]
    generic: Callable[..., Any]
    backend: Callable[..., Any]
    autocast: dict[str, AutocastKernel]


class DirectCall:
    """A holder of the function that runs an operator's calls of one kind without the dispatcher.

    ``fn`` is None until a call is bound, and again when the operator changes. It may be called for tensors for which a guard
    like the operator's own holds, while the thread records gradients or not as it did then, and while
    :func:`no_active_modes` holds.
    """

    __slots__ = ("__weakref__", "fn")

    def __init__(self) -> None:
        self.fn: Callable[..., Any] | None = None


def no_active_modes() -> bool:
    """Return whether this thread has no mode, profiler or forward gradient that must see calls; guards test the rest."""
    active = private.profiling() or private.function_modes() or private.dispatch_modes()
    return not active and private.forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]


class FastCalls:
    """The generated functions of one operator, for direct calls and for the Autograd kernel.

    The first four are set to functions that do without generated code while a kernel is forced, and
    for signatures that have no generated form. ``bound`` returns the function that calls with these arguments run; None until
    a guard is installed for them.
    """

    call: Callable[..., Any]
    dispatched: Callable[..., Any]
    planned: Callable[..., Any]
    below: Callable[..., Any]
    bound: Callable[..., Any]

    def __init__(self) -> None:
        self.bindings: weakref.WeakSet[DirectCall] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._generated: dict[str, Any] = {}
        self._generate: Callable[[], dict[str, Any]] | None = None
        self._operator: Operator | None = None

    def bind(self, binding: DirectCall, *args: Any, **kwargs: Any) -> None:
        """Let ``binding`` run what calls like this one run, until the operator changes."""
        with self._lock:
            binding.fn = self.bound(*args, **kwargs)
            if binding.fn is not None:
                self.bindings.add(binding)

    def _release_bindings(self) -> None:
        with self._lock:
            self.bound = lambda *args, **kwargs: None
            for binding in list(self.bindings):
                binding.fn = None
            self.bindings.clear()

    def renew(self, operator: Operator, routes: Routes) -> None:
        """Forget all plans, and generate the functions for this operator again when one of them is next called."""
        self._generated = {}
        self._generate = None
        if fastcall_source.has_fast_form(operator):
            self._generate = functools.partial(_functions, operator, routes)
            self._operator = operator
        self.suspend(routes)
        self.resume()

    def _generating(self, name: str) -> Callable[..., Any]:
        """Return a stand-in for the function of this name that generates the functions at its first call."""

        def first(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                generate, self._generate = self._generate, None
                if generate is not None:
                    self._generated = generate()
            operator = self._operator
            if generate is not None and operator is not None:
                with operator.lock:
                    operator.refreshed(renewed=False)
            return (self._generated.get(name) or getattr(self, name))(*args, **kwargs)

        return first

    def suspend(self, routes: Routes) -> None:
        """Do without the generated functions."""
        self._release_bindings()
        self.call, self.dispatched, self.planned, self.below, _ = routes

    def resume(self) -> None:
        """Use the functions that were generated last, without their plans, or those that the next call will generate."""
        if self._generate is not None:
            names = ("call", "dispatched", "planned", "below")
            self.call, self.dispatched, self.planned, self.below = map(self._generating, names)
        if not self._generated:
            return
        self._generated["_opkit_plans"].clear()
        self._generated["_opkit_entries"].clear()
        self.call, self.dispatched = self._generated["call"], self._generated["dispatched"]
        self.planned, self.bound = self._generated["planned"], self._generated["bound"]
        self.below = self._generated.get("below", self._first_below)

    def _first_below(self, *args: Any, **kwargs: Any) -> Any:
        assert self._operator is not None
        with self._operator.lock:
            if self.below == self._first_below:
                _define(self._operator, self._generated, fastcall_source.BELOW)
                self.below = self._generated["below"]
        return self.below(*args, **kwargs)


def _functions(operator: Operator, routes: Routes) -> dict[str, Any]:
    """Return the generated functions of an operator and the names that they use, as one namespace."""
    namespace = _namespace(operator, routes)
    _define(operator, namespace, fastcall_source.CALLS)
    namespace["_opkit_planned"] = namespace["planned"]
    return namespace


def _define(operator: Operator, namespace: dict[str, Any], template: str) -> None:
    source = fastcall_source.source(operator, namespace, template)
    exec(compile(source, f"<opkit call of {operator.name}>", "exec"), namespace)


def _namespace(operator: Operator, routes: Routes) -> dict[str, Any]:
    plans: dict[Any, CallPlan] = {}
    autocast = {device: CallPlan("autocast", kernel.kernel) for device, kernel in routes.autocast.items()}
    guards = Guards(strides=bool(operator.kernels.kernels))  # results are copied into a layout that depends on them

    def new_plan(key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        plan = make_plan(operator, args, kwargs)
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        plans[key] = plan
        return plan

    def new_training(plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan.train = make_training(operator, plan, args, kwargs)

    def plan_for(
        known: dict[Any, CallPlan], sizes: Any, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallPlan:
        if len(known) >= _MAX_PLANS:
            known.clear()
        known[sizes] = plan = plans.get(key) or new_plan(key, args, kwargs)
        return plan

    def any_size(known: dict[Any, CallPlan], training: bool) -> Callable[..., Any]:
        if "any_size" not in namespace:
            _define(operator, namespace, fastcall_source.ANY_SIZE)
        return namespace["any_size"](known, training)

    def install(training: bool, plan: CallPlan, tensors: Sequence[Any], flags: tuple[Any, ...]) -> None:
        plan.uses, plan.patience = 0, plan.patience * 2
        if tensors and not any(tensor is None for tensor in tensors):
            guards.install(training, plan, any_size, tensors, flags)

    def install_around(plan: CallPlan, kernel: AutocastKernel, tensors: Sequence[Any], flags: tuple[Any, ...]) -> None:
        private.set_excluded(kernel.key, True)
        try:
            inner = None if kernel.casts else guards.holding(tensors, flags)
        finally:
            private.set_excluded(kernel.key, False)
        if inner is not None:
            plan.uses, plan.patience = 0, plan.patience * 2
            kind = kind_of(tensors, flags, inner.recorded)
            guards.add(kernel.around(inner.fn), inner.plan, inner.recorded, kind, tensors, flags)

    def under_autocast(tensors: Sequence[Any], flags: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        device, *others = {tensor.device.type for tensor in tensors} or ("",)
        if others or device not in autocast or not torch.is_autocast_enabled(device):
            return routes.slow(*args, **kwargs)
        plan = autocast[device]
        plan.uses += 1
        if plan.uses >= plan.patience:
            install_around(plan, routes.autocast[device], tensors, flags)
        return plan.run(*args, **kwargs)

    def returned_argument() -> None:
        raise AliasError(
            f"{operator.name}: the output is one of the inputs and may not alias it. Return a copy, for example x.clone()."
        )

    helpers: dict[str, Any] = {
        "dispatch_modes": private.dispatch_modes, "function_modes": private.function_modes,
        "functorch_level": private.functorch_level, "profiling": private.profiling, "any_autocast": private.any_autocast,
        "jit_tracing": private.jit_tracing, "forward_ad": private.forward_ad, "grad_enabled": private.grad_enabled,
        "plans": plans, "entries": guards.entries, "new_plan": new_plan, "plan_for": plan_for, "new_training": new_training,
        "install": install, "under_autocast": under_autocast, "returned_argument": returned_argument,
        "plain_types": PLAIN_TYPES, "strided": torch.strided, **routes._asdict(),
    }  # fmt: skip
    namespace = {f"_opkit_{name}": value for name, value in helpers.items()}
    return namespace


class GenericCall:
    """The same plans without generated code, for arguments that the generated functions do not cover."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.plans: dict[Any, CallPlan] = {}

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        """Return the plan of a call; it is made when its shapes are first seen."""
        values = (*args, *kwargs.items()) if kwargs else args
        key = (forced_kernels.get().get(self.operator.name), tuple([_key_of(value) for value in values]))
        plan = self.plans.get(key)
        if plan is None:
            plan = make_plan(self.operator, args, kwargs)
            if len(self.plans) >= _MAX_PLANS:
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


def _key_of(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.shape, arg.dtype, arg.device, arg.stride() if arg.layout is torch.strided else arg.layout
    if isinstance(arg, (list, tuple)):
        return tuple([_key_of(item) for item in arg])
    return type(arg), arg


# ---- results cached by a guard --------------------------------------------------------------------------------------


class GuardedResult(DirectCall, Generic[T]):
    """A cached result: it holds for calls whose flags are equal and for whose tensors ``check`` is true."""

    __slots__ = ("check", "flags", "result")

    def __init__(self, flags: Any, check: Callable[..., bool], result: T) -> None:
        super().__init__()
        self.flags, self.check, self.result = flags, check, result


def bind(op: Any, binding: DirectCall, *args: Any, **kwargs: Any) -> None:
    """Let ``binding`` run plain calls of ``op`` like this one directly, once one has run, until the operator changes."""
    op._dispatcher.fast.bind(binding, *args, **kwargs)


class GuardedCache(Generic[T]):
    """A cache of the last few results that depend on sizes, strides, dtypes, devices and dispatch keys, and on flags.

    To look a result up, go through ``entries`` and compare; call :meth:`store` each time that there is none. An entry is a
    :class:`DirectCall` too, for :func:`bind`.

    >>> cache, x, y = GuardedCache(), torch.ones(2), torch.ones(3)
    >>> for _ in range(2):
    ...     cache.store((x, y), "sum", 5)
    >>> [entry.result for entry in cache.entries if entry.flags == "sum" and entry.check(y[:2], y)]
    [5]
    """

    def __init__(self) -> None:
        self.entries: list[GuardedResult[T]] = []
        self._counts: dict[Any, tuple[int, int]] = {}

    def store(self, tensors: Sequence[torch.Tensor], flags: Any, result: T) -> None:
        """Store ``result`` if calls like this one come often; after each eviction twice as many must come."""
        if not all([type(x) in PLAIN_TYPES and x.layout is torch.strided for x in tensors]):  # noqa: C419
            return
        if len(self._counts) >= _MAX_COUNTED:
            self._counts.clear()
        key = (flags, *[(x.shape, x.dtype) for x in tensors])
        uses, patience = self._counts.get(key, (0, 2))
        self._counts[key] = (uses + 1, patience)
        if uses + 1 >= patience:
            self._counts[key] = (0, 2 * patience)
            check = guard(tensors, True)
            if check(*tensors):
                self.entries[:] = [GuardedResult(flags, check, result), *self.entries[: _MAX_ENTRIES - 1]]
