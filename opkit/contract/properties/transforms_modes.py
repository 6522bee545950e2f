"""The group ``transforms``: autocast, modes that change nothing, tensor subclasses and checkpoints."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import BaseTorchDispatchMode

from opkit.contract.calls.cases import Call, Case
from opkit.contract.compare.calls import observe
from opkit.contract.compare.outcome import CallOutcome
from opkit.contract.prop import Property, Remark, Violation
from opkit.contract.properties.transforms import transform_property
from opkit.contract.subject import CallRefused, Subject
from opkit.contract.traced import derivatives as d
from opkit.op import torch_private as private
from opkit.op.rules import transforms

_LOW = torch.bfloat16


def _policy(subject: Subject, device: str) -> tuple[str | None, torch.dtype | None] | None:
    """Return opkit's autocast policy and dtype that the operator declares for a device, or None."""
    if subject.operator is not None:
        return subject.operator._operator.autocast, subject.operator._operator.registered.autocast.get(device)
    if isinstance(subject.target, private.CustomOpDef):
        known = getattr(subject.target, "_autocast_dtype", None)  # torch 2.11 has an attribute for each device
        dtype = getattr(subject.target, f"_autocast_{device}_dtype", None) if known is None else known.get(device)
        return None if dtype is None else (None, dtype)
    return None


def _autocast(subject: Subject, case: Case) -> None:
    plain = observe(subject, case)
    device = torch.device(subject.device).type
    policy = _policy(subject, device)
    with torch.autocast(device, _LOW):
        found = _or_violation(subject, case, "under torch.autocast")
        call = case.make(subject.device)
        cast = None if policy is None else transforms.cast_arguments((call.args, call.kwargs), device, *policy)
        with torch.autocast(device, enabled=False):
            disabled = _or_violation(subject, case, "under a disabled torch.autocast")
    _compare(disabled, plain, "under torch.autocast(enabled=False)", "a call without autocast")
    if cast is not None:
        wanted = observe(subject, Call(*cast))
        _compare(found, wanted, "under torch.autocast", "a call with the arguments cast as declared")


def _or_violation(subject: Subject, case: Case, where: str) -> CallOutcome:
    try:
        return observe(subject, case)
    except CallRefused as refusal:
        if subject.reference is not None:
            subject.expect(case)  # if the reference raises too, the case is passed over
            raise Violation(f"{where} it raises {refusal}") from refusal
        raise Remark(f"{where} it raises {refusal}") from refusal


def _compare(found: CallOutcome, wanted: CallOutcome, where: str, whose: str) -> None:
    for number, (a, b) in enumerate(zip(found.tensors(), wanted.tensors(), strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Violation(
                f"{where}, result {number} is {a.dtype}{list(a.shape)}; of {whose} {b.dtype}{list(b.shape)}"
            )
        if a.is_floating_point() and (wrong := d.mismatch(a, b, 1.0)):
            raise Violation(f"{where}, result {number} is not that of {whose}: {wrong}")


# ---- modes -------------------------------------------------------------------------------------------------------------


MODES: dict[str, Callable[[], Any]] = {
    "a TorchDispatchMode that changes nothing": BaseTorchDispatchMode,
    "a TorchFunctionMode that changes nothing": torch.overrides.BaseTorchFunctionMode,
}


def _modes(subject: Subject, case: Case) -> None:
    plain = observe(subject, case)
    for name, mode in MODES.items():
        try:
            with mode():
                found = observe(subject, case)
        except CallRefused as refusal:
            raise Remark(f"under {name} it raises {refusal}") from refusal
        _compare(found, plain, f"under {name}", "a plain call")


# ---- subclasses --------------------------------------------------------------------------------------------------------


class _Wrapper(torch.Tensor):
    """A tensor that wraps another one; its own memory has other numbers, which nobody may read."""

    wrapped: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> torch.Tensor:
        """Wrap ``tensor``, if its dtype is floating-point."""
        if not tensor.is_floating_point() or tensor.is_neg():
            return tensor
        wrapper = torch.Tensor._make_subclass(cls, tensor.detach().clone().mul_(-0.5).add_(0.25))
        wrapper.wrapped = tensor
        return wrapper


def _call_unwrapped(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map_only(_Wrapper, lambda each: each.wrapped, (args, kwargs or {}))
    return func(*args, **kwargs)


class _DispatchWrapper(_Wrapper):
    """A wrapper that ``__torch_dispatch__`` unwraps."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call_unwrapped(func, args, kwargs)


class _FunctionWrapper(_Wrapper):
    """A wrapper that ``__torch_function__`` unwraps, as torch.nn.attention.bias.CausalBias is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _call_unwrapped(func, args, kwargs)


def _subclasses(subject: Subject, case: Case) -> None:
    plain = observe(subject, case)
    for kind in (_DispatchWrapper, _FunctionWrapper):
        try:
            found = observe(subject, case.make(subject.device).map(kind.of))
        except CallRefused:
            continue  # it may accept plain tensors only
        results = pytree.tree_map_only(_Wrapper, lambda each: each.wrapped, found.results)
        hook = "__torch_dispatch__" if kind is _DispatchWrapper else "__torch_function__"
        where = f"called with a tensor subclass that has {hook}"
        _compare(dataclasses.replace(found, results=results), plain, where, "a call with the tensors that it wraps")


def _checkpoint(subject: Subject, case: Case) -> None:
    from torch.utils.checkpoint import checkpoint

    graph, numbers, right, grads = d.supported(subject, case)

    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(subject.function, *args, use_reentrant=False, **kwargs)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return subject.function(*args, **kwargs)

    for name, function in (("torch.utils.checkpoint", again), ("saved_tensors_hooks that copy", hooked)):
        other = d.trace(subject, case, numbers, function)
        try:
            got = other.vjp(grads)
        except Exception as error:
            raise Remark(f"with {name} the backward raises {type(error).__name__}: {error}") from error
        for number, mine, wanted in zip(numbers, got, right, strict=True):
            if wrong := d.mismatch(mine, wanted, d.magnitude(grads)):
                raise Violation(f"with {name}, the gradient of {d.argument(subject, case, number)} differs: {wrong}")
    assert graph.inputs


PROPERTIES: tuple[Property, ...] = (
    transform_property(
        "transforms.autocast",
        rule="Under autocast arguments are cast as declared, nothing breaks, and a disabled autocast changes nothing.",
        defect="a declared dtype that the kernel does not see; an operator that raises under autocast",
        check=_autocast,
        cases=d.smooth_cases(dtypes=(torch.float32, torch.float64)),
        share=0.4,
    ),
    transform_property(
        "transforms.modes",
        rule="Dispatch and function modes that change nothing change no result.",
        defect="a fast path that computes something else than the dispatcher's kernel",
        check=_modes,
        cases=d.smooth_cases(),
    ),
    transform_property(
        "transforms.subclasses",
        rule="A tensor subclass counts as the tensor that it wraps, or is refused: its own memory is not read.",
        defect="a Python function before the operator that takes data_ptr(), or makes a plain tensor of the subclass's storage",
        check=_subclasses,
        share=0.2,
        skip=d.no_candidates,
    ),
    transform_property(
        "transforms.checkpoint",
        rule="Gradients are the same in a checkpoint, and where hooks store copies of saved tensors.",
        defect="state stored outside save_for_backward, which a second forward overwrites",
        check=_checkpoint,
        cost=0.003,
        skip=d.no_candidates,
    ),
)
