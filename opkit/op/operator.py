"""The operator object that authors and callers hold: registration of kernels and rules, and calls.

A call runs ``_call``: a fast call (``dispatch.fastcall``), or the compiled function behind the overload once kernels run without
Python (``native.compiled``).
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportMissingSuperCall=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.compiler import is_dynamo_compiling

from opkit.errors import RuleError
from opkit.op import kernel_kinds, torch_compile
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.description import Description, describe
from opkit.op.dispatch import planning
from opkit.op.dispatch.dispatcher import Dispatcher
from opkit.op.dispatch.selection import RegisteredKernel, Selection, predicate_names
from opkit.op.native.compiled import Bridged
from opkit.op.rules.autograd import RegisteredRule
from opkit.op.schema.schema_string import device_argument
from opkit.op.triton.function import functional_rule

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
Devices = str | Sequence[str] | None


class CustomOp(private.CustomOpDef, Generic[P, R]):
    """A PyTorch operator, made by :func:`opkit.custom_op`; call it like the function it was made from.

    It has every method of ``torch.library``'s ``CustomOpDef`` with the same meaning, and torch accepts it as one.
    A call whose arguments do not fit raises a ShapeError, a DtypeError or an ArgumentTypeError, which names the argument.

    >>> import opkit, torch
    >>> twice = opkit.custom_op("operator_example::twice", lambda x: x + x, mutates_args=(), schema="(Tensor x) -> Tensor")
    >>> twice(torch.ones(2)), twice.name, twice.select(torch.ones(2)).kernel
    (tensor([2., 2.]), 'operator_example::twice', 'reference')
    """

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._namespace, self._name = operator.namespace, operator.opname
        self._schema, self._tags = operator.schema_text, operator.tags
        self._init_fn = operator.function
        self._backend_fns: dict[str | None, Callable[..., Any]] = {}
        self._torch_dispatch_fns: dict[type, Callable[..., Any]] = {}
        self._disabled_kernel: Any = operator.kernels.disabled
        self._used_triton_kernels: list[Any] = []
        self._dispatcher = Dispatcher(operator, repr(self))
        operator.bridged, operator.refreshed = Bridged(), self._refresh
        self._registered = torch_compile.renew_cache_key(operator)
        functools.update_wrapper(self, operator.function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the operator."""
        if is_dynamo_compiling() and self._registered:  # read here, so that compiled programs guard it
            return self._dispatched(*args, **kwargs)
        try:
            return self._call(*args, **kwargs)
        except (TypeError, RuntimeError):  # a wrong call is reported by the parameters that the author wrote
            self._operator.signature.bind(args, kwargs)
            raise

    def _dispatched(self, *args: Any, **kwargs: Any) -> Any:
        call, signature = self._opoverload, self._operator.signature
        return signature.through(call, *args, **kwargs) if signature.flattened else call(*args, **kwargs)

    def _renew(self) -> None:
        """Forget every plan because a kernel or a rule was registered, enabled or disabled."""
        with self._operator.lock:
            self._registered = torch_compile.renew_cache_key(self._operator)
            self._operator.sharding_renewed()
            self._refresh()

    def _refresh(self, renewed: bool = True) -> None:
        """Set what ``_call`` runs; ``renewed`` says whether kernels or rules may have changed."""
        operator = self._operator
        self._opoverload = operator.overload
        through, serving = private.builtin(operator.overload), operator.bridged.serving
        planned = self._dispatcher.refresh(through, operator.forced > 0, renewed)
        private.use_pyobj_dispatch(operator.overload, not serving)
        call = through if serving else planned
        self._call = functools.partial(operator.signature.through, call) if operator.signature.flattened else call

    def _force(self, change: int) -> None:
        with self._operator.lock:
            self._operator.forced += change
            self._operator.bridged.suspend()
            self._refresh(renewed=False)

    def _retire(self) -> None:
        """Send calls to Python again, before the operator is removed from the dispatcher."""
        self._operator.bridged.remove()
        self._operator.sharding_renewed()  # DTensor's cache finds a later operator at this one's address
        self._refresh()

    def _register(self, library: Any) -> None:
        operator = self._operator
        self._lib = library
        self._dispatcher.register(library)
        for device in operator.device_types or (None,):
            self._backend_fns[device] = operator.function
        self._opoverload = operator.overload
        self._select_by_device(operator.device_types or (None,))
        self._is_inplace, self._is_out = operator.is_inplace, operator.is_out
        self._refresh()

    # ---- kernels ---------------------------------------------------------------------------------------------------

    @overload
    def register_kernel(
        self,
        device_types: Devices,
        fn: None = None,
        /,
        *,
        when: Callable[..., Any] | None = None,
        dtypes: Iterable[torch.dtype] | None = None,
        priority: int = 0,
        name: str | None = None,
        autotune: bool = False,
        traceable: bool = False,
        trusted: bool = False,
    ) -> Callable[[F], F]: ...

    @overload
    def register_kernel(
        self,
        device_types: Devices,
        fn: kernel_kinds.K,
        /,
        *,
        when: Callable[..., Any] | None = None,
        dtypes: Iterable[torch.dtype] | None = None,
        priority: int = 0,
        name: str | None = None,
        autotune: bool = False,
        traceable: bool = False,
        trusted: bool = False,
    ) -> kernel_kinds.K: ...

    def register_kernel(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        device_types: Devices,
        fn: Any = None,
        /,
        *,
        when: Callable[..., Any] | None = None,
        dtypes: Iterable[torch.dtype] | None = None,
        priority: int = 0,
        name: str | None = None,
        autotune: bool = False,
        traceable: bool = False,
        trusted: bool = False,
    ) -> Any:
        """Register a kernel; usable as a decorator.

        Args:
            device_types: "cpu", "cuda", ..., a sequence of them, or None for every device.
            fn: a function that takes the operator's arguments and returns what the reference returns; or the result of
                :func:`opkit.c_kernel`, :func:`opkit.cpp_kernel`, :func:`opkit.cuda_kernel` or :func:`opkit.triton_kernel`.
            when: a predicate over the operator's arguments, by name; the kernel takes only calls for which it is true. It
                may read sizes, strides, dtypes and scalars, not the values in tensors: it runs once for each set of shapes.
            dtypes: the kernel takes only calls whose floating tensors have these dtypes.
            priority: kernels of higher priority are tried first, later registrations before earlier ones.
            name: for :func:`opkit.use_kernel` and messages; the function's name by default.
            autotune: time the eligible autotuned kernels once per shape bucket, and remember the fastest across processes.
            traceable: torch.compile sees what ``fn`` does, torch operations and Triton launches, in place of the operator.
            trusted: first calls are compared with the reference (whose first trace takes seconds) only by OPKIT_VERIFY=all.

        Raises:
            KernelError: the name is taken, a device type is unknown, or ``when`` names an unknown argument.
        """

        def register(function: Any) -> Any:
            devices = kernel_kinds.devices_of(self._qualname, device_types)
            self._select_by_device(devices)
            allowed = None if dtypes is None else frozenset(dtypes)
            names = predicate_names(when, [p.name for p in self._operator.signature.parameters], self._qualname)
            kernels = [
                dataclasses.replace(
                    kernel_kinds.make(self._operator, function, device, name), when=when, dtypes=allowed, priority=priority,
                    autotune=autotune, predicate_names=names, traceable=traceable, trusted=trusted,
                )
                for device in devices
            ]  # fmt: skip
            for kernel in kernels:  # all or none of them
                self._operator.kernels.check_free(kernel)
            for kernel in kernels:
                self._add_kernel(kernel, function)
            self._renew()
            return function

        return register if fn is None else register(fn)

    def _select_by_device(self, devices: Sequence[str | None]) -> None:
        if (index := device_argument(self._operator.schema, devices)) is not None:
            self._register_backend_select_dispatcher(index)

    def _add_kernel(self, kernel: RegisteredKernel, function: Any) -> None:
        operator, device = self._operator, kernel.device
        operator.kernels.add(kernel)
        function = kernel.function if kernel.native else function
        visible = kernel.traceable or hasattr(kernel.function, "visible")
        if visible and private.FunctionalTensorMode not in self._torch_dispatch_fns:
            self.register_torch_dispatch(private.FunctionalTensorMode, functional_rule(operator))
        if device not in self._backend_fns:
            self._backend_fns[device] = function
            if not (operator.device_types is None and device is not None):
                self._dispatcher.register_backend(device)

    @contextlib.contextmanager
    def set_kernel_enabled(self, device_type: str, enabled: bool = True) -> Generator[None]:  # pyright: ignore
        """Enable or disable the kernels of a device type within a context; the reference takes their calls."""
        with super().set_kernel_enabled(device_type, enabled):
            self._renew()
            yield
        self._renew()

    def select(self, *args: P.args, **kwargs: P.kwargs) -> Selection:
        """Return the kernel that this call would run, and the reason for which each other one is refused."""
        return planning.select(self._operator, *self._operator.signature.encode(args, kwargs))

    # ---- rules -----------------------------------------------------------------------------------------------------

    def register_fake(self, fn: F, /) -> F:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Register the fake implementation: the outputs' sizes, strides, dtypes and devices from those of the arguments."""
        if self._is_inplace or self._is_out:
            tag = "torch.Tag.inplace" if self._is_inplace else "torch.Tag.out"
            warnings.warn(
                f"The fake registration for {self} is unnecessary. Custom ops tagged with {tag} already get an autogenerated "
                "fake kernel. The provided fake impl will be used instead.",
                stacklevel=2,
            )
        self._operator.registered.fake = self._callable(fn, "register_fake")
        self._renew()
        return fn

    def register_autograd(
        self, backward: Callable[..., Any], /, *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """Register the backward formula, with ``torch.library``'s ``backward(ctx, *grads)`` and ``setup_context``.

        Raises:
            RuleError: the operator writes to its arguments, or ``backward`` is no function.
        """
        operator = self._operator
        if self._is_out:
            raise RuleError(
                f"Cannot register autograd formula for operator tagged with torch.Tag.out: {self}. "
                "Out variants do not support autograd."
            )
        if not private.library_utils.is_functional_schema(operator.schema, allow_valid_view=True):
            raise RuleError(
                f"Cannot register autograd formula for non-functional operator {self} with schema {operator.schema}. Please "
                "create a functional operator and register an autograd formula for that."
            )
        operator.registered.autograd = RegisteredRule(
            operator, self._callable(backward, "register_autograd"), setup_context
        )
        self._renew()

    def register_vmap(self, func: Callable[..., Any] | None = None) -> Any:  # pyright: ignore
        """Register the vmap rule ``(info, in_dims, *args) -> (outputs, out_dims)``; usable as a decorator."""
        return self._register_rule("vmap", func)

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype) -> None:  # pyright: ignore
        """Cast floating arguments to ``cast_inputs`` under autocast on ``device_type``, in place of the policy."""
        if not isinstance(device_type, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
        if not torch.amp.is_autocast_available(device_type):
            raise ValueError(f"Device type '{device_type}' does not support autocast.")
        self._operator.registered.autocast.setdefault(device_type, cast_inputs)
        self._renew()

    def register_lowering(self, rule: F, /) -> F:
        """Register the loop nest that ``torch.compile(backend="opkit")`` compiles for the operator; usable as a decorator.

        The compiler then neither sees through the operator nor calls a kernel, but fuses what the rule computes with the
        operators around it. The rule takes an :class:`opkit.lowering.Builder` and the operator's arguments as its schema
        has them, tensors as :class:`opkit.lowering.Tensor`, and returns a ``Tensor`` for each result; it may raise
        :class:`opkit.lowering.NoRule` for arguments that it does not cover, and the operator is called. The backward stays
        as it is. With ``options={"inline": ...}`` the rule is not used.

        Raises:
            RuleError: the operator writes to its arguments, or returns views of them.
        """
        operator = self._operator
        if operator.schema.is_mutable or operator.schema._is_view_op():
            raise RuleError(
                f"Cannot register a lowering for {operator.name} with schema {operator.schema}: a rule computes new tensors, and "
                "the operator writes to its arguments or returns views of them."
            )
        operator.registered.lowering = self._callable(rule, "register_lowering")
        self._renew()
        return rule

    def register_sharding(self, func: Callable[..., Any] | None = None) -> Any:
        """Register how the operator runs on DTensors, in place of what is derived; usable as a decorator.

        ``func`` takes the operator's arguments and returns ``[([output placements], [input placements]), ...]`` of one mesh
        dimension, as for torch's ``register_sharding``; the tensors of a list have one placement each. Anything else is a
        :class:`opkit.errors.RuleError` at the call. Replicated arguments need not be listed.

        >>> import opkit, torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> @opkit.custom_op("doc::double_rows", mutates_args=())
        ... def double_rows(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> by_rows = double_rows.register_sharding(lambda x: [([Shard(0)], [Shard(0)])])
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        >>> double_rows(distribute_tensor(torch.eye(2), mesh, [Shard(0)])).placements
        (Shard(dim=0),)
        >>> dist.destroy_process_group()
        """
        return self._register_rule("sharding", func)

    def _register_rule(self, rule: str, func: Callable[..., Any] | None) -> Any:
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            setattr(self._operator.registered, rule, self._callable(function, f"register_{rule}"))
            self._renew()
            return function

        return register if func is None else register(func)

    def register_effect(self, effect: Any) -> None:
        """Declare side effects, as ``torch.library`` 2.13's ``register_effect``."""
        private.register_effect(self._qualname, effect, self._lib)

    def _callable(self, function: Any, method: str) -> Any:
        if not callable(function):
            raise RuleError(f"{self._qualname}: {method} takes a function, got {type(function).__name__}: {function!r}")
        return function

    # ---- description ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The qualified name, "namespace::name"."""
        return self._operator.name

    @property
    def schema(self) -> str:
        """The schema as the dispatcher has it."""
        return str(self._operator.schema)

    @property
    def reference(self) -> Callable[P, R]:
        """The function that defines what the operator computes."""
        return self._operator.explicit_reference or self._operator.function

    @property
    def _abstract_fn(self) -> Callable[..., Any] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # torch reads this name to find out whether an operator has a fake implementation, and which
        operator, trace = self._operator, self._operator.last_trace()
        opaque = operator.declared_opaque if trace is None else trace.opaque is not None
        return operator.registered.fake or (None if opaque and operator.explicit_reference is None else self.reference)

    @property
    def lowering(self) -> Callable[..., Any] | None:
        """The rule registered with :meth:`register_lowering`."""
        return self._operator.registered.lowering

    def describe(self) -> Description:
        """Return the schema, the arguments written to, the kernels, and where each rule comes from."""
        return describe(self._operator)

    def _repr_html_(self) -> str:
        return self.describe()._repr_html_()

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return what the contract hash covers; see ``opkit.op.trace.contract_hash``."""
        return self._operator.contract_parts()

    def __copy__(self) -> CustomOp[P, R]:
        return self

    def __deepcopy__(self, memo: Any) -> CustomOp[P, R]:
        return self
