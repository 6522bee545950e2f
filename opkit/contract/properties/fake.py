"""The group ``fake``: the fake implementation predicts the kernel's sizes, strides, dtypes and other metadata."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from opkit.contract.calls.cases import Case
from opkit.contract.calls.specs import Drawing
from opkit.contract.calls.tensors import LAYOUTS, ORDINARY
from opkit.contract.compare.outcome import CallOutcome, described
from opkit.contract.prop import NotApplicable, Property, Remark, Violation, swept_and_drawn
from opkit.contract.subject import CallRefused, Subject
from opkit.contract.traced import fakes, symbols

_EVERY_DEVICE = "CompositeExplicitAutograd"  # the dispatch key of a kernel that runs on every device
Difference = Callable[[str, Any, Any], str]
_REPAIR = "The fake implementation must give what the kernel gives"
_MAX_SUBSETS = 8
_SIZES = (2, 3, 65, 1, 0, 17, 4, 33, 8, 129, 7)
_FILLS = (*ORDINARY, "ones", "zeros")  # a result's size may depend on elements


_DRAWN = Drawing(layouts=tuple(LAYOUTS), fills=_FILLS)


def _compares(difference: Difference) -> Callable[[Subject, Case], None]:
    """Return a check that compares each tensor, and each other result, by ``difference``."""

    def check(subject: Subject, case: Case) -> None:
        outcome, fake_outcome = fakes.both(subject, case)
        for name, real, fake in _paired(outcome, fake_outcome):
            found = difference(name, real, fake)
            if found:
                raise Violation(f"{found}. {_REPAIR}.")

    return check


def _paired(outcome: CallOutcome, fake_outcome: CallOutcome) -> Iterator[tuple[str, Any, Any]]:
    named = zip(fakes.named_tensors(outcome), fakes.named_tensors(fake_outcome), strict=False)
    return ((name, real, fake) for (name, real), (_, fake) in named)


def _tensors(real: Any, fake: Any) -> bool:
    return isinstance(real, torch.Tensor) and isinstance(fake, torch.Tensor)


def _accepts(subject: Subject, case: Case) -> None:
    try:
        fake, refused = fakes.run_fake(subject, case), None
    except CallRefused as refusal:
        fake, refused = None, refusal
    try:
        subject.run(case)
    except CallRefused as refusal:
        if fake is not None:
            raise Remark(
                f"the kernel refuses arguments with {type(refusal.error).__name__} that the fake implementation accepts: a "
                "program compiles and fails when it runs. That is right if the kernel checks values; check sizes and dtypes in "
                "both."
            ) from refusal
        raise
    if refused is not None and fakes.has_own_fake(subject):
        raise Violation(
            f"the kernel accepts this, and the fake implementation raises {fakes.shortened(refused.error)}. It sees "
            "sizes, strides and dtypes, no elements, and must accept whatever the kernel accepts."
        )
    if refused is not None:
        raise NotApplicable(f"what it calls does not run on fake tensors: {fakes.shortened(refused.error)}")


def _shapes(subject: Subject, case: Case) -> None:
    outcome, fake_outcome = fakes.both(subject, case)
    counts = len(outcome.results), len(fake_outcome.results)
    if counts[0] != counts[1]:
        raise Violation(f"the kernel gives {counts[0]} results, the fake {counts[1]}. {_REPAIR}.")
    for name, real, fake in _paired(outcome, fake_outcome):
        found = _shape(name, real, fake)
        if found:
            raise Violation(f"{found}. {_REPAIR}.")


def _shape(name: str, real: Any, fake: Any) -> str:
    if not _tensors(real, fake):
        return _value(name, real, fake)
    if not symbols.is_fake(fake):
        return f"{name}: the fake implementation gave a real tensor, {described(fake)}"
    same = real.dim() == fake.dim() and all(
        symbols.unknown(b) or a == int(b) for a, b in zip(real.shape, fake.shape, strict=True)
    )
    return "" if same else f"{name} has shape {_list(real.shape)}, and {_list(fake.shape)} by the fake implementation"


def _value(name: str, real: Any, fake: Any) -> str:
    """Describe a difference of results that are not both tensors: None, a number, a string."""
    if isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool)) and isinstance(real, (int, float, bool)):
        return ""
    same = type(real) is type(fake) and (real == fake or real != real)
    return "" if same else f"{name} is {described(real)}, and {described(fake)} by the fake implementation"


def _list(numbers: Any) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def _strides(subject: Subject, case: Case) -> None:
    remarks: list[str] = []
    for name, real, fake in _paired(*fakes.both(subject, case)):
        if not _tensors(real, fake) or real.layout != torch.strided:
            continue
        if any(map(symbols.unknown, (*fake.shape, *fake.stride()))) or real.shape != fake.shape:
            continue
        differ = [dim for dim in range(real.dim()) if real.stride(dim) != fake.stride(dim)]
        message = f"{name} {described(real)} has strides {_list(real.stride())}, and {_list(fake.stride())} by the fake"
        if real.numel() and any(real.shape[dim] > 1 for dim in differ):
            raise Violation(f"{message} implementation. {_REPAIR}: compilers compute addresses from these strides.")
        remarks += [f"{name} has another stride by the fake implementation, in a dimension of size 1"] if differ else []
    if remarks:
        raise Remark(remarks[0])


def _dtype(name: str, real: Any, fake: Any) -> str:
    if not _tensors(real, fake) or (real.dtype == fake.dtype and real.layout == fake.layout):
        return ""
    return f"{name} is {real.dtype} ({real.layout}), and {fake.dtype} ({fake.layout}) by the fake implementation"


def _offset(name: str, real: Any, fake: Any) -> str:
    if not _tensors(real, fake) or real.layout != torch.strided or not real.numel():
        return ""
    one, other = real.storage_offset(), fake.storage_offset()
    if symbols.unknown(other) or one == other:
        return ""
    return f"{name} begins at element {one} of its memory, and at {other} by the fake implementation"


def _device(subject: Subject, case: Case) -> None:
    for name, real, fake in _paired(*fakes.both(subject, case)):
        if _tensors(real, fake) and real.device != fake.device:
            raise Violation(f"{name} is on {real.device}, and on {fake.device} by the fake implementation. {_REPAIR}.")
    if fakes.has_kernel(subject, "CUDA") or fakes.has_kernel(subject, _EVERY_DEVICE):
        _on_other_device(subject, case)


def _on_other_device(subject: Subject, case: Case) -> None:
    """Check devices on fakes of another device's tensors, which do not need this device."""
    # A torch that was built without CUDA ends the process where autograd records a fake tensor there.
    remote = "cuda:0" if torch.backends.cuda.is_built() else "meta"
    other = torch.device(remote if subject.device == "cpu" else "cpu")
    mode = fakes.static_mode()
    with mode:
        call = fakes.fake_call(mode, case.make(subject.device)).map(lambda each: torch.empty_like(each, device=other))
    if not call.tensors():
        return
    try:
        fake_outcome = fakes.call_fake(subject, call, mode)
        every = fakes.has_kernel(subject, _EVERY_DEVICE)
        outcome = fakes.call_kernel(subject, call, mode, _EVERY_DEVICE) if every else None
    except CallRefused:
        return  # a kernel in C or NumPy does not run on other devices; some argument may have to stay on its device
    known = {} if outcome is None else dict(fakes.named_tensors(outcome))
    for name, fake in fakes.named_tensors(fake_outcome):
        real = known.get(name)
        allowed = (real.device, other) if isinstance(real, torch.Tensor) else (other,)
        if isinstance(fake, torch.Tensor) and fake.device not in allowed:
            raise Violation(
                f"with every argument on {other}, {name} is on {fake.device} by the fake implementation, and the operator "
                f"has a kernel for every device. Create results with x.new_empty(...) or device=x.device."
            )


def _requires_grad(subject: Subject, case: Case) -> None:
    refused: CallRefused | None = None
    accepted = 0
    for subset in _subsets(case):
        variant = case.map(lambda number, each, on=subset: dataclasses.replace(each, requires_grad=number in on))
        try:
            pairs = _paired(*fakes.both(subject, variant))
        except CallRefused as refusal:
            refused = refusal
            continue
        accepted += 1
        for name, real, fake in pairs:
            if _tensors(real, fake) and real.requires_grad != fake.requires_grad:
                needs = " and ".join(f"tensor {number}" for number in subset) or "no tensor"
                raise Violation(
                    f"where {needs} requires gradients, {name} has requires_grad={real.requires_grad}, and "
                    f"{fake.requires_grad} by the fake implementation: a compiled program loses gradients, or computes "
                    f"needless ones. {_REPAIR}."
                )
    if refused is not None and not accepted:
        raise refused


def _subsets(case: Case) -> list[tuple[int, ...]]:
    """Return subsets of the tensors that can require gradients: all of them, or if these are many, none, single ones and all."""
    able = [number for number, tensor in enumerate(case.tensors()) if tensor.differentiable]
    every = [each for size in range(len(able) + 1) for each in itertools.combinations(able, size)]
    return every if len(every) <= _MAX_SUBSETS else [(), *((number,) for number in able), tuple(able)]


def _no_rule(subject: Subject) -> str:
    return "" if fakes.registers_autograd(subject) else "no autograd rule is registered"


def _aliasing(subject: Subject, case: Case) -> None:
    outcome, fake_outcome = fakes.both(subject, case)
    if len(outcome.results) != len(fake_outcome.results):
        return
    real, fake = (fakes.shared_memory(fakes.named_tensors(each)) for each in (outcome, fake_outcome))
    for pairs, which, other in (
        (real - fake, "the kernel's", "the fake's"),
        (fake - real, "the fake's", "the kernel's"),
    ):
        if pairs:
            first, second = min(pairs)
            raise Violation(f"{first} and {second} share memory in {which} results, and not in {other}. {_REPAIR}.")


def _effects(subject: Subject, case: Case) -> None:
    state = _state()
    fake = fakes.run_fake(subject, case)
    if not all(a == b for a, b in zip(state, _state(), strict=True)):
        raise Violation(
            "the fake implementation changes global state (torch's random numbers, default dtype or grad mode): it "
            "runs while programs are compiled, any number of times. Compute sizes only."
        )
    again = fakes.run_fake(subject, case)
    if [described(each) for each in again.results] != [described(each) for each in fake.results]:
        raise Violation("a second call of the fake implementation with the same arguments gives other results")


def _state() -> tuple[Any, ...]:
    return torch.get_rng_state().numpy().tobytes(), torch.get_default_dtype(), torch.is_grad_enabled()


def _no_own_fake(subject: Subject) -> str:
    return "" if fakes.has_own_fake(subject) else "it is no opaque operator: torch's own fakes of its operations run"


_property = functools.partial(Property, **swept_and_drawn(_DRAWN, sizes=_SIZES), share=0.3, cost=0.001)

PROPERTIES = (
    _property(
        "fake.accepts",
        rule="The fake implementation accepts what the kernel accepts.",
        defect="a fake that reads elements, calls .item() or the kernel, or checks more than the kernel does",
        check=_accepts,
        cost=0.002,
    ),
    _property(
        "fake.shapes",
        rule="The fake implementation gives as many results as the kernel, of the same kinds and sizes.",
        defect="a fake that forgets keepdim, rounds another way, has a size of its own, or leaves out an optional result",
        check=_shapes,
        cost=0.002,
    ),
    _property(
        "fake.dtype",
        rule="Results of the fake implementation have the dtypes of the kernel's.",
        defect="a fake that takes the dtype of its first argument where the kernel promotes, or torch's default dtype",
        check=_compares(_dtype),
    ),
    _property(
        "fake.strides",
        rule="Results of the fake implementation have the strides of the kernel's, in dimensions larger than 1.",
        defect="empty_like preserves a transposed layout where the kernel returns a contiguous result: compiled code then reads "
        "the wrong elements",
        check=_strides,
    ),
    _property(
        "fake.offset",
        rule="Results of the fake implementation begin where the kernel's do within their memory.",
        defect="a kernel that returns part of a larger buffer, which the fake does not",
        check=_compares(_offset),
    ),
    _property(
        "fake.device",
        rule="Results of the fake implementation are on the kernel's devices, wherever the arguments are.",
        defect="a fake that makes results on the CPU, or on the meta device",
        check=_device,
        share=0.1,
        cost=0.003,
    ),
    _property(
        "fake.requires_grad",
        rule="Results require gradients on fake tensors where they do on real ones, whichever arguments require them.",
        defect="a fake that detaches, or a kernel that gives integers or constants where its fake gives a float result",
        check=_requires_grad,
        share=0.1,
        cost=0.008,
        skip=_no_rule,
    ),
    _property(
        "fake.aliasing",
        rule="Results share memory with arguments and with one another on fake tensors where they do on real ones.",
        defect="a fake that returns its argument, where the kernel returns a new tensor",
        check=_aliasing,
    ),
    _property(
        "fake.effects",
        rule="The fake implementation changes no state, and gives the same when it is called again.",
        defect="a fake that seeds torch's generator, counts its calls, or switches gradients off",
        check=_effects,
        share=0.1,
        cost=0.003,
        skip=_no_own_fake,
    ),
    _property(
        "fake.symbolic",
        rule="Traced once with symbolic sizes, the fake implementation gives the kernel's sizes and strides at others too.",
        defect="a size that is burned in as a number, int() of a size, a wrong branch on a size, a fake that remembers",
        check=symbols.check_symbolic,
        cases=symbols.CASES,
        share=0.12,
        cost=0.02,
        first=None,
    ),
    _property(
        "fake.unbacked",
        rule="Sizes that depend on data are within the bounds, and have the relations, that the fake implementation states.",
        defect="new_dynamic_size(min=1) where nothing may be found; one symbol for two sizes that differ",
        check=symbols.check_unbacked,
        share=0.4,
        cost=0.002,
        first=None,
    ),
)
