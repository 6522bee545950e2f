"""How one eager call runs: which kernel, checked how, with which gradients; decided once for each set of shapes."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit import config
from opkit.errors import AliasError, ArgumentError, NoKernelError, OutputError, StrideWarning
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.dispatch import autotune
from opkit.op.dispatch.prepared import TunedKernel
from opkit.op.dispatch.selection import REFERENCE, Kernel, Selection, leaves
from opkit.op.schema import patterns
from opkit.op.trace import mutation
from opkit.op.trace.body import Trace


class Plan:
    """``run`` computes; ``train`` computes and records gradients (made when first asked for).

    ``uses`` counts the look-ups since a guard was last installed for the plan, ``patience`` how many it takes: twice as
    many each time, so that calls of changing shapes do not spend their time on installing guards.
    """

    __slots__ = ("kernel", "patience", "run", "train", "uses")

    def __init__(self, kernel: str, run: Callable[..., Any]) -> None:
        self.kernel = kernel
        self.run = run
        self.train: Callable[..., Any] | None = None
        self.uses, self.patience = 0, 2


def completed(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's Python arguments by name, defaults filled in."""
    positional, named = operator.signature.decode(args, kwargs) if operator.signature.flattened else (args, kwargs)
    bound = operator.signature.python.bind(*positional, **named)
    bound.apply_defaults()
    return bound.arguments


def check_arguments(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> patterns.Binding:
    """Check the call against the operator's annotations; symbolic sizes are left to the program that has them.

    Raises:
        ShapeError, DtypeError: naming operator, argument, shape, pattern and the conflicting size.
        ArgumentError: a value is none of its annotation's ``Literal``.
    """
    binding = patterns.Binding(operator.name)
    if not (operator.signature.annotated and config.get().check):
        return binding
    values = completed(operator, args, kwargs)
    for parameter in operator.signature.parameters:
        if parameter.choices and values[parameter.name] not in parameter.choices:
            raise ArgumentError(
                f"{operator.name}: the argument {parameter.name} must be {' or '.join(map(repr, parameter.choices))}, got "
                f"{values[parameter.name]!r}."
            )
        if parameter.pattern is not None:
            for tensor in pytree.tree_leaves(values[parameter.name]):
                if isinstance(tensor, torch.Tensor) and private.sizes_known(tensor):
                    binding.check(f"the argument {parameter.name}", tensor, parameter.pattern)
    return binding


def eligible(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Kernel], dict[str, str]]:
    """The kernels that take a call through the schema, the preferred one first, and the reason of each one refused."""
    values = completed(operator, args, kwargs) if operator.kernels.kernels else {}
    return operator.kernels.eligible((), values, operator.device(args, kwargs), (args, kwargs))


def choose(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Kernel | None, dict[str, str]]:
    """The kernel of a call (None: the reference), and the reason of each one refused.

    Raises:
        NoKernelError: nothing fits, because the reference itself is limited to other devices.
    """
    device = operator.device(args, kwargs)
    found, refused = eligible(operator, args, kwargs)
    tuned = [kernel for kernel in found if kernel.autotune]
    if tuned and found[0].autotune:
        chosen = autotune.choose(operator.name, tuned, args, kwargs, device)
        refused |= {k.name: f"{chosen.name} was measured to be faster" for k in found if k is not chosen}
        return chosen, refused
    if found:
        return found[0], refused | {k.name: f"{found[0].name} is preferred" for k in found[1:]}
    if operator.device_types is not None and device not in operator.device_types and device != "meta":
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
        raise NoKernelError(
            f"{operator.opname} does not have a kernel registered for {device}. Please use register_kernel to do so.{reasons}"
        )
    return None, refused


def select(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Selection:
    """What a call would run, and why not the others."""
    kernel, refused = choose(operator, args, kwargs)
    if kernel is not None and operator.given_reference is None:
        refused = {**refused, REFERENCE: f"{kernel.name} is preferred"}
    notes: Sequence[str] = ()
    if kernel is not None and isinstance(kernel.function, TunedKernel):
        notes = kernel.function.notes(*completed(operator, args, kwargs).values())
    return Selection(operator.name, REFERENCE if kernel is None else kernel.name, refused, tuple(notes))


def make_plan(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
    """Decide how calls of these shapes run. The first run verifies; later ones go straight to the kernel."""
    binding = check_arguments(operator, args, kwargs)
    if _without_data(operator, args, kwargs):
        return Plan("fake", _fake(operator))
    kernel = _ready(operator, args, kwargs)
    name = REFERENCE if kernel is None else kernel.name
    function = operator.body if kernel is None else kernel.function
    if kernel is not None and kernel.prepared:
        function = kernel.function.prepare(*args, **kwargs)  # type: ignore[attr-defined]  # pyright: ignore
    native: Any = kernel.function if kernel is not None and kernel.native else None
    plan = Plan(name, function)

    def first(*args: Any, **kwargs: Any) -> Any:
        capturing = autotune.capturing()  # when nothing may be read back, to be compared
        try:
            plan.run = run = function if native is None else native.prepare(args, kwargs)
            output, plan.run = _verified(operator, kernel, run, args, kwargs, binding, not capturing)
        except BaseException:
            plan.run = first
            raise
        if capturing:
            plan.run = first
            return output
        if native is not None and plan.run is run:
            plan.run = native.settle(args, kwargs, run)
        return output

    if _verifies(kernel) or native is not None:
        plan.run = first
    return plan


def _verifies(kernel: Kernel | None) -> bool:
    """Whether the first calls of a kernel (None: the reference) are verified."""
    settings = config.get()
    return settings.verify_all or (settings.verify and not (kernel is not None and kernel.trusted))


def _ready(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Kernel | None:
    """The kernel of a call, built; one that cannot be built for want of a compiler refuses from then on."""
    while True:
        kernel, _ = choose(operator, args, kwargs)
        native: Any = None if kernel is None or not kernel.native else kernel.function
        if native is None or native.ready():
            return kernel


def _without_data(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call has tensors on the meta device, which hold nothing that a body or kernel could read."""
    tensors = [leaf for leaf in leaves(args, kwargs) if isinstance(leaf, torch.Tensor)]
    if operator.device(args, kwargs) != "meta" and not any(tensor.is_meta for tensor in tensors):
        return False
    if any(kernel.device == "meta" for kernel in operator.kernels.kernels):
        return False
    # the reference itself is as good as the fake implementation derived from it, and keeps torch's own gradients
    return bool(operator.given.fake or operator.kernels.serves("meta") or not operator.transparent(args, kwargs))


def _fake(operator: Operator) -> Callable[..., Any]:
    """The call by the fake implementation, which is registered for meta tensors."""
    keys = private.DispatchKeySet(private.DispatchKey.Meta)
    return lambda *args, **kwargs: operator.overload.redispatch(keys, *args, **kwargs)


def _verified(
    operator: Operator,
    kernel: Kernel | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    binding: patterns.Binding,
    verify: bool = True,
) -> tuple[Any, Callable[..., Any]]:
    name = REFERENCE if kernel is None else kernel.name
    snapshot = None
    fresh = verify and operator.needs_verifying(name, args, kwargs)
    try:
        if fresh:
            snapshot = mutation.snapshot(operator.name, schema_mutates(operator), _unshared(operator, args, kwargs))
        output = function(*args, **kwargs)
        if snapshot is not None:
            snapshot.check(f"the kernel {name}" if kernel else "its body")
        check_output(operator, name, args, kwargs, output)
        output, function = _contained(operator, output, function)
        _check_patterns(operator, output, binding)
        # other shapes of a verified guard set are trusted, but for kernels whose layout has to be put right
        compared = kernel is not None and (fresh or name in operator.restrided)
        trace = operator.traced(args, kwargs) if compared and not operator.mutates else None
        layout = _compare(operator, name, output, trace) if trace is not None and trace.opaque is None else None
    except BaseException:
        operator.unverify(name, args, kwargs)
        raise
    if trace is not None and trace.captures_gradient:
        operator.captured.add(name)
    if name in operator.captured:
        if private.grad_enabled():
            raise operator.captured_error()
        function = _refusing_gradient(operator, function)
    if layout is None:
        return output, function
    operator.restrided.add(name)
    return _restride(output, layout), _restriding(function, layout)


def _unshared(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a call by name, without those that change as a tensor written to does, whose memory they share."""
    named, mutated = list(operator.named_tensors(args, kwargs)), schema_mutates(operator)
    written = [tensor for name, tensor in named if name in mutated]
    return [
        (name, tensor)
        for name, tensor in named
        if name in mutated or not any(private.shares_memory(tensor, w) for w in written)
    ]


def _refusing_gradient(operator: Operator, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, of whose reference a tensor that is not an argument requires grad, for calls that record none."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if private.grad_enabled():
            raise operator.captured_error()
        return function(*args, **kwargs)

    return run


def _contained(operator: Operator, output: Any, function: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """Several results in a tuple and a list of results in a list, as they come through the dispatcher."""
    returns = operator.schema.returns
    container: Any = (
        tuple if len(returns) > 1 else list if returns and str(returns[0].type).startswith("List") else None
    )
    if container is None or type(output) is container:
        return output, function
    return container(output), lambda *args, **kwargs: container(function(*args, **kwargs))


def schema_mutates(operator: Operator) -> set[str]:
    """The schema arguments that the operator writes to."""
    arguments = operator.schema.arguments
    return {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}


def check_output(operator: Operator, kernel: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Raise unless the result has the schema's form and shares no memory with arguments or itself."""
    _check_form(operator, kernel, output)
    refuse_aliases(operator, kernel, args, kwargs, output)


def refuse_aliases(operator: Operator, kernel: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Raise if a result that the schema declares as new shares memory with an argument or another result."""
    if operator.schema._is_view_op() or _returns_arguments(operator):  # pyright: ignore[reportPrivateUsage]
        return
    results = output if isinstance(output, tuple) else (output,)
    if torch._C._any_output_is_alias_to_input_or_output(args, kwargs, results):  # pyright: ignore[reportPrivateUsage]
        raise AliasError(
            f"{operator.name} (kernel {kernel}): an output of a custom operator must not be one of its inputs and may not "
            "alias an input or another output. Return a copy, for example x.clone()."
        )


def _returns_arguments(operator: Operator) -> bool:
    return any(r.alias_info is not None and r.alias_info.is_write for r in operator.schema.returns)


def _check_form(operator: Operator, kernel: str, output: Any) -> None:
    returns = operator.schema.returns
    count = len(returns)
    if count == 0:
        wrong = output is not None
    elif count == 1:
        wrong = not _fits(output, returns[0])
    else:
        items = output if isinstance(output, (tuple, list)) else ()
        wrong = len(items) != count or not all(
            _fits(i, r) for i, r in zip(items, returns, strict=True) if i is not None
        )
    if wrong:
        declared = ", ".join(str(r.type) for r in returns) or "nothing"
        raise OutputError(
            f"{operator.name}: {'its body' if kernel == REFERENCE else 'the kernel ' + kernel} returned {_described(output)}, "
            f"but the schema declares {declared}."
        )


def _fits(value: Any, declared: Any) -> bool:
    kind = str(declared.type)
    if kind == "Tensor":
        return isinstance(value, torch.Tensor)
    return isinstance(value, (list, tuple)) if kind.startswith("List") else value is not None


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values ({', '.join(type(item).__name__ for item in value)})"
    return "nothing" if value is None else type(value).__name__


def _check_patterns(operator: Operator, output: Any, binding: patterns.Binding) -> None:
    declared = operator.signature.return_patterns
    if not any(declared) or operator.signature.returns is not None or not config.get().check:
        return
    outputs = output if isinstance(output, (tuple, list)) and len(declared) > 1 else (output,)
    for i, (value, pattern) in enumerate(zip(outputs, declared, strict=False)):
        if pattern is not None and isinstance(value, torch.Tensor):
            binding.check("the output" if len(declared) == 1 else f"the output {i}", value, pattern)


def _compare(operator: Operator, kernel: str, output: Any, trace: Trace) -> list[Any] | None:
    """Raise where shapes, dtypes or devices differ from the reference's; where only strides do, return those to restore."""
    layout: list[Any] = []
    expected = pytree.tree_leaves(trace.outputs)
    for i, (value, fake) in enumerate(zip(pytree.tree_leaves(output), expected, strict=False)):
        if not isinstance(value, torch.Tensor) or not isinstance(fake, torch.Tensor):
            layout.append(None)
            continue
        known = private.sizes_known(fake)
        if value.dtype != fake.dtype or value.device.type != fake.device.type or (known and value.shape != fake.shape):
            raise OutputError(
                f"{operator.name}: output {i} of the kernel {kernel} is {tuple(value.shape)} {value.dtype} on {value.device}, "
                f"but the reference gives {tuple(fake.shape)} {fake.dtype} on {fake.device}."
            )
        layout.append(fake.stride() if known and _strides_differ(value, fake) else None)
    if not any(strides is not None for strides in layout):
        return None
    if kernel not in operator.restrided:
        _warn_of_strides(operator, kernel)
    return layout


def _warn_of_strides(operator: Operator, kernel: str) -> None:
    warnings.warn(
        f"{operator.name}: the kernel {kernel} returns other strides than the reference, which compiled programs rely on. "
        "Its results are copied into the reference's layout; allocate outputs with that layout to save the copy.",
        StrideWarning,
        stacklevel=5,
    )


def _strides_differ(value: torch.Tensor, fake: torch.Tensor) -> bool:
    if value.numel() == 0:
        return False
    pairs = zip(value.shape, value.stride(), fake.stride(), strict=True)
    return any(size > 1 and a != b for size, a, b in pairs)


def _restride(output: Any, layout: list[Any]) -> Any:
    leaves, spec = pytree.tree_flatten(output)
    for i, strides in enumerate(layout):
        if strides is not None:
            leaves[i] = torch.empty_strided(
                leaves[i].shape, strides, dtype=leaves[i].dtype, device=leaves[i].device
            ).copy_(leaves[i])
    return pytree.tree_unflatten(leaves, spec)


def _restriding(function: Callable[..., Any], layout: list[Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _restride(function(*args, **kwargs), layout)

    return run
