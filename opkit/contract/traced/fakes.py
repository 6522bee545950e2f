"""This module runs an operator on fake tensors, as torch.compile and torch.export do: no elements, only metadata."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch

from opkit.contract.calls.cases import Call, Case
from opkit.contract.compare.outcome import CallOutcome
from opkit.contract.prop import NotApplicable
from opkit.contract.subject import CallRefused, Subject
from opkit.op import torch_private as private

Make = Callable[[Any, torch.Tensor, int], torch.Tensor]
_MAX_CACHED = 128


def has_own_fake(subject: Subject) -> bool:
    """Return whether the operator is opaque to the dispatcher, so that its body does not run on fake tensors."""
    return subject.overload is not None and not has_kernel(subject, "CompositeImplicitAutograd")


def has_kernel(subject: Subject, key: str) -> bool:
    """Return whether the operator has a kernel for this dispatch key."""
    if subject.overload is None:
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(subject.overload.name(), key))


def registers_autograd(subject: Subject) -> bool:
    """Return whether the operator defines its gradients; without a rule, which results require them is accidental."""
    if subject.overload is None or subject.operator is not None:
        return True
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    return any(has_kernel(subject, key) for key in keys)


def static_mode() -> Any:
    """Return a fake mode in which sizes are numbers, except those that depend on data."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=False), static_shapes=True)
    return _safe(mode)


def symbolic_mode(duck_shape: bool) -> Any:
    """Return a fake mode in which every size above 1 is a symbol; with ``duck_shape`` equal sizes are the same symbol."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return _safe(FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=False, duck_shape=duck_shape)))


def _safe(mode: Any) -> Any:
    mode._allow_unsafe_data_ptr_access = False  # a kernel in C would crash on a null pointer
    return mode


def fake_tensor(mode: Any, tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Return a fake of ``tensor``, with its sizes, strides and offset."""
    return mode.from_tensor(without_base(tensor))


def symbolic_tensor(mode: Any, tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Return a fake of ``tensor`` whose sizes are all symbols."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kind = DimDynamic.DUCK if mode.shape_env.duck_shape else DimDynamic.DYNAMIC
    context = StatelessSymbolicContext(dynamic_sizes=[kind] * tensor.dim())
    source = ConstantSource(f"tensor{number}")
    return mode.from_tensor(without_base(tensor), symbolic_context=context, source=source)


def without_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that is no view: torch creates a fake of that three times as fast."""
    if not tensor._is_view() or tensor.is_neg() or tensor.is_conj():
        return tensor
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return plain.requires_grad_(tensor.requires_grad)


def fake_call(mode: Any, call: Call, make: Make = fake_tensor) -> Call:
    """Return the call with fakes of its tensors."""
    numbers = iter(range(len(call.tensors())))
    return call.map(lambda tensor: make(mode, tensor, next(numbers)))


@contextlib.contextmanager
def quietly(mode: Any, symbolic: bool = False) -> Generator[None]:
    """Run operations on fake tensors, as AOTAutograd does where sizes are symbols; torch logs nothing."""
    with private.symbolic_tracing(mode) if symbolic else private.without_fake_tensor_logs(), mode:
        yield


def run_fake(subject: Subject, case: Case, mode: Any = None) -> CallOutcome:
    """Call the operator on fakes of the case's tensors.

    Raises:
        CallRefused: the operator raised.
        NotApplicable: the operator has no fake implementation.
    """
    mode = mode or static_mode()
    return call_fake(subject, fake_call(mode, case.make(subject.device)), mode)


def call_fake(subject: Subject, call: Call, mode: Any, symbolic: bool = False) -> CallOutcome:
    """Call the operator on arguments that are fake already; raises as :func:`run_fake` does."""
    try:
        with quietly(mode, symbolic):
            return subject.call(call)
    except CallRefused as refusal:
        reason = _nothing_to_check(subject, refusal.error)
        if reason:
            raise NotApplicable(reason) from refusal
        raise


def call_kernel(subject: Subject, call: Call, mode: Any, key: str) -> CallOutcome:
    """Call the operator's kernel for a dispatch key on fake arguments, which works if it is built of torch's operations.

    Raises:
        CallRefused: the kernel raised, as one that reads elements does.
    """
    kernel = functools.partial(subject.overload._op_dk, getattr(torch._C.DispatchKey, key))
    with private.without_fake_tensor_logs(), mode:
        return subject.call(call, kernel)


def _nothing_to_check(subject: Subject, error: BaseException) -> str:
    """Return why an error on fake tensors means that there is nothing to compare, or ""."""
    unsupported = type(error).__name__ == "UnsupportedOperatorException"
    if (unsupported and getattr(error, "func", None) is subject.overload) or "no fake impl registered" in str(error):
        return "it has no fake implementation, so nothing can compile or export it: see register_fake"
    if subject.overload is not None and torch.Tag.data_dependent_output in subject.overload.tags:
        return "what it returns depends on data, as its tag data_dependent_output says"
    return ""


def both(subject: Subject, case: Case) -> tuple[CallOutcome, CallOutcome]:
    """Call the operator on real tensors and on fakes of these; properties that check the same case share the outcomes.

    Raises:
        CallRefused: the operator raised on either.
        NotApplicable: it is not an operator of the dispatcher, and torch has no fake of something that it calls.
    """
    cache: dict[str, tuple[CallOutcome, CallOutcome]] = vars(subject).setdefault("_faked", {})
    if len(cache) > _MAX_CACHED:
        cache.clear()
    key = repr(case)
    if key not in cache:
        cache[key] = _both(subject, case)
    return cache[key]


def _both(subject: Subject, case: Case) -> tuple[CallOutcome, CallOutcome]:
    try:
        fake = run_fake(subject, case)  # first, so that it cannot use state that the kernel leaves
    except CallRefused as refusal:
        subject.run(case)
        if not has_own_fake(subject):
            raise NotApplicable(f"what it calls does not run on fake tensors: {shortened(refusal.error)}") from refusal
        raise
    return subject.run(case), fake


def shortened(error: BaseException, most: int = 240) -> str:
    """Return an error's type and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:most]}{'...' if len(text) > most else ''}"


def shared_memory(named: list[tuple[str, Any]]) -> set[tuple[str, str]]:
    """Return the pairs of names of tensors that share a storage."""
    first: dict[int, str] = {}
    found: set[tuple[str, str]] = set()
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            other = first.setdefault(tensor.untyped_storage()._cdata, name)
            found |= {(other, name)} if other != name else set()
    return found


def named_tensors(outcome: CallOutcome) -> list[tuple[str, Any]]:
    """Return the arguments' tensors and all results, with names for messages."""
    arguments = [(f"argument tensor {number}", tensor) for number, tensor in enumerate(outcome.call.tensors())]
    return arguments + [(f"result {number}", leaf) for number, leaf in enumerate(outcome.results)]
