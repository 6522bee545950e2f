"""Register an operator with PyTorch's dispatcher: one Python kernel for each dispatch key that opkit handles.

=======================  ============================================================================================
key                      kernel
=======================  ============================================================================================
Autocast*                cast by the policy, then run with autocast off
FuncTorchBatched         the vmap rule
Autograd*                gradients, or, while a compiler traces an operator to be inlined, the reference itself
ADInplaceOrView          version counters of the arguments written to
CompositeExplicit...     the planned kernel (or one device's key where the operator is limited to devices)
fake                     the fake rule
=======================  ============================================================================================
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import ArgumentTypeError, NameClashError, RuleError
from opkit.op import torch_compile
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch.fastcall import AutocastKernel, FastCalls, GenericCall, Routes
from opkit.op.dispatch.fastcall_source import kernels
from opkit.op.dispatch.planning import observers
from opkit.op.dispatch.selection import REFERENCE
from opkit.op.dispatch.verification import check_arguments, refuse_aliases, schema_mutates
from opkit.op.rules import transforms
from opkit.op.rules.autograd import AutogradCall, apply, restore
from opkit.op.rules.derived import forward_from_backward
from opkit.op.torch_compile import in_guarded_compilation, note_traced

_HANDLED_BELOW = tuple(
    getattr(private.DispatchKey, name) for name in ("Python", "Conjugate", "Negative", "ZeroTensor", "Functionalize")
)
"""Keys that the dispatcher handles below autograd: subclasses, lazy conjugation, negation and zeros, functionalisation."""


class Dispatcher:
    """The dispatcher kernels of one operator."""

    def __init__(self, operator: Operator, shown: str) -> None:
        self.operator = operator
        self.shown = shown  # the operator's name in the error that torch's users know
        self.plain = GenericCall(operator)
        self.fast = FastCalls()
        self.flop_formula: Callable[..., int] | None = None
        self.autocast: dict[str, AutocastKernel] = {}

    def refresh(self, slow: Callable[..., Any], forced: bool, renewed: bool) -> Callable[..., Any]:
        """Forget every plan, and return the function that direct calls run from now on.

        Args:
            slow: calls through the dispatcher.
            forced: whether a kernel is forced in some thread; then every call looks up which.
            renewed: whether the operator's kernels or rules may have changed.
        """
        operator, routes = self.operator, Routes(slow, self.autograd, self.plain, self.backend, self.autocast)
        self.plain.plans.clear()
        if renewed:
            self.fast.renew(operator, routes)
        if forced:
            self.fast.suspend(routes)
        elif not renewed:
            self.fast.resume()
        below = operator.overload if operator.bridged.serving else self.fast.call
        for device, kernel in self.autocast.items():
            kernel.casts = operator.autocast is not None or device in operator.registered.autocast
            kernel.below[0] = functools.partial(self._cast, device, below) if kernel.casts else below
        return self.fast.call

    # ---- registration ----------------------------------------------------------------------------------------------

    def register(self, library: Any) -> None:
        """Define the schema and register every kernel in ``library``.

        Raises:
            NameClashError: another library has defined the name.
        """
        operator = self.operator
        tags = [torch.Tag.pt2_compliant_tag, *(t for t in operator.tags if t is not torch.Tag.pt2_compliant_tag)]
        try:
            library.define(operator.opname + operator.schema_text, tags=tags)
        except RuntimeError as error:
            match = re.search(r"Original registration: registered at ([^\n]*?)\.?(\n|$)", str(error))
            owner = f"registered at {match[1]}" if match else str(error).splitlines()[0]
            raise NameClashError(
                f"{operator.name} is already defined by another library, {owner}. Choose another name or namespace."
            ) from error
        operator.library = library
        operator.overload = private.library_utils.lookup_op(operator.name)
        self.schema: Any = SimpleNamespace(arguments=operator.schema.arguments)  # torch makes a new list at each access
        opname = operator.opname
        private.register_fake(library, operator.name, self.fake, operator.function)
        make = kernels(operator)
        library.impl(opname, private.untraced(make["autograd"](self.fast)), "Autograd", with_keyset=True)
        library.impl(opname, self.batched, "FuncTorchBatched", with_keyset=True)
        for device, key in private.autocast_keys().items():
            self.autocast[device] = AutocastKernel(key, make["autocast"])
            library.impl(opname, self.autocast[device].kernel, key.name)
        self._backend = private.untraced(make["backend"](self.fast))
        for device in operator.device_types or (None,):
            self.register_backend(device)
        if operator.schema._is_view_op():
            library.m.register_ad_inplace_or_view_fallback(opname)
        elif operator.schema.is_mutable:
            library.impl(opname, self.inplace, "ADInplaceOrView", with_keyset=True)
        if operator.only_effects:
            private.register_ordered_effect(operator.name, library)

    @private.untraced
    def inplace(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Advance the version counters of the arguments written to, so that a stale backward raises."""
        positions, names = private.library_utils.mutated_args_kwargs(self.schema)
        filled, named = private.library_utils.fill_defaults(self.schema, args, kwargs)
        for value in [*(filled[i] for i in positions), *(named[n] for n in names)]:
            private.custom_ops.increment_version(value)
        return self.operator.overload.redispatch(keyset & private.after_inplace_or_view_keyset, *args, **kwargs)

    def register_backend(self, device: str | None) -> None:
        """Register the planned kernel for one device type, or for all."""
        key = "CompositeExplicitAutograd" if device is None else private.dispatch_key_of(device)
        self.operator.library.impl(self.operator.opname, self._backend, key)

    # ---- kernels ---------------------------------------------------------------------------------------------------

    @private.untraced
    def backend(self, *args: Any, **kwargs: Any) -> Any:
        """Run the planned kernel, below autograd; the dispatcher leaves out arguments that equal their defaults."""
        if len(args) + len(kwargs) < len(self.operator.signature.arguments):
            args, kwargs = private.library_utils.fill_defaults(self.schema, args, kwargs)
        run = self.plain.plan(args, kwargs).run
        run = functools.partial(self._profiled, run) if private.profiling() else run
        return self._checked(run(*args, **kwargs), args, kwargs)

    def _profiled(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call in a range of the profiler that is named after the operator and the kernel."""
        for observer in observers:
            observer(self.operator, args, kwargs)
        with torch.profiler.record_function(f"{self.operator.name}[{self.plain.plan(args, kwargs).kernel}]"):
            return run(*args, **kwargs)

    def _checked(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``result`` if it keeps the promise of the operator's tags."""
        operator = self.operator
        if operator.is_inplace and result is not args[0]:
            raise private.tag_error(operator.opname, "inplace must return its first argument")
        if operator.is_out:
            _, names = private.library_utils.mutated_args_kwargs(operator.schema)
            results = result if isinstance(result, tuple) else (result,)
            if len(results) != len(names) or any(r is not kwargs[n] for r, n in zip(results, names, strict=True)):
                raise private.tag_error(operator.opname, "out must return its mutable keyword-only arguments")
        return result

    @private.untraced
    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Return fake outputs, from the author's fake implementation or the reference."""
        operator = self.operator
        note_traced(operator)
        if operator.registered.fake is not None:
            return operator.flat(operator.registered.fake)(*args, **kwargs)
        if operator.only_effects:
            return None
        if private.library_utils.can_generate_trivial_fake_impl(operator.overload):
            generate = getattr(private.library_utils, "generate_trivial_fake_impl", None)  # torch 2.13 and newer
            return None if generate is None else generate(operator.overload, *args, **kwargs)
        check_arguments(operator, args, kwargs)
        if not operator.transparent(args, kwargs):
            raise operator.fake_error(self.shown)
        if not operator.state.volatile:
            operator.state.guard()
        return operator.reference(*args, **kwargs)

    @private.untraced
    def autograd(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Decide how a call is differentiated, or what the compiler that traces it sees."""
        operator = self.operator
        if private.dispatch_modes():
            return self._under_modes(keyset, args, kwargs)
        if private.forward_ad._current_level >= 0 and self._any_tangent(args, kwargs):
            return self._forward_mode(keyset, args, kwargs)
        if private.functorch_level() is not None:
            return self._transformed(keyset, args, kwargs)
        if (
            operator.schema.is_mutable
            or any(keyset.has(key) for key in _HANDLED_BELOW)
            or not all(map(_strided, args))
            or operator.schema._is_view_op()
        ):
            return self._unit(keyset, args, kwargs)
        if any(value is None for value in args):
            args = self._without_missing(args)
        run = functools.partial(self._profiled, self.fast.planned) if private.profiling() else self.fast.planned
        return run(*args, **kwargs)

    def _without_missing(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arguments with empty lists in place of those that are None, as AOTInductor's archives pass empty lists.

        Raises:
            ArgumentTypeError: a tensor is None, which the dispatcher accepts and a kernel would fail on.
        """
        found = list(args)
        for number, (argument, value) in enumerate(zip(self.operator.signature.arguments, args, strict=False)):
            if value is None and argument.type == "Tensor":
                raise ArgumentTypeError(
                    f"{self.operator.name}: the argument {argument.name} must be a tensor, got None."
                )
            if value is None and argument.type.endswith("[]"):
                found[number] = []
        return tuple(found)

    def _under_modes(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = self.operator
        note_traced(operator)
        if self._reads_matter(args, kwargs):  # while Dynamo traces, as a hit in AOTAutograd's cache skips its trace
            operator.state.guard()
        mode = torch_compile.fake_mode_in_force()
        if mode is not None and operator.known_trace(args, kwargs).captures:
            mode.allow_non_fake_inputs = True  # tensors that the reference captured are constants of the traced program
        if transforms.flop_counter_in_use() and operator.transparent(args, kwargs):
            if self.flop_formula is None:
                self.flop_formula = transforms.flop_formula(lambda *a, **k: operator.reference(*a, **k))
            transforms.install_flop_formula(operator.overload.overloadpacket, self.flop_formula)
        level = private.functorch_level()
        # within a transform, AOTAutograd enters a level of forward mode that Python does not see
        if (private.forward_ad._current_level >= 0 or level is not None) and self._any_tangent(args, kwargs):
            return self._forward_mode(keyset, args, kwargs)
        unit = operator.registered.autograd is not None and level is not None
        if (
            torch_compile.functionalizing()
            and torch_compile.compiling()
            and not unit
            and operator.inlinable(args, kwargs)
        ):
            return self._inlined(args, kwargs)
        if level is not None:
            return self._transformed(keyset, args, kwargs)
        return self._unit(keyset, args, kwargs)

    def _reads_matter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the reference, or a backward derived from it, becomes part of what torch.compile traces."""
        if not in_guarded_compilation():
            return False
        derived = self.operator.registered.autograd is None and self._needs_gradient(args, kwargs)
        return derived or self.operator.inlinable(args, kwargs)

    def _inlined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = self.operator
        if operator.registered.autograd is None or not self._needs_gradient(args, kwargs):
            return self._run_inlined(*args, **kwargs)
        call = AutogradCall.of(self._run_inlined, operator.registered.autograd, args, kwargs)
        return restore(call, apply(operator.autograd_function, call, args))

    def _run_inlined(self, *args: Any, **kwargs: Any) -> Any:
        """Run the reference in place of the operator, and refuse a result that is an argument, as in eager calls."""
        result = self.operator.run_reference(*args, **kwargs)
        plain = pytree.tree_map_only(torch.Tensor, torch_compile.without_functional_wrapper, (args, kwargs, result))
        refuse_aliases(self.operator, REFERENCE, *plain)
        return result

    def _forward_mode(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = self.operator
        if operator.registered.autograd is not None:
            call = functools.partial(self._transformed, keyset)
            return forward_from_backward(operator.name, lambda *args, **kwargs: call(args, kwargs), args, kwargs)
        if not operator.transparent(args, kwargs):
            error = RuleError(
                f"{operator.name}: forward-mode derivatives come from the reference, and there is none in torch. "
                "Give the operator one with reference=."
            )
            error.add_note(operator.opaque_note("forward-mode derivative", "reference="))
            raise error
        return operator.run_reference(*args, **kwargs)

    def _transformed(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.operator.composite(args, kwargs):
            return self.operator.run_reference(*args, **kwargs)
        with private.single_level_functions_allowed():
            return self._unit(keyset, args, kwargs)

    def _unit(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = self.operator
        if not self._needs_gradient(args, kwargs):
            return self._below_autograd(keyset)(*args, **kwargs)
        if operator.is_out:
            raise RuleError(
                f"{operator.opname}(): functions with out=... arguments don't support automatic differentiation, but one of "
                "the arguments requires grad."
            )
        composite = operator.composite(args, kwargs)
        if composite and (operator.mutates or operator.refusal(operator.known_trace(args, kwargs)) is not None):
            return operator.run_reference(*args, **kwargs)
        self._refuse_lost_gradient(args, kwargs)
        below = _recording(self._below_autograd(keyset))
        call = AutogradCall.of(below, operator.rule(args, kwargs), args, kwargs)
        return restore(call, apply(operator.autograd_function, call, args))

    def _refuse_lost_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        operator = self.operator
        written = schema_mutates(operator)
        if operator.is_inplace or operator.transparent(args, kwargs):
            return
        for name, tensor in operator.named_tensors(args, kwargs):
            if name in written and tensor.requires_grad:
                raise operator.lost_gradient_error(name)

    def _below_autograd(self, keyset: Any) -> Callable[..., Any]:
        overload = self.operator.overload

        def run(*args: Any, **kwargs: Any) -> Any:
            with private.AutoDispatchBelowAutograd():
                return overload.redispatch(keyset & private.after_autograd_keyset, *args, **kwargs)

        return run

    @staticmethod
    def _needs_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return private.grad_enabled() and private.any_requires_grad(*args, **kwargs)

    @staticmethod
    def _any_tangent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(private.has_tangent(leaf) for leaf in pytree.tree_leaves((args, kwargs)))

    def _cast(self, device: str, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        operator = self.operator
        registered = operator.registered.autocast.get(device)
        args, kwargs = transforms.cast_arguments((args, kwargs), device, operator.autocast, registered)
        return below(*args, **kwargs)

    @private.untraced
    def batched(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the author's vmap rule, one folded call, the mapped reference, or a loop over the kernel."""
        operator = self.operator
        if operator.registered.vmap is not None:
            return private.run_vmap_rule(operator.registered.vmap, operator.overload, *args, **kwargs)
        transparent = operator.transparent(args, kwargs)
        has_kernel = operator.kernels.serves(operator.device(args, kwargs)) or not transparent
        refused = operator.folds.broken or transforms.fold_refusal(operator.signature, private.batch_dims(args))
        needs_registered = operator.registered.autograd is not None and private.recorded_below(args, kwargs)
        if transparent and not needs_registered and (refused or not has_kernel):
            return operator.run_reference(*args, **kwargs)
        rule = self._looped if refused else functools.partial(self._folded, transparent)
        return private.run_vmap_rule(rule, operator.overload, *args, **kwargs)

    def _looped(self, info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        return transforms.loop_over_batch(self.operator.overload, info, in_dims, args, kwargs)

    def _folded(self, transparent: bool, info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        operator = self.operator
        folded = transforms.fold_batch(operator.overload, operator.signature, info, in_dims, args, kwargs)
        key = (tuple(in_dims), tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in args))
        if not transparent or key in operator.folds.agreed or private.dispatch_modes():
            return folded
        if transforms.agrees_with_reference(operator.run_reference, folded[0], info, in_dims, args, kwargs):
            operator.folds.agreed.add(key)
            return folded
        operator.folds.broken = "the operator does not treat its leading *batch sizes independently"
        return transforms.loop_over_batch(operator.run_reference, info, in_dims, args, kwargs)


def _strided(arg: Any) -> bool:
    if isinstance(arg, torch.Tensor):
        return arg.layout is torch.strided
    return not isinstance(arg, (list, tuple)) or all(map(_strided, arg))


def _recording(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run``, which an autograd function's forward calls, so that outer transforms record it as well."""
    if private.functorch_level() is None:
        return run

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), private.forward_grad_enabled():
            return run(*args, **kwargs)

    return recorded
